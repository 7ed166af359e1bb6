"""What a handler sees: the job, a context, and the outcomes it can choose.

A handler is an async function of one argument, the context; a plain function runs in a thread.
What it returns is stored as the job's result. To end otherwise it raises one of the outcomes.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, TypeVar
from uuid import UUID

from psycopg import AsyncConnection

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Job:
    """A claimed job, as `taskboard.claim` returned it, without its lease token."""

    id: UUID
    queue: str
    kind: str
    payload: Any
    attempt: int
    max_attempts: int
    failures: int
    lease: timedelta
    timeout: timedelta
    headers: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Effect:
    """The answer of `begin_effect`: the key to send along, and what earlier attempts left.

    `state` is `fresh` (nobody began), `done` (it happened: `result` tells, do not repeat it) or
    `unknown` (an earlier attempt began and never reported; repeat it with the same key).
    """

    step: str
    idempotency_key: str
    state: str
    result: Any = None


class Context(Protocol):
    """What a handler may do while it owns its job."""

    @property
    def job(self) -> Job: ...

    async def begin_effect(
        self, step: str = "main", *, key_valid_for: timedelta | None = None
    ) -> Effect:
        """Pass the gate before an effect outside the database; committed before it returns.

        `key_valid_for`: how long the other side remembers the key. Raises `LeaseLost` when the
        lease is not current and unexpired, `Held` when a person must decide first.
        """
        ...

    async def end_effect(
        self, step: str = "main", *, happened: bool = True, result: Any = None
    ) -> None:
        """Record what became of an effect; `happened=False` means refused before it took place."""
        ...

    def connection(self) -> AbstractAsyncContextManager[AsyncConnection[Any]]:
        """Borrow a pooled connection in autocommit mode."""
        ...

    def transaction(
        self, *, complete: bool = False, result: Any = None
    ) -> AbstractAsyncContextManager[AsyncConnection[Any]]:
        """Open a transaction that only the current lease can commit (`require_lease`).

        With `complete` the job is completed in it, with `result`: the writes and the completion
        are one atom, and the handler should return after it. Raises `LeaseLost` and rolls back
        when the lease token is no longer current.
        """
        ...


class ThreadContext(Context, Protocol):
    """The context of a plain function: `ctx.wait(ctx.begin_effect())`, and so on."""

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the runner's loop, and wait for its result in this thread."""
        ...


class Outcome(Exception):
    """Base of what a handler raises to end otherwise than completed."""


class Permanent(Outcome):
    """Fail for good: repeating the job cannot help. The text is stored with the job."""


class Retry(Outcome):
    """Fail this attempt; `retry_in` overrides the backoff that the database computes."""

    def __init__(self, error: str, *, retry_in: timedelta | None = None) -> None:
        super().__init__(error)
        self.retry_in = retry_in


class Release(Outcome):
    """Give the job back without charging a failure: not yet, or rate limited.

    It can be claimed again after `delay`, by default a second.
    """

    def __init__(self, reason: str, *, delay: timedelta | None = None) -> None:
        super().__init__(reason)
        self.delay = delay


class LeaseLost(Outcome):
    """The lease is gone: stop, start no further effect, settle nothing."""


class Held(Outcome):
    """`begin_effect` held the job: an earlier outcome is unknown and a person must decide."""


Handler = Callable[[Any], Any]  # of a Context; of a ThreadContext when it is a plain function


def handler(kind: str) -> Callable[[Handler], Handler]:
    """Mark a function as the handler of `kind`, in a module named to `taskboard run`."""

    def mark(function: Handler) -> Handler:
        function.taskboard_kind = kind  # type: ignore[attr-defined]
        return function

    return mark
