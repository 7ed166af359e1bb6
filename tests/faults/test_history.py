"""Under faults every job's history has an order that explains it; broken variants have none."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from faults.history import NEVER, History, Hold, Op
from faults.run import NOT_DURABLE, NOTICED, Bench, bench, notice

JOB = UUID(int=1)
START = datetime(2026, 1, 1, tzinfo=UTC)
LEASE = timedelta(seconds=10)

# Those that most runs of two seconds notice; `python -m faults.run --mutants` tries all.
QUICK = (
    "token ignored in complete",
    "renew without a deadline",
    "renew reads the clock before the lock",
    "reclaim a minute early",
    "attempts counted only when a lease was lost",
    "completion of a finished job by anybody",
    "completion not repeatable",
    "finishing and the look for a repeat with one snapshot",
    "effect key per attempt",
    NOT_DURABLE,
)


@pytest.fixture(scope="module")
def place(programs: str) -> Iterator[Bench]:
    place = bench(programs)
    yield place
    place.server.close()


def test_sessions_end_and_the_server_restarts_and_some_order_explains_every_job(
    place: Bench,
) -> None:
    verdict = place.run("", 1, 5, restarts=True)
    print(verdict)
    assert verdict.violations == []
    assert verdict.undecided == 0
    # The load was one.
    assert verdict.jobs > 50 and verdict.calls > 200
    assert min(verdict.unanswered, verdict.ended, verdict.restarts) > 0


@pytest.mark.wide
@pytest.mark.parametrize("what", QUICK)
def test_histories_show_what_is_wrong_with(what: str, place: Bench, programs: str) -> None:
    assert what in NOTICED
    assert notice(what, programs, place, 1, 40).violations


def clock(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


class Row(SimpleNamespace):
    def _asdict(self) -> dict[str, Any]:
        return dict(vars(self))


def op(verb: str, at: float, token: int | None = None, until: float = 0.0, **row: Any) -> Op:
    """One call: from `at`, for half a second or until then; with columns: a row is the answer."""
    began = START.timestamp() + at
    ended = {0.0: began + 0.5, NEVER: NEVER}.get(until, START.timestamp() + until)
    answer = Row(**row) if row else None
    return Op(verb, began, ended, None if token is None else UUID(int=token), answer)


def claim(at: float, token: int, attempt: int) -> Op:
    return op("claim", at, token, attempt=attempt, lease=LEASE,
              lease_expires_at=clock(at + 0.2) + LEASE)  # fmt: skip


def renew(at: float, token: int, read: float, until: float = 0.0) -> Op:
    return op("renew", at, token, until, lease_expires_at=clock(read) + LEASE)


def complete(at: float, token: int, finished: float) -> Op:
    return op("complete", at, token, finished_at=clock(finished))


def begin(at: float, token: int, state: str) -> Op:
    return op("begin_effect", at, token, state=state, idempotency_key="k")


def end(at: float, token: int) -> Op:
    return op("end_effect", at, token, state="done")


ADDED, FIRST, SECOND = op("enqueue", 0), claim(1, 1, 1), claim(12, 2, 2)
DONE = complete(13, 2, 13.1)


@pytest.mark.parametrize(
    "ops",
    [
        [ADDED, FIRST, SECOND, op("complete", 12.6, 1), DONE, complete(20, 2, 13.1)],
        [ADDED, FIRST, complete(11.9, 1, 12), op("renew", 12.5, 1)],  # late, not overtaken
        [ADDED, FIRST, renew(5, 1, 5.1), claim(15.2, 2, 2)],
        [ADDED, FIRST, op("complete", 2, 1, NEVER), complete(3, 1, 2.1)],
        [ADDED, FIRST, op("complete", 2, 1, NEVER), claim(12, 2, 2)],
        [ADDED, FIRST, op("release", 2, 1, claimable_at=clock(2.1)), claim(3, 2, 2)],
        [ADDED, FIRST, begin(2, 1, "fresh"), SECOND, begin(13, 2, "unknown"), end(14, 1),
         begin(15, 2, "done")],
        [claim(0.1, 1, 1), op("enqueue", 0, until=9)],  # claimed before the producer was told
    ],
)  # fmt: skip
def test_history_that_some_order_explains(ops: list[Op]) -> None:
    assert found(ops) == []


@pytest.mark.parametrize(
    "ops",
    [
        [ADDED, FIRST, claim(10.9, 2, 2)],  # early
        [ADDED, FIRST, SECOND, complete(13, 1, 13.1)],  # superseded
        [ADDED, FIRST, SECOND, op("complete", 13, 2)],  # refused to the owner
        [ADDED, FIRST, renew(11.3, 1, 11.4)],  # lapsed
        [ADDED, FIRST, claim(12, 2, 1)],  # the same attempt again
        [ADDED, FIRST, claim(12, 3, 3)],  # nobody has the second
        [ADDED, FIRST, SECOND, DONE, op("complete", 14, 2)],  # denied
        [ADDED, FIRST, SECOND, DONE, complete(14, 2, 14.1)],  # another time
        [ADDED, FIRST, SECOND, DONE, complete(14, 1, 13.1)],  # to anybody
        [ADDED, FIRST, SECOND, DONE, claim(40, 3, 3)],  # after the end
        [ADDED, FIRST, begin(2, 1, "fresh"), end(3, 1), SECOND, begin(13, 2, "fresh")],
        [ADDED, FIRST, begin(11.3, 1, "fresh")],  # too late for an effect
        [FIRST],  # of a job that nobody added
    ],
)
def test_history_that_no_order_explains(ops: list[Op]) -> None:
    assert len(found(ops)) == 1


def test_claim_without_an_answer_stands_in_for_a_missing_attempt() -> None:
    ops = [ADDED, FIRST, claim(30, 3, 3)]
    assert len(found(ops)) == 1
    assert found(ops, lost_claims=[START.timestamp() + 12]) == []


def test_renewal_that_waited_for_a_row_and_read_the_clock_before_it_is_noticed() -> None:
    held = Hold(START.timestamp() + 10, START.timestamp() + 12)
    ops = [ADDED, FIRST, renew(10.5, 1, 10.6, until=12.5)]
    assert found(ops) == []
    assert len(found(ops, holds=[held])) == 1


def test_violating_history_is_told_up_to_the_answer_that_violates() -> None:
    (text,) = found([ADDED, FIRST, claim(10.9, 2, 2), op("complete", 11.5, 1), complete(12, 2, 13)])
    assert [line.split()[2] for line in text.splitlines()[1:]] == ["enqueue:", "claim", "claim"]


def found(ops: list[Op], **more: Any) -> list[str]:
    history = History(lost_claims=more.get("lost_claims", []))
    for each in ops:
        history.add(JOB, each)
    history.holds[JOB] += more.get("holds", [])
    return history.violations()
