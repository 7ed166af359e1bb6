"""What a handler is given: its job, and what it may do while it owns it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg

from taskboard import db, trace
from taskboard.connections import Call, Connection, Weather, ask, lent, one_line
from taskboard.job import Effect, Held, Job, LeaseLost, storable
from taskboard.leases import Lease, News, now

if TYPE_CHECKING:
    from taskboard.worker import Worker

log = logging.getLogger(__name__)
T = TypeVar("T")


class Context:
    """The job of one attempt, and what its handler may do while it owns it."""

    def __init__(self, job: Job, lease: Lease, worker: Worker) -> None:
        self.job = job
        self._lease, self._worker = lease, worker
        self._begun: set[str] = set()
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()

    @property
    def traceparent(self) -> str | None:
        """The trace that whoever enqueued the job was in, if its headers carry one."""
        return self.trace_context.get("traceparent")

    @property
    def trace_context(self) -> dict[str, str]:
        """The headers of the W3C's trace context, to be extracted from or passed on."""
        return trace.context(self.job.headers)

    async def begin_effect(
        self, step: str = "main", *, key_valid_for: timedelta | None = None
    ) -> Effect:
        """Pass the gate before an effect outside the database; committed before it returns.

        `key_valid_for`: how long the other side remembers the key. Raises `LeaseLost` when the
        lease is not current and unexpired, `Held` when a person must decide first.
        """
        self.check()
        asked = self._worker.spawn(self._ask(db.begin_effect, step, key_valid_for))
        try:
            effect: Effect | None = await asyncio.shield(asked)
        except asyncio.CancelledError:
            # The handler never learns that it may act, so nothing happened. Say so, or the next
            # attempt would be told `unknown`.
            with suppress(LeaseLost, psycopg.Error):
                if await asked and step not in self._begun:
                    await self.end_effect(step, happened=False)
            raise
        if effect is None:
            late = now() >= self._lease.stop_at
            self._hear(News.TIMED_OUT if late else News.LOST)
            raise LeaseLost("begin_effect was refused")
        if effect.state == "held":
            raise Held(f"{step}: an earlier outcome is unknown and a person must decide")
        self._begun.add(step)
        return effect

    async def end_effect(
        self, step: str = "main", *, happened: bool = True, result: Any = None
    ) -> None:
        """Record what became of an effect; `happened=False` means refused before it took place."""
        text, note = storable(result)
        # Evidence counts, late or not: neither a cancel nor a lost lease stops it.
        asked = self._worker.spawn(self._testify(step, happened, text))
        state, refused = await asyncio.shield(asked)
        note = note or refused
        if state is None:
            note = "was never begun"
        elif not happened:
            self._begun.discard(step)  # as if it had never begun
        if note:
            log.warning("job=%s kind=%s end_effect %s: %s", self.job.id, self.job.kind, step, note)

    async def _testify(self, step: str, happened: bool, text: str | None) -> tuple[Any, str]:
        """End an effect, if need be without its result; answer its state, and a note about that."""
        try:
            return await self._ask(db.end_effect, step, happened, text, always=True), ""
        except psycopg.Error as exc:
            if text is None:
                raise
            note = f"result dropped: {one_line(exc)}"
        return await self._ask(db.end_effect, step, happened, None, always=True), note

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Borrow a pooled connection in autocommit mode."""
        self.check()
        async with lent(self._worker.pool) as conn:
            self.check()  # waiting for it may have taken long
            yield conn

    @asynccontextmanager
    async def transaction(
        self, *, complete: bool = False, result: Any = None
    ) -> AsyncIterator[Connection]:
        """Open a transaction that only the current lease can commit (`require_lease`).

        With `complete` the job is completed in it, with `result`: the writes and the completion
        are one atom, and the handler should return after it. Raises `LeaseLost` and rolls back
        when the lease token is no longer current.
        """
        completing = lost = False
        try:
            async with self.connection() as conn:
                try:
                    async with conn.transaction():
                        await db.require_lease(conn, *self._lease.owner)
                        yield conn
                        if complete:
                            # No renewal from here on: it would find the job gone, and call it lost.
                            # When the handler returns, the completion is repeated; that is safe.
                            completing = True
                            self._worker.renewer.forget(self._lease)
                            await db.complete(conn, *self._lease.owner, storable(result)[0])
                    completing = False
                except psycopg.Error as exc:
                    if exc.sqlstate != db.LEASE_LOST:
                        raise
                    lost = True
                    self._lease.told.add(News.LOST)
                    with suppress(psycopg.Error):  # refused, too: that leaves the evidence
                        await db.renew(conn, *self._lease.owner)
                    raise LeaseLost("require_lease was refused") from exc
        finally:
            if completing:  # the commit may have failed, and the handler may go on
                self._worker.renewer.hold([self._lease])
            if lost:
                self._hear(News.LOST)

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """In a plain function's thread: run one of the coroutines above in the runner's loop."""
        if threading.get_ident() == self._thread:
            coroutine.close()
            raise RuntimeError("ctx.wait() is for plain functions; await it in an async one")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def check(self) -> None:
        """Raise LeaseLost unless the lease holds, as far as that is known here."""
        if not self._lease.owned:
            raise LeaseLost("the lease has lapsed or is somebody else's")

    def _hear(self, news: News) -> None:
        """Take in what a gate said, and interrupt the handler, if it goes on all the same."""
        self._lease.told.add(news)
        self._loop.call_soon(self._lease.tell, news)

    async def _ask(self, call: Call[T], *arguments: Any, always: bool = False) -> T:
        """Call until there is an answer; the lease is checked each time, unless told not to."""
        pool, control = self._worker.pool, self._worker.control
        arguments = (*self._lease.owner, *arguments)
        while True:
            if not always:
                self.check()
            try:
                return await ask(pool, control, call, *arguments)
            except Weather:
                await asyncio.sleep(control.delay)


ThreadContext = Context  # the one that a plain function is given, which needs `wait`
