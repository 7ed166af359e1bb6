"""What was called, from when to when, and what it answered; and whether some order explains it.

Each job is looked at by itself. A call takes effect at one instant between its beginning and its
answer; one without an answer at any later instant, or never. The checker searches for an order of
these instants in which every answer is what the promises say. A claim without an answer may have
leased any job: it stands in wherever an attempt is missing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final
from uuid import UUID

from faults.keys import Keyed, Pause, Shared, pauses_ignored, turns_out_of_order, unique_twice
from faults.rules import NEVER, Op, Row, State, after


@dataclass(slots=True)
class Lost:
    """Calls without an answer that may have been about any job: when each began."""

    claims: list[float] = field(default_factory=list)
    retries: list[float] = field(default_factory=list)
    evictions: list[tuple[float, str]] = field(default_factory=list)  # of whom


def explain(ops: Sequence[Op], lost: Lost, attempts: int) -> bool:
    """Tell whether some order of the calls about one job keeps the promises.

    `attempts`: how often it was claimed.
    """
    answered = {op.row.attempt for op in ops if op.verb == "claim"}
    ahead = max((op.ahead for op in ops), default=0.0)
    needed = sum(1 << n for n, op in enumerate(ops) if op.known)
    seen: set[tuple[int, State]] = set()
    stack = [(0, State())]
    while stack:
        done, state = stack.pop()
        if done & needed == needed:
            return True
        if (done, state) in seen:
            continue
        seen.add((done, state))
        if len(seen) > MOST:
            raise TooMany
        left = [n for n in range(len(ops)) if not done >> n & 1]
        bound = min(ops[n].ended for n in left)
        steps = [
            (n, after(state, told))
            for n in left
            if ops[n].began <= bound
            for told in guesses(ops[n])
        ]
        # What can change nothing is in order now if it ever is: nothing else need be tried.
        still = [n for n, then in steps if then == state and is_still(ops[n])]
        if still:
            stack.append((done | sum(1 << n for n in still), state))
            continue
        stack += [
            (done | 1 << n, then)
            for n, then in steps
            if then is not None and (then != state or ops[n].known)
        ]
        if state.attempt + 1 not in answered and state.attempt < attempts:
            stack += [(done, then) for then in unseen_claim(state, lost, bound, ahead)]
        stack += [(done, then) for then in unseen(state, lost, bound, ahead)]
    return False


def is_still(op: Op) -> bool:
    """Where this answer fits and changes nothing, it would never have changed anything."""
    return op.known and (op.row is None or op.verb in STILL)


STILL: Final = ("lease_status", "job", "complete", "renew")


def guesses(op: Op) -> list[Op]:
    """A call as it may have been answered."""
    if op.verb != "cancel" or op.known:
        return [op]
    return [replace(op, row=Row(state=state)) for state in ("running", "cancelled")]


def unseen_claim(state: State, lost: Lost, bound: float, ahead: float) -> Iterator[State]:
    """A claim that nobody was told of."""
    lapsed = state.until is None or state.until.timestamp() <= bound + ahead
    to_stop = state.to_cancel and state.token is not None
    if state.phase == "live" and lapsed and not to_stop and min(lost.claims, default=NEVER) < bound:
        number = state.attempt + 1
        yield state._replace(
            token=f"of lost attempt {number}", until=None, attempt=number, worker=None
        )


def unseen(state: State, lost: Lost, bound: float, ahead: float) -> Iterator[State]:
    """What happens to a job without a call about it that was answered."""
    leased = state.phase == "live" and state.token is not None
    lapsed = state.until is None or state.until.timestamp() <= bound + ahead
    if leased and lapsed and state.to_cancel:  # some claim came by
        yield state.end("cancelled")
    if state.phase == "failed" and min(lost.retries, default=NEVER) < bound:
        yield state._replace(phase="live", until=None, ended_by=None, to_cancel=False)
    if leased and state.until is not None and any(
        began < bound and state.worker in (None, worker) for began, worker in lost.evictions
    ):
        yield state._replace(until=None)


class TooMany(Exception):
    """A job's history has too many orders to look at."""


MOST: Final = 100_000


def shortest(ops: Sequence[Op], lost: Lost, attempts: int) -> list[Op]:
    """The shortest beginning of a history that no order explains."""

    def until(now: float) -> list[Op]:
        return [
            op if op.ended <= now else replace(op, ended=NEVER)
            for op in ops
            if op.began <= now and (op.ended <= now or op.verb not in ANSWERED)
        ]

    def explained(now: float) -> bool:
        # A claim that answers only later may by now have had its effect.
        later = [op.began for op in ops if op.verb == "claim" and op.began < now < op.ended]
        more = replace(lost, claims=[*lost.claims, *later])
        return explain(until(now), more, attempts)

    answers = sorted(op.ended for op in ops if op.known)
    return until(answers[bisect_left(answers, True, key=lambda now: not explained(now))])


def attempts_of(ops: Iterable[Op]) -> int:
    """How often a job was claimed: it says so in the end; else once more than is known."""
    ends = [op.row.attempt for op in ops if op.verb == "job"]
    known = (op.row.attempt for op in ops if op.verb == "claim")
    return ends[0] if ends else 1 + max(known, default=0)


ANSWERED: Final = ("claim", "lease_status", "job")  # are nothing without an answer


@dataclass(frozen=True, slots=True)
class Hold:
    """Somebody merely had the row locked, `for update`, from when to when at least."""

    got: float
    let_go: float


def wait_for_holds(ops: Iterable[Op], holds: Sequence[Hold]) -> list[Op]:
    """A call that was accepted, and had to wait for a row, had no effect before it got that."""

    def began(op: Op) -> float:
        waited = op.verb in LOCKING and op.known and op.row is not None
        ends = [h.let_go for h in holds if h.got <= op.began < h.let_go <= op.ended]
        return max([op.began, *ends]) if waited else op.began

    return sorted((replace(op, began=began(op)) for op in ops), key=lambda op: op.began)


LOCKING: Final = ("renew", "begin_effect", "complete", "fail", "release")


@dataclass(slots=True)
class History:
    """All calls of a run. Appending needs no lock."""

    ops: dict[UUID, list[Op]] = field(default_factory=lambda: defaultdict(list))
    holds: dict[UUID, list[Hold]] = field(default_factory=lambda: defaultdict(list))
    lost: Lost = field(default_factory=Lost)
    keys: list[Keyed] = field(default_factory=list)
    shared: list[Shared] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # seen at once, without an order
    verbs: Counter[str] = field(default_factory=Counter)  # calls
    refused: Counter[str] = field(default_factory=Counter)  # by the error's code
    unanswered: int = 0
    undecided: int = 0  # jobs with too many orders to look at

    @property
    def calls(self) -> int:
        return self.verbs.total()

    def add(self, job_id: UUID, op: Op) -> None:
        self.ops[job_id].append(op)

    def violations(self, most: int = 3) -> list[str]:
        """Say what no order explains, each by its shortest history."""
        found = list(self.problems) + list(issued_twice(self.ops))
        found += unique_twice(self.ops, self.keys, self.shared, self.lost.retries)
        found += turns_out_of_order(self.ops, self.keys)
        found += pauses_ignored(self.ops, self.pauses)
        for job_id, ops in self.ops.items():
            if len(found) >= most:
                break
            ops = wait_for_holds(ops, self.holds[job_id])
            told = ops, self.lost, attempts_of(ops)
            try:
                if explain(*told):
                    continue
                lines = shortest(*told)
            except TooMany:
                self.undecided += 1
            else:
                found.append("\n  ".join([f"no order explains job {job_id}:", *map(str, lines)]))
        return found


def issued_twice(of_jobs: dict[UUID, list[Op]]) -> Iterator[str]:
    """S1, E1: a lease token is given once; a job has one key, and a key one job."""
    tokens: set[Any] = set()
    keys: dict[str, UUID] = {}
    for job_id, ops in of_jobs.items():
        for token in [op.token for op in ops if op.verb == "claim"]:
            if token in tokens:
                yield f"lease token {token} was given twice"
            tokens.add(token)
        mine = {op.row.idempotency_key for op in answered(ops) if op.verb == "begin_effect"}
        if len(mine) > 1:
            yield f"job {job_id} has more than one idempotency key: {sorted(mine)}"
        for key in mine:
            if keys.setdefault(key, job_id) != job_id:
                yield f"{key} is the key of {keys[key]} and of {job_id}"


def answered(ops: Iterable[Op]) -> Iterator[Op]:
    return (op for op in ops if op.known and op.row is not None)
