"""The timeline of the README with two named workers, on both sides of the deadline.

A claims and stalls; B takes over; A wakes up. What is promised about a token (S1 to S5) and about
effects (E1) is checked verb by verb in the neighbouring files; here it is told as one story.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import psycopg
import pytest
from verbs import (
    Db,
    Row,
    blocked,
    call,
    claim,
    claim_one,
    clock,
    ended,
    enqueue,
    everything,
    gets_nothing,
    incidents,
    lease_status,
    own,
    raises,
    row_of,
    state,
)

from support import expire

pytestmark = pytest.mark.rows_only


@pytest.fixture
def a(connect: Callable[..., Db]) -> Db:
    return connect(application_name="A")


@pytest.fixture
def b(connect: Callable[..., Db]) -> Db:
    return connect(application_name="B")


def overtaken(db: Db, a: Db, b: Db) -> tuple[Row, Row]:
    """Steps 1 to 3: A claims, A's lease expires, B claims the same job."""
    job_id = enqueue(db, payload={"to": "ada@example.com"})
    claim_a = claim_one(a)
    assert claim_a["job_id"] == job_id
    expire(db, job_id)
    claim_b = claim_one(b)
    assert claim_b["job_id"] == job_id
    return claim_a, claim_b


def test_s1_s2_a_worker_that_was_overtaken_completes_nothing_and_the_new_owner_does(
    db: Db, a: Db, b: Db
) -> None:
    """S1 one valid token; S2 an accepted complete carries it; S4 attempts are counted."""
    claim_a, claim_b = overtaken(db, a, b)
    assert claim_a["lease_token"] != claim_b["lease_token"]
    assert (claim_a["attempt"], claim_b["attempt"]) == (1, 2)
    assert claim_b["payload"] == {"to": "ada@example.com"}

    owner = row_of(db, claim_b["job_id"])
    gets_nothing(a, "complete", **own(claim_a), result={"by": "A"})
    assert row_of(db, claim_b["job_id"]) == owner, "nothing of B's is touched"
    assert lease_status(a, claim_a) == "not_current"
    assert lease_status(b, claim_b) == "current"

    (row,) = call(b, "complete", **own(claim_b), result={"by": "B"})
    kept = ended(db, claim_b["job_id"])
    assert (kept["state"], kept["finished_at"]) == ("completed", row["finished_at"])
    assert (kept["finished_by"], kept["result"]) == ("B", {"by": "B"})
    assert kept["lease_token"] == claim_b["lease_token"]
    assert incidents(db) == ["lease_lapsed", "write_refused"]


def test_s5_after_the_new_owner_has_completed_the_old_one_still_gets_nothing(
    db: Db, a: Db, b: Db
) -> None:
    """S5: nothing is accepted after a final state but the same completion repeated."""
    claim_a, claim_b = overtaken(db, a, b)
    first = call(b, "complete", **own(claim_b))
    gets_nothing(a, "complete", **own(claim_a))
    assert lease_status(a, claim_a) == "finished_by_other"
    assert call(b, "complete", **own(claim_b)) == first
    assert lease_status(b, claim_b) == "completed_by_you"


@pytest.mark.parametrize("verb", ["complete", "fail", "release", "renew", "begin_effect"])
def test_s2_whatever_the_overtaken_worker_says_the_owner_keeps_the_job(
    db: Db, a: Db, b: Db, verb: str
) -> None:
    """S2: an accepted renew, complete, fail, release, begin_effect carries the current token."""
    claim_a, claim_b = overtaken(db, a, b)
    gets_nothing(a, verb, **own(claim_a))
    raises(a, "TB001", "require_lease", **own(claim_a))
    assert len(call(b, "renew", **own(claim_b))) == 1
    assert len(call(b, "complete", **own(claim_b))) == 1


def test_s3_before_the_deadline_nobody_overtakes_and_the_owner_completes(
    db: Db, a: Db, b: Db
) -> None:
    """S3: no early reclaim."""
    enqueue(db)
    before = clock(db)
    claim_a = claim_one(a)
    assert claim_a["lease_expires_at"] >= before + timedelta(seconds=60)
    gets_nothing(b, "claim", max_jobs=10)
    assert len(call(a, "renew", **own(claim_a))) == 1
    assert len(call(a, "complete", **own(claim_a))) == 1
    assert claim(b) == [] and incidents(db) == []


def test_after_the_deadline_but_not_overtaken_a_completion_counts_and_a_renewal_does_not(
    db: Db, a: Db, b: Db
) -> None:
    enqueue(db)
    claim_a = claim_one(a)
    expire(db, claim_a["job_id"])
    assert lease_status(a, claim_a) == "expired"
    gets_nothing(a, "renew", **own(claim_a))
    gets_nothing(a, "begin_effect", **own(claim_a))
    assert len(call(a, "complete", **own(claim_a))) == 1
    assert claim(b) == []
    assert ended(db, claim_a["job_id"])["attempt"] == 1


def test_a_completion_and_a_takeover_at_the_same_moment_do_not_both_count(
    db: Db, a: Db, b: Db
) -> None:
    enqueue(db)
    claim_a = claim_one(a)
    expire(db, claim_a["job_id"])
    a.execute("begin")
    assert len(call(a, "complete", **own(claim_a))) == 1
    assert claim(b) == [], "B does not wait, and does not take what is being completed"
    a.execute("rollback")
    b.execute("begin")
    claim_b = claim_one(b)
    with blocked(db, a, "complete", **own(claim_a)) as answer:
        b.execute("commit")
        assert answer.result() == []
    assert len(call(b, "complete", **own(claim_b))) == 1


def test_business_writes_of_the_overtaken_worker_are_rolled_back(
    orders: Callable[[], list[int]], db: Db, a: Db, b: Db
) -> None:
    claim_a, claim_b = overtaken(db, a, b)
    for session, job in ((a, claim_a), (b, claim_b)):
        try:
            with session.transaction():
                call(session, "require_lease", **own(job))
                session.execute("insert into orders values (%s)", [job["attempt"]])
                call(session, "complete", **own(job))
        except psycopg.Error as error:
            assert session is a and error.sqlstate == "TB001"
    assert orders() == [claim_b["attempt"]]


def test_e1_the_overtaken_worker_may_not_complete_but_may_testify(db: Db, a: Db, b: Db) -> None:
    """E1: after done, no attempt is ever told fresh."""
    job_id = enqueue(db)
    claim_a = claim_one(a)
    assert call(a, "begin_effect", **own(claim_a))[0]["state"] == "fresh"
    expire(db, job_id)
    claim_b = claim_one(b)
    assert call(b, "begin_effect", **own(claim_b))[0]["state"] == "unknown"
    assert call(a, "end_effect", **own(claim_a), result={"id": "m1"})[0]["state"] == "done"
    gets_nothing(a, "complete", **own(claim_a))
    (row,) = call(b, "begin_effect", **own(claim_b))
    assert (row["state"], row["result"]) == ("done", {"id": "m1"})
    assert row["idempotency_key"] == f"{job_id}/main"
    assert len(call(b, "complete", **own(claim_b))) == 1


def test_the_story_told_again_after_a_retry_has_new_tokens_and_higher_attempts(
    db: Db, a: Db, b: Db
) -> None:
    claim_a, claim_b = overtaken(db, a, b)
    call(b, "complete", **own(claim_b))
    call(db, "retry", job_id=claim_b["job_id"])
    third = claim_one(a)
    assert third["attempt"] == 3
    before = everything(db)
    for session, job in ((a, claim_a), (b, claim_b)):
        assert call(session, "complete", **own(job)) == []
    assert everything(db) == before
    assert state(db, claim_a["job_id"]) == "running"
