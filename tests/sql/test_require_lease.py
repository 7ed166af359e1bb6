from __future__ import annotations

from collections.abc import Callable
from uuid import uuid4

import psycopg
import pytest
from verbs import (
    Db,
    blocked,
    call,
    change,
    claim,
    claim_one,
    ended,
    enqueue,
    everything,
    leased,
    own,
    query,
    raises,
    refuses,
    state,
)

from support import expire

pytestmark = pytest.mark.rows_only


def test_the_owner_gets_the_job_and_its_deadline_and_changes_nothing(db: Db) -> None:
    job = leased(db)
    before = everything(db)
    (row,) = call(db, "require_lease", **own(job))
    assert row == {"job_id": job["job_id"], "lease_expires_at": job["lease_expires_at"]}
    assert everything(db) == before


def test_business_writes_and_the_completion_are_one_atom(
    orders: Callable[[], list[int]], db: Db, connect: Callable[..., Db]
) -> None:
    job = leased(db)
    worker = connect()
    worker.execute("begin")
    call(worker, "require_lease", **own(job))
    worker.execute("insert into orders values (1)")
    assert len(call(worker, "complete", **own(job))) == 1
    assert orders() == [] and state(db, job["job_id"]) == "running"
    worker.execute("commit")
    assert orders() == [1]
    assert ended(db, job["job_id"])["state"] == "completed"


def test_s2_the_business_writes_of_a_superseded_owner_roll_back(
    orders: Callable[[], list[int]], db: Db
) -> None:
    """S2: what a transaction writes behind the fence carries the then-current token."""
    job = leased(db)
    expire(db, job["job_id"])
    claim_one(db, worker="b")
    with pytest.raises(psycopg.Error) as caught, db.transaction():
        db.execute("insert into orders values (1)")
        call(db, "require_lease", **own(job))
    assert caught.value.sqlstate == "TB001"
    assert orders() == []


def test_a_token_that_is_not_current_raises_lease_lost(db: Db) -> None:
    given_back, failed, done = leased(db), leased(db), leased(db)
    call(db, "release", **own(given_back), delay="1 h")
    call(db, "fail", **own(failed))
    call(db, "complete", **own(done))
    waiting = enqueue(db)
    for job in (given_back, failed, done):
        raises(db, "TB001", "require_lease", **own(job))
    raises(db, "TB001", "require_lease", job_id=waiting, lease_token=done["lease_token"])
    raises(db, "TB001", "require_lease", job_id=uuid4(), lease_token=done["lease_token"])


def test_an_expired_lease_that_nobody_took_over_is_still_the_owners(db: Db) -> None:
    job = leased(db)
    expire(db, job["job_id"])
    (row,) = call(db, "require_lease", **own(job))
    assert row["job_id"] == job["job_id"]


def test_while_the_transaction_lasts_a_lapsed_job_is_not_reclaimed(
    db: Db, connect: Callable[..., Db]
) -> None:
    job = leased(db)
    worker = connect()
    worker.execute("begin")
    call(worker, "require_lease", **own(job))
    expire(db, job["job_id"])
    assert claim(db) == []
    call(db, "maintain")
    assert len(call(worker, "complete", **own(job))) == 1
    worker.execute("commit")
    assert ended(db, job["job_id"])["attempt"] == 1


def test_an_exhausted_job_is_not_ended_while_the_transaction_lasts(
    db: Db, connect: Callable[..., Db]
) -> None:
    job = leased(db, max_lost_leases=1)
    worker = connect()
    worker.execute("begin")
    call(worker, "require_lease", **own(job))
    expire(db, job["job_id"])
    assert claim(db) == []
    assert len(call(worker, "complete", **own(job))) == 1
    worker.execute("commit")
    assert ended(db, job["job_id"])["state"] == "completed"


def test_two_transactions_of_one_owner_do_not_wait_for_each_other(
    db: Db, connect: Callable[..., Db]
) -> None:
    job = leased(db)
    one, two = connect(), connect()
    for session in (one, two):
        session.execute("begin")
        assert len(call(session, "require_lease", **own(job))) == 1
    for session in (one, two):
        session.execute("rollback")


def test_the_fence_waits_for_a_reclaim_that_is_under_way(
    db: Db, connect: Callable[..., Db]
) -> None:
    job = leased(db)
    expire(db, job["job_id"])
    claimer, worker = connect(), connect()
    claimer.execute("begin")
    claim_one(claimer, worker="b")
    with blocked(db, worker, "require_lease", **own(job)) as answer:
        claimer.execute("commit")
        error = answer.exception()
    assert isinstance(error, psycopg.Error) and error.sqlstate == "TB001"


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_above_read_committed_a_reclaim_shows_as_40001_and_then_as_lease_lost(
    db: Db, connect: Callable[..., Db], level: str
) -> None:
    job = leased(db)
    worker = connect()
    worker.execute(f"begin isolation level {level}")
    query(worker, "select 1 from taskboard.settings")
    expire(db, job["job_id"])
    claim_one(db, worker="b")
    with pytest.raises(psycopg.errors.SerializationFailure):
        call(worker, "require_lease", **own(job))
    worker.execute("rollback")
    raises(worker, "TB001", "require_lease", **own(job))


def test_the_fence_says_nothing_about_the_timeout(db: Db) -> None:
    job = leased(db, timeout="1 s")
    change(db, job["job_id"], "claimed_at = claimed_at - interval '1 hour'")
    assert len(call(db, "require_lease", **own(job))) == 1


def test_null_arguments_are_refused(db: Db) -> None:
    refuses(
        db,
        "require_lease",
        own(leased(db)),
        [({"job_id": None}, "22004"), ({"lease_token": None}, "22004")],
    )
