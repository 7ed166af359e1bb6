"""The renewer keeps the leases of running jobs alive, whatever their handlers do.

It has a thread, an event loop and a connection of its own: a handler that blocks the runner's
loop keeps its lease, and a process that is gone loses it. A lease's local deadline counts from
when the request was sent, so it never lies behind the database's.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from contextvars import copy_context
from enum import StrEnum
from uuid import UUID

import psycopg

from taskboard import db
from taskboard.connections import Dial, Link, Weather, array
from taskboard.job import Job

log = logging.getLogger(__name__)

CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now() -> float:
    """Seconds on a clock that runs on while the machine sleeps, where there is one."""
    return time.clock_gettime(CLOCK)


class News(StrEnum):
    """What can happen to a lease."""

    LOST = "lease lost"
    TIMED_OUT = "timed out"
    CANCEL = "cancel requested"


class Lease:
    """A claimed job's lease, shared by the runner's loop and the renewer's thread.

    `tell` is called in the runner's loop, once for each kind of news; also late, when the job has
    just ended and a renewal therefore found nothing.
    """

    __slots__ = "deadline length owner renew_at stop_at tell told".split()  # noqa: SIM905

    def __init__(self, token: UUID, job: Job, sent_at: float) -> None:
        self.owner, self.length = (job.id, token), job.lease.total_seconds()
        self.stop_at = sent_at + job.timeout.total_seconds()
        self.tell: Callable[[News], None] = lambda news: None
        self.told: set[News] = set()
        self.grant(sent_at)

    def grant(self, sent_at: float) -> None:
        """Count anew from when a call was sent that was answered."""
        self.deadline = sent_at + self.length
        self.renew_at = sent_at + self.length / 3

    @property
    def owned(self) -> bool:
        """Whether the lease holds, as far as that can be known without asking."""
        return News.LOST not in self.told and now() < self.deadline


class Renewer(threading.Thread):
    """Renews each held lease at a third of its length, all that are due in one call.

    A renewal may hang for a quarter of the shortest lease; then its connection is cut and another
    one opened, early enough for a second try.
    """

    def __init__(self, dial: Dial, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(name="taskboard-renewer", daemon=True)
        self._dial, self._loop = dial, loop
        self.leases: dict[UUID, Lease] = {}
        self._guard = threading.Lock()
        self._poke: Callable[[], object] = lambda: None
        self._stopped, self.turned_at = False, now()

    # Called from the runner's loop.

    def hold(self, leases: Iterable[Lease]) -> None:
        """Look after these leases from now on."""
        with self._guard:
            for lease in leases:
                if (old := self.leases.get(lease.owner[0])) not in (None, lease):
                    self._tell(old, News.LOST)  # we took the job from ourselves
                self.leases[lease.owner[0]] = lease
                if min(lease.renew_at, lease.stop_at) < now() + 1:  # else it is looked at in time
                    self._poke()

    def forget(self, lease: Lease) -> None:
        """The job has ended, or its lease is given up."""
        with self._guard:
            if self.leases.get(lease.owner[0]) is lease:
                del self.leases[lease.owner[0]]

    def start(self) -> None:
        self._context = copy_context()  # so that its lines in the log name the same database
        super().start()

    def stop(self) -> None:
        self._stopped = True
        self._poke()

    # The renewer's own thread.

    def run(self) -> None:
        self._context.run(self._run)

    def _run(self) -> None:
        while not self._stopped:
            try:
                with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
                    runner.run(self._look_after())
            except Exception:  # a runner whose leases lapse unseen would be worse
                log.exception("renewer: unexpected end, beginning again")
                time.sleep(0.5)

    async def _look_after(self) -> None:
        loop, poked = asyncio.get_running_loop(), asyncio.Event()

        def poke() -> None:
            with suppress(RuntimeError):  # this loop has just ended
                loop.call_soon_threadsafe(poked.set)

        self._poke = poke
        link = Link("renewer", self._dial, within=10, cap=1)
        try:
            while not self._stopped:
                poked.clear()
                self.turned_at = now()
                held = self._watch()
                due = [lease for lease in held if lease.renew_at <= now() + lease.length / 12]
                if any(lease.renew_at <= now() for lease in due):
                    await self._renew(link, due[:100])
                    continue
                # A second at most: the loop's timer stands still while the machine sleeps.
                first = (min(o.renew_at, o.deadline, o.stop_at) for o in held)
                nap = min(1.0, max(min(first, default=1e9) - now(), 0.005))
                with suppress(TimeoutError):
                    async with asyncio.timeout(nap):
                        await poked.wait()
        finally:
            link.close()

    def _watch(self) -> list[Lease]:
        """Tell what time has brought; answer the leases that are to be renewed."""
        with self._guard:
            held = list(self.leases.values())
        for lease in held:
            if now() >= lease.deadline:
                self._tell(lease, News.LOST)
            elif now() >= lease.stop_at:
                self._tell(lease, News.TIMED_OUT)
        return [lease for lease in held if lease.told <= {News.CANCEL}]

    async def _renew(self, link: Link, due: list[Lease]) -> None:
        sent_at = now()
        left = min(lease.deadline for lease in due) - sent_at
        # Dialling and asking may take this long each, and never past the first deadline.
        link.within = max(min(10.0, min(lease.length for lease in due) / 4, left / 2), 0.05)
        job_ids, tokens = (array(each) for each in zip(*(o.owner for o in due), strict=True))
        try:
            answers = {one.job_id: one for one in await link.call(db.renew_many, job_ids, tokens)}
        except (Weather, psycopg.Error) as exc:
            if not isinstance(exc, Weather):
                log.error("renewer: %s", exc)
            for lease in due:
                lease.renew_at = now() + min(link.delay, lease.length / 12)
            return
        for lease in due:
            answer = answers.get(lease.owner[0])
            if answer is None:
                self._tell(lease, News.TIMED_OUT if now() >= lease.stop_at else News.LOST)
            elif answer.outcome == "renewed":
                lease.grant(sent_at)
            else:
                # Somebody has locked the row: while that lasts, nobody can take the job over.
                lease.renew_at = now() + min(lease.length / 12, 1.0)
                lease.deadline = max(lease.deadline, sent_at + lease.length / 3)
            if answer and answer.cancel_requested:
                self._tell(lease, News.CANCEL)

    def _tell(self, lease: Lease, news: News) -> None:
        if news not in lease.told:
            lease.told.add(news)
            with suppress(RuntimeError):  # the runner's loop has ended
                self._loop.call_soon_threadsafe(lease.tell, news)
