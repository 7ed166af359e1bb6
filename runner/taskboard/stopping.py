"""How a runner ends: its handlers get their time, and what is left is given back or let go."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from taskboard import attempts
from taskboard.attempts import STOPPING

if TYPE_CHECKING:
    from taskboard.worker import Worker

log = logging.getLogger(__name__)

FINE, BROKEN, JOBS_FAILED, STUCK = 0, 1, 3, 4  # exit codes; 2 is a usage error
SETTLES_WITHIN = 5.0


async def drain(worker: Worker, claiming: asyncio.Task[None], grace: float) -> None:
    """Let what runs end within the grace period, end what does not, and settle it all."""
    slots, settler = worker.slots, worker.settler
    ends_at = worker.loop.time() + grace
    if slots.running:
        log.info("stopping: %d running, %g s to end", len(slots.running), grace)
    await _until(worker, lambda: not slots.alive, grace)
    for attempt in list(slots.running):
        attempt.interrupt(STOPPING)
    await _until(worker, lambda: not slots.alive, attempts.ENDS_WITHIN)
    # A thread cannot be cancelled; giving its job back would have it done twice at once.
    if any(attempt.threaded for attempt in slots.alive):
        log.info("stopping: waiting for handlers in threads")
        await _until(worker, lambda: not any(a.threaded for a in slots.alive), math.inf)
    await asyncio.wait([claiming])  # what a claim under way returns is given back
    left_of_it = ends_at - worker.loop.time()
    await _until(worker, lambda: not settler.waiting, max(SETTLES_WITHIN, left_of_it))
    if left := len(settler.waiting):
        log.warning("stopping: %d jobs not settled, their leases lapse", left)
    if stuck := len(slots.running):
        log.error("stopping: %d handlers do not end", stuck)
        worker.code = STUCK
    elif settler.failed and worker.settings.until_empty and worker.code == FINE:
        worker.code = JOBS_FAILED


async def _until(worker: Worker, done: Callable[[], bool], seconds: float) -> None:
    ends_at = worker.loop.time() + seconds
    while not done() and worker.loop.time() < ends_at:
        worker.stirred.clear()
        await worker.rest(min(ends_at - worker.loop.time(), 0.2))
