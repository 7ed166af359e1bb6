"""Waking up: LISTEN on a connection of its own, as a hint to claim again.

Everything works without it, by polling. Order: listen, claim once more, then wait; so each time
the channel or the sleeper's mark is taken, the runner is woken for one more claim.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

import psycopg

from taskboard import db

log = logging.getLogger(__name__)

PROBE_EVERY = 30.0  # seconds; a socket that is dead without saying so is noticed by then
ANSWER_WITHIN = 5.0
AT_MOST_EVERY = 0.02  # seconds between wake-ups: anybody may notify, as often as they like


class Wake:
    """Keeps a listening connection while the runner is idle and calls `wake` when one should claim.

    The sleeper's mark makes others notify, which costs them, so it is given up while the runner is
    busy: `sleeping` says which.
    """

    def __init__(
        self,
        dial: Callable[[], Awaitable[db.Connection]],
        queues: list[str] | None,
        wake: Callable[[], None],
    ) -> None:
        self._dial, self._queues, self._wake = dial, queues, wake
        self._sleeping = self._marked = False
        self._stirred = asyncio.Event()
        self._up: bool | None = None
        self._pause = 1.0

    @property
    def works(self) -> bool:
        """Whether somebody who makes a job claimable would tell."""
        return self._marked

    def sleeping(self, asleep: bool) -> None:
        """Say whether the runner waits for jobs."""
        if asleep != self._sleeping:
            self._sleeping = asleep
            self._stirred.set()

    async def run(self) -> None:
        """Listen for ever, connecting at most once a second. Returns only behind a pooler."""
        while True:
            try:
                async with asyncio.timeout(ANSWER_WITHIN):
                    conn = await self._dial()
                try:
                    with db.bounded(conn, ANSWER_WITHIN):
                        pooled = await db.is_pooled(conn)
                    if pooled:
                        log.warning(
                            "wake: polling only: behind a pooler notifications do not arrive;"
                            " set TASKBOARD_LISTEN_URL to a direct connection"
                        )
                        return
                    await self._serve(conn)
                finally:
                    self._marked = False
                    conn.pgconn.finish()
            except (psycopg.Error, OSError) as exc:
                text = db.one_line(exc) or "no answer"
                self._report(False, f"polling only until the channel is back: {text}")
            await asyncio.sleep(self._pause * random.uniform(1, 1.5))
            self._pause = min(self._pause * 2, 15)

    def _report(self, up: bool, text: str) -> None:
        if up != self._up:
            self._up = up
            log.log(logging.INFO if up else logging.WARNING, "wake: %s", text)

    async def _serve(self, conn: db.Connection) -> None:
        """Take and give up the mark as the runner falls asleep and wakes; raises when lost."""
        loop = asyncio.get_running_loop()
        conn.add_notify_handler(lambda notify: self._wake())
        look_at = woken_at = 0.0
        while True:
            self._stirred.clear()
            with db.bounded(conn, ANSWER_WITHIN):
                if self._sleeping and loop.time() >= look_at:
                    # Also the probe of a connection that has been silent for long.
                    self._marked = await db.listen(conn, self._queues)
                    look_at = loop.time() + (PROBE_EVERY if self._marked else 0.05)
                    self._pause = 1.0
                    self._report(True, "listening")
                    if self._marked:
                        self._wake()
                elif self._marked and not self._sleeping:
                    await db.unlisten(conn)
                    self._marked, look_at = False, 0.0
            # Not psycopg's notifies(): leaving that loses what it has fetched, and a call waits
            # for it.
            loop.add_reader(conn.fileno(), self._stirred.set)
            try:
                async with asyncio.timeout_at(look_at if self._sleeping else None):
                    await self._stirred.wait()
            except TimeoutError:
                pass
            finally:
                loop.remove_reader(conn.fileno())
            conn.pgconn.consume_input()
            heard = False
            while conn.pgconn.notifies():
                heard = True
            if heard:
                await asyncio.sleep(max(woken_at + AT_MOST_EVERY - loop.time(), 0))
                woken_at = loop.time()
                self._wake()
