"""A fresh database and a fresh session cost more than most tests here, so many share both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from psycopg import sql

from support import Connection, Server, rows, session

pytest.register_assert_rewrite("verbs")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "rows_only: changes rows and nothing else; may share a database with others"
    )


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
            own.execute(
                sql.SQL(
                    "create procedure public.empty() language sql begin atomic {};"
                    " insert into taskboard.settings default values; end"
                ).format(
                    sql.SQL("; ").join(
                        sql.SQL("delete from taskboard.{}").format(sql.Identifier(table))
                        for (table,) in rows(
                            own,
                            "select relname from pg_class"
                            " where relnamespace = 'taskboard'::regnamespace"
                            " and relkind in ('r', 'p') and not relispartition"
                            " and relname <> 'migrations' and relname !~ '^_?yoyo'",
                        )
                    )
                )
            )
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
def orders(db: Connection) -> Iterator[Callable[[], list[int]]]:
    """A table `orders` of the user's own business; what it holds, as others see it."""
    db.execute("create table public.orders (n integer)")
    yield lambda: [n for (n,) in rows(db, "select n from public.orders order by n")]
    db.execute("drop table public.orders")
