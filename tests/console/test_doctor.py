"""Doctor finds each fault that is planted, and finds nothing where nothing is."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from console.conftest import Console, Said, enqueue, make_jobs
from support import Connection, Server, rows, session
from taskboard.cli import dev_servers
from taskboard.console import checks
from taskboard.console.checks import Look
from taskboard.dev.smtp import DevSmtp
from taskboard.migrate import migrate


def lines(said: Said, topic: str) -> list[tuple[str, str, str]]:
    """Level, text and fix of a topic's findings."""
    return [
        (one["level"], one["text"], one["fix"])
        for one in said.json["findings"]
        if one["topic"] == topic
    ]


def sees(said: Said, topic: str, level: str, text: str, fix: str = "") -> bool:
    return any(
        found[0] == level and re.search(text, found[1]) and re.search(fix, found[2])
        for found in lines(said, topic)
    )


@contextmanager
def pooler(dsn: str) -> Iterator[str]:
    """Stand before a server and announce other process ids than its own, as poolers do."""
    to = conninfo_to_dict(dsn)
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, sink: socket.socket, from_server: bool) -> None:
        try:
            while data := source.recv(65536):
                if from_server and (found := re.search(rb"K\0\0\0[\x0c-\xff]", data)):
                    at = found.start() + 5
                    data = data[:at] + struct.pack("!I", 99_999) + data[at + 4 :]
                sink.sendall(data)
        except OSError:
            pass
        source.close()
        sink.close()

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            if str(to["host"]).startswith("/"):
                server = socket.socket(socket.AF_UNIX)
                server.connect(f"{to['host']}/.s.PGSQL.{to['port']}")
            else:
                server = socket.create_connection((str(to["host"]), int(to["port"] or 5432)))
            for source, sink, from_server in ((client, server, False), (server, client, True)):
                pump_it = threading.Thread(target=pump, args=(source, sink, from_server))
                pump_it.daemon = True
                pump_it.start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        port = listener.getsockname()[1]
        yield make_conninfo(dsn, host="127.0.0.1", port=port, sslmode="disable")
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def test_where_nothing_is_wrong_doctor_says_so(
    server_factory: Callable[..., Server], console: Console
) -> None:
    dsn = server_factory().dsn()
    migrate(dsn)
    with session(dsn) as db:
        db.execute("create role runner login password 'secret'; grant taskboard_worker to runner")
        runner = make_conninfo(dsn, user="runner", password="secret")
        with dev_servers() as servers:
            environment = {
                "TASKBOARD_DATABASE_URL": runner, "TASKBOARD_SMTP_URL": servers["smtp_url"],
                "TASKBOARD_MAIL_FROM": servers["mail_from"],
                "STRIPE_API_KEY": servers["stripe_api_key"],
                "TASKBOARD_STRIPE_BASE": servers["stripe_base"],
            }  # fmt: skip
            said = console("doctor", "--json", **environment)
            assert said.code == 0 and said.json["ok"], said
            found = {one["topic"]: one["level"] for one in said.json["findings"]}
            assert set(found.values()) == {"ok"} and len(found) == 18
            assert sees(said, "stripe", "ok", "test mode")
            plain = console("doctor", **environment)
            assert plain.code == 0 and "fix:" not in plain.out
            # What only the whole server can have.
            for name, topic in (("autovacuum", "autovacuum"), ("fsync", "durability")):
                db.execute(f"alter system set {name} = off")
                db.execute("select pg_reload_conf(), pg_sleep(0.1)")
                said = console("doctor", "--json", **environment)
                assert said.code == 1 and sees(said, topic, "wrong", f"{name} is off", name)


# What is wrong, by statements for a database of the test's own; all at once, as no check needs
# another. {db} is its name.
PLANTED: list[tuple[str, str, str, str, str]] = [
    ("alter database {db} set track_counts = off",
     "autovacuum", "wrong", "track_counts is off", "alter system set track_counts = on"),
    ("alter table taskboard.jobs set (autovacuum_enabled = off)",
     "autovacuum", "wrong", "off for taskboard.jobs", "alter table taskboard.jobs reset"),
    ("", "durability", "wrong", "full_page_writes is off", "full_page_writes = on"),
    ("", "durability", "wrong", "synchronous_commit is off", "alter role .* synchronous_commit"),
    ("alter database {db} set log_statement = 'all'",
     "logs", "wrong", "log_statement = all.* lease tokens", "log_parameter_max_length = 0"),
    ("alter database {db} set log_min_duration_statement = '1 s'",
     "logs", "wrong", "log_min_duration_statement = 1000", "log_parameter_max_length"),
    ("alter database {db} set log_parameter_max_length_on_error = 80",
     "logs", "wrong", "log_parameter_max_length_on_error is 80", "= 0"),
    ("alter database {db} set default_transaction_isolation = 'serializable'",
     "isolation", "note", "is serializable", "'read committed'"),
    ("drop function taskboard.prune cascade",
     "version", "wrong", "missing: prune", "taskboard migrate"),
    ("create or replace function taskboard.version() returns text language sql immutable"
     " security definer set search_path = pg_catalog, pg_temp as $$ select '0.1.0'::text $$;"
     " create or replace function taskboard.wake(due_in interval default '0') returns void"
     " language sql security definer set search_path = pg_catalog, pg_temp as $$ select $$",
     "version", "wrong", "not of this release: wake$", "taskboard migrate"),
    ("update taskboard.migrations set checksum = 'x' where name = '0001_tables'",
     "version", "note", "not what was applied: 0001_tables", "reinstall"),
    ("revoke execute on function taskboard.claim from taskboard_worker",
     "rights", "wrong", "may not call claim$", "grant taskboard_worker"),
    ("create role gone; select taskboard.allow_queue('gone', 'mails'); drop role gone",
     "rights", "wrong", "role with oid [0-9]+, limited to mails, is gone", "allow_queue"),
    ("alter database {db} connection limit 4",
     "connections", "wrong", "up to 11 connections, and [1-4] are free", "smaller --pool"),
    ("", "email", "note", "off", "set TASKBOARD_SMTP_URL and TASKBOARD_MAIL_FROM"),
    ("", "stripe", "note", "off", "set STRIPE_API_KEY"),
    ("", "jobs", "wrong", "held: 1;", "taskboard resolve ID STEP"),
    ("", "jobs", "wrong", "kind ready: 1 ready, .* none is running", "that handles ready"),
    ("select taskboard.enqueue('email')",
     "jobs", "wrong", "kind email: 1 ready, .* none is", "TASKBOARD_SMTP_URL"),
    ("select taskboard.enqueue('running')",
     "jobs", "note", "kind running: .* they come faster", "start more"),
    ("select taskboard.enqueue('k', queue => 'shut'), taskboard.pause('shut')",
     "jobs", "note", "the queue shut is paused, since 2[^ ]+ [^ ]+ by [^ :]+$",
     "^taskboard resume shut$"),
    ("select taskboard.pause('empty', 'disk full')",
     "jobs", "note", "the queue empty is paused, since .* by .*: disk full$", "resume empty$"),
    ("select taskboard.enqueue('k', queue => 'none'), taskboard.limit_queue('none', 0)",
     "jobs", "note", "the queue none may run 0 jobs at once", "^taskboard limit none --running N$"),
    ("select taskboard.enqueue('k', queue => 'rate'),"
     " taskboard.limit_queue('rate', max_starts => 0, starts_per => '1 min')",
     "jobs", "note", "the queue rate may start 0 jobs per 1 min", "limit rate --starts N --per"),
    ("select taskboard.enqueue('one', queue => 'one'), taskboard.enqueue('one', queue => 'one'),"
     " taskboard.limit_queue('one', 1); select taskboard.claim(kinds => '{{one}}')",
     "jobs", "note", "the queue one may run 1 jobs at once", "limit one --running N"),
]  # fmt: skip


@pytest.fixture
def worker(db: Connection, login: Callable[..., str]) -> str:
    make_jobs(db)
    return login("taskboard_worker")


def test_each_planted_fault_is_found(worker: str, db: Connection, console: Console) -> None:
    for statements, *_ in PLANTED:
        if statements:
            db.execute(statements.format(db=db.info.dbname))
    try:
        said = console("doctor", "--json", "--older-than", "0s", TASKBOARD_DATABASE_URL=worker)
        owner = console("doctor", "--json", "--older-than", "0s")
        text = console("doctor", TASKBOARD_DATABASE_URL=worker)
    finally:
        db.execute(f"alter database {db.info.dbname} reset all")
        db.execute(f"alter database {db.info.dbname} connection limit -1")
    assert said.code == owner.code == text.code == 1
    found = said.json["findings"] + owner.json["findings"]
    assert [one for one in found if one["level"] != "ok" and not one["fix"]] == []
    for _, *finding in PLANTED:
        assert sees(said, *finding) or sees(owner, *finding), (finding, lines(said, finding[0]))
    assert "WRONG  rights " in text.out and "fix:  grant taskboard_worker to" in text.out
    assert sees(owner, "rights", "note", "superuser", "grant taskboard_worker to runner")


def test_a_pause_of_all_is_told_once_and_undone_by_one_command(
    db: Connection, console: Console
) -> None:
    enqueue(db)
    assert console("pause", "--reason", "fire").code == 0
    (found,) = lines(console("doctor", "--json", "--older-than", "0s"), "jobs")
    assert re.fullmatch(r"all queues are paused, since 2.* by \w+: fire", found[1])
    assert (found[0], found[2]) == ("note", "taskboard resume")
    said = console("resume", "default")
    assert said.err == "note: all queues are paused still: taskboard resume\n"
    assert console("resume").code == 0
    said = console("doctor", "--json", "--older-than", "0s")
    assert sees(said, "jobs", "wrong", "none is running")


@pytest.mark.parametrize("role", ["operator", "observer"])
def test_a_login_for_people_is_not_advised_to_become_a_runner(
    role: str, db: Connection, login: Callable[..., str], console: Console
) -> None:
    person = login(f"taskboard_{role}")
    said = console("doctor", "--json", TASKBOARD_DATABASE_URL=person)
    assert sees(said, "rights", "note", "operator's or observer's login", "of a runner"), said
    assert "grant taskboard_worker" not in said.out


def test_limits_that_a_restore_has_lost_are_missed(db: Connection, console: Console) -> None:
    assert not sees(console("doctor", "--json"), "rights", "wrong", "limit")
    db.execute("create role gone_too; select taskboard.allow_queue('gone_too', 'mails')")
    try:
        assert not sees(console("doctor", "--json"), "rights", "wrong", "limit")
        # What is left when the table could not be filled, because the role was not there.
        db.execute("delete from taskboard.queue_rights")
        said = console("doctor", "--json")
        assert sees(said, "rights", "wrong", "no limit is left", "allow_queue"), said
        db.execute("select taskboard.disallow_queue('gone_too', 'mails')")
        assert not sees(console("doctor", "--json"), "rights", "wrong", "limit")
    finally:
        db.execute("drop role gone_too")


def test_transactions_that_hold_up_everybody_are_named_with_who_holds_them(
    worker: str, db: Connection, connect: Callable[..., Connection], console: Console
) -> None:
    writer, reader = connect("report"), connect("dump")
    with session(make_conninfo(db.info.dsn, dbname="postgres"), "elsewhere") as other:
        pids = [conn.info.backend_pid for conn in (writer, other, reader)]
        for conn in (writer, other):
            conn.execute("begin; select pg_current_xact_id()")
        reader.execute("begin isolation level repeatable read; select 1")
        db.execute("begin; select pg_current_xact_id(); prepare transaction 'console''s'")
        db.execute("select pg_create_physical_replication_slot('console_slot', true)")
        try:
            said = console("doctor", "--json", "--older-than", "0s")
            young = console("doctor", "--json")
            little = console("doctor", "--json", TASKBOARD_DATABASE_URL=worker)
        finally:
            db.execute("rollback prepared 'console''s'")
            db.execute("select pg_drop_replication_slot('console_slot')")
    end = f"pg_terminate_backend\\({pids[0]}\\)"
    for result, text, fix in (
        ("wrong", f"process {pids[0]} .*report, idle in transaction.*claims", end),
        ("wrong", f"process {pids[1]} .*elsewhere", "pg_terminate_backend"),
        ("wrong", "prepared transaction 'console''s'", "commit prepared 'console''s';"),
        ("note", f"process {pids[2]} .*dump.* snapshot .*vacuum", "terminate"),
    ):
        assert sees(said, "transactions", result, text, fix), text
    assert sees(said, "slots", "wrong", "slot console_slot: it keeps .* WAL", "pg_drop_replication")
    assert sees(young, "transactions", "ok", "nobody")
    assert sees(little, "transactions", "note", "[3-9] transactions .* not be looked at",
                "grant pg_read_all_stats")  # fmt: skip


def test_a_pooler_in_the_way_is_noticed(dsn: str, console: Console) -> None:
    with pooler(dsn) as pooled:
        said = console("doctor", "--json", TASKBOARD_DATABASE_URL=pooled)
        assert sees(said, "listen", "note", "a pooler stands between", "TASKBOARD_LISTEN_URL")
        said = console("doctor", "--json", TASKBOARD_DATABASE_URL=pooled, TASKBOARD_LISTEN_URL=dsn)
        assert sees(said, "listen", "ok", "notifications arrive")
        said = console("doctor", "--json", TASKBOARD_LISTEN_URL=pooled)
        assert sees(said, "listen", "wrong", "a pooler stands there, too", "the server itself")
    said = console("doctor", "--json", TASKBOARD_LISTEN_URL="postgresql://127.0.0.1:1/x")
    assert sees(said, "listen", "wrong", "TASKBOARD_LISTEN_URL: connection failed")


def test_services_that_do_not_answer_as_configured_are_named(
    dsn: str, console: Console, free_port: int
) -> None:
    nowhere = f"127.0.0.1:{free_port}"

    def doctor(**environment: str) -> Said:
        return console("doctor", "--json", TASKBOARD_MAIL_FROM="a@example.com", **environment)

    said = doctor(
        TASKBOARD_SMTP_URL=f"smtp://{nowhere}", STRIPE_API_KEY="sk_test_x",
        TASKBOARD_STRIPE_BASE=f"http://{nowhere}",
    )  # fmt: skip
    assert said.code == 1
    assert sees(said, "email", "wrong", f"{nowhere} connect: ", "host and port")
    assert sees(said, "stripe", "wrong", f"{nowhere}: .*failed", "TASKBOARD_STRIPE_BASE")
    said = doctor(TASKBOARD_SMTP_URL="http://x", STRIPE_API_KEY="a b")
    assert sees(said, "email", "wrong", "expected smtp://", "correct it")
    assert sees(said, "stripe", "wrong", "blanks", "correct STRIPE_API_KEY")
    with dev_servers() as servers:
        smtp = servers["smtp_url"].replace("starttls=off", "starttls=require")
        said = doctor(
            TASKBOARD_SMTP_URL=smtp, STRIPE_API_KEY="sk_live_x",
            TASKBOARD_STRIPE_BASE=servers["stripe_base"],
        )  # fmt: skip
    assert sees(said, "email", "wrong", "STARTTLS", "starttls=off")
    assert sees(said, "stripe", "wrong", "does not know the key", "STRIPE_API_KEY")
    assert "sk_live_x" not in said.out


def test_a_mail_server_that_refuses_the_login_is_told_from_one_that_is_away(dsn: str) -> None:
    from taskboard.console.services import email
    from taskboard.settings import Settings

    async def look(password: str) -> list[Any]:
        async with DevSmtp(login=("ann", "right")) as smtp:
            url = smtp.url.replace("right", password)
            settings = Settings(smtp_url=url, mail_from="ann@example.com")
            return await email(Look(None, settings, 0, set()))  # type: ignore[arg-type]

    (found,) = asyncio.run(look("right"))
    assert (found.level, "takes the login" in found.text) == ("ok", True)
    (found,) = asyncio.run(look("wrong"))
    assert (found.level, "login: " in found.text) == ("WRONG", True)
    assert "wrong@" not in found.text and "check user and password" in found.fix


def test_what_cannot_be_planted_here_is_judged_by_its_figures() -> None:
    def look(**facts: Any) -> Look:
        values = {"synchronous_commit": "on", "synchronous_standby_names": ""}
        return Look(None, None, 0, set(), facts=facts, values=values)  # type: ignore[arg-type]

    async def judge() -> None:
        for used, level in ((0.01, None), (0.2, "note"), (0.6, "WRONG")):
            found = await checks.notifications(look(notifications=used))
            assert [finding.level for finding in found] == ([level] if level else [])
        (found,) = await checks.durability(look(standbys=1))
        assert found.level == "note" and "synchronous_standby_names" in found.fix
        assert await checks.durability(look(standbys=0)) == []
        logs = dict.fromkeys(checks.LOGGING, "-1") | {"log_transaction_sample_rate": "0"}
        for explains, cut_at, told in (("1000", "-1", 1), ("1000", "0", 0), ("-1", "-1", 0)):
            explained = dict(zip(checks.EXPLAIN, (explains, cut_at), strict=True))
            one = look()
            one.values |= logs | explained
            assert len(await checks.logs(one)) == told

    asyncio.run(judge())


def test_a_standby_whose_query_holds_back_vacuum_is_named(
    db: Connection, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sees(console("doctor", "--json"), "standbys", "ok", "no standby")
    held = "select 'replica'::name as name, {} as transactions"
    monkeypatch.setitem(checks.SQL, "standbys", held.format(100_000))
    assert sees(console("doctor", "--json"), "standbys", "ok", "no standby")
    monkeypatch.setitem(checks.SQL, "standbys", held.format(2_000_000))
    said = console("doctor", "--json")
    assert sees(said, "standbys", "note", "replica .* 2,000,000 transactions", "hot_standby")


def test_clocks_that_differ_are_a_note(
    dsn: str, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = checks.time.time
    monkeypatch.setattr(checks.time, "time", lambda: real() - 30)
    said = console("doctor", "--json")
    assert sees(said, "clock", "note", "differ by 30.* s", "time service")


def test_another_version_is_told(db: Connection, console: Console) -> None:
    for version, level in (("0.1.99", "note"), ("7.0.0", "wrong")):
        db.execute(
            "create or replace function taskboard.version() returns text language sql immutable"
            f" security definer set search_path = pg_catalog, pg_temp as $$ select '{version}' $$"
        )
        assert sees(console("doctor", "--json"), "version", level, version, "taskboard migrate")


def test_without_taskboard_or_without_a_server_doctor_says_that(
    empty_dsn: str, console: Console, free_port: int
) -> None:
    said = console("doctor", "--json", TASKBOARD_DATABASE_URL=empty_dsn)
    assert (said.code, len(said.json["findings"])) == (1, 1)
    assert sees(said, "database", "wrong", "not installed", "taskboard migrate")
    nowhere = f"postgresql://ann:secret@127.0.0.1:{free_port}/shop"
    said = console("doctor", "--json", TASKBOARD_DATABASE_URL=nowhere)
    assert sees(said, "database", "wrong", "connection failed", "TASKBOARD_DATABASE_URL")
    assert said.code == 1 and "secret" not in said.out


def test_a_login_without_any_right_learns_what_it_may(
    db: Connection, login: Callable[..., str], console: Console
) -> None:
    stranger = login()
    said = console("doctor", "--json", TASKBOARD_DATABASE_URL=stranger)
    assert said.code == 1 and len({one["topic"] for one in said.json["findings"]}) == 18
    assert sees(said, "rights", "wrong", "may not call .* more$", "grant taskboard_worker to")
    assert sees(said, "jobs", "note", "could not be looked at: permission denied")


def test_a_module_with_a_handler_counts(
    db: Connection, console: Console, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "shop_console.py").write_text(
        "from taskboard.handlers import handler\n\n@handler('ship')\nasync def ship(ctx): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    for kind in ("ship", "pack", "email"):
        enqueue(db, kind)
    said = console("doctor", "--json")
    assert [line[1].split(":")[0] for line in lines(said, "jobs")] == ["kind email"]
    said = console("doctor", "shop_console", "--json")
    found = lines(said, "jobs")
    assert [line[1].split(":")[0] for line in found] == ["kind email", "kind pack"]
    assert all(line[0] == "note" and "no handler" in line[1] for line in found)
    said = console("doctor", "shop_console", "--json", "--older-than", "0s")
    assert sees(said, "jobs", "wrong", "kind ship: .* none is", "^taskboard run shop_console$")
    said = console("doctor", "no_such_module")
    assert said.code == 2 and "there is no module no_such_module\nhint: " in said.err


def test_each_statement_of_doctor_is_shown_and_runs(db: Connection, console: Console) -> None:
    shown = console("doctor", "--show-sql")
    assert shown.code == 0 and shown.out.count(";\n") == len(checks.SQL)
    for statement in shown.out.split(";\n"):
        rows(db, statement.strip() or "select")


@pytest.fixture
def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
