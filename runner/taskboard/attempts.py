"""One claimed job on its way through the runner: its handler is called, and how that ended."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from taskboard.context import Context
from taskboard.handlers import Handler
from taskboard.job import Ending, Job, Permanent, clean, judge, storable
from taskboard.leases import Lease, News, now

if TYPE_CHECKING:
    from taskboard.worker import Worker

log = logging.getLogger(__name__)

ENDS_WITHIN = 2.0  # seconds; a cancelled handler is waited for
STOPPING = "stopping"


def is_async(handler: Handler) -> bool:
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
        getattr(handler, "__call__", None)  # noqa: B004
    )


def in_thread(handler: Handler, context: Context) -> tuple[Any, BaseException | None]:
    """Call a plain function. What it raises is a value: a future cannot carry StopIteration."""
    try:
        return handler(context), None
    except BaseException as exc:
        return None, exc


@dataclass(slots=True, eq=False)
class Attempt:
    """One claimed job; its documents are still text."""

    job: Job
    handler: Handler
    lease: Lease
    threaded: bool  # the handler works in a thread, until it has ended there
    started_at: float = field(default_factory=now)
    task: asyncio.Task[Ending] | None = None
    why: str = ""  # what interrupted the handler
    interrupted_at: float = math.inf
    ending: Ending = Ending()  # noqa: RUF009
    alone: bool = False  # to be settled by itself, not in a batch

    def __post_init__(self) -> None:
        self.lease.tell = self.interrupt

    @property
    def hung(self) -> bool:
        """Whether the lease is gone and the handler had time to end, and did not."""
        patience = max(ENDS_WITHIN, self.lease.length if self.threaded else 0)
        return News.LOST in self.lease.told and now() - self.interrupted_at > patience

    async def run(self, worker: Worker) -> Ending:
        """Run the handler; answer how it ended, unless it was cancelled."""
        if self.why:  # a thread would not be cancelled
            raise asyncio.CancelledError
        try:
            job = self.job.read()
        except (ValueError, RecursionError) as exc:
            return judge(Permanent(f"the payload cannot be read: {clean(exc)}"))
        context = Context(job, self.lease, worker)
        try:
            context.check()
            if self.threaded:
                call = partial(in_thread, self.handler, context)
                loop = asyncio.get_running_loop()
                result, error = await loop.run_in_executor(worker.threads, call)
                self.threaded = False
                if error is not None:
                    return judge(error)
            else:
                result = self.handler(context)
            if inspect.isawaitable(result):
                result = await result
        except asyncio.CancelledError:
            raise
        except BaseException as exc:  # of a handler, also SystemExit: it must not end the runner
            return judge(exc)
        text, note = storable(result)
        return Ending("complete", note, result=text)

    def interrupt(self, why: str) -> None:
        """Cancel the handler, unless something else did; a thread cannot be cancelled."""
        if self.task is None or self.task.done() or self.why:
            return
        self.why, self.interrupted_at = why, now()
        if not self.threaded:
            self.task.cancel()
        asyncio.get_running_loop().call_later(ENDS_WITHIN, self._complain)

    def _complain(self) -> None:
        if self.task and not self.task.done():
            text = "job=%s kind=%s attempt=%d does not end: %s"
            log.warning(text, self.job.id, self.job.kind, self.job.attempt, self.why)

    def conclude(self) -> Ending:
        """Decide, now that the handler has ended, how the attempt is to be settled."""
        assert self.task is not None
        ending = None
        if not self.task.cancelled():
            # What was raised may be such that it could not even be judged.
            exc = self.task.exception()
            ending = self.task.result() if exc is None else Ending("fail", type(exc).__name__)
        silent = News.TIMED_OUT in self.lease.told and ending and not ending.verb
        if not self.lease.owned:
            return Ending()
        if self.why == News.TIMED_OUT or silent:
            return Ending("fail", f"timed out after {self.job.timeout.total_seconds():g} s")
        if self.why == STOPPING and (not ending or (ending.verb == "fail" and not ending.chosen)):
            return Ending("release")
        return ending or Ending("fail", self.why or "the handler was cancelled from within")
