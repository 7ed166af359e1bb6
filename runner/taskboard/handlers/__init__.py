"""What own handlers import: the context, the job in it, and the outcomes to choose from.

A handler is an async function of one argument, the context; a plain function runs in a thread.
What it returns is stored as the job's result. To end otherwise it raises one of the outcomes.
"""

from __future__ import annotations

from taskboard.context import Context, ThreadContext
from taskboard.job import Effect, Held, Job, LeaseLost, Outcome, Permanent, Release, Retry
from taskboard.mark import Handler, handler

__all__ = [
    "Context", "Effect", "Handler", "Held", "Job", "LeaseLost", "Outcome", "Permanent", "Release",
    "Retry", "ThreadContext", "handler",
]  # fmt: skip
