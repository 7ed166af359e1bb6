"""Shards on the server of this run; before them a proxy, on Debian's PostgreSQL 15."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import dict_row

from support import CARELESS, Connection, Databases, OwnServer, make_server, rows, session
from taskboard.console.shards import script

DEBIAN = "/usr/lib/postgresql/15/bin"


@dataclass(slots=True)
class Sharded:
    """A proxy's DSN, and those of its shards by their numbers."""

    proxy: str
    shards: list[str]

    def configure(self, conn: Connection) -> None:
        """Name the shards to PL/Proxy; it wants a power of two, so the first one fills up."""
        count = 1 << (len(self.shards) - 1).bit_length()
        named = [*self.shards, *[self.shards[0]] * (count - len(self.shards))]
        options = sql.SQL(", ").join(
            sql.SQL("{} {}").format(sql.Identifier(f"p{n}"), sql.Literal(bare(dsn)))
            for n, dsn in enumerate(named)
        )
        conn.execute("drop server if exists taskboard cascade")
        make = "create server taskboard foreign data wrapper plproxy options ({})"
        conn.execute(sql.SQL(make).format(options))
        conn.execute("create user mapping for public server taskboard")
        conn.execute(
            "grant usage on foreign server taskboard to taskboard_producer, taskboard_worker,"
            " taskboard_operator, taskboard_observer"
        )


def bare(dsn: str) -> str:
    """Leave the user out: PL/Proxy goes on as whoever calls it."""
    parts = {name: value for name, value in conninfo_to_dict(dsn).items() if name != "user"}
    return make_conninfo(**parts, connect_timeout=2)


@pytest.fixture(scope="package")
def proxies() -> Iterator[Databases]:
    server = make_server(DEBIAN, CARELESS)
    assert isinstance(server, OwnServer)
    yield Databases(server, "proxy")
    server.close()


@pytest.fixture(scope="package")
def proxy_template(proxies: Databases, databases: Databases, template: str) -> str:
    """The name of a proxy's database that knows no shard yet, to be copied."""
    name = proxies.create()
    with (
        session(databases.server.dsn(template), row_factory=dict_row) as shard,
        session(proxies.server.dsn(name)) as conn,
    ):
        conn.execute("create extension plproxy")
        conn.execute(script(shard).encode())
    return name


@pytest.fixture
def make_sharded(
    proxies: Databases, proxy_template: str
) -> Callable[[list[str]], Sharded]:
    """Put a proxy before some databases, which become shards 0, 1 …"""

    def make(shards: list[str]) -> Sharded:
        sharded = Sharded(proxies.server.dsn(proxies.create(proxy_template)), shards)
        with session(sharded.proxy) as conn:
            sharded.configure(conn)
            for number in range(len(shards)):
                rows(conn, "select taskboard_shards.add_shard(%s)", [number])
            rows(conn, "select taskboard_shards.spread()")
        return sharded

    return make


@pytest.fixture
def sharded(
    make_sharded: Callable[[list[str]], Sharded], new_database: Callable[..., str], template: str
) -> Sharded:
    """Two shards and a proxy."""
    return make_sharded([new_database(template), new_database(template)])


@pytest.fixture
def proxy(sharded: Sharded) -> Iterator[Connection]:
    with session(sharded.proxy, "proxy") as conn:
        yield conn


@pytest.fixture
def shard(sharded: Sharded, connect: Callable[..., Connection]) -> list[Connection]:
    """A session on each shard, of its owner."""
    return [connect(f"shard {n}", dsn) for n, dsn in enumerate(sharded.shards)]


def shard_in(job_id: Any) -> int:
    """Read the shard's number in a job id."""
    return int(str(job_id)[-4:], 16)
