from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from uuid import uuid4

import pytest
from verbs import (
    Db,
    blocked,
    call,
    change,
    claim_one,
    clock,
    ended,
    enqueue,
    gets_nothing,
    incidents,
    leased,
    old_transaction,
    own,
    query,
    raises,
    refuses,
    row_of,
    set_default,
)

from support import expire

pytestmark = pytest.mark.rows_only


def test_a_renewal_extends_the_lease_by_what_was_granted(db: Db) -> None:
    job = leased(db, lease="30 s")
    before = row_of(db, job["job_id"])
    asked = clock(db)
    (row,) = call(db, "renew", **own(job))
    assert row["job_id"] == job["job_id"] and row["cancel_requested"] is False
    assert asked < row["lease_expires_at"] - timedelta(seconds=30) < clock(db)
    # Nothing else about the job moves: the token, the attempt, when it was claimed.
    after = row_of(db, job["job_id"])
    assert after == before | {"claimable_at": row["lease_expires_at"]}


def test_a_renewal_may_be_repeated(db: Db) -> None:
    job = leased(db)
    deadlines = [call(db, "renew", **own(job))[0]["lease_expires_at"] for _ in range(4)]
    assert deadlines == sorted(set(deadlines))


def test_a_renewal_with_a_lease_grants_it_and_later_ones_grant_it_again(db: Db) -> None:
    job = leased(db, lease="30 s")
    for arguments in ({"lease": "90 s"}, {}, {"lease": None}):
        asked = clock(db)
        (row,) = call(db, "renew", **own(job), **arguments)
        assert asked < row["lease_expires_at"] - timedelta(seconds=90) < clock(db)


def test_a_renewal_may_shorten_a_lease(db: Db) -> None:
    job = leased(db)
    (row,) = call(db, "renew", **own(job), lease="1 s")
    assert row["lease_expires_at"] < clock(db) + timedelta(seconds=1)


def test_s2_a_lapsed_lease_is_never_revived(db: Db) -> None:
    """S2: an accepted renew carries the then-current token, and an unexpired lease."""
    job = leased(db)
    expire(db, job["job_id"])
    gets_nothing(db, "renew", **own(job))
    gets_nothing(db, "renew", **own(job), lease="1 hour")
    assert incidents(db, job["job_id"]) == ["write_refused"] * 2
    assert claim_one(db)["attempt"] == 2


def test_s2_a_superseded_token_cannot_renew(db: Db) -> None:
    """S2: an accepted renew carries the then-current token."""
    job = leased(db)
    expire(db, job["job_id"])
    claim_one(db, worker="b")
    gets_nothing(db, "renew", **own(job))
    (incident,) = query(db, "select * from taskboard.incident_list where what = 'write_refused'")
    assert incident["job_id"] == job["job_id"] and "not_current" in incident["detail"]


def test_the_token_of_another_job_cannot_renew(db: Db) -> None:
    one, two = leased(db), leased(db)
    gets_nothing(db, "renew", job_id=one["job_id"], lease_token=two["lease_token"])
    gets_nothing(db, "renew", job_id=uuid4(), lease_token=two["lease_token"])
    gets_nothing(db, "renew", job_id=one["job_id"], lease_token=uuid4())


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        ("complete", {}),
        ("fail", {"permanent": True}),
        ("fail", {"retry_in": "0"}),
        ("fail", {"retry_in": "1 hour"}),
        ("release", {}),
    ],
)
def test_s5_a_renewal_after_the_outcome_changes_nothing(
    db: Db, verb: str, arguments: dict[str, object]
) -> None:
    """S5: nothing is accepted after the end; nor after the job was given back."""
    job = leased(db)
    call(db, verb, **own(job), **arguments)
    gets_nothing(db, "renew", **own(job))


def test_past_its_timeout_an_attempt_cannot_renew_but_can_still_say_fail(db: Db) -> None:
    job = leased(db, timeout="10 s", lease="1 hour")
    change(db, job["job_id"], "claimed_at = claimed_at - interval '9 seconds'")
    assert len(call(db, "renew", **own(job))) == 1
    change(db, job["job_id"], "claimed_at = claimed_at - interval '1 second'")
    gets_nothing(db, "renew", **own(job))
    (row,) = call(db, "fail", **own(job), error="timed out")
    assert row["state"] == "scheduled"


def test_a_job_without_a_timeout_has_that_of_the_settings(db: Db) -> None:
    set_default(db, "timeout", timedelta(seconds=20))
    job = leased(db)
    change(db, job["job_id"], "claimed_at = claimed_at - interval '20 seconds'")
    gets_nothing(db, "renew", **own(job))


def test_the_timeout_counts_anew_for_each_attempt(db: Db) -> None:
    job = leased(db, timeout="10 s")
    change(db, job["job_id"], "claimed_at = claimed_at - interval '11 seconds'")
    expire(db, job["job_id"])
    assert len(call(db, "renew", **own(claim_one(db)))) == 1


def test_a_renewal_may_report_progress_which_stays_until_the_next_report(db: Db) -> None:
    job = leased(db)
    for report, shown in ((None, None), ({"done": 1}, {"done": 1}), (None, {"done": 1})):
        call(db, "renew", **own(job), progress=report)
        (row,) = call(db, "job", job_id=job["job_id"])
        assert row["progress"] == shown
    raises(db, "22023", "renew", **own(job), progress={"text": "x" * 10_000})


def test_a_renewal_says_when_a_cancel_was_asked_for(db: Db) -> None:
    job = leased(db)
    call(db, "cancel", job_id=job["job_id"])
    (row,) = call(db, "renew", **own(job))
    assert row["cancel_requested"] is True and row["lease_expires_at"] > clock(db)


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_lease_that_lapses_while_the_renewal_waits_for_the_row_is_not_revived(
    db: Db, connect: Callable[..., Db], end: str
) -> None:
    job = leased(db)
    holder, worker = connect(), connect()
    change(db, job["job_id"], "claimable_at = clock_timestamp() + interval '0.15 seconds'")
    before = row_of(db, job["job_id"])
    holder.execute("begin")
    query(holder, "select 1 from taskboard.jobs where id = %(id)s for update", id=job["job_id"])
    with blocked(db, worker, "renew", **own(job)) as answer:
        query(db, "select pg_sleep(0.16)")
        holder.execute(end)
        assert answer.result() == []
    assert row_of(db, job["job_id"]) == before


def test_a_renewal_that_waits_for_a_completion_finds_the_job_ended(
    db: Db, connect: Callable[..., Db]
) -> None:
    job = leased(db)
    holder, worker = connect(), connect()
    holder.execute("begin")
    call(holder, "complete", **own(job))
    with blocked(db, worker, "renew", **own(job)) as answer:
        holder.execute("commit")
        assert answer.result() == []
    assert ended(db, job["job_id"])["state"] == "completed"


def test_a_renewal_does_not_wait_for_the_fence_of_a_transaction(
    db: Db, connect: Callable[..., Db]
) -> None:
    job = leased(db)
    handler = connect()
    handler.execute("begin")
    call(handler, "require_lease", **own(job))
    call(handler, "begin_effect", **own(job))
    assert len(call(db, "renew", **own(job))) == 1
    handler.execute("commit")


def test_in_an_old_transaction_the_deadline_counts_from_the_call(db: Db) -> None:
    job = leased(db)
    with old_transaction(db):
        called = clock(db)
        (row,) = call(db, "renew", **own(job), lease="0.1 s")
    assert row["lease_expires_at"] >= called + timedelta(seconds=0.1)


def test_absurd_arguments_are_refused_and_renew_nothing(db: Db) -> None:
    job = leased(db)
    enqueue(db)
    refuses(
        db,
        "renew",
        own(job),
        [
            ({"job_id": None}, "22004"),
            ({"lease_token": None}, "22004"),
            ({"lease": "0"}, "22023"),
            ({"lease": "0.09 s"}, "22023"),
            ({"lease": "-1 s"}, "22023"),
            ({"lease": "25 hours"}, "22023"),
        ],
    )
    if db.info.server_version >= 170000:
        refuses(db, "renew", own(job), [({"lease": "infinity"}, "22023")])
