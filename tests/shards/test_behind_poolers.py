"""PgBouncer before the proxy, and between the proxy and its shards."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pytest

from poolers.bouncer import pgbouncer
from shards.sharded import Sharded, shard_in
from shards.test_proxy import ask, keys
from support import Connection, rows, session

pytestmark = pytest.mark.wide


def test_a_life_goes_through_poolers_on_both_sides_of_the_proxy(
    sharded: Sharded, shard: list[Connection], connect: Callable[..., Connection]
) -> None:
    with ExitStack() as stack:
        between = [stack.enter_context(pgbouncer(dsn)) for dsn in sharded.shards]
        with session(sharded.proxy) as conn:
            Sharded(sharded.proxy, between).configure(conn)
        before = stack.enter_context(pgbouncer(sharded.proxy))
        clients = [stack.enter_context(session(before, f"c{n}", options="")) for n in range(8)]
        for number, client in enumerate(clients):
            (key,) = keys(number % 2, 1, client)
            job_id, created = ask(client, "enqueue('k', unique_key => %s)", key)[0]
            assert created == (number < 2) and shard_in(job_id) == number % 2
            ask(client, "enqueue_many('k', '{1,2,3}')")
        owners = [row[:2] for client in clients for row in ask(client, "claim(max_jobs => 4)")]
        assert len(owners) == 26
        for (job_id, token), client in zip(owners, clients * 4, strict=False):
            assert ask(client, "renew(%s, %s)", job_id, token)
            assert ask(client, "complete(%s, %s)", job_id, token)
        sessions = (
            "select count(*) from pg_stat_activity where datname = current_database()"
            " and backend_type = 'client backend' and pid <> pg_backend_pid()"
        )
        assert all(0 < rows(conn, sessions)[0][0] <= 2 for conn in shard)
    assert sum(rows(c, "select count(*) from taskboard.history")[0][0] for c in shard) == 26
