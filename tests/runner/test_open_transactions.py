"""A runner keeps no snapshot: nothing of it holds back vacuum, however long a handler takes."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import psycopg
from harness import Context, enqueue, running, until

Connection = psycopg.Connection[Any]


def held(db: Connection) -> list[tuple[Any, ...]]:
    """Sessions of the runner that are inside a transaction."""
    return db.execute(
        "select application_name, state, query from pg_stat_activity"
        " where datname = current_database() and application_name like 'taskboard %'"
        " and (state like 'idle in transaction%' or state = 'idle' and backend_xmin is not null)"
    ).fetchall()


def sessions(db: Connection) -> int:
    row = db.execute(
        "select count(*) from pg_stat_activity where datname = current_database()"
        " and application_name like 'taskboard %' and state = 'idle'"
    ).fetchone()
    return int(row[0]) if row else 0


def test_between_its_calls_a_runner_holds_no_transaction_open(dsn: str, db: Connection) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow(ctx: Context) -> None:
        begun.set()
        await go_on.wait()

    async def watch() -> None:
        async with running(dsn, {"slow": slow}, listen=True, lease=timedelta(seconds=1)):
            await until(lambda: sessions(db) >= 2, what="an idle runner")
            await until(lambda: not held(db), what="no transaction, while it waits for jobs")
            enqueue(db, "slow")
            async with asyncio.timeout(10):
                await begun.wait()
            await until(lambda: not held(db), what="no transaction, while a handler works")
            go_on.set()

    asyncio.run(watch())
    row = db.execute("select count(*) from taskboard.jobs").fetchone()
    assert row == (0,)
