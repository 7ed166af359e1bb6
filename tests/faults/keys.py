"""What is promised across jobs: one live holder of a unique key, turns of a serial key, pauses.

Of each job it is worked out when it certainly lived, and when it had certainly ended, whatever the
order of calls that overlap. What these times contradict is a violation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple
from uuid import UUID

from faults.rules import FINAL, NEVER, Op

Ops = Mapping[UUID, Sequence[Op]]


class Keyed(NamedTuple):
    """A job that was added with a unique or a serial key; `place`: in its batch."""

    job_id: UUID
    began: float
    ended: float
    unique: str | None = None
    serial: str | None = None
    place: int = 0


class Shared(NamedTuple):
    """A producer was given somebody else's job for its unique key."""

    key: str
    job_id: UUID
    began: float
    ended: float


class Pause(NamedTuple):
    """The queue was certainly paused."""

    queue: str
    since: float
    until: float


class Span(NamedTuple):
    since: float
    until: float

    def holds(self, began: float, ended: float) -> bool:
        return self.since < began and ended < self.until


ENDING: Final = ("complete", "fail", "release", "cancel")
UNENDING: Final = ("ready", "scheduled", "blocked")


def may_end(op: Op) -> bool:
    """A call that has ended its job, or may have, or asked for that."""
    if op.verb not in ENDING:
        return False
    return not op.known or (op.row is not None and getattr(op.row, "state", "") not in UNENDING)


def has_ended(op: Op) -> bool:
    """The answer says that the job has ended."""
    if op.verb not in ENDING or not op.known or op.row is None:
        return False
    return op.verb == "complete" or op.row.state in FINAL


def lives_from(since: Op | Keyed, ops: Iterable[Op]) -> Span:
    """From the answer of what gave it life, or of a claim, to the first call that may end it."""
    ends = [op.began for op in ops if may_end(op) and op.ended >= since.began]
    return Span(since.ended, min(ends, default=NEVER))


def over(ops: Sequence[Op], lost_retries: Sequence[float]) -> Iterator[Span]:
    """When a job had certainly ended, and nobody had called it back."""
    back = [op for op in ops if op.verb == "retry"]
    for end in filter(has_ended, ops):
        begun = [op.began for op in back if op.ended >= end.began] + list(lost_retries)
        yield Span(end.ended, min(begun, default=NEVER))


def unique_twice(
    of_jobs: Ops, keyed: Iterable[Keyed], shared: Iterable[Shared], lost_retries: Sequence[float]
) -> Iterator[str]:
    """At most one live job holds a unique key, and who is given another's job gets a live one."""
    lives: dict[str, list[tuple[Span, UUID]]] = defaultdict(list)
    for each in keyed:
        if each.unique is not None:
            ops = of_jobs[each.job_id]
            begun: list[Any] = [each, *(op for op in ops if op.verb == "retry" and op.known)]
            lives[each.unique] += [(lives_from(birth, ops), each.job_id) for birth in begun]
    for key, spans in lives.items():
        longest, first = Span(-NEVER, -NEVER), UUID(int=0)
        for span, second in sorted(spans):
            if first != second and span.since < min(longest.until, span.until):
                yield f"jobs {first} and {second} lived at once with the unique key {key}"
            if span.until > longest.until:
                longest, first = span, second
    for given in shared:
        for span in over(of_jobs[given.job_id], lost_retries):
            if span.holds(given.began, given.ended):
                yield f"job {given.job_id} was given out for {given.key} when it had ended"


def turns_out_of_order(of_jobs: Ops, keyed: Iterable[Keyed]) -> Iterator[str]:
    """Of a serial key one job is claimed until it has ended; they come in the order of joining."""
    of_keys: dict[str, list[Keyed]] = defaultdict(list)
    for each in keyed:
        if each.serial is not None:
            of_keys[each.serial].append(each)
    for key, members in of_keys.items():
        turns = []  # of a job, from when to when others had to wait for it
        claims = []
        for each in members:
            ops = of_jobs[each.job_id]
            mine = [op for op in ops if op.verb == "claim"]
            turns += [(lives_from(op, ops), each) for op in mine]
            claims += [(op, each) for op in mine]
        lives = [(lives_from(each, of_jobs[each.job_id]), each) for each in members]
        for op, each in claims:
            for span, other in turns:
                if other is not each and span.holds(op.began, op.ended):
                    yield f"job {each.job_id} got the turn of {key} that {other.job_id} had"
            for span, other in lives:
                before = other.ended < each.began or (
                    (other.began, other.ended) == (each.began, each.ended)
                    and other.place < each.place
                )
                if before and span.holds(op.began, op.ended):
                    yield f"job {each.job_id} got the turn of {key} before {other.job_id}"


def pauses_ignored(of_jobs: Ops, pauses: Sequence[Pause]) -> Iterator[str]:
    for job_id, ops in of_jobs.items():
        for op in ops:
            if op.verb == "claim" and any(
                op.row.queue == pause.queue and Span(*pause[1:]).holds(op.began, op.ended)
                for pause in pauses
            ):
                yield f"job {job_id} was claimed from a queue that was paused: {op}"
