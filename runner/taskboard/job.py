"""What is spoken about: answers of the database, and the outcomes that a handler may raise."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import UUID


@dataclass(frozen=True, slots=True)
class Job:
    """A claimed job, as `taskboard.claim` returned it, without its lease token."""

    id: UUID
    queue: str
    kind: str
    payload: Any = field(repr=False)
    attempt: int
    max_attempts: int
    failures: int
    lease: timedelta
    timeout: timedelta
    headers: dict[str, Any] = field(default_factory=dict, repr=False)


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


class Renewed(NamedTuple):
    """An answer of renew_many; `outcome` is `renewed` or `busy`, no answer means lost."""

    job_id: UUID
    outcome: str
    cancel_requested: bool


class Failed(NamedTuple):
    """The answer of fail: the job's state and, if it is to run again, in how many seconds."""

    state: str
    again_in: float | None


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
