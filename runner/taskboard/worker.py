"""The runner: claim a batch, run its handlers, settle what became of them.

It computes no state, no backoff and no eligibility: the database does. What it adds is care at
the edges: a lost answer, a lost lease, a handler that hangs, a database that is away, a stop.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import logging
import math
import os
import random
import re
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import psycopg

from taskboard import db, schedules, version
from taskboard.handlers import (
    Effect,
    Handler,
    Held,
    Job,
    LeaseLost,
    Outcome,
    Permanent,
    Release,
    Retry,
)
from taskboard.leases import Lease, News, Renewer, now
from taskboard.settings import Settings, SettingsError
from taskboard.wake import Wake

log = logging.getLogger(__name__)
T = TypeVar("T")

FINE, BROKEN, JOBS_FAILED, STUCK = 0, 1, 3, 4  # exit codes; 2 is a usage error
STOPPING = "stopping"
# Seconds.
POLL, POLL_LISTENING = 1.0, 5.0
ENDS_WITHIN = 2.0  # a cancelled handler is waited for
SETTLES_WITHIN = 5.0  # what has ended is tried to be settled, at the end
ANSWERS_WITHIN = 10.0  # a call; longer than the 5 s that functions wait for a lock
MAINTAIN_EVERY = 60.0
# What lease_status says when an earlier try, whose answer was lost, did settle the attempt.
SETTLED = {
    "complete": {"completed_by_you"},
    "fail": {"given_back", "cancelled", "held"},
    "release": {"given_back", "cancelled"},
}
HINTS = {
    "login": "check user, password and database in TASKBOARD_DATABASE_URL, or the PG* variables",
    "version": "`taskboard migrate` upgrades the database; or run the matching release",
    "3F000": "the schema is not installed here: run `taskboard migrate`",
    "42883": "the functions are not installed here: run `taskboard migrate`",
    "42501": "grant taskboard_worker to the user that the runner logs in as",
}
NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


def clean(error: BaseException | str) -> str:
    """Make a text of an error that can be stored, whatever its __str__ does."""
    try:
        text = str(error)
    except Exception as exc:
        text = f"(its __str__ raised {type(exc).__name__})"
    if not isinstance(error, str | Outcome):
        text = f"{type(error).__name__}: {text}"
    text = text[:20_000].replace("\0", "\N{REPLACEMENT CHARACTER}")
    return text.encode("utf-8", "backslashreplace").decode()


def storable(result: Any) -> tuple[str | None, str]:
    """Make JSON that PostgreSQL can store; else nothing, and a note that says why."""
    if result is None:
        return None, ""
    try:
        text = json.dumps(result, ensure_ascii=False, allow_nan=False)
        text.encode()  # refuses a lone surrogate
    except Exception as exc:
        return None, f"result dropped: {clean(exc)}"
    if "\\u0000" in text and NUL.search(text):
        return None, "result dropped: it holds a NUL character"
    return text, ""


@dataclass(slots=True)
class Ending:
    """How an attempt ended: the verb that settles it (none: nothing does), what to pass along."""

    verb: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    chosen: bool = False  # by the handler, with an outcome
    plain: bool = False  # nothing is left that the database may refuse

    def strip(self, why: str) -> None:
        """Keep the verb and what can always be stored, because the database refused the rest."""
        error = self.arguments.get("error", "").encode("ascii", "backslashreplace").decode()
        kept = {"error": error, "permanent": self.arguments.get("permanent", False)}
        self.arguments = {
            "complete": {"result": None},
            "fail": kept,
            "release": {"delay": timedelta(minutes=1)},
        }[self.verb]
        self.note, self.plain = f"{error} (dropped what came along: {why})".lstrip(), True


def judge(exc: BaseException) -> Ending:
    """Sort what a handler raised."""
    text = clean(exc)
    match exc:
        case LeaseLost() | Held():
            return Ending(note=text)
        case Permanent():
            return Ending("fail", {"error": text, "permanent": True}, chosen=True)
        case Retry():
            return Ending("fail", {"error": text, "retry_in": exc.retry_in}, chosen=True)
        case Release():
            return Ending("release", {"delay": exc.delay or timedelta(seconds=1)}, text)
    return Ending("fail", {"error": text})


def is_async(handler: Handler) -> bool:
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
        getattr(handler, "__call__", None)  # noqa: B004
    )


def in_thread(handler: Handler, context: Any) -> tuple[Any, BaseException | None]:
    """Call a plain function. What it raises is a value: a future cannot carry StopIteration."""
    try:
        return handler(context), None
    except BaseException as exc:
        return None, exc


@dataclass(slots=True, eq=False)
class Attempt:
    """One claimed job on its way through the runner."""

    claimed: db.Claimed
    handler: Handler
    lease: Lease
    threaded: bool
    started_at: float = field(default_factory=now)
    task: asyncio.Task[Ending] | None = None
    why: str = ""  # what interrupted the handler
    interrupted_at: float = math.inf
    ending: Ending = field(default_factory=Ending)
    alone: bool = False  # to be settled by itself, not in a batch
    doubtful: bool = False  # an earlier try to settle it got no answer

    @property
    def hung(self) -> bool:
        """Whether the lease is gone and the handler had time to end, and did not."""
        patience = max(ENDS_WITHIN, self.lease.length if self.threaded else 0)
        return News.LOST in self.lease.told and now() - self.interrupted_at > patience


class JobContext:
    """The Context of one attempt."""

    def __init__(self, job: Job, lease: Lease, worker: Worker) -> None:
        self.job = job
        self._lease, self._worker = lease, worker
        self._begun: set[str] = set()

    def check(self) -> None:
        if not self._lease.owned:
            raise LeaseLost("the lease has lapsed or is somebody else's")

    async def _ask(self, function: Any, *, always: bool = False, **arguments: Any) -> Any:
        """Call until there is an answer; the lease is checked each time, unless told not to."""
        while True:
            if not always:
                self.check()
            try:
                return await self._worker.ask(function, *self._lease.owner, **arguments)
            except db.Weather:
                await asyncio.sleep(self._worker.control.delay)

    async def begin_effect(
        self, step: str = "main", *, key_valid_for: timedelta | None = None
    ) -> Effect:
        asked = self._worker.spawn(
            self._ask(db.begin_effect, step=step, key_valid_for=key_valid_for)
        )
        try:
            row = await asyncio.shield(asked)
        except asyncio.CancelledError:
            # The handler never learns that it may act, so nothing happened. Say so, or the next
            # attempt would be told `unknown`.
            with suppress(LeaseLost, psycopg.Error):
                if await asked and step not in self._begun:
                    await self.end_effect(step, happened=False)
            raise
        if row is None:
            late = now() >= self._lease.stop_at
            self._lease.told.add(News.TIMED_OUT if late else News.LOST)
            raise LeaseLost("begin_effect was refused")
        key, state, result = row
        if state == "held":
            raise Held(f"{step}: an earlier outcome is unknown and a person must decide")
        self._begun.add(step)
        return Effect(step, key, state, None if result is None else json.loads(result))

    async def end_effect(
        self, step: str = "main", *, happened: bool = True, result: Any = None
    ) -> None:
        text, note = storable(result)
        # Evidence counts, late or not: neither a cancel nor a lost lease stops it.
        asked = self._worker.spawn(
            self._ask(db.end_effect, always=True, step=step, happened=happened, result=text)
        )
        if await asyncio.shield(asked) is None:
            note = "was never begun"
        elif not happened:
            self._begun.discard(step)  # as if it had never begun
        if note:
            log.warning("job=%s kind=%s end_effect %s: %s", self.job.id, self.job.kind, step, note)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[db.Connection]:
        self.check()
        async with self._worker.pool.connection() as conn:
            self.check()  # waiting for it may have taken long
            yield conn

    @asynccontextmanager
    async def transaction(
        self, *, complete: bool = False, result: Any = None
    ) -> AsyncIterator[db.Connection]:
        async with self.connection() as conn:
            try:
                async with conn.transaction():
                    await db.require_lease(conn, *self._lease.owner)
                    yield conn
                    if complete:
                        # No renewal from here on: it would find the job gone, and call it lost.
                        # When the handler returns, the completion is repeated; that is safe.
                        self._worker.forget(self._lease)
                        await db.complete(conn, *self._lease.owner, result=storable(result)[0])
            except psycopg.Error as exc:
                if exc.sqlstate != db.LEASE_LOST:
                    raise
                self._lease.told.add(News.LOST)
                with suppress(psycopg.Error):  # refused, too: that leaves the evidence
                    await db.renew(conn, *self._lease.owner)
                raise LeaseLost("require_lease was refused") from exc

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """In a handler's thread: run one of the coroutines above in the loop, and wait for it."""
        if threading.get_ident() == self._worker.thread:
            coroutine.close()
            raise RuntimeError("ctx.wait() is for plain functions; await it in an async one")
        return asyncio.run_coroutine_threadsafe(coroutine, self._worker.loop).result()


class Worker:
    """The state of one runner; lives in its event loop, but for what the renewer's thread has."""

    def __init__(self, settings: Settings, handlers: Mapping[str, Handler]) -> None:
        self._settings, self._handlers = settings, handlers
        self._scope: dict[str, Any] = {
            "queues": list(settings.queues) or None,
            "kinds": sorted(handlers),
        }
        self.loop = asyncio.get_running_loop()
        self.thread = threading.get_ident()
        self._stirred = asyncio.Event()  # there may be something to claim, or to wait no more for
        url, name = settings.database_url, f"taskboard {settings.worker}"
        dial = partial(db.connect, url, name)
        self.control = db.Link("control", dial, within=ANSWERS_WITHIN, cap=5)
        self.pool = db.handler_pool(url, name, settings.pool - 2)
        self._renewer = Renewer(dial, self.loop)
        self._wake = Wake(
            partial(db.connect, settings.listen_url or url, name),
            self._scope["queues"],
            self._stirred.set,
        )
        self._threads = ThreadPoolExecutor(settings.slots, "taskboard-handler")
        self._running: dict[Attempt, None] = {}
        self._ended: dict[Attempt, None] = {}  # and not settled yet
        self._side: set[asyncio.Task[Any]] = set()
        self._unsettled = asyncio.Event()
        self._fits = asyncio.Event()  # the database's version is this runner's
        self._stopping = asyncio.Event()
        self._asking = False  # a claim is under way
        self._failed = False
        self._misconfigured: SettingsError | None = None
        self.code = FINE

    # Starting and stopping.

    async def run(self, off: Mapping[str, str]) -> int:
        """Work until stopped; return the exit code. Raises SettingsError."""
        self._renewer.start()
        claiming = self.spawn(self._claim(off))
        monitored = [
            claiming,
            self.spawn(self._settle()),
            self.spawn(self._maintain()),
            self.spawn(self._advance()),
        ]
        if self._settings.listen:
            monitored.append(self.spawn(self._wake.run()))
        for task in monitored:
            task.add_done_callback(self._check_end)
        try:
            await self._stopping.wait()
            await self._drain(claiming, self._settings.grace)
        except asyncio.CancelledError:
            self.stop()
            await self._drain(claiming, 0)
            raise
        finally:
            await self._close_all()
        if self._misconfigured:
            raise self._misconfigured
        return self.code

    async def _close_all(self) -> None:
        self._renewer.stop()
        self.control.close()
        for task in self._side:
            task.cancel()
        closing: list[Any] = [
            handler.aclose() for handler in self._handlers.values() if hasattr(handler, "aclose")
        ]
        tasks = [self.loop.create_task(coroutine) for coroutine in [*closing, self.pool.close(1)]]
        await asyncio.wait([*self._side, *tasks], timeout=ENDS_WITHIN)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def forget(self, lease: Lease) -> None:
        """Renew a lease no more."""
        self._renewer.forget(lease)

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that is ended with the runner at the latest."""
        task = self.loop.create_task(coroutine)
        self._side.add(task)
        task.add_done_callback(self._side.discard)
        return task

    async def ask(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Make a call for a handler on a pooled connection: calls at once share a commit.

        Where handlers hold them all, or left one unfit for use, the control connection decides.
        """
        try:
            async with self.pool.connection(timeout=0.2) as conn:
                with db.bounded(conn, ANSWERS_WITHIN):
                    return await function(conn, *args, **kwargs)
        except (psycopg.Error, OSError):
            return await self.control.call(function, *args, **kwargs)

    def _check_end(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() and self._stopping.is_set():
            return
        exc = asyncio.CancelledError() if task.cancelled() else task.exception()
        if isinstance(exc, SettingsError):
            self._misconfigured = exc
            self.stop()
        elif exc is not None:  # without one of its loops the runner would be alive but deaf
            log.error("unexpected end of %s", task.get_coro(), exc_info=exc)
            self.code = BROKEN
            self.stop()

    def stop(self) -> None:
        """Claim no more, give the handlers their time, and end."""
        self._stopping.set()

    async def _drain(self, claiming: asyncio.Task[None], grace: float) -> None:
        if not self._asking:  # what a claim under way returns is given back
            claiming.cancel()
        if self._running:
            log.info("stopping: %d running, %g s to end", len(self._running), grace)
        await self._until(lambda: not self._alive(), grace)
        for attempt in list(self._running):
            self._interrupt(attempt, STOPPING)
        await self._until(lambda: not self._alive(), ENDS_WITHIN)
        # A thread cannot be cancelled; giving its job back would have it done twice at once.
        if any(attempt.threaded for attempt in self._alive()):
            log.info("stopping: waiting for handlers in threads")
            await self._until(lambda: not any(a.threaded for a in self._alive()), math.inf)
        await asyncio.wait([claiming])
        await self._until(lambda: not self._ended, SETTLES_WITHIN)
        if self._ended:
            log.warning("stopping: %d jobs not settled, their leases lapse", len(self._ended))
        if self._running:
            log.error("stopping: %d handlers do not end", len(self._running))
            self.code = STUCK
        elif self._failed and self._settings.until_empty and self.code == FINE:
            self.code = JOBS_FAILED

    def _alive(self) -> list[Attempt]:
        return [attempt for attempt in self._running if not attempt.hung]

    async def _until(self, done: Callable[[], bool], seconds: float) -> None:
        ends_at = self.loop.time() + seconds
        while not done() and self.loop.time() < ends_at:
            self._stirred.clear()
            await self._rest(min(ends_at - self.loop.time(), 0.2))

    async def _rest(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stirred.wait()

    # Claiming.

    async def _introduce(self, off: Mapping[str, str]) -> None:
        """Wait for the database, check that it fits, and say what this runner does."""
        await self.pool.open()
        while True:
            try:
                installed = await self.control.call(db.version)
                break
            except db.Weather as exc:
                if db.REFUSED.search(str(exc)):
                    raise SettingsError(f"cannot log in: {exc}", HINTS["login"]) from None
                await asyncio.sleep(self.control.delay)
            except psycopg.Error as exc:
                hint = HINTS.get(exc.sqlstate or "", "see the server's log")
                text = db.one_line(exc.diag.message_primary or exc)
                raise SettingsError(f"cannot use the database: {text}", hint) from None
        own = version()
        if installed.split(".")[:2] != own.split(".")[:2]:
            raise SettingsError(
                f"the database has taskboard {installed}, this runner is {own}", HINTS["version"]
            )
        self._fits.set()
        waiting: dict[str, int] = {}
        with suppress(psycopg.Error, OSError):  # not every worker's role may look
            async with self.pool.connection(timeout=3) as conn:
                with db.bounded(conn, 3):
                    waiting = await db.jobs_waiting(conn)
        settings = self._settings
        log.info(
            "taskboard %s: worker %s, queues %s, %d slots, at most %d connections",
            own, settings.worker, ", ".join(settings.queues) or "all", settings.slots,
            settings.pool + settings.listen,
        )  # fmt: skip
        reasons = {kind: "no handler here" for kind, count in waiting.items() if count}
        reasons |= {kind: f"off ({reason})" for kind, reason in off.items()}
        reasons |= dict.fromkeys(self._handlers, "on")
        for kind, reason in sorted(reasons.items()):
            count = waiting.get(kind, 0)
            jobs = f", {count} job{'s' * (count > 1)} waiting" if count else ""
            log.info("%s: %s%s", kind, reason, jobs)

    async def _claim(self, off: Mapping[str, str]) -> None:
        await self._introduce(off)
        settings, missed = self._settings, 0
        while not self._stopping.is_set():
            self._stirred.clear()
            free = settings.slots - max(len(self._running), len(self._ended))
            if free <= 0:
                if len(self._running) - len(self._alive()) >= settings.slots:
                    log.error("all %d slots hold handlers that do not end", settings.slots)
                    return self.stop()
                await self._rest(1)
                continue
            if not self._renewer.is_alive():
                raise RuntimeError("the renewer's thread is gone")
            self._asking, sent_at = True, now()
            try:
                rows = await self.control.call(
                    db.claim, **self._scope, max_jobs=free, lease=settings.lease,
                    worker=settings.worker,
                )  # fmt: skip
                due_in = None
                if not rows:
                    due_in = await self.control.call(db.next_claimable_in, **self._scope)
            except db.Weather:
                self._asking = False
                await asyncio.sleep(self.control.delay)
                continue
            self._asking = False
            self._wake.sleeping(len(rows) < free)
            if rows:
                self._start(rows, sent_at)
                missed = 0
                continue
            if self._stopping.is_set():
                return
            ready = due_in is not None and due_in <= 0  # just being taken, or out of reach
            if settings.until_empty and not (ready or self._running or self._ended):
                return self.stop()
            missed = missed + 1 if ready else 0
            poll = settings.poll or (POLL_LISTENING if self._wake.works else POLL)
            if ready or due_in is None:
                due_in = 0.02 * 2 ** min(missed, 9) if ready else poll
            await self._rest(min(due_in + 0.002, poll * random.uniform(0.9, 1.1)))

    # Running.

    def _start(self, rows: Sequence[db.Claimed], sent_at: float) -> None:
        attempts: list[Attempt] = []
        for row in rows:
            handler = self._handlers[row.kind]
            lease = Lease((row.job_id, row.lease_token), row.lease, row.timeout, sent_at)
            attempts.append(attempt := Attempt(row, handler, lease, not is_async(handler)))
            lease.tell = partial(self._hear, attempt)
        self._renewer.hold(attempt.lease for attempt in attempts)
        alive = {attempt.claimed.job_id for attempt in self._running}
        for attempt in attempts:
            if self._stopping.is_set():
                self._settle_soon(attempt, Ending("release"))
                continue
            if attempt.claimed.job_id in alive:  # the handler of an earlier attempt does not end
                later = {"delay": attempt.claimed.lease}
                self._settle_soon(attempt, Ending("release", later, "it still runs here"))
                continue
            attempt.task = self.loop.create_task(self._handle(attempt))
            self._running[attempt] = None
            attempt.task.add_done_callback(partial(self._end, attempt))

    async def _handle(self, attempt: Attempt) -> Ending:
        """Run the handler of one job; answer how it ended, unless it was cancelled."""
        claimed = attempt.claimed
        try:
            payload = json.loads(claimed.payload)
            headers = json.loads(claimed.headers) if claimed.headers else {}
        except (ValueError, RecursionError) as exc:
            return judge(Permanent(f"the payload cannot be read: {clean(exc)}"))
        job = Job(
            id=claimed.job_id, queue=claimed.queue, kind=claimed.kind, payload=payload,
            attempt=claimed.attempt, max_attempts=claimed.max_attempts, failures=claimed.failures,
            lease=claimed.lease, timeout=claimed.timeout, headers=headers,
        )  # fmt: skip
        context = JobContext(job, attempt.lease, self)
        try:
            context.check()
            if attempt.threaded:
                call = partial(in_thread, attempt.handler, context)
                result, error = await self.loop.run_in_executor(self._threads, call)
                attempt.threaded = False
                if error is not None:
                    return judge(error)
            else:
                result = attempt.handler(context)
            if inspect.isawaitable(result):
                result = await result
        except asyncio.CancelledError:
            raise
        except BaseException as exc:  # of a handler, also SystemExit: it must not end the runner
            return judge(exc)
        text, note = storable(result)
        return Ending("complete", {"result": text}, note)

    def _hear(self, attempt: Attempt, news: News) -> None:
        if attempt in self._running:  # else it has ended, and the news is no news
            self._interrupt(attempt, news)

    def _interrupt(self, attempt: Attempt, why: str) -> None:
        if not attempt.why:
            attempt.why, attempt.interrupted_at = why, now()
            if attempt.task is not None and not attempt.threaded:
                attempt.task.cancel()
            self.loop.call_later(ENDS_WITHIN, self._complain, attempt)

    def _complain(self, attempt: Attempt) -> None:
        if attempt in self._running:
            job = attempt.claimed
            text = "job=%s kind=%s attempt=%d does not end: %s"
            log.warning(text, job.job_id, job.kind, job.attempt, attempt.why)

    def _end(self, attempt: Attempt, task: asyncio.Task[Ending]) -> None:
        del self._running[attempt]
        told, why = attempt.lease.told, attempt.why
        ending = None if task.cancelled() else task.result()
        late = why == News.TIMED_OUT or (News.TIMED_OUT in told and ending and not ending.verb)
        if not attempt.lease.owned:
            ending = Ending()
        elif late:
            seconds = attempt.claimed.timeout.total_seconds()
            ending = Ending("fail", {"error": f"timed out after {seconds:g} s"})
        elif why == STOPPING and (ending is None or (ending.verb == "fail" and not ending.chosen)):
            ending = Ending("release")
        elif ending is None:
            ending = Ending("fail", {"error": why or "the handler was cancelled from within"})
        self._settle_soon(attempt, ending)

    # Settling.

    def _settle_soon(self, attempt: Attempt, ending: Ending) -> None:
        attempt.ending, lease = ending, attempt.lease
        # It is settled in a moment; a renewal that comes after that would only be refused.
        lease.renew_at = max(lease.renew_at, now() + lease.length / 6)
        self._ended[attempt] = None
        self._unsettled.set()
        self._stirred.set()

    async def _settle(self) -> None:
        """Settle what has ended, until it is known to be settled: every call may be repeated."""
        while True:
            await self._unsettled.wait()
            self._unsettled.clear()
            batch = list(self._ended)[:1000]
            try:
                await self._complete([a for a in batch if a.ending.verb == "complete"])
                for attempt in batch:
                    if attempt in self._ended:
                        await self._settle_alone(attempt)
            except db.Weather:
                await asyncio.sleep(self.control.delay)
            if self._ended:
                self._unsettled.set()

    async def _complete(self, attempts: list[Attempt]) -> None:
        together = [attempt for attempt in attempts if not attempt.alone]
        if len(together) < 2:
            return
        try:
            recorded = await self.control.call(
                db.complete_many,
                [attempt.lease.owner[0] for attempt in together],
                [attempt.lease.owner[1] for attempt in together],
                [attempt.ending.arguments["result"] for attempt in together],
            )
        except (db.Weather, psycopg.Error) as exc:
            for attempt in together:
                attempt.doubtful = True
                # One row that is locked, or one result that is refused, holds up no others.
                attempt.alone = not isinstance(exc, db.Weather) or exc.passing
            if isinstance(exc, db.Weather):
                raise
            return
        for attempt in together:
            attempt.alone = True
            if attempt.claimed.job_id in recorded:
                self._close(attempt, "completed")

    async def _settle_alone(self, attempt: Attempt) -> None:
        ending, owner, status = attempt.ending, attempt.lease.owner, ""
        try:
            answer: Any = None
            if ending.verb:
                call: Any = getattr(db, ending.verb)
                answer = await self.control.call(call, *owner, **ending.arguments)
            if not answer:
                status = await self.control.call(db.lease_status, *owner)
        except db.Weather:
            if ending.verb:
                attempt.doubtful = True
                self._ended[attempt] = self._ended.pop(attempt)  # the others go first next time
                raise
            status = "not asked"
        except psycopg.Error as exc:
            if not ending.plain:
                return ending.strip(clean(exc))
            status = f"settling was refused: {clean(exc)}"
        if attempt.doubtful and status in SETTLED[ending.verb]:
            answer = (status, None)  # by the earlier try, whose answer was lost
        if not answer:
            what = "held" if status == "held" else f"lease lost ({status})"
            self._close(attempt, what, logging.WARNING)
        elif ending.verb == "fail":
            state, again_in = answer
            what = "failed" if again_in is None else f"failed, again in {max(again_in, 0):.0f} s,"
            self._failed |= state != "cancelled"
            self._close(attempt, "cancelled" if state == "cancelled" else what, logging.WARNING)
        else:
            self._close(attempt, f"{ending.verb}d")

    def _close(self, attempt: Attempt, what: str, level: int = logging.INFO) -> None:
        """The attempt is over: one line about it."""
        del self._ended[attempt]
        self._renewer.forget(attempt.lease)
        self._stirred.set()
        if log.isEnabledFor(level):
            note = db.one_line(attempt.ending.note or attempt.ending.arguments.get("error", ""))
            fields = {
                "job": str(attempt.claimed.job_id),
                "kind": attempt.claimed.kind,
                "attempt": attempt.claimed.attempt,
                "outcome": what,
                "seconds": round(now() - attempt.started_at, 3),
            }
            line = "job=%(job)s kind=%(kind)s attempt=%(attempt)d %(outcome)s %(seconds).2fs"
            log.log(
                level,
                line + (": %(note)s" if note else ""),
                fields | {"note": note},
                extra={"fields": fields},
            )

    # Housekeeping.

    async def _advance(self) -> None:
        await self._fits.wait()
        await schedules.run(self.control)

    async def _maintain(self) -> None:
        await self._fits.wait()
        pause = random.uniform(0, 2)
        while True:
            await asyncio.sleep(pause)
            pause = MAINTAIN_EVERY * random.uniform(0.9, 1.1)
            try:
                async with self.pool.connection(timeout=10) as conn:
                    with db.bounded(conn, MAINTAIN_EVERY):
                        await db.maintain(conn)
            except (psycopg.Error, OSError) as exc:
                log.warning("maintain: %s", db.one_line(exc))


async def run(
    settings: Settings, handlers: Mapping[str, Handler], off: Mapping[str, str] | None = None
) -> int:
    """Run jobs until a signal, or until nothing is left; return the exit code.

    `handlers` maps kinds to handlers; `off` maps kinds that are not configured to the reason.
    Raises SettingsError when the database cannot be used as configured.
    """
    off = dict(off or {})
    missing = [kind for kind in settings.kinds if kind not in handlers]
    if missing or not handlers:
        reasons = [f"{kind}: {off[kind]}" for kind in missing or off if kind in off]
        what = f"no handler for {', '.join(missing)}" if missing else "no handler is configured"
        raise SettingsError(what, "; ".join(reasons) or "name the module that has it")
    if settings.kinds:
        off |= {kind: "not asked for" for kind in handlers}
        handlers = {kind: handlers[kind] for kind in settings.kinds}
    worker = Worker(settings, handlers)
    with stopped_by_signals(worker.stop):
        return await worker.run(off)


@contextmanager
def stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Stop at the first SIGTERM or SIGINT, end at once at the second, even with a blocked loop."""
    loop = asyncio.get_running_loop()
    seen: list[int] = []

    def on_signal(number: int, frame: object) -> None:
        if seen:
            os._exit(128 + number)
        seen.append(number)
        loop.call_soon_threadsafe(stop)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.signal(n, on_signal) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def find_handlers(
    settings: Settings, modules: Sequence[str]
) -> tuple[dict[str, Handler], dict[str, str]]:
    """Collect the handlers that are configured, and why others are off, both by kind.

    A module's handler goes before the built-in one of its kind. Raises SettingsError.
    """
    found: dict[str, Handler] = {}
    off: dict[str, str] = {}
    try:
        if settings.smtp_url and settings.mail_from:
            from taskboard.handlers.email import MailSettings, email_handler

            found["email"] = email_handler(
                MailSettings.from_url(settings.smtp_url, settings.mail_from)
            )
        else:
            missing = "TASKBOARD_MAIL_FROM" if settings.smtp_url else "TASKBOARD_SMTP_URL"
            off["email"] = f"set {missing}"
        if settings.stripe_api_key:
            from taskboard.handlers.stripe import StripeSettings, stripe_handler

            chosen = StripeSettings(settings.stripe_api_key, settings.stripe_base)
            found["stripe"] = stripe_handler(chosen)
            log.info("stripe: the key is of mode %s", chosen.mode)
        else:
            off["stripe"] = "set STRIPE_API_KEY"
    except ValueError as exc:
        raise SettingsError(str(exc), "correct the setting, or unset it") from None
    own: dict[str, Handler] = {}
    sys.path.insert(0, os.getcwd())
    for name in modules:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as exc:
            if exc.name is None or not f"{name}.".startswith(f"{exc.name}."):
                raise
            raise SettingsError(f"there is no module {name}", "name it as in `import`") from None
        for handler in vars(module).values():
            kind = getattr(handler, "taskboard_kind", None)
            if isinstance(kind, str) and callable(handler):
                if own.setdefault(kind, handler) is not handler:
                    raise SettingsError(f"two handlers for {kind}", "give each a kind of its own")
                off.pop(kind, None)
    return found | own, off


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Make the line; a job's transition has its parts as fields."""
        line = {
            "at": self.formatTime(record),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_to_stderr(as_json: bool = False, level: int = logging.INFO) -> None:
    """Set up logging for the process, plain or as JSON lines."""
    out = logging.StreamHandler()
    plain = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    out.setFormatter(JsonLines() if as_json else plain)
    logging.basicConfig(level=level, handlers=[out])
    logging.getLogger("psycopg.pool").setLevel(logging.ERROR)  # it reports each failed try


def main(
    settings: Settings,
    modules: Sequence[str] = (),
    handlers: Mapping[str, Handler] | None = None,
) -> int:
    """Run a worker process with the handlers that are configured; return its exit code.

    `handlers` adds to them. When handlers do not end, the process is left within a second of the
    return. Raises SettingsError.
    """
    log_to_stderr(settings.log_json)
    found, off = find_handlers(settings, modules)
    runner = asyncio.Runner(loop_factory=asyncio.SelectorEventLoop)
    try:
        code = runner.run(run(settings, found | dict(handlers or {}), off))
    except SettingsError:
        runner.close()
        raise
    if code != STUCK:
        runner.close()
    else:  # closing would wait for the tasks, and the interpreter for the threads
        leave = threading.Timer(1, os._exit, [code])
        leave.daemon = True
        leave.start()
    return code
