"""Shards on the server of this run; before them a proxy, on Debian's PostgreSQL 15."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from shards.sharded import DEBIAN, Sharded, connect_shards, install
from support import CARELESS, Connection, Databases, OwnServer, make_server, session


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
    install(proxies.server.dsn(name), databases.server.dsn(template))
    return name


@pytest.fixture
def make_sharded(
    proxies: Databases, proxy_template: str
) -> Callable[[list[str]], Sharded]:
    """Put a proxy before some databases, which become shards 0, 1 …"""

    def make(shards: list[str]) -> Sharded:
        sharded = Sharded(proxies.server.dsn(proxies.create(proxy_template)), shards)
        connect_shards(sharded)
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
