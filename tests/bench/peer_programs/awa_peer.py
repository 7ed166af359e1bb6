"""awa: storage by ring segments, claimed by its engine in Rust; only its inserts are plain SQL."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import peer
from meter import meter


@dataclass
class Email:
    to: str = ""
    subject: str = ""
    text: str = ""
    n: int = 0


def sql() -> dict[str, object]:
    from awa import bridge
    from awa._awa import derive_kind

    insert = peer.bind(
        bridge._INSERT_SQL_DOLLAR,
        f"'{derive_kind('Email')}'",
        "'default'",
        f"'{peer.PAYLOAD}'",
        "'available'",
        "2",
        "25",
        "null",
        "'{}'",
        "'{}'",
        "null",
    )
    call = insert[insert.index("FROM ") + 5 :]
    return {
        "enqueue": insert,
        "bulk": f"select count(j) from (select {call} as j from generate_series(1, @N@)"
        " offset 0) as x",
        "waiting": "select count(*) from awa.jobs where state in ('available', 'running')",
        "tables": [],
        "guarantees": {
            "token checked": "by a lease of its own (engine in Rust, not read)",
            "dead worker's job": "rescued by heartbeat, says its page",
            "history": "completed jobs are kept for hours",
            "seen in": "awa_pg's METADATA",
        },
    }


def install() -> None:
    async def run() -> None:
        import awa

        async with awa.AsyncClient(peer.DSN) as client:
            await client.migrate()

    asyncio.run(run())


def work() -> None:
    async def run() -> None:
        import awa

        client = awa.AsyncClient(peer.DSN, max_connections=peer.SLOTS + 2)

        @client.task(Email, queue="default")
        async def email(job: object) -> None:
            meter.hit(job.args.n)

        await client.start([("default", peer.SLOTS)])
        await asyncio.sleep(3600)

    asyncio.run(run())


if __name__ == "__main__":
    peer.main(sql, install, work)
