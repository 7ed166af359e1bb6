"""A fresh database and a fresh session cost more than most tests here, so many share both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from hypothesis import Phase
from psycopg import sql

from support import Connection, Server, add_empty, rows, session

pytest.register_assert_rewrite("verbs")


@dataclass(slots=True)
class Shared:
    """A database for tests that change only rows, and its owner's session."""

    dsn: str
    conn: Connection

    def empty(self) -> None:
        """Take away every row that a test may have left, and what it set in the session."""
        self.conn.rollback()
        self.conn.execute("discard all")
        self.conn.execute("call public.empty()")


@pytest.fixture(scope="session")
def shared(server: Server, template: str) -> Iterator[Shared]:
    name = f"{template}_sql"
    with session(server.dsn(), options="") as conn:
        conn.execute(
            sql.SQL("create database {} template {}").format(
                sql.Identifier(name), sql.Identifier(template)
            )
        )
        with session(server.dsn(name), "db") as own:
            add_empty(own)
            yield Shared(server.dsn(name), own)
        conn.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


def shares(request: pytest.FixtureRequest) -> Shared | None:
    if request.node.get_closest_marker("rows_only") is None:
        return None
    shared: Shared = request.getfixturevalue("shared")
    return shared


@pytest.fixture
def dsn(
    request: pytest.FixtureRequest, new_database: Callable[..., str], template: str
) -> Iterator[str]:
    """A database with Taskboard and without jobs."""
    if shared := shares(request):
        yield shared.dsn
        shared.empty()
    else:
        yield new_database(template=template)


@pytest.fixture
def db(request: pytest.FixtureRequest, dsn: str) -> Iterator[Connection]:
    """A session of the database's owner, in autocommit mode, as it was at its start."""
    if shared := shares(request):
        yield shared.conn
    else:
        with session(dsn, "db") as conn:
            yield conn


@pytest.fixture
def empty(request: pytest.FixtureRequest, db: Connection) -> Callable[[], None]:
    """Takes away every row, in the middle of a test."""
    if shares(request) is None:
        add_empty(db)

    def take_away() -> None:
        db.execute("call public.empty()")

    return take_away


@pytest.fixture
def phases() -> tuple[Phase, ...]:
    """What Hypothesis does: it looks for a failure, and shortens it."""
    return (Phase.generate, Phase.shrink)


@pytest.fixture
def orders(db: Connection) -> Iterator[Callable[[], list[int]]]:
    """A table `orders` of the user's own business; what it holds, as others see it."""
    db.execute("create table public.orders (n integer)")
    yield lambda: [n for (n,) in rows(db, "select n from public.orders order by n")]
    db.execute("drop table public.orders")
