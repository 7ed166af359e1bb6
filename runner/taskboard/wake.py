"""Waking up: LISTEN on a connection of its own, as a hint to claim again.

Everything works without it, by polling. Order: listen, claim once more, then wait; so each time
the channel or the sleeper's mark is taken, the runner is woken for one more claim.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from taskboard import db
from taskboard.connections import Connection, Dial, Link, keep_on

log = logging.getLogger(__name__)

PROBE_EVERY = 30.0  # seconds; a socket that is dead without saying so is noticed by then
ANSWER_WITHIN = 5.0
AT_MOST_EVERY = 0.02  # seconds between wake-ups: anybody may notify, as often as they like


class Wake:
    """Keeps a listening connection while the runner is idle and calls `wake` when one should claim.

    The sleeper's mark makes others notify, which costs them: `sleeping` says when it is needed.
    """

    def __init__(self, dial: Dial, queues: list[str] | None, wake: Callable[[], None]) -> None:
        self.link = Link("wake", dial, within=ANSWER_WITHIN, first=1, cap=15)
        self._queues, self._wake = queues, wake
        self.asleep = self._marked = False
        self._stirred = asyncio.Event()

    @property
    def works(self) -> bool:
        """Whether somebody who makes a job claimable would tell."""
        return self._marked and self.link.conn is not None

    def sleeping(self, asleep: bool) -> None:
        """Say whether the runner waits for jobs."""
        if asleep != self.asleep:
            self.asleep = asleep
            self._stirred.set()

    async def run(self) -> None:
        """Listen for ever; behind a pooler, where nothing is heard, do nothing for ever."""
        try:
            await keep_on("wake: polling only", self.link, self._serve, 0)
        finally:
            self.link.close()

    async def _serve(self) -> None:
        """Take and give up the mark as the runner falls asleep and wakes; raises when lost."""
        self._marked = False
        if await self.link.call(db.is_pooled):
            log.warning(
                "wake: polling only: behind a pooler notifications do not arrive;"
                " set TASKBOARD_LISTEN_URL to a direct connection"
            )
            self.link.close()
            await asyncio.Event().wait()
        loop, conn, look_at = asyncio.get_running_loop(), self.link.conn, 0.0
        assert conn is not None
        conn.add_notify_handler(lambda notify: self._wake())
        log.info("wake: listening")
        held = False  # a mark that is not yet to be relied on costs others as much
        while True:
            self._stirred.clear()
            if self.asleep and loop.time() >= look_at:
                # Also the probe of a connection that has been silent for long.
                held = True
                self._marked = bool(await self.link.call(db.listen, self._queues))
                look_at = loop.time() + (PROBE_EVERY if self._marked else 0.05)
                if self._marked:
                    self._wake()
            elif held and not self.asleep:
                await self.link.call(db.unlisten)
                held, self._marked, look_at = False, False, 0.0
            # Not psycopg's notifies(): leaving that loses what it has fetched, and a call waits
            # for it.
            loop.add_reader(conn.fileno(), self._stirred.set)
            try:
                async with asyncio.timeout_at(look_at if self.asleep else None):
                    await self._stirred.wait()
            except TimeoutError:
                pass
            finally:
                loop.remove_reader(conn.fileno())
            if await self.link.call(self._take):
                self._wake()
                await asyncio.sleep(AT_MOST_EVERY)

    async def _take(self, conn: Connection) -> bool:
        """Take what has arrived; answer whether there was a notification."""
        conn.pgconn.consume_input()
        return bool(list(iter(conn.pgconn.notifies, None)))
