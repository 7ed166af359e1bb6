"""What the charts show: the last hour, minute by minute, and how deep the queues were.

What has ended is counted in history, a whole minute at a time, so that it is exact and each count
is a short one. How many jobs waited a while ago is stored nowhere: the board looks now and then,
and remembers it as long as it runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import psycopg
from psycopg_pool import PoolTimeout

from taskboard.connections import one_line
from taskboard.console.board.queries import ABOUT, DEPTH, MINUTE, Ask, Database

log = logging.getLogger(__name__)

LOOK_EVERY = 10.0  # seconds
MINUTES = 60
MINUTE_LONG = timedelta(minutes=1)
CATCHES_UP_FOR = 2.0  # seconds a round, so that the depth is looked at in time


@dataclass(frozen=True, slots=True)
class Minute:
    """What ended in the minute that begins at `at`; seconds of the last attempt."""

    at: datetime
    completed: int
    failed: int
    cancelled: int
    half: float | None  # took no longer
    most: float | None  # 95 of 100 took no longer


@dataclass(frozen=True, slots=True)
class Depth:
    """How many jobs were in a state at a time."""

    at: datetime
    ready: int
    running: int
    scheduled: int
    held: int


class Samples:
    """The last hour."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.minutes: dict[datetime, Minute] = {}
        self.depths: deque[Depth] = deque(maxlen=int(3600 / LOOK_EVERY))
        self.now = datetime.now(UTC)

    async def run(self) -> None:
        """Look for ever, whatever the weather; log a refusal once."""
        refused = ""
        while True:
            try:
                await self.look()
                refused = ""
            except (psycopg.Error, PoolTimeout, OSError) as exc:
                if refused != (refused := one_line(exc) or type(exc).__name__):
                    log.warning("board: no figures: %s", refused)
            await asyncio.sleep(LOOK_EVERY)

    async def look(self) -> None:
        """Look once; count minutes that were not counted yet, the newest first."""
        async with self._database.reading("jit") as ask:
            [about] = await ask(ABOUT)
            self.now = about["now"]
            [depth] = await ask(DEPTH)
            self.depths.append(Depth(self.now, **depth))
        first = self.now.replace(second=0, microsecond=0) - MINUTES * MINUTE_LONG
        for at in [at for at in self.minutes if at < first]:
            del self.minutes[at]
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + CATCHES_UP_FOR
        for number in range(MINUTES - 1, -1, -1):
            at = first + number * MINUTE_LONG
            if at not in self.minutes and loop.time() < ends_at:
                async with self._database.reading("jit") as ask:
                    self.minutes[at] = await count(ask, at)


async def count(ask: Ask, at: datetime) -> Minute:
    """Count what ended in a minute."""
    [row] = await ask(MINUTE, since=at, until=at + MINUTE_LONG)
    return Minute(at, **row)
