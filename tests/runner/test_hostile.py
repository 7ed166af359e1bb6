"""A runner among hostile neighbours, and what it keeps to itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from harness import enqueue, process, running, until
from psycopg.conninfo import make_conninfo

from support import rows, session
from taskboard import db as calls
from taskboard import wake

Connection = psycopg.Connection[Any]


def test_a_storm_of_notifications_wakes_a_runner_a_bounded_number_of_times(
    dsn: str, db: Connection
) -> None:
    woken = 0

    def count() -> None:
        nonlocal woken
        woken += 1

    def storm() -> None:
        with session(dsn, "stranger") as stranger:
            for _ in range(3000):
                stranger.execute("notify taskboard")

    async def scenario() -> float:
        nonlocal woken
        channel = wake.Wake(lambda: calls.connect(dsn, "sleeper"), None, count)
        channel.sleeping(True)
        task = asyncio.create_task(channel.run())
        await until(lambda: channel.works)
        woken, began = 0, asyncio.get_running_loop().time()
        await asyncio.to_thread(storm)
        took = asyncio.get_running_loop().time() - began
        await until(lambda: woken)
        task.cancel()
        return took

    took = asyncio.run(scenario())
    assert 1 <= woken <= took / wake.AT_MOST_EVERY + 3
