"""A job, what a handler may raise, and how an attempt can end."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import UUID

NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


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

    def read(self) -> Job:
        """Return the job with its documents, which come as JSON texts. Raises ValueError."""
        return Job(
            self.id, self.queue, self.kind, json.loads(self.payload), self.attempt,
            self.max_attempts, self.failures, self.lease, self.timeout,
            json.loads(str(self.headers)) if self.headers else {},
        )  # fmt: skip


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
    """An answer of fail: the job's state and, if it is to run again, in how many seconds."""

    job_id: UUID
    state: str
    again_in: float | None


class Outcome(Exception):
    """Base of what a handler raises to end otherwise than completed."""


class Permanent(Outcome):
    """Fail for good: repeating the job cannot help. The text is stored with the job."""


class Retry(Outcome):
    """Fail this attempt; `retry_in` overrides the backoff that the database computes."""

    retry_in: timedelta | None = None  # also where a subclass has an __init__ of its own

    def __init__(self, error: str, *, retry_in: timedelta | None = None) -> None:
        super().__init__(error)
        self.retry_in = retry_in


class Release(Outcome):
    """Give the job back without charging a failure: not yet, or rate limited.

    It can be claimed again after `delay`, by default a second.
    """

    delay: timedelta | None = None

    def __init__(self, reason: str, *, delay: timedelta | None = None) -> None:
        super().__init__(reason)
        self.delay = delay


class LeaseLost(Outcome):
    """The lease is gone: stop, start no further effect, settle nothing."""


class Held(Outcome):
    """`begin_effect` held the job: an earlier outcome is unknown and a person must decide."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt ended: the verb that settles it (none: nothing does), what to pass along.

    `note` is for the log, and the error of a failure.
    """

    verb: str = ""
    note: str = ""
    result: str | None = None
    permanent: bool = False
    after: timedelta | None = None  # retry_in of fail, delay of release
    chosen: bool = False  # by the handler, with an outcome
    plain: bool = False  # nothing is left that the database may refuse

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What the verb's function takes behind job id and token."""
        if self.verb == "fail":
            return self.note, self.after, self.permanent
        return (self.after if self.verb == "release" else self.result,)

    def strip(self, why: str) -> Ending:
        """Keep the verb and what can always be stored, because the database refused the rest."""
        note = f"{self.note} (dropped what came along: {why})".lstrip()
        note = note.encode("ascii", "backslashreplace").decode()
        after = timedelta(minutes=1) if self.verb == "release" else None
        return Ending(self.verb, note, permanent=self.permanent, after=after, plain=True)


def judge(exc: BaseException) -> Ending:
    """Sort what a handler raised."""
    text = clean(exc)
    match exc:
        case LeaseLost() | Held():
            return Ending(note=text)
        case Permanent():
            return Ending("fail", text, permanent=True, chosen=True)
        case Retry():
            return Ending("fail", text, after=exc.retry_in, chosen=True)
        case Release():
            return Ending("release", text, after=exc.delay or timedelta(seconds=1))
    return Ending("fail", text)


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
