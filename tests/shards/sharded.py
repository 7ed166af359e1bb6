"""A proxy's database, and the shards behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import dict_row

from support import Connection, rows, session
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
    return make_conninfo(**parts, tcp_user_timeout=1000)


def install(proxy: str, shard: str) -> None:
    """Make a database a proxy, with the signatures of a shard."""
    with session(shard, row_factory=dict_row) as there, session(proxy) as conn:
        conn.execute("create extension plproxy")
        conn.execute(script(there).encode())


def connect_shards(sharded: Sharded) -> None:
    """Take all shards into use, and give each its part of the keys."""
    with session(sharded.proxy) as conn:
        sharded.configure(conn)
        for number in range(len(sharded.shards)):
            rows(conn, "select taskboard_shards.add_shard(%s)", [number])
        rows(conn, "select taskboard_shards.spread()")


def shard_in(job_id: Any) -> int:
    """Read the shard's number in a job id."""
    return int(str(job_id)[-4:], 16)
