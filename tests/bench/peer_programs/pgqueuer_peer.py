"""pgqueuer, by asyncpg: statements built by its own query builder."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta

import peer
from meter import meter


def sql() -> dict[str, object]:
    import uuid

    from pgqueuer.adapters.persistence.qb import QueryQueueBuilder

    own = QueryQueueBuilder()
    data = f"convert_to('{peer.PAYLOAD}', 'UTF8')"

    def enqueue(n: str) -> str:
        many = [
            f"array_fill({value}, array[{n}])"
            for value in ("0", "'email'::text", data, "'0'::interval", "null::text", "null::jsonb")
        ]
        return peer.bind(own.build_enqueue_query(), *many)

    def dequeue(n: str) -> str:
        query = own.build_dequeue_query(
            batch_size=1,
            entrypoints=["email"],
            concurrency_limits=[0],
            queue_manager_id=uuid.UUID(int=1),
            global_concurrency_limit=None,
            heartbeat_timeout=timedelta(seconds=30),
        )
        values = []
        for value in query.args:
            values.append(
                n
                if value == 1
                else "array['email']"
                if isinstance(value, list)
                else "interval '30 seconds'"
                if isinstance(value, timedelta)
                else f"'{value}'"
            )
        return peer.bind(query.sql, *values)

    def done(ids: str, n: str) -> str:
        status = f"array_fill('successful'::pgqueuer_status, array[{n}])"
        return peer.bind(
            own.build_log_job_query(), ids, status, f"array_fill(null::jsonb, array[{n}])"
        )

    return {
        "enqueue": enqueue("1"),
        "bulk": enqueue("@N@"),
        "one": peer.collected(dequeue("1"), "max(id) as id, count(payload)")
        + " \\gset\n"
        + done("array[:id]::bigint[]", "1"),
        "many": peer.collected(dequeue("@N@"), "array_agg(id) as ids, count(payload)")
        + " \\gset\n"
        + done("':ids'::bigint[]", "@N@"),
        "waiting": "select count(*) from pgqueuer",
        "tables": ["pgqueuer", "pgqueuer_log"],
        "guarantees": {
            "token checked": "no: by id",
            "dead worker's job": "picked again when its heartbeat is stale (30 s)",
            "history": "a log of states, without payload",
            "seen in": "pgqueuer/adapters/persistence/qb.py",
        },
    }


def install() -> None:
    async def run() -> None:
        import asyncpg
        from pgqueuer.db import AsyncpgDriver
        from pgqueuer.queries import Queries

        await Queries(AsyncpgDriver(await asyncpg.connect(peer.DSN))).install()

    asyncio.run(run())


def work() -> None:
    async def run() -> None:
        import asyncpg
        from pgqueuer import PgQueuer
        from pgqueuer.db import AsyncpgDriver

        own = PgQueuer(AsyncpgDriver(await asyncpg.connect(peer.DSN)))

        @own.entrypoint("email")
        async def email(job: object) -> None:
            payload = json.loads(job.payload)
            meter.hit(payload.get("n"))

        await own.run(batch_size=peer.SLOTS)

    asyncio.run(run())


if __name__ == "__main__":
    peer.main(sql, install, work)
