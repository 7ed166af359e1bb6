from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from uuid import uuid4

import pytest
from verbs import (
    Db,
    Row,
    blocked,
    call,
    change,
    claim_one,
    clock,
    gets_nothing,
    incidents,
    leased,
    own,
    pairs,
    refuses,
    row_of,
    set_default,
)

from support import expire

pytestmark = pytest.mark.rows_only

ABSURD: list[tuple[Row, str]] = [
    ({"job_ids": None}, "22004"),
    ({"lease_tokens": None}, "22004"),
    ({"job_ids": []}, "22023"),
    ({"job_ids": [None]}, "22023"),
    ({"lease_tokens": [None]}, "22023"),
    ({"lease_tokens": [uuid4(), uuid4()]}, "22023"),
    ({"job_ids": [uuid4()] * 1001, "lease_tokens": [uuid4()] * 1001}, "22023"),
    ({"job_ids": [[uuid4()]], "lease_tokens": [[uuid4()]]}, "22023"),
    ({"lease": "0"}, "22023"),
    ({"lease": "-1 s"}, "22023"),
    ({"lease": "25 hours"}, "22023"),
]


def outcomes(rows: list[Row]) -> dict[object, str]:
    return {row["job_id"]: row["outcome"] for row in rows}


def test_each_lease_is_extended_by_what_it_was_granted(db: Db) -> None:
    jobs = [leased(db, lease=lease) for lease in ("30 s", "5 min")]
    asked = clock(db)
    rows = {row["job_id"]: row for row in call(db, "renew_many", **pairs(*jobs))}
    assert len(rows) == 2
    for job in jobs:
        row = rows[job["job_id"]]
        assert (row["outcome"], row["cancel_requested"]) == ("renewed", False)
        assert asked < row["lease_expires_at"] - job["lease"] < clock(db)
        assert row_of(db, job["job_id"])["claimable_at"] == row["lease_expires_at"]


def test_a_lease_in_the_call_is_granted_to_all(db: Db) -> None:
    jobs = [leased(db), leased(db)]
    asked = clock(db)
    for row in call(db, "renew_many", **pairs(*jobs), lease="90 s"):
        assert asked < row["lease_expires_at"] - timedelta(seconds=90) < clock(db)
    (row,) = call(db, "renew", **own(jobs[0]))
    assert row["lease_expires_at"] > clock(db) + timedelta(seconds=80)


def test_s2_lost_leases_get_no_row_and_keep_nobody_from_renewing(db: Db) -> None:
    """S2: an accepted renew carries the then-current token, and an unexpired lease."""
    good, lapsed, taken, done, wrong = (leased(db) for _ in range(5))
    expire(db, taken["job_id"])
    claim_one(db, worker="b")
    expire(db, lapsed["job_id"])
    call(db, "complete", **own(done))
    wrong = wrong | {"lease_token": good["lease_token"]}
    lost = [lapsed, taken, done, wrong]
    assert outcomes(call(db, "renew_many", **pairs(good, *lost))) == {good["job_id"]: "renewed"}
    gets_nothing(db, "renew_many", **pairs(*lost))


def test_a_lost_lease_is_recorded(db: Db) -> None:
    job = leased(db)
    expire(db, job["job_id"])
    call(db, "renew_many", **pairs(job))
    assert incidents(db, job["job_id"]) == ["write_refused"]


def test_past_its_timeout_an_attempt_gets_no_row(db: Db) -> None:
    own_limit, general = leased(db, timeout="10 s"), leased(db)
    set_default(db, "timeout", timedelta(seconds=20))
    for job in (own_limit, general):
        change(db, job["job_id"], "claimed_at = claimed_at - interval '15 seconds'")
    rows = call(db, "renew_many", **pairs(own_limit, general))
    assert outcomes(rows) == {general["job_id"]: "renewed"}
    change(db, general["job_id"], "claimed_at = claimed_at - interval '15 seconds'")
    gets_nothing(db, "renew_many", **pairs(own_limit, general))


def test_a_renewal_says_which_jobs_are_to_be_cancelled(db: Db) -> None:
    one, two = leased(db), leased(db)
    call(db, "cancel", job_id=two["job_id"])
    rows = {row["job_id"]: row for row in call(db, "renew_many", **pairs(one, two))}
    assert rows[one["job_id"]]["cancel_requested"] is False
    assert rows[two["job_id"]]["cancel_requested"] is True


def test_a_locked_row_is_busy_not_lost_and_holds_up_nobody(
    db: Db, connect: Callable[..., Db]
) -> None:
    locked, free = leased(db), leased(db)
    before = row_of(db, locked["job_id"])
    handler = connect()
    handler.execute("begin")
    call(handler, "complete", **own(locked))
    rows = call(db, "renew_many", **pairs(locked, free))
    assert outcomes(rows) == {locked["job_id"]: "busy", free["job_id"]: "renewed"}
    assert {row["job_id"]: row["lease_expires_at"] for row in rows}[locked["job_id"]] is None
    assert row_of(db, locked["job_id"]) == before
    handler.execute("rollback")
    assert outcomes(call(db, "renew_many", **pairs(locked))) == {locked["job_id"]: "renewed"}
    handler.execute("begin")
    call(handler, "complete", **own(locked))
    handler.execute("commit")
    assert call(db, "renew_many", **pairs(locked)) == []


def test_a_fenced_transaction_is_not_busy(db: Db, connect: Callable[..., Db]) -> None:
    job = leased(db)
    handler = connect()
    handler.execute("begin")
    call(handler, "require_lease", **own(job))
    assert outcomes(call(db, "renew_many", **pairs(job))) == {job["job_id"]: "renewed"}
    handler.execute("rollback")


def test_a_completion_waits_for_a_renewal_and_both_count(
    db: Db, connect: Callable[..., Db]
) -> None:
    job = leased(db)
    renewer, worker = connect(), connect()
    renewer.execute("begin")
    assert len(call(renewer, "renew_many", **pairs(job))) == 1
    with blocked(db, worker, "complete", **own(job)) as answer:
        renewer.execute("commit")
        assert len(answer.result()) == 1


def test_a_job_named_twice_is_renewed_once(db: Db) -> None:
    job = leased(db)
    rows = call(db, "renew_many", **pairs(job, job, job | {"lease_token": uuid4()}))
    assert outcomes(rows) == {job["job_id"]: "renewed"} and len(rows) == 1


def test_an_empty_batch_gets_nothing(db: Db) -> None:
    leased(db)
    gets_nothing(db, "renew_many", job_ids=[], lease_tokens=[])


def test_absurd_arguments_are_refused_and_renew_nothing(db: Db) -> None:
    job = leased(db)
    refuses(db, "renew_many", pairs(job), ABSURD)
