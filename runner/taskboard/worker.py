"""The runner: claim a batch, run its handlers, settle what became of them.

It computes no state, no backoff and no eligibility: the database does. What it adds is care at
the edges: a lost answer, a lost lease, a handler that hangs, a database that is away, a stop.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any
from uuid import UUID

from psycopg.errors import InsufficientPrivilege, InvalidParameterValue

from taskboard import attempts, db, schedules
from taskboard.attempts import Attempt, is_async
from taskboard.connections import Link, Weather, borrow, connect, handler_pool, keep_on
from taskboard.handlers import Handler
from taskboard.job import Ending, Job
from taskboard.leases import Lease, Renewer, now
from taskboard.preflight import introduce, refused
from taskboard.settings import Settings, SettingsError
from taskboard.settle import Settler
from taskboard.slots import WAITS_WITHIN, Slots
from taskboard.stopping import BROKEN, FINE, STUCK, drain
from taskboard.wake import Wake

log = logging.getLogger(__name__)

POLL, POLL_WOKEN = 1.0, 5.0  # seconds
ANSWERS_WITHIN = 10.0  # a call, which may wait 5 s for a lock
MAINTAIN_EVERY = 60.0


class Worker:
    """The state of one runner; lives in its event loop, but for what the renewer's thread has."""

    def __init__(self, settings: Settings, handlers: Mapping[str, Handler]) -> None:
        self.settings, self._handlers = settings, handlers
        self._plain = {kind for kind, handler in handlers.items() if not is_async(handler)}
        self._scope = list(settings.queues) or None, sorted(handlers)
        self.loop = asyncio.get_running_loop()
        self.stirred = asyncio.Event()  # there may be something to claim, or to wait no more for
        url, name = settings.database_url, f"taskboard {settings.worker}"
        dial = partial(connect, url, name)
        self.control = Link("control", dial, within=ANSWERS_WITHIN, cap=5)
        self.pool = handler_pool(url, name, settings.pool - 2)
        self.renewer = Renewer(dial, self.loop)
        self.settler = Settler(self.control, self.pool, self._leave)
        dial_directly = partial(connect, settings.listen_url or url, name)
        self.wake = Wake(dial_directly, self._scope[0], self.stirred.set)
        self.threads = ThreadPoolExecutor(settings.slots, "taskboard-handler")
        self.slots = Slots(settings.slots)
        self._side: set[asyncio.Task[Any]] = set()
        self.stopping, self.code = asyncio.Event(), FINE
        self.well_at = 0.0  # when a claim was answered last, or there was no room for one

    async def run(self, off: Mapping[str, str]) -> int:
        """Work until stopped; return the exit code, or raise SettingsError. `off`: see process."""
        stop_asked = self.spawn(self.stopping.wait())
        introduced = self.spawn(introduce(self.control, self.settings, self._handlers, off))
        try:
            await asyncio.wait({stop_asked, introduced}, return_when=asyncio.FIRST_COMPLETED)
            if introduced.done():
                introduced.result()
                await self._work(stop_asked)
        finally:
            await self._close_all()
        return self.code

    async def _work(self, stop_asked: asyncio.Task[Any]) -> None:
        self.renewer.start()
        await self.pool.open()
        maintain = partial(borrow, self.pool, db.maintain, wait=10, within=MAINTAIN_EVERY)
        endless = [
            self.settler.run(),
            schedules.run(self.control),
            keep_on("maintain", self.control, maintain, MAINTAIN_EVERY),
        ]
        if self.settings.listen:
            endless.append(self.wake.run())
        claiming = self.spawn(self._claim())
        monitored = {claiming, *(self.spawn(coroutine) for coroutine in endless)}
        try:
            await asyncio.wait({stop_asked, *monitored}, return_when=asyncio.FIRST_COMPLETED)
            self.stop()
            for task in monitored:  # without one of them the runner would be alive but deaf
                if task.done() and (exc := task.exception()):
                    self.code = BROKEN
                    if not isinstance(exc, SettingsError):
                        log.error("unexpected end of %s", task.get_coro(), exc_info=exc)
            await drain(self, claiming, self.settings.grace)
            if isinstance(exc := claiming.exception(), SettingsError) and self.code != STUCK:
                raise exc
        except asyncio.CancelledError:
            self.stop()
            await drain(self, claiming, 0)
            raise

    def stop(self) -> None:
        """Claim no more, give the handlers their time, and end."""
        self.stopping.set()
        self._fill()
        self.stirred.set()

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task that is ended with the runner at the latest."""
        task = self.loop.create_task(coroutine)
        self._side.add(task)
        task.add_done_callback(self._side.discard)
        return task

    # Claiming.

    async def _claim(self) -> None:
        settings, missed = self.settings, 0
        while not self.stopping.is_set():
            self.stirred.clear()
            self.settler.release(self.slots.drop())
            if self.settler.behind:
                await self.rest(self.control.delay)
                continue
            # The next batch is claimed while the last one runs and the one before it is settled.
            free = self.slots.free(len(self.settler.waiting))
            if free <= 0:
                if len(self.slots.running) == settings.slots and not self.slots.alive:
                    log.error("all %d slots hold handlers that do not end", settings.slots)
                    return self.stop()
                self.well_at = now()
                await self.rest(1)
                continue
            if not self.renewer.is_alive():
                raise RuntimeError("the renewer's thread is gone")
            sent_at, due_in = now(), None
            try:
                asked = *self._scope, free, settings.lease, settings.worker
                claimed = await self.control.call(db.claim, *asked)
                self.well_at = now()
                if not claimed:
                    due_in = await self.control.call(db.next_claimable_in, *self._scope)
            except Weather:
                self.slots.slow_down()  # what was claimed just now may be lost
                await self.rest(self.control.delay)
                continue
            except (InsufficientPrivilege, InvalidParameterValue) as exc:
                raise refused(self.control, "cannot claim", exc) from None
            self.wake.sleeping(self.slots.idles(len(claimed), free))
            if claimed:
                self._start(claimed, sent_at)
                missed = 0
                await asyncio.sleep(0)  # they begin before the next claim is sent
                continue
            ready = due_in is not None and due_in <= 0  # just being taken, or out of reach
            if settings.until_empty and not (ready or self.slots.alive or self.settler.waiting):
                return self.stop()
            missed = missed + 1 if ready else 0
            poll = self.slots.linger or settings.poll or (POLL_WOKEN if self.wake.works else POLL)
            if ready or due_in is None:
                due_in = 0.02 * 2 ** min(missed, 9) if ready else poll
            if self.slots.next:
                due_in = min(due_in, WAITS_WITHIN)
            await self.rest(min(due_in + 0.002, poll * random.uniform(0.9, 1.1)))

    def _start(self, claimed: Sequence[tuple[UUID, Job]], sent_at: float) -> None:
        begun = []
        for token, job in claimed:
            self.slots.weigh(len(job.payload))
            lease, handler = Lease(token, job, sent_at), self._handlers[job.kind]
            begun.append(Attempt(job, handler, lease, threaded=job.kind in self._plain))
        self.renewer.hold(attempt.lease for attempt in begun)
        still_here = self.slots.job_ids()
        self.slots.next.extend(each for each in begun if each.job.id not in still_here)
        for attempt in begun:
            if attempt.job.id in still_here:  # the handler of an earlier attempt does not end
                later = Ending("release", "it still runs here", after=attempt.job.lease)
                self.settler.add(attempt, later)
        self._fill()

    def _fill(self) -> None:
        if self.stopping.is_set():
            return self.settler.release(self.slots.drop(0))
        for attempt in self.slots.fill():
            attempt.task = self.loop.create_task(attempt.run(self))
            attempt.task.add_done_callback(partial(self._end, attempt))
            for news in sorted(attempt.lease.told):  # while it waited for a slot
                attempt.interrupt(news)

    def _end(self, attempt: Attempt, task: object) -> None:
        self.slots.end(attempt)
        self.settler.add(attempt, attempt.conclude())
        self._fill()
        self.stirred.set()

    def _leave(self, attempt: Attempt) -> None:
        self.renewer.forget(attempt.lease)
        self.stirred.set()

    async def rest(self, seconds: float) -> None:
        """Wait until something stirs, for so long at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stirred.wait()

    async def _close_all(self) -> None:
        self.renewer.stop()
        self.control.close()
        for task in self._side:
            task.cancel()
        self.spawn(self.pool.close(1))
        await asyncio.wait(self._side, timeout=attempts.ENDS_WITHIN)
        self.threads.shutdown(wait=False, cancel_futures=True)
