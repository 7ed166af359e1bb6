"""Under faults every job's history has an order that explains it; broken variants have none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from faults.broken import NOTICED, broken
from faults.history import History, Hold, Lost
from faults.keys import Keyed, Pause, Shared, pauses_ignored, turns_out_of_order, unique_twice
from faults.rules import NEVER, Op, Row
from faults.run import AS_RELEASED, Bench, bench, notice

JOB = UUID(int=1)
START = datetime(2026, 1, 1, tzinfo=UTC)
LEASE = timedelta(seconds=10)

# Enough to show, in the default suite, that the checker can see.
QUICK = ("token ignored in complete", "completion not repeatable")


@pytest.fixture(scope="module")
def place(programs: str) -> Iterator[Bench]:
    place = bench(programs)
    yield place
    place.server.close()


def test_sessions_end_and_the_server_restarts_and_some_order_explains_every_job(
    place: Bench,
) -> None:
    verdict = place.run(AS_RELEASED, 1, 4, restarts=True, proxies=2, processes=1)
    print(verdict)
    assert verdict.violations == []
    assert verdict.undecided == 0
    # The load was one.
    assert verdict.jobs > 30 and verdict.calls > 150 and verdict.unanswered > 0
    assert sum(verdict.faults.values()) > 5


@pytest.mark.parametrize(
    "what",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.wide) for name in NOTICED],
)
def test_histories_show_what_is_wrong_with(what: str, place: Bench, programs: str) -> None:
    assert notice(broken(what, NOTICED[what]), programs, place, 1, 40).violations


def clock(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def op(
    verb: str, at: float, token: int | None = None, until: float = 0.0, asked: str = "",
    happened: bool = True, **row: Any,
) -> Op:  # fmt: skip
    """One call: from `at`, for half a second or until then; with columns: a row is the answer."""
    began = START.timestamp() + at
    ended = {0.0: began + 0.5, NEVER: NEVER}.get(until, START.timestamp() + until)
    answer = Row(**row) if row else None
    by = None if token is None else UUID(int=token)
    return Op(verb, began, ended, by, answer, happened, asked)


def claim(at: float, token: int, attempt: int) -> Op:
    return op("claim", at, token, attempt=attempt, lease=LEASE,
              lease_expires_at=clock(at + 0.2) + LEASE)  # fmt: skip


def renew(at: float, token: int, read: float, until: float = 0.0, to_stop: bool = False) -> Op:
    expires = clock(read) + LEASE
    return op("renew", at, token, until, lease_expires_at=expires, cancel_requested=to_stop)


def busy(at: float, token: int) -> Op:
    return op("renew", at, token, lease_expires_at=None, cancel_requested=False, outcome="busy")


def release(at: float, token: int, state: str = "ready") -> Op:
    return op("release", at, token, state=state, claimable_at=clock(at + 0.1))


def fail(at: float, token: int, state: str) -> Op:
    return op("fail", at, token, asked="permanent", state=state, claimable_at=None)


def ended(state: str, attempt: int, by: int | None) -> Op:
    token = None if by is None else UUID(int=by)
    return op("job", 90, state=state, attempt=attempt, lease_token=token)


def complete(at: float, token: int, finished: float) -> Op:
    return op("complete", at, token, finished_at=clock(finished))


def begin(at: float, token: int, state: str) -> Op:
    return op("begin_effect", at, token, state=state, idempotency_key="k")


def end(at: float, token: int) -> Op:
    return op("end_effect", at, token, state="done")


ADDED, FIRST, SECOND = op("enqueue", 0), claim(1, 1, 1), claim(12, 2, 2)
DONE = complete(13, 2, 13.1)
ASKING = op("enqueue", 0, asked="hold"), FIRST, begin(2, 1, "fresh")
HELD = begin(5, 2, "held")


@pytest.mark.parametrize(
    "ops",
    [
        [ADDED, FIRST, SECOND, op("complete", 12.6, 1), DONE, complete(20, 2, 13.1)],
        [ADDED, FIRST, complete(11.9, 1, 12), op("renew", 12.5, 1)],  # late, not overtaken
        [ADDED, FIRST, renew(5, 1, 5.1), claim(15.2, 2, 2)],
        [ADDED, FIRST, op("complete", 2, 1, NEVER), complete(3, 1, 2.1)],
        [ADDED, FIRST, op("complete", 2, 1, NEVER), claim(12, 2, 2)],
        [ADDED, FIRST, release(2, 1), claim(3, 2, 2)],
        [ADDED, FIRST, begin(2, 1, "fresh"), SECOND, begin(13, 2, "unknown"), end(14, 1),
         begin(15, 2, "done")],
        [claim(0.1, 1, 1), op("enqueue", 0, until=9)],  # claimed before the producer was told
        [ADDED, FIRST, busy(2, 1), op("renew", 12, 1)],
        [ADDED, FIRST, op("cancel", 2, state="running"), renew(3, 1, 3.1, to_stop=True),
         release(4, 1, "cancelled"), ended("cancelled", 1, 1)],
        [ADDED, FIRST, op("cancel", 2, state="running"), complete(3, 1, 3.1)],
        [ADDED, FIRST, op("cancel", 2, state="running"), ended("cancelled", 1, None)],  # lapsed
        [ADDED, FIRST, op("cancel", 12, state="cancelled"), op("complete", 13, 1)],
        [ADDED, FIRST, op("cancel", 2, asked="force", state="cancelled"), op("renew", 3, 1)],
        [ADDED, FIRST, op("cancel", 2, until=NEVER), renew(3, 1, 3.1, to_stop=True)],
        [ADDED, FIRST, op("cancel", 2, until=NEVER), renew(3, 1, 3.1)],
        [ADDED, FIRST, complete(2, 1, 2.1), op("retry", 3, state="ready"), claim(4, 2, 2),
         op("complete", 5, 1), complete(6, 2, 6.1)],
        [ADDED, FIRST, op("cancel", 2, asked="force", state="cancelled"),
         op("retry", 3, state="ready"), op("cancel", 3.2, asked="force", state="cancelled"),
         ended("cancelled", 1, None)],  # the second cancel came after the retry, not before
        [ADDED, FIRST, fail(2, 1, "failed"), op("retry", 3, state="ready"), claim(4, 2, 2)],
        [ADDED, FIRST, op("evict", 2, state="expired"), op("renew", 3, 1), claim(4, 2, 2)],
        [ADDED, FIRST, op("evict", 2, state="expired"), complete(3, 1, 3.1)],  # not overtaken
        [*ASKING, release(3, 1), claim(4, 2, 2), HELD, end(6, 1), claim(7, 3, 3),
         begin(8, 3, "done")],
        [*ASKING, release(3, 1), claim(4, 2, 2), HELD,
         op("resolve", 6, happened=False, state="ready"), claim(7, 3, 3), begin(8, 3, "fresh")],
        [*ASKING, fail(3, 1, "held"), op("resolve", 6, state="ready"), claim(7, 2, 2),
         begin(8, 2, "done")],
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
        [ADDED, FIRST, SECOND, busy(13, 1)],  # of a lease that is lost
        [ADDED, FIRST, op("cancel", 2, state="running"), claim(12, 2, 2)],  # what is to stop
        [ADDED, FIRST, op("cancel", 2, state="running"), renew(3, 1, 3.1)],  # does not say so
        [ADDED, FIRST, op("cancel", 2, state="running"), release(3, 1)],  # forgets it
        [ADDED, FIRST, op("cancel", 12, state="running")],  # it is not
        [ADDED, FIRST, op("cancel", 2, state="cancelled")],  # without force
        [ADDED, FIRST, complete(2, 1, 2.1), op("retry", 3, state="ready"), claim(4, 2, 1)],
        [ADDED, FIRST, complete(2, 1, 2.1), op("retry", 3, state="ready"), complete(4, 1, 2.1)],
        [ADDED, FIRST, op("evict", 2, state="expired"), renew(3, 1, 3.1)],
        [ADDED, op("evict", 2, state="expired")],  # that nobody has
        [ADDED, replace(FIRST, worker="w"), op("evict", 2, state="expired")],  # that another has
        [*ASKING, release(3, 1), claim(4, 2, 2), begin(5, 2, "unknown")],  # and not held
        [*ASKING, release(3, 1), claim(4, 2, 2), HELD, claim(7, 3, 3)],  # without an answer
        [*ASKING, release(3, 1), claim(4, 2, 2), HELD, end(6, 1),
         op("resolve", 7, happened=False, state="ready")],  # evidence did not free it
        [*ASKING, release(3, 1), claim(4, 2, 2), HELD, op("complete", 6, 2, state="completed",
         finished_at=clock(6.1))],
        [*ASKING, fail(3, 1, "failed")],  # unknown, and not held
    ],
)  # fmt: skip
def test_history_that_no_order_explains(ops: list[Op]) -> None:
    assert len(found(ops)) == 1


def test_claim_without_an_answer_stands_in_for_a_missing_attempt() -> None:
    ops = [ADDED, FIRST, claim(30, 3, 3)]
    assert len(found(ops)) == 1
    assert found(ops, lost=Lost(claims=[START.timestamp() + 12])) == []


def test_renewal_that_waited_for_a_row_and_read_the_clock_before_it_is_noticed() -> None:
    held = Hold(START.timestamp() + 10, START.timestamp() + 12)
    ops = [ADDED, FIRST, renew(10.5, 1, 10.6, until=12.5)]
    assert found(ops) == []
    assert len(found(ops, holds=[held])) == 1


def test_violating_history_is_told_up_to_the_answer_that_violates() -> None:
    (text,) = found([ADDED, FIRST, claim(10.9, 2, 2), op("complete", 11.5, 1), complete(12, 2, 13)])
    assert [line.split()[2] for line in text.splitlines()[1:]] == ["enqueue:", "claim", "claim"]


def test_call_that_may_have_been_about_any_job_stands_in_for_a_retry_or_an_eviction() -> None:
    retried = [ADDED, FIRST, fail(2, 1, "failed"), claim(5, 2, 2)]
    evicted = [ADDED, replace(FIRST, worker="w"), claim(5, 2, 2)]
    other = [ADDED, replace(FIRST, worker="v"), claim(5, 2, 2)]
    for ops in (retried, evicted, other):
        assert len(found(ops)) == 1
    at = START.timestamp() + 3
    assert found(retried, lost=Lost(retries=[at])) == []
    assert found(evicted, lost=Lost(evictions=[(at, "w")])) == []
    assert len(found(other, lost=Lost(evictions=[(at, "w")]))) == 1


def test_claim_while_the_clock_steps_back_is_judged_by_what_it_said_before_the_lock() -> None:
    early = claim(5, 2, 2)  # it reads 5.2; the first lease runs until 11.2
    assert len(found([ADDED, FIRST, replace(early, behind=0, ahead=3)])) == 1
    assert found([ADDED, FIRST, replace(early, behind=0, ahead=9)]) == []
    assert len(found([ADDED, FIRST, replace(early, behind=9, ahead=9)])) == 1


OTHER = UUID(int=2)
AT = START.timestamp()


def test_two_live_jobs_with_one_unique_key_and_a_dead_one_that_is_given_out_are_noticed() -> None:
    one, two = Keyed(JOB, AT, AT + 0.5, "u"), Keyed(OTHER, AT + 3, AT + 3.5, "u")
    gone = complete(2, 1, 2.1)
    for ops, problems in (([FIRST, gone], 0), ([FIRST], 1), ([FIRST, complete(3.2, 1, 3.3)], 0)):
        assert len(list(unique_twice({JOB: ops, OTHER: []}, [one, two], [], []))) == problems
    late = Shared("u", JOB, AT + 4, AT + 4.5)
    back = op("retry", 3, state="ready")
    for ops, problems in (([FIRST], 0), ([FIRST, gone], 1), ([FIRST, gone, back], 0)):
        assert len(list(unique_twice({JOB: ops}, [one], [late], []))) == problems


def test_turn_of_a_serial_key_that_another_has_or_comes_before_is_noticed() -> None:
    one = Keyed(JOB, AT, AT + 0.5, None, "s")
    two = Keyed(OTHER, AT + 0.6, AT + 0.9, None, "s")
    batch = Keyed(OTHER, AT, AT + 0.5, None, "s", 1)
    meanwhile = Keyed(OTHER, AT + 0.2, AT + 0.7, None, "s")
    for mine, theirs, second, problems in (
        ([FIRST], [claim(4, 2, 1)], meanwhile, 1),  # both have it
        ([FIRST, complete(2, 1, 2.1)], [claim(4, 2, 1)], two, 0),
        ([], [claim(4, 2, 1)], two, 1),  # the first waits
        ([], [claim(4, 2, 1)], batch, 1),
        ([], [claim(4, 2, 1)], meanwhile, 0),  # nobody knows who was first
    ):
        ops = {JOB: mine, OTHER: theirs}
        assert len(list(turns_out_of_order(ops, [one, second]))) == problems


def test_claim_from_a_queue_that_is_paused_is_noticed() -> None:
    ops = {JOB: [op("claim", 5, 1, queue="q")]}
    for since, until, queue, problems in ((4, 6, "q", 1), (4, 6, "other", 0), (5.2, 6, "q", 0)):
        pauses = [Pause(queue, AT + since, AT + until)]
        assert len(list(pauses_ignored(ops, pauses))) == problems


def found(ops: list[Op], **more: Any) -> list[str]:
    history = History(lost=more.get("lost", Lost()))
    for each in ops:
        history.add(JOB, each)
    history.holds[JOB] += more.get("holds", [])
    return history.violations()
