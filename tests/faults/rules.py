"""What the promises say of one call about one job: which answers fit, and what the job is after it.

A state is a job as the promises see it. A call that gets an answer must fit the state in which it
takes effect; one without an answer does what it would have done.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, Final, NamedTuple
from uuid import UUID

NEVER: Final = math.inf
FINAL: Final = ("completed", "failed", "cancelled")


@dataclass(frozen=True, slots=True)
class Op:
    """One call about one job. Times are seconds of this machine's clock.

    `row` is the answer's row, None for zero rows; without meaning while `ended` is NEVER. The
    server's clock was `behind` to `ahead` seconds off while the call ran.
    """

    verb: str
    began: float
    ended: float
    token: UUID | None = None
    row: Any = None
    happened: bool = True  # of end_effect and resolve
    asked: str = ""  # permanent of fail, force of cancel, hold of enqueue
    worker: str | None = None  # of claim and evict
    behind: float = 0.0
    ahead: float = 0.0

    @property
    def known(self) -> bool:
        return self.ended != NEVER

    @property
    def low(self) -> float:
        """The server's clock was not before that, whenever the call took effect."""
        return self.began + self.behind

    @property
    def high(self) -> float:
        return self.ended + self.ahead

    def __str__(self) -> str:
        if not self.known:
            said = "no answer"
        elif self.row is None:
            said = "zero rows"
        else:
            said = ", ".join(f"{k} {v}" for k, v in self.row._asdict().items() if k in TOLD)
        token = "" if self.token is None else f" {str(self.token)[:8]}"
        asked = f" ({self.asked})" if self.asked else "" if self.happened else " (not happened)"
        began = datetime.fromtimestamp(self.began).strftime("%H:%M:%S.%f")
        took = min(self.ended - self.began, 999)
        return f"{began} +{took:.4f} {self.verb}{token}{asked}: {said}"


TOLD: Final = (
    "attempt", "lease_expires_at", "finished_at", "state", "claimable_at", "idempotency_key",
    "status", "outcome", "cancel_requested",
)  # fmt: skip


class Row(SimpleNamespace):
    """An answer's row, where the database's own cannot be had."""

    def _asdict(self) -> dict[str, Any]:
        return dict(vars(self))


class State(NamedTuple):
    """A job as the promises see it. `until`: claimable from then on; None: from when is unknown."""

    phase: str = "absent"  # or live, held, or one of FINAL
    token: Any = None
    until: datetime | None = None
    lease: timedelta = timedelta(0)
    attempt: int = 0
    ended_by: Any = None
    finished_at: datetime | None = None
    effects: frozenset[tuple[Any, str]] = frozenset()  # token: open, happened or refused
    hold: bool = False  # on_unknown
    to_cancel: bool = False  # asked for
    worker: str | None = None

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

    def end(self, phase: str, by: Any = None, at: datetime | None = None) -> State:
        """Finished, or held."""
        return self._replace(phase=phase, token=None, until=None, ended_by=by, finished_at=at)

    def free(self, low: float) -> State:
        """Claimable, by a clock that is not before `low`."""
        at = datetime.fromtimestamp(low, UTC)
        return self._replace(phase="live", token=None, until=at, ended_by=None, finished_at=None)


def after(state: State, op: Op) -> State | None:
    """The state after a call took effect, None when its answer breaks a promise in this one."""
    mine = state.phase == "live" and state.token is not None and state.token == op.token
    refused = op.known and op.row is None
    if refused and op.verb in ("fail", "release"):
        return None if mine else state
    if refused and op.verb in ("renew", "begin_effect"):
        late = state.until is None or state.until.timestamp() <= op.high
        return state if not mine or late else None
    match op.verb:
        case "enqueue":
            begun = state._replace(phase="live", hold=op.asked == "hold")
            return begun if state.phase == "absent" else None
        case "claim":
            return after_claim(state, op)
        case "renew":
            return after_renew(state, op) if mine else None
        case "begin_effect":
            return after_begin(state, op) if mine else None
        case "end_effect":
            return after_end(state, op)
        case "complete":
            return after_complete(state, op, mine)
        case "fail" if mine:
            what = "ready"
            if state.to_cancel:
                what = "cancelled"
            elif op.asked == "permanent":
                what = "held" if state.hold and state.effect(None) == "unknown" else "failed"
            return given_back(state, op, what)
        case "release" if mine:
            return given_back(state, op, "cancelled" if state.to_cancel else "ready")
        case "lease_status":
            return after_status(state, op, mine)
        case "cancel" | "evict" | "retry" | "resolve":
            return after_operator(state, op)
        case "job":  # the last look of all
            fits = op.row.state == state.phase and op.row.attempt == state.attempt
            by = op.row.lease_token
            return state if fits and (state.ended_by is None or state.ended_by == by) else None
    return None


def after_claim(state: State, op: Op) -> State | None:
    """S1, S3, S4, S5; and nobody gets what somebody else was asked to stop."""
    fits = state.phase == "live" and op.row.attempt == state.attempt + 1
    read = (op.row.lease_expires_at - op.row.lease).timestamp()  # the clock, after the lock
    if op.behind != op.ahead:
        read = max(read, op.high)  # it was set meanwhile: what it said before the lock is unknown
    if not fits or (state.until is not None and state.until.timestamp() > read):
        return None
    if state.to_cancel and state.token is not None:
        return None
    return state._replace(
        token=op.token, until=op.row.lease_expires_at, lease=op.row.lease,
        attempt=op.row.attempt, worker=op.worker,
    )  # fmt: skip


def after_renew(state: State, op: Op) -> State | None:
    """S2: the current token, an unexpired lease; busy says only that it is the current token."""
    if not op.known:
        return state._replace(until=None)
    if op.row.cancel_requested != state.to_cancel:
        return None
    if getattr(op.row, "outcome", "renewed") == "busy":
        return state
    read = op.row.lease_expires_at - state.lease  # the clock
    if read.timestamp() < op.low or (state.until is not None and state.until <= read):
        return None
    return state._replace(until=op.row.lease_expires_at)


def after_begin(state: State, op: Op) -> State | None:
    """S2, E1, and with hold nobody repeats what is unknown."""
    if state.until is not None and state.until.timestamp() <= op.low:
        return None
    told = state.effect(op.token)
    if told == "unknown" and state.hold:
        told = "held"
    if op.known and op.row.state != told:
        return None
    if told == "held":
        return state.end("held")
    return state if told == "done" else state.with_effect(op.token, "open")


def after_end(state: State, op: Op) -> State | None:
    """Evidence by who began it, whoever owns the job; it frees a job that is held."""
    was = dict(state.effects).get(op.token)
    refused = op.known and op.row is None
    if refused or was is None:
        return state if was is None and (refused or not op.known) else None
    what = "happened" if op.happened or was == "happened" else "refused"
    state = state.with_effect(op.token, what)
    if op.known and (op.row.state == "done") != (state.effect(op.token) == "done"):
        return None
    answered = state.phase == "held" and state.effect(None) != "unknown"
    return state.free(op.low) if answered else state


def after_complete(state: State, op: Op, mine: bool) -> State | None:
    """S2, S5, S7: the same again gets the same."""
    theirs = state.phase == "completed" and state.ended_by == op.token
    if op.known and op.row is None:
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
    return state.end("completed", op.token, op.row.finished_at if op.known else None)


def given_back(state: State, op: Op, what: str) -> State | None:
    if op.known and what != ("ready" if op.row.state == "scheduled" else op.row.state):
        return None
    if what == "ready":
        return state._replace(token=None, until=op.row.claimable_at if op.known else None)
    return state.end(what, None if what == "held" else op.token)


def after_status(state: State, op: Op, mine: bool) -> State | None:
    until = None if state.until is None else state.until.timestamp()
    match op.row.status:
        case "current":
            return state if mine and (until is None or until > op.low) else None
        case "expired":
            fits = mine and (until is None or until <= op.high)
            return state if fits else None
        case "completed_by_you":
            return state if state.ended_by == op.token else None
    return None if mine else state


def after_operator(state: State, op: Op) -> State | None:
    told = None if op.row is None else op.row.state
    leased = state.phase == "live" and state.token is not None
    until = state.until if leased else None
    match op.verb:
        case "cancel" if state.phase in FINAL:
            return state if told in (None, state.phase) else None
        case "cancel" if told == "running":
            runs = leased and (until is None or until.timestamp() > op.low)
            return state._replace(to_cancel=True) if runs and op.asked != "force" else None
        case "cancel" if told == "cancelled":
            lapsed = until is None or until.timestamp() <= op.high
            gone = state.phase != "absent" and (not leased or lapsed or op.asked == "force")
            return state.end("cancelled") if gone else None
        case "evict":
            runs = leased and (until is None or until.timestamp() > op.low)
            theirs = state.worker in (None, op.worker)
            return state._replace(until=state.free(op.low).until) if runs and theirs else None
        case "retry" if state.phase in FINAL:
            return state.free(op.low)._replace(to_cancel=False)
        case "retry":  # of what waits already
            return state if not leased and state.phase != "absent" else None
        case "resolve" if state.phase == "held":
            what = "happened" if op.happened else "refused"
            told_now = {(by, what if was == "open" else was) for by, was in state.effects}
            return state._replace(effects=frozenset(told_now)).free(op.low)
        case "resolve":  # the same answer again, or evidence that came first
            agrees = state.effect(None) == ("done" if op.happened else "fresh")
            return state if agrees and state.effects else None
    return None
