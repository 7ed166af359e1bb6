"""Two ways to install, one result; at once, interrupted, as different roles, over what is there."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import taskboard
from support import Connection, Server, rows, session, wait_for, wait_until_blocked
from taskboard.cli import main
from taskboard.localpg import binaries, temporary_folder
from taskboard.migrate import LOCK, MigrateError, migrate

EVERYTHING = [*sorted(path.stem for path in taskboard.MIGRATIONS.glob("*.sql")), "functions"]
ROLES = ("producer", "worker", "operator", "observer")

# What an installation consists of, but for the tables that yoyo keeps its own notes in.
CATALOG = {
    "schema": """
        select nspowner::regrole::text, nspacl::text, obj_description(oid, 'pg_namespace')
        from pg_namespace where nspname = 'taskboard'""",
    "functions": """
        select oid::regprocedure::text, pg_get_functiondef(oid), proowner::regrole::text,
          array(select unnest(proacl)::text order by 1), obj_description(oid, 'pg_proc')
        from pg_proc where pronamespace = 'taskboard'::regnamespace""",
    "relations": """
        select relname, relkind::text, relpersistence::text, relowner::regrole::text, reloptions,
          array(select unnest(relacl)::text order by 1), obj_description(oid, 'pg_class'),
          relispartition, pg_get_expr(relpartbound, oid), pg_get_partkeydef(oid),
          case relkind when 'v' then pg_get_viewdef(oid) when 'i' then pg_get_indexdef(oid) end
        from pg_class
        where relnamespace = 'taskboard'::regnamespace and relname !~ '^_?yoyo'""",
    "columns": """
        select c.relname, a.attnum, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull,
          a.attidentity::text, a.attstorage::text, a.attcompression::text, a.attacl::text,
          pg_get_expr(d.adbin, d.adrelid), col_description(c.oid, a.attnum)
        from pg_class as c
        join pg_attribute as a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
        left join pg_attrdef as d on d.adrelid = c.oid and d.adnum = a.attnum
        where c.relnamespace = 'taskboard'::regnamespace and c.relname !~ '^_?yoyo'""",
    "constraints": """
        select conname, conrelid::regclass::text, pg_get_constraintdef(oid), convalidated,
          obj_description(oid, 'pg_constraint')
        from pg_constraint
        where connamespace = 'taskboard'::regnamespace and conrelid::regclass::text !~ '_?yoyo'""",
    "types": """
        select typname, typtype::text, typowner::regrole::text, typacl::text,
          obj_description(oid, 'pg_type')
        from pg_type where typnamespace = 'taskboard'::regnamespace and typname !~ '^_*yoyo'""",
    "sequences": """
        select seqrelid::regclass::text, seqtypid::regtype::text, seqstart, seqincrement, seqmax,
          seqmin, seqcache, seqcycle
        from pg_sequence where seqrelid::regclass::text ~ '^taskboard'""",
    "triggers": """
        select tgrelid::regclass::text, pg_get_triggerdef(oid) from pg_trigger
        where not tgisinternal""",
    "default privileges": "select defaclacl::text from pg_default_acl",
    "settings": "select * from taskboard.settings",
    "record": "select name from taskboard.migrations",
}


def catalog(dsn: str) -> dict[str, list[Any]]:
    """Describe what is installed in a database, comparably."""
    with session(dsn) as conn:
        rows(conn, "set search_path = pg_catalog")
        return {what: sorted(rows(conn, sql), key=repr) for what, sql in CATALOG.items()}


def install_by_psql(dsn: str) -> str:
    """Run sql/install.sql as people without Python do; return what psql said."""
    command = [str(binaries() / "psql"), "-X", "-q", "-d", dsn]
    command += ["-f", str(taskboard.SQL / "install.sql")]
    done = subprocess.run(command, cwd="/", check=False, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return "".join(line for line in done.stderr.splitlines() if not line.endswith("skipping"))


def install_by_migrate(dsn: str) -> str:
    return "\n".join(migrate(dsn).notices)


INSTALLERS = pytest.mark.parametrize(
    "install", [install_by_migrate, install_by_psql], ids=["migrate", "psql"]
)


def start_migrating(dsn: str, **environment: str) -> subprocess.Popen[str]:
    """Start the command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "taskboard", "migrate"], text=True,
        env=os.environ | environment | {"TASKBOARD_DATABASE_URL": dsn},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def works(conn: Connection) -> bool:
    """Take a job through its life."""
    job_id, created = rows(conn, "select * from taskboard.enqueue('k')")[0]
    claimed = rows(conn, "select job_id, lease_token from taskboard.claim()")
    done = rows(conn, "select job_id from taskboard.complete(%s, %s)", claimed[0])
    return created and done == [(job_id,)]


def test_psql_and_migrate_give_the_same_catalog(dsn: str, empty_dsn: str) -> None:
    assert install_by_psql(empty_dsn) == ""
    assert catalog(empty_dsn) == catalog(dsn)


def test_every_sql_file_is_in_the_list_of_psql() -> None:
    listed = [
        line.split()[1]
        for line in (taskboard.SQL / "install.sql").read_text().splitlines()
        if line.startswith("\\ir")
    ]
    migrations = [f"../migrations/{path.name}" for path in taskboard.MIGRATIONS.glob("*.sql")]
    functions = [path.name for path in taskboard.SQL.glob("[0-9]*.sql")]
    assert listed == sorted(migrations) + sorted(functions)


@INSTALLERS
def test_installing_twice_changes_nothing(
    empty_dsn: str, install: Callable[[str], str], connect: Callable[..., Connection]
) -> None:
    install(empty_dsn)
    before = catalog(empty_dsn)
    with connect("A", empty_dsn) as conn:
        job_id = rows(conn, "select job_id from taskboard.enqueue('k')")[0][0]
        rows(conn, "update taskboard.settings set lease = '7 seconds'")
        before["settings"] = sorted(rows(conn, CATALOG["settings"]), key=repr)
        install(empty_dsn)
        assert catalog(empty_dsn) == before
        assert rows(conn, "select job_id from taskboard.claim()") == [(job_id,)]


def test_migrate_does_nothing_where_everything_is_there(dsn: str, db: Connection) -> None:
    before = rows(db, "select xmin, * from taskboard.migrations order by name")
    assert migrate(dsn).applied == []
    assert rows(db, "select xmin, * from taskboard.migrations order by name") == before


def test_migrate_takes_over_what_psql_installed(dsn: str, empty_dsn: str) -> None:
    install_by_psql(empty_dsn)
    assert migrate(empty_dsn).applied == ["functions"]
    assert migrate(empty_dsn).applied == []
    assert catalog(empty_dsn) == catalog(dsn)


def test_psql_goes_over_what_migrate_installed(dsn: str, db: Connection) -> None:
    before = catalog(dsn)
    install_by_psql(dsn)
    assert catalog(dsn) == before
    assert works(db)


def test_ten_at_once_on_an_empty_database_all_succeed_and_one_installs(
    dsn: str, empty_dsn: str
) -> None:
    with ThreadPoolExecutor(10) as pool:
        reports = list(pool.map(lambda _: migrate(empty_dsn), range(10)))
    assert sorted(report.applied for report in reports) == [[]] * 9 + [EVERYTHING]
    assert catalog(empty_dsn) == catalog(dsn)


def test_psql_and_migrate_at_once_both_succeed(dsn: str, empty_dsn: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        installs = [install_by_psql, install_by_migrate] * 2
        for done in [pool.submit(install, empty_dsn) for install in installs]:
            done.result()
    assert catalog(empty_dsn) == catalog(dsn)


def test_two_databases_of_one_cluster_at_once_both_succeed(
    server_factory: Callable[..., Server],
) -> None:
    server = server_factory(fsync="off")  # its roles are not there yet
    with session(server.dsn()) as conn:
        for number in range(4):
            conn.execute(f"create database d{number}".encode())
    processes = [start_migrating(server.dsn(f"d{number}")) for number in range(4)]
    for process in processes:
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, "")
    catalogs = [catalog(server.dsn(f"d{number}")) for number in range(4)]
    assert all(catalog == catalogs[0] for catalog in catalogs)


def test_killed_at_any_moment_the_next_one_succeeds(dsn: str, empty_dsn: str) -> None:
    with session(empty_dsn) as observer:
        for after in (0.0, 0.03, 0.06, 0.1, 0.15, 0.2):
            process = start_migrating(empty_dsn)
            wait_for(lambda: is_migrating(observer), what="the migration")
            time.sleep(after)
            process.kill()
            process.communicate()
            wait_for(lambda: not is_migrating(observer), what="its sessions to end")
    migrate(empty_dsn)
    assert catalog(empty_dsn) == catalog(dsn)


def is_migrating(conn: Connection) -> bool:
    return bool(
        rows(
            conn,
            "select 1 from pg_stat_activity where application_name = 'taskboard migrate'"
            " and datname = current_database()",
        )
    )


def test_killed_between_a_migration_and_its_mark_the_next_one_succeeds(
    dsn: str, empty_dsn: str
) -> None:
    migrate(empty_dsn)
    with session(empty_dsn) as conn:
        rows(conn, "delete from taskboard._yoyo_migration")
        rows(conn, "delete from taskboard.migrations")
        assert migrate(empty_dsn).applied == EVERYTHING
        marked = rows(conn, "select migration_id from taskboard._yoyo_migration order by 1")
        assert [name for (name,) in marked] == EVERYTHING[:-1]
    assert catalog(empty_dsn) == catalog(dsn)


def test_killed_while_yoyo_prepares_itself_the_next_one_succeeds(dsn: str, empty_dsn: str) -> None:
    with session(empty_dsn) as conn:
        rows(conn, "create schema taskboard")
        rows(conn, "create table taskboard.yoyo_lock (locked int primary key, ctime timestamp,"
                   " pid int not null)")  # fmt: skip
        rows(conn, "insert into taskboard.yoyo_lock (locked, pid) values (1, 1)")
    migrate(empty_dsn)
    assert catalog(empty_dsn) == catalog(dsn)


def test_only_the_new_migration_of_a_release_is_run_whichever_way_the_others_came(
    empty_dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_by_psql(empty_dsn)
    release = tmp_path / "odd [1] name" / "migrations"
    release.mkdir(parents=True)
    for path in taskboard.MIGRATIONS.glob("*.sql"):
        (release / path.name).write_text("do $$ begin raise 'must not run again'; end $$;")
    (release / "9000_later.sql").write_text(
        "create table taskboard.later (id int);"
        "insert into taskboard.migrations (name) values ('9000_later');"
    )
    monkeypatch.setattr(taskboard, "MIGRATIONS", release)
    assert migrate(empty_dsn).applied == ["9000_later", "functions"]
    assert migrate(empty_dsn).applied == []
    with session(empty_dsn) as conn:
        assert rows(conn, "select * from taskboard.later") == []


def test_killed_while_it_loads_the_functions_the_old_ones_stay_and_the_next_one_succeeds(
    dsn: str, db: Connection, connect: Callable[..., Connection]
) -> None:
    before = catalog(dsn)
    rows(db, "update taskboard.migrations set checksum = 'of other functions'")
    with connect("A") as blocker, blocker.transaction():
        rows(blocker, "lock table taskboard.migrations in share mode")
        process = start_migrating(dsn)
        waiting = "select 1 from pg_locks where not granted and locktype = 'relation'"
        wait_for(lambda: rows(db, waiting), what="the load to wait")
        assert works(db)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    wait_for(lambda: not is_migrating(db), what="its session to end")
    assert catalog(dsn) == before
    assert migrate(dsn).applied == ["functions"]


@INSTALLERS
def test_ordinary_owner_is_told_the_roles_and_can_work_without_them(
    server_factory: Callable[..., Server], install: Callable[[str], str]
) -> None:
    server = server_factory(fsync="off")
    with session(server.dsn()) as conn:
        rows(conn, "create role shop login nosuperuser nocreaterole nocreatedb")
        rows(conn, "create database shop owner shop")
    mine = make_conninfo(server.dsn("shop"), user="shop")
    said = install(mine)
    assert "Then run taskboard migrate again" in said
    # A role for the owner would change nothing: the installer may not become it.
    assert "taskboard_owner" not in said
    for role in ROLES:
        assert f"create role taskboard_{role} nologin;" in said
    if install is install_by_migrate:
        assert len(said.splitlines()) == len(ROLES) + 2
    with session(mine) as shop, session(server.dsn("shop")) as admin:
        assert works(shop)
        for role in ROLES:
            rows(admin, f"create role taskboard_{role} nologin")
        rows(admin, "create role producer login in role taskboard_producer")
        with session(mine, user="producer") as producer:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                rows(producer, "select * from taskboard.enqueue('k')")
            assert install(mine) == ""
            assert rows(producer, "select created from taskboard.enqueue('k')") == [(True,)]
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                rows(producer, "select * from taskboard.claim()")
    if install is install_by_migrate:
        assert migrate(mine).applied == []


@pytest.mark.wide
def test_owner_who_may_create_roles_as_on_a_managed_server_needs_no_administrator(
    server_factory: Callable[..., Server],
) -> None:
    server = server_factory(fsync="off")
    with session(server.dsn()) as conn:
        rows(conn, "create role first login nosuperuser createrole createdb")
    with session(server.dsn(), user="first") as first:
        rows(first, "create database shop")
    assert not migrate(make_conninfo(server.dsn("shop"), user="first")).notices
    with session(server.dsn("shop"), user="first") as first:
        rows(first, "create role web login in role taskboard_producer")
        with session(server.dsn("shop"), user="web") as web:
            assert rows(web, "select created from taskboard.enqueue('k')") == [(True,)]
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                rows(web, "select * from taskboard.claim()")


def test_role_that_may_not_make_the_schema_is_told_what_to_do(
    server: Server, empty_dsn: str
) -> None:
    said = r"grant create on database .* to \"stranger\""
    with (
        session(empty_dsn) as conn,
        role(conn, "stranger"),
        pytest.raises(MigrateError, match=said),
    ):
        migrate(make_conninfo(empty_dsn, user="stranger"))


@INSTALLERS
def test_schema_of_another_role_is_refused_and_left_alone(
    empty_dsn: str, install: Callable[[str], str]
) -> None:
    with session(empty_dsn) as conn, role(conn, "other"):
        rows(conn, "create schema taskboard authorization other")
        with pytest.raises((MigrateError, AssertionError), match="belongs to"):
            install(empty_dsn)
        assert (
            rows(conn, "select 1 from pg_class where relnamespace = 'taskboard'::regnamespace")
            == []
        )
        rows(conn, "drop schema taskboard")


def test_schema_that_holds_something_else_is_refused_and_left_alone(empty_dsn: str) -> None:
    with session(empty_dsn) as conn:
        rows(conn, "create schema taskboard")
        rows(conn, "create table taskboard.jobs (name text)")
        with pytest.raises(MigrateError, match="not Taskboard"):
            migrate(empty_dsn)
        relations = "select relname from pg_class where relnamespace = 'taskboard'::regnamespace"
        assert rows(conn, relations) == [("jobs",)]


def test_database_that_takes_any_bytes_for_text_is_refused_with_what_helps(
    new_database: Callable[..., str],
) -> None:
    dsn = new_database("template0 encoding 'SQL_ASCII' lc_collate 'C' lc_ctype 'C'")
    with pytest.raises(MigrateError, match=r"SQL_ASCII.*encoding 'UTF8' and template template0"):
        migrate(dsn)
    with session(dsn) as conn:
        assert rows(conn, "select from pg_namespace where nspname = 'taskboard'") == []


def test_empty_schema_of_ones_own_is_used(dsn: str, empty_dsn: str) -> None:
    with session(empty_dsn) as conn:
        rows(conn, "create schema taskboard")
    migrate(empty_dsn)
    assert catalog(empty_dsn) == catalog(dsn)


def test_newer_installation_is_left_as_it_is(dsn: str, db: Connection) -> None:
    rows(db, "insert into taskboard.migrations (name) values ('9999_later')")
    rows(db, "update taskboard.migrations set checksum = 'of later functions'")
    report = migrate(dsn)
    assert report.applied == [] and "newer than this package" in report.notices[0]


def test_edited_migration_does_not_go_unnoticed(dsn: str, db: Connection) -> None:
    rows(db, "update taskboard.migrations set checksum = 'x' where name = '0001_tables'")
    assert "0001_tables.sql is not what was applied here" in migrate(dsn).notices[0]


def test_failed_self_check_undoes_the_load(dsn: str, db: Connection) -> None:
    rows(db, "update taskboard.migrations set checksum = 'x' where name = 'functions'")
    rows(db, "create function taskboard.rogue() returns int language sql as 'select 1'")
    before = catalog(dsn)
    with pytest.raises(MigrateError, match=r"sql/99_checks.sql.*rogue"):
        migrate(dsn)
    assert catalog(dsn) == before
    rows(db, "drop function taskboard.rogue()")
    assert migrate(dsn).applied == ["functions"]


def test_wait_for_another_migration_is_bounded(
    dsn: str, db: Connection, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows(db, "select pg_advisory_lock(%s, %s)", LOCK)
    monkeypatch.setenv("TASKBOARD_DATABASE_URL", dsn)
    started_at = time.monotonic()
    assert main(["migrate", "--wait", "1s"]) == 1
    assert time.monotonic() - started_at < 5
    assert "another migration" in capsys.readouterr().err


# What somebody may have done in a transaction that is still open, and how that transaction ends.
IN_THE_WAY = {
    "a table": ("lock table taskboard.migrations in share mode", "rollback"),
    "a view": ("select count(*) from taskboard.job_list", "rollback"),
    "a function": (
        "create or replace function taskboard.version() returns text language sql immutable"
        " security definer set search_path = pg_catalog, pg_temp as $$ select 'mine'::text $$",
        "commit",
    ),
}


@pytest.mark.parametrize(("statement", "end"), IN_THE_WAY.values(), ids=IN_THE_WAY)
def test_load_waits_for_a_transaction_that_is_in_its_way_and_names_it(
    dsn: str, db: Connection, connect: Callable[..., Connection], statement: str, end: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("taskboard.migrate.PAUSE", 0.1)
    rows(db, "update taskboard.migrations set checksum = 'of other functions'")
    before = catalog(dsn)
    blocker = connect("nightly report")
    blocker.execute("begin")
    blocker.execute(statement.encode())
    with pytest.raises(MigrateError, match="transaction is in the way") as failed:
        migrate(dsn, wait=0.1)
    said = f"process {blocker.info.backend_pid} (nightly report, user "
    assert said in str(failed.value) and "idle in transaction, begun at " in str(failed.value)
    assert catalog(dsn) == before
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(migrate, dsn)
        waits = "select 1 from pg_locks where not granted"
        wait_for(lambda: rows(db, waits), what="the first try to wait")
        wait_for(lambda: not rows(db, waits), what="it to end")
        wait_for(lambda: rows(db, waits), what="another to wait")
        blocker.execute(end.encode())
        assert waiting.result().applied == ["functions"]
    assert catalog(dsn) == before


def test_psql_that_cannot_get_a_lock_gives_up_soon_and_changes_nothing(
    dsn: str, connect: Callable[..., Connection]
) -> None:
    before = catalog(dsn)
    blocker = connect("A")
    blocker.execute("begin; select count(*) from taskboard.job_list")
    started_at = time.monotonic()
    with pytest.raises(AssertionError, match="canceling statement due to lock timeout"):
        install_by_psql(dsn)
    assert time.monotonic() - started_at < 20
    blocker.execute("rollback")
    assert catalog(dsn) == before
    install_by_psql(dsn)


def test_transaction_that_was_prepared_and_is_in_the_way_is_named(
    dsn: str, db: Connection, connect: Callable[..., Connection]
) -> None:
    rows(db, "update taskboard.migrations set checksum = 'of other functions'")
    blocker = connect("A")
    for statement in ("begin", "select count(*) from taskboard.job_list"):
        blocker.execute(statement.encode())
    name = f"two phases {blocker.info.backend_pid}"
    blocker.execute(psycopg.sql.SQL("prepare transaction {}").format(name))
    with pytest.raises(MigrateError, match=f"the prepared transaction '{name}' of "):
        try:
            migrate(dsn, wait=0.1)
        finally:
            db.execute(psycopg.sql.SQL("rollback prepared {}").format(name))
    assert migrate(dsn).applied == ["functions"]


def test_new_table_step_waits_no_longer_than_it_says_and_work_goes_on_in_between(
    dsn: str, db: Connection, connect: Callable[..., Connection], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A claim is seen to wait behind the change, which waits for a reader; then it goes through."""
    release = shutil.copytree(taskboard.MIGRATIONS, tmp_path / "migrations")
    (release / "9000_later.sql").write_text(
        "alter table taskboard.jobs add column if not exists later integer;\n"
        "insert into taskboard.migrations (name) values ('9000_later') on conflict do nothing;\n"
    )
    monkeypatch.setattr(taskboard, "MIGRATIONS", release)
    job_id = rows(db, "select job_id from taskboard.enqueue('k')")[0][0]
    reader, worker = connect("reader"), connect("worker")
    reader.execute("begin; select count(*) from taskboard.jobs")
    with ThreadPoolExecutor(2) as pool:
        migrating = pool.submit(migrate, dsn)
        wait_for(lambda: rows(
            db, "select 1 from pg_locks where mode = 'AccessExclusiveLock' and not granted"
            " and relation = 'taskboard.jobs'::regclass"), what="the change to wait")  # fmt: skip
        claim = pool.submit(rows, worker, "select job_id from taskboard.claim()")
        wait_until_blocked(db, worker.info.backend_pid)
        assert claim.result(5) == [(job_id,)], "it waits for the change, not for the reader"
        assert not migrating.done()
        reader.execute("rollback")
        assert migrating.result().applied == ["9000_later", "functions"]
    assert rows(db, "select later from taskboard.jobs") == [(None,)]


def test_index_is_built_beside_the_work_while_another_migration_waits(
    dsn: str, db: Connection, connect: Callable[..., Connection], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    release = shutil.copytree(taskboard.MIGRATIONS, tmp_path / "migrations")
    (release / "9000_index.sql").write_text(
        "-- transactional: false\n"
        "drop index concurrently if exists taskboard.jobs_later;\n"
        "create index concurrently jobs_later on taskboard.jobs (created_at);\n"
        "insert into taskboard.migrations (name) values ('9000_index') on conflict do nothing;\n"
    )
    monkeypatch.setattr(taskboard, "MIGRATIONS", release)
    writer, worker = connect("writer"), connect("worker")
    writer.execute("begin; select taskboard.enqueue('k')")
    with ThreadPoolExecutor(2) as pool:
        migrating = [pool.submit(migrate, dsn, wait=15)]
        building = "select 1 from pg_stat_progress_create_index where datname = current_database()"
        wait_for(lambda: rows(db, building), what="the build to wait for the writer")
        migrating.append(pool.submit(migrate, dsn, wait=15))
        waiting = "select 1 from pg_stat_activity where query ~ 'pg_try_advisory_lock'"
        wait_for(lambda: rows(db, waiting), what="the other one")
        assert works(worker), "meanwhile the work goes on"
        writer.execute("commit")
        assert [each.result().applied for each in migrating] == [["9000_index", "functions"], []]
    valid = "select indisvalid from pg_index where indexrelid = 'taskboard.jobs_later'::regclass"
    assert rows(db, valid) == [(True,)]


def test_limits_of_the_role_do_not_stop_a_migration(
    dsn: str, empty_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = "statement_timeout=200ms lock_timeout=100ms default_transaction_isolation=serializable"
    monkeypatch.setenv("PGOPTIONS", " ".join(f"-c {limit}" for limit in limits.split()))
    with session(empty_dsn) as conn, ThreadPoolExecutor(1) as pool:
        rows(conn, "select pg_advisory_lock(%s, %s)", LOCK)
        migrating = pool.submit(migrate, empty_dsn)
        time.sleep(0.8)
        rows(conn, "select pg_advisory_unlock(%s, %s)", LOCK)
        assert migrating.result().applied == EVERYTHING
    monkeypatch.undo()
    assert catalog(empty_dsn) == catalog(dsn)


def test_password_with_every_special_character_gets_through(
    server: Server, new_database: Callable[[], str]
) -> None:
    secret = "p@:/?#[]&=% +'\"\\ä"
    url = new_database()
    with session(url) as conn, role(conn, "odd one"):
        rows(conn, psycopg.sql.SQL('alter role "odd one" password {}').format(secret))
        rows(conn, psycopg.sql.SQL("grant create on database {} to {}").format(
            psycopg.sql.Identifier(conn.info.dbname), psycopg.sql.Identifier("odd one")
        ))  # fmt: skip
        host = conninfo_to_dict(url)["host"]
        tcp = "127.0.0.1" if str(host).startswith("/") else host
        mine = make_conninfo(url, user="odd one", password=secret, host=tcp)
        assert migrate(mine).applied == EVERYTHING
        rows(conn, 'drop owned by "odd one" cascade')


def test_user_without_a_name_can_migrate(empty_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> str:
        if "LOGNAME" in os.environ:
            return os.environ["LOGNAME"]
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setenv("LOGNAME", "to be restored")
    monkeypatch.delenv("LOGNAME")
    monkeypatch.setattr(getpass, "getuser", unknown)
    assert migrate(empty_dsn).applied == EVERYTHING


def test_worker_refuses_what_is_not_installed_and_says_what_to_do(
    empty_dsn: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASKBOARD_DATABASE_URL", empty_dsn)
    assert main(["enqueue", "k"]) == 1
    assert "hint: run: taskboard migrate" in capsys.readouterr().err


class role:
    """A login role for as long as a block lasts: roles are the cluster's, not the database's."""

    def __init__(self, conn: Connection, name: str) -> None:
        self._conn, self._name = conn, psycopg.sql.Identifier(name)

    def __enter__(self) -> None:
        rows(self._conn, psycopg.sql.SQL("create role {} login").format(self._name))

    def __exit__(self, *_: object) -> None:
        rows(self._conn, psycopg.sql.SQL("drop owned by {0}").format(self._name))
        rows(self._conn, psycopg.sql.SQL("drop role {}").format(self._name))


@pytest.mark.wide
def test_package_from_a_wheel_works_in_an_empty_home() -> None:
    """The first of the README's two lines, and the commands after it."""
    repository, home = Path(__file__).parents[1], temporary_folder()
    environment = {k: v for k, v in os.environ.items() if k.startswith("PIP_") or k == "PATH"}

    def run(*command: str | Path) -> str:
        done = subprocess.run(
            command, cwd=home, env=environment | {"HOME": str(home)}, check=False, text=True,
            capture_output=True, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    program = home / ".venv/bin/taskboard"
    try:
        run(sys.executable, "-m", "venv", home / ".venv")
        run(home / ".venv/bin/pip", "install", "-q", f"{repository}[embedded]")
        assert run(program, "--version") == f"taskboard {taskboard.version()}\n"
        assert "All of this was seen to happen" in run(program, "demo")
        job_id = run(program, "enqueue", "k").strip()
        assert (
            run(program, "psql", "-XAtc", "select job_id from taskboard.job_list") == job_id + "\n"
        )
        assert (home / ".local/share/taskboard/pg18/data/PG_VERSION").exists()
        assert not (home / ".local/share/taskboard/pg18/data/postmaster.pid").exists()
    finally:
        shutil.rmtree(home)
