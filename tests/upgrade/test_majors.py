"""To another major version of PostgreSQL while leases run: what workers hold stays theirs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg
import pytest

from support import Connection, OwnServer, make_server, rows, session, wait_for
from taskboard.localpg import binaries
from taskboard.migrate import migrate

pytestmark = pytest.mark.wide

DEBIAN = "/usr/lib/postgresql/15/bin"
SETTINGS = {"fsync": "off", "full_page_writes": "off", "wal_level": "logical"}
# Of these each installation has its own.
OWN = "'migrations', '_yoyo_log', '_yoyo_version', '_yoyo_migration', 'yoyo_lock'"
TABLES = f"""
select format('taskboard.%I', c.relname)
from pg_class as c
where c.relnamespace = 'taskboard'::regnamespace and c.relkind in ('r', 'p')
  and not c.relispartition and c.relname not in ({OWN})
order by 1"""
COUNTERS = """
select setval('taskboard.lane_ids', greatest((select max(l.id) from taskboard.lanes as l), 1)),
  setval(pg_get_serial_sequence('taskboard.incidents', 'id'),
    (select coalesce(max(i.id), 0) + 1 from taskboard.incidents as i))"""


@dataclass(slots=True)
class Work:
    """What is under way when the database is moved."""

    running: tuple[UUID, UUID]
    lapsed: tuple[UUID, UUID]
    done: tuple[UUID, UUID]
    blocked: UUID
    unique: UUID

    @classmethod
    def begin(cls, old: Connection) -> Work:
        def one(call: str, *args: Any) -> Any:
            return rows(old, f"select * from taskboard.{call}", args)[0]

        unique = one("enqueue('later', unique_key => 'u', delay => '1 h')")[0]
        one("enqueue('k', serial_key => 's')")
        blocked = one("enqueue('k', serial_key => 's')")[0]
        running = one("claim(worker => 'A')")[:2]
        one("begin_effect(%s, %s)", *running)
        one("enqueue('k')")
        lapsed = one("claim(worker => 'B')")[:2]
        rows(old, "select * from taskboard.evict('B')")
        one("enqueue('other')")
        done = one("claim(kinds => '{other}', worker => 'C')")[:2]
        one("complete(%s, %s)", *done)
        return cls(running, lapsed, done, blocked, unique)

    def go_on(self, new: Connection) -> None:
        """The same workers go on with the same tokens, as if nothing had been."""

        def ask(call: str, *args: Any) -> list[tuple[Any, ...]]:
            return rows(new, f"select * from taskboard.{call}", args)

        assert ask("renew(%s, %s)", *self.running)
        assert not ask("renew(%s, %s)", *self.lapsed)
        assert ask("complete(%s, %s)", *self.done), "a lost answer is given again"
        ((again, token, *_),) = ask("claim(kinds => '{k}', worker => 'D')")
        assert again == self.lapsed[0] and not ask("complete(%s, %s)", *self.lapsed)
        assert ask("complete(%s, %s)", again, token)
        assert not ask("claim(kinds => '{k}')"), "the rest is leased or blocked"
        assert ask("begin_effect(%s, %s)", *self.running)[0][3] == "fresh"
        assert ask("complete(%s, %s)", *self.running)
        assert [row[0] for row in ask("claim(kinds => '{k}')")] == [self.blocked]
        assert ask("enqueue('later', unique_key => 'u')") == [(self.unique, False)]
        assert ask("enqueue('a new lane', queue => 'a new queue')")
        refused = "select id from taskboard.incident_list where what = 'write_refused'"
        assert rows(new, refused)
        assert ask("maintain()")


@pytest.fixture
def old() -> Iterator[OwnServer]:
    yield from server(DEBIAN)


@pytest.fixture
def new() -> Iterator[OwnServer]:
    yield from server("wheel")


def server(choice: str) -> Iterator[OwnServer]:
    started = make_server(choice, SETTINGS)
    assert isinstance(started, OwnServer)
    yield started
    started.close()


def test_leases_go_on_after_a_dump_is_restored_into_the_next_major(
    old: OwnServer, new: OwnServer
) -> None:
    migrate(old.dsn())
    with session(old.dsn()) as conn:
        work = Work.begin(conn)
    with session(new.dsn()) as conn:
        for role in ("owner", "producer", "worker", "operator", "observer"):
            conn.execute(f"create role taskboard_{role} nologin")
    dump = [binaries() / "pg_dump", "--dbname", old.dsn(), "--format=custom"]
    restore = [binaries() / "pg_restore", "--dbname", new.dsn(), "--exit-on-error"]
    with subprocess.Popen(dump, stdout=subprocess.PIPE) as dumping:
        subprocess.run(restore, stdin=dumping.stdout, check=True)
    assert migrate(new.dsn()).applied == []
    with session(new.dsn()) as conn:
        work.go_on(conn)


def test_leases_go_on_after_a_switch_to_a_subscriber_of_the_next_major(
    old: OwnServer, new: OwnServer
) -> None:
    migrate(old.dsn())
    with session(old.dsn()) as here:
        published = ", ".join(name for (name,) in rows(here, TABLES))
        here.execute(
            f"create publication taskboard for table {published}"
            " with (publish_via_partition_root = true)"
        )
        before = rows(here, "select job_id from taskboard.enqueue('copied', delay => '1 h')")

    # The tables are made by migrate, and emptied: what they begin with comes from the other side.
    migrate(new.dsn())
    with session(new.dsn()) as there:
        there.execute("truncate " + ", ".join(name for (name,) in rows(there, TABLES)))
        from_there = f"connection '{old.dsn()}' publication taskboard"
        there.execute(f"create subscription taskboard {from_there}")
        copied = "select bool_and(srsubstate = 'r') from pg_subscription_rel"
        wait_for(lambda: rows(there, copied) == [(True,)], seconds=30, what="the first copy")
        with session(old.dsn()) as here:
            work = Work.begin(here)  # while it is replicated

            # The switch: no more writes there, wait for the last of them, then here.
            name = here.info.dbname
            here.execute(f"alter database {name} set default_transaction_read_only = on")
            end = rows(here, "select pg_current_wal_lsn()")[0][0]
        with session(old.dsn()) as here:
            with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
                rows(here, "select * from taskboard.renew(%s, %s)", work.running)
            arrived = (
                "select confirmed_flush_lsn >= %s from pg_replication_slots"
                " where slot_name = 'taskboard'"
            )
            wait_for(lambda: rows(here, arrived, [end]) == [(True,)], seconds=30, what="the rest")
        there.execute("drop subscription taskboard")
        rows(there, COUNTERS)
        work.go_on(there)
        assert rows(there, "select state from taskboard.job(%s)", before[0]) == [("scheduled",)]


def test_leases_go_on_after_pg_upgrade(old: OwnServer, new: OwnServer) -> None:
    migrate(old.dsn())
    with session(old.dsn()) as conn:
        work = Work.begin(conn)
    old.stop()
    new.stop()
    owner = os.stat(new.cluster.data)
    demoted: dict[str, Any] = {}
    if os.getuid() == 0:
        demoted = {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []}

    def run(program: str, *arguments: object) -> None:
        command = [binaries() / program, *map(str, arguments)]
        done = subprocess.run(
            command, cwd=new.cluster.data, env={"PATH": os.defpath, "LC_ALL": "C"}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120, **demoted,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout

    run("pg_checksums", "--disable", "-D", new.cluster.data)
    run(
        "pg_upgrade", "-b", old.bin, "-B", new.bin, "-d", old.cluster.data, "-D", new.cluster.data,
        "-U", "postgres", "-s", new.cluster.data, "--no-sync",
    )  # fmt: skip
    new.start()
    assert migrate(new.dsn()).applied == []
    with session(new.dsn()) as conn:
        work.go_on(conn)


