"""Uninstall takes all of Taskboard, nothing else, and not by accident."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from psycopg.conninfo import make_conninfo

from console.conftest import Console, enqueue
from support import Connection, Server, rows, session
from taskboard.console import uninstall
from taskboard.localpg import binaries
from taskboard.migrate import migrate


def installed(db: Connection) -> bool:
    return bool(rows(db, "select 1 from pg_namespace where nspname = 'taskboard'"))


def roles(db: Connection) -> int:
    return len(rows(db, "select 1 from pg_roles where rolname ~ '^taskboard_[a-z]+$'"))


def test_the_schema_goes_and_can_come_back(db: Connection, dsn: str, console: Console) -> None:
    said = console("uninstall", "--yes")
    assert said.code == 0 and said.out.startswith("dropped the schema taskboard of ")
    assert not installed(db)
    assert rows(db, "select 1 from pg_class where relname ~ 'yoyo'") == []
    said = console("uninstall", "--yes")
    assert (said.code, said.out) == (0, "") and "is not installed" in said.err
    migrate(dsn)
    assert enqueue(db)


def test_nothing_goes_by_accident(
    db: Connection, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = console("uninstall", "--show-sql")
    assert shown.code == 0 and "drop schema if exists taskboard cascade;" in shown.out
    said = console("uninstall")
    assert said.code == 2 and "hint: say --yes" in said.err
    enqueue(db)
    said = console("uninstall", "--yes")
    assert said.code == 1 and "1 live job\nhint: let workers finish it, taskboard" in said.err
    db.execute("create view public.mine as select * from taskboard.job_list")
    db.execute("create table public.orders (job uuid default (taskboard.enqueue('k')).job_id)")
    said = console("uninstall", "--yes")
    assert said.code == 1 and "public.mine" in said.err and "public.orders.job" in said.err
    assert installed(db) and rows(db, "select 1 from pg_class where relname = 'mine'")
    said = console("uninstall", "--yes", "--force", "--json")
    assert said.code == 0 and said.json["schema"] == "dropped"
    assert rows(db, "select 1 from pg_class where relname = 'mine'") == []
    assert len(rows(db, "select * from pg_class where relname = 'orders'")) == 1


def test_who_may_not_changes_nothing(
    db: Connection, login: Callable[..., str], console: Console
) -> None:
    operator = login("taskboard_operator", "taskboard_worker")
    said = console("uninstall", "--yes", TASKBOARD_DATABASE_URL=operator)
    assert said.code == 1 and "must be owner of schema taskboard" in said.err and installed(db)


def test_a_lock_is_not_queued_for(
    db: Connection, connect: Callable[..., Connection], console: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(uninstall, "PATIENCE", 0.1)
    patient = uninstall.STATEMENTS[1:]
    monkeypatch.setattr(uninstall, "STATEMENTS", ("set local lock_timeout = '50ms'", *patient))
    reader = connect("reader")
    reader.execute("begin; select from taskboard.settings")
    said = console("uninstall", "--yes")
    assert said.code == 1 and "lock timeout" in said.err and installed(db)


@pytest.fixture
def cluster(server_factory: Callable[..., Server]) -> Iterator[Callable[[str], str]]:
    """A cluster in which nobody else uses the roles."""
    server = server_factory(fsync="off")

    def make(database: str) -> str:
        with session(server.dsn()) as conn:
            conn.execute(f"create database {database}")
        return server.dsn(database)

    yield make


def test_roles_stay_while_somebody_needs_them(
    cluster: Callable[[str], str], console: Console
) -> None:
    first, second = cluster("first"), cluster("second")
    for dsn in (first, second):
        migrate(dsn)
    with session(first) as db:
        db.execute("create role ann login; grant taskboard_worker to ann")
        said = console("uninstall", "--yes", TASKBOARD_DATABASE_URL=first)
        assert said.code == 0 and "and 0 roles" in said.out and roles(db) == 5
        assert "note: the role taskboard_worker stays: used in second (" in said.err
    with session(second) as db:
        assert enqueue(db)
        db.execute("create table public.t (); grant select on public.t to taskboard_observer")
        said = console("uninstall", "--yes", "--force", "--json", TASKBOARD_DATABASE_URL=second)
        assert list(said.json["roles_kept"]) == ["taskboard_observer"] and roles(db) == 1
        assert len(said.json["roles_dropped"]) == 4
        # Whoever drops the schema need not be one who may drop roles.
        db.execute("drop table public.t; create role bob login createdb password 'secret'")
    of_bob = make_conninfo(second, user="bob", password="secret")
    with session(of_bob) as bob:
        bob.execute("create database bobs")
    of_bob = make_conninfo(of_bob, dbname="bobs")
    migrate(of_bob)
    said = console("uninstall", "--yes", TASKBOARD_DATABASE_URL=of_bob)
    assert said.code == 0 and "taskboard_observer stays: bob may not drop it" in said.err
    migrate(of_bob)
    shown = console("uninstall", "--show-sql", TASKBOARD_DATABASE_URL=of_bob)
    subprocess.run(
        [str(binaries() / "psql"), "-Xq", "-v", "ON_ERROR_STOP=1", of_bob], input=shown.out,
        text=True, check=True, capture_output=True,
    )  # fmt: skip
    with session(of_bob) as bob:
        assert not installed(bob) and roles(bob)


def test_it_asks_on_a_terminal(db: Connection, dsn: str) -> None:
    for answer, code in ((b"yes\n", 1), (f"{db.info.dbname}\n".encode(), 0)):
        ours, theirs = pty.openpty()
        os.write(ours, answer)
        done = subprocess.run(
            [sys.executable, "-m", "taskboard", "uninstall"], stdin=theirs, capture_output=True,
            env=os.environ | {"TASKBOARD_DATABASE_URL": dsn}, text=True, timeout=60,
        )  # fmt: skip
        os.close(ours)
        os.close(theirs)
        assert done.returncode == code and "Type the name of the database" in done.stderr
        assert installed(db) == bool(code)
