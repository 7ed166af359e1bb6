"""What was called, from when to when, and what it answered; and whether some order explains it.

Each job is looked at by itself. A call takes effect at one instant between its beginning and its
answer; one without an answer at any later instant, or never. The checker searches for an order of
these instants in which every answer is what the promises say. A claim without an answer may have
leased any job: it stands in wherever an attempt is missing.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple
from uuid import UUID

NEVER: Final = math.inf


@dataclass(frozen=True, slots=True)
class Op:
    """One call about one job. Times are seconds of this machine's clock, which is the server's.

    `row` is the answer's row, None for zero rows; without meaning while `ended` is NEVER.
    """

    verb: str
    began: float
    ended: float
    token: UUID | None = None
    row: Any = None
    happened: bool = True

    @property
    def known(self) -> bool:
        return self.ended != NEVER

    def __str__(self) -> str:
        if not self.known:
            said = "no answer"
        elif self.row is None:
            said = "zero rows"
        else:
            said = ", ".join(f"{k} {v}" for k, v in self.row._asdict().items() if k in TOLD)
        token = "" if self.token is None else f" {str(self.token)[:8]}"
        began = datetime.fromtimestamp(self.began).strftime("%H:%M:%S.%f")
        return f"{began} +{min(self.ended - self.began, 999):.4f} {self.verb}{token}: {said}"


TOLD: Final = (
    "attempt", "lease_expires_at", "finished_at", "state", "claimable_at", "idempotency_key",
    "status",
)  # fmt: skip


class State(NamedTuple):
    """A job as the promises see it. `until`: claimable from then on; None: from when is unknown."""

    phase: str = "absent"  # or live, completed, failed
    token: Any = None
    until: datetime | None = None
    lease: timedelta = timedelta(0)
    attempt: int = 0
    ended_by: Any = None
    finished_at: datetime | None = None
    effects: frozenset[tuple[Any, str]] = frozenset()  # token: open, happened or refused

    def effect(self, token: Any) -> str:
        """What an attempt is told of the effect."""
        if any(what == "happened" for _, what in self.effects):
            return "done"
        if any(what == "open" and other != token for other, what in self.effects):
            return "unknown"
        return "fresh"

    def with_effect(self, token: Any, what: str) -> State:
        others = {(other, was) for other, was in self.effects if other != token}
        return self._replace(effects=frozenset(others | {(token, what)}))


def after(state: State, op: Op) -> State | None:
    """The state after a call took effect, None when its answer breaks a promise in this one."""
    mine = state.phase == "live" and state.token is not None and state.token == op.token
    refused = op.known and op.row is None
    match op.verb:
        case "enqueue":
            return state._replace(phase="live") if state.phase == "absent" else None
        case "claim":  # S1, S3, S4, S5
            fits = state.phase == "live" and op.row.attempt == state.attempt + 1
            read = op.row.lease_expires_at - op.row.lease  # the clock
            if not fits or (state.until is not None and state.until > read):
                return None
            return state._replace(
                token=op.token, until=op.row.lease_expires_at, lease=op.row.lease,
                attempt=op.row.attempt,
            )
        case "renew" | "begin_effect" if refused:
            late = state.until is None or state.until.timestamp() <= op.ended
            return state if not mine or late else None
        case "renew":  # S2: the current token, an unexpired lease
            if not mine:
                return None
            if not op.known:
                return state._replace(until=None)
            read = op.row.lease_expires_at - state.lease  # the clock
            if read.timestamp() < op.began or (state.until is not None and state.until <= read):
                return None
            return state._replace(until=op.row.lease_expires_at)
        case "begin_effect":  # S2, E1
            if not mine or (state.until is not None and state.until.timestamp() <= op.began):
                return None
            told = state.effect(op.token)
            if op.known and op.row.state != told:
                return None
            return state if told == "done" else state.with_effect(op.token, "open")
        case "end_effect":  # by who began it, whoever owns the job
            was = dict(state.effects).get(op.token)
            if refused or was is None:
                return state if refused and was is None else None
            what = "happened" if op.happened or was == "happened" else "refused"
            if what == "refused" and was == "refused":
                return state
            state = state.with_effect(op.token, what)
            fits = not op.known or (op.row.state == "done") == (state.effect(op.token) == "done")
            return state if fits else None
        case "complete":  # S2, S5, S7: the same again gets the same
            theirs = state.phase == "completed" and state.ended_by == op.token
            if refused:
                return None if mine or theirs else state
            if theirs:
                same = not op.known or op.row.finished_at == state.finished_at
                if state.finished_at is None and op.known:
                    return state._replace(finished_at=op.row.finished_at)
                return state if same else None
            if not mine:
                return None
            if (op.token, "open") in state.effects:
                state = state.with_effect(op.token, "happened")
            return state._replace(
                phase="completed", token=None, until=None, ended_by=op.token,
                finished_at=op.row.finished_at if op.known else None,
            )  # fmt: skip
        case "fail" | "release":
            if refused or not mine:
                return state if refused and not mine else None
            until = op.row.claimable_at if op.known else None
            return state._replace(token=None, until=until)
        case "lease_status":
            return after_status(state, op, mine)
        case "job":  # the last look of all
            fits = op.row.state == state.phase and op.row.attempt == state.attempt
            by = op.row.lease_token
            return state if fits and (state.ended_by is None or state.ended_by == by) else None
    raise ValueError(op.verb)


def after_status(state: State, op: Op, mine: bool) -> State | None:
    until = None if state.until is None else state.until.timestamp()
    match op.row.status:
        case "current":
            return state if mine and (until is None or until > op.began) else None
        case "expired":
            fits = mine and (until is None or until <= op.ended)
            return state if fits else None
        case "completed_by_you":
            return state if state.ended_by == op.token else None
    return None if mine else state


def explain(ops: Sequence[Op], lost_claims: Sequence[float], attempts: int) -> bool:
    """Tell whether some order of the calls about one job keeps the promises.

    `lost_claims`: when each claim without an answer began; `attempts`: how many there were.
    """
    answered = {op.row.attempt for op in ops if op.verb == "claim"}
    first_lost = min(lost_claims, default=NEVER)
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
        steps = [(n, after(state, ops[n])) for n in left if ops[n].began <= bound]
        # What changes nothing is in order now if it ever is: nothing else need be tried.
        still = [n for n, then in steps if then == state and ops[n].known]
        if still:
            stack.append((done | sum(1 << n for n in still), state))
            continue
        stack += [(done | 1 << n, then) for n, then in steps if then not in (None, state)]
        if (
            state.phase == "live" and state.attempt < attempts and first_lost < bound
            and state.attempt + 1 not in answered
            and (state.until is None or state.until.timestamp() <= bound)
        ):  # fmt: skip
            number = state.attempt + 1
            stack.append((done, state._replace(
                token=f"of lost attempt {number}", until=None, attempt=number)))  # fmt: skip
    return False


class TooMany(Exception):
    """A job's history has too many orders to look at."""


MOST: Final = 100_000


def shortest(ops: Sequence[Op], lost_claims: Sequence[float], attempts: int) -> list[Op]:
    """The shortest beginning of a history that no order explains."""

    def until(now: float) -> list[Op]:
        return [
            op if op.ended <= now else replace(op, ended=NEVER)
            for op in ops
            if op.began < now and (op.ended <= now or op.verb not in ANSWERED)
        ]

    def explained(now: float) -> bool:
        # A claim that answers only later may by now have had its effect.
        later = [op.began for op in ops if op.verb == "claim" and op.began < now < op.ended]
        return explain(until(now), [*lost_claims, *later], attempts)

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
    lost_claims: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # seen at once, without an order
    calls: int = 0
    unanswered: int = 0
    undecided: int = 0  # jobs with too many orders to look at

    def add(self, job_id: UUID, op: Op) -> None:
        self.ops[job_id].append(op)

    def violations(self, most: int = 3) -> list[str]:
        """Say what no order explains, each by its shortest history."""
        found = list(self.problems) + list(issued_twice(self.ops))
        for job_id, ops in self.ops.items():
            if len(found) >= most:
                break
            ops = wait_for_holds(ops, self.holds[job_id])
            told = ops, self.lost_claims, attempts_of(ops)
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
