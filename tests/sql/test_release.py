from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from uuid import uuid4

import pytest
from verbs import (
    Db,
    blocked,
    call,
    claim,
    claim_one,
    clock,
    ended,
    enqueue,
    gets_nothing,
    incidents,
    lease_status,
    leased,
    old_transaction,
    own,
    refuses,
    row_of,
    state,
)

from support import expire

pytestmark = pytest.mark.rows_only


def test_a_released_job_is_ready_at_once_and_charged_nothing(db: Db) -> None:
    job = leased(db)
    (row,) = call(db, "release", **own(job))
    assert row["job_id"] == job["job_id"]
    kept = row_of(db, job["job_id"])
    assert row["claimable_at"] == kept["claimable_at"] <= clock(db)
    assert (kept["attempt"], kept["failures"], kept["lost_leases"]) == (1, 0, 0)
    assert (kept["lease_token"], kept["leased_by"]) == (None, None)
    assert lease_status(db, job) == "given_back"
    assert state(db, job["job_id"]) == "ready" and incidents(db) == []
    assert row["state"] == "ready"


def test_releases_do_not_use_up_a_budget(db: Db) -> None:
    job_id = enqueue(db, max_attempts=2, max_lost_leases=1)
    for n in range(1, 31):
        job = claim_one(db)
        assert (job["attempt"], job["failures"], job["lost_leases"]) == (n, 0, 0)
        call(db, "release", **own(job))
    call(db, "fail", **own(claim_one(db)), retry_in="0")
    job = claim_one(db)
    assert job["failures"] == 1
    call(db, "complete", **own(job))
    assert ended(db, job_id)["state"] == "completed"


def test_a_delay_is_kept_to_the_letter(db: Db) -> None:
    for delay in (timedelta(seconds=3), timedelta(days=365)):
        before = clock(db)
        (row,) = call(db, "release", **own(leased(db)), delay=delay)
        assert row["state"] == "scheduled"
        assert before < row["claimable_at"] - delay < clock(db)
    assert claim(db) == []


def test_a_released_job_is_found_before_the_backlog(db: Db) -> None:
    call(db, "enqueue_many", kind="mail", payloads=[{}] * 30)
    job = claim_one(db)
    call(db, "release", **own(job))
    assert claim_one(db)["job_id"] == job["job_id"]


def test_a_repeat_gets_zero_rows_and_changes_nothing(db: Db) -> None:
    job = leased(db)
    call(db, "release", **own(job), delay="1 h")
    gets_nothing(db, "release", **own(job))


def test_s2_a_superseded_token_releases_nothing(db: Db) -> None:
    """S2: an accepted release carries the then-current token."""
    job = leased(db)
    expire(db, job["job_id"])
    claim_one(db, worker="b")
    gets_nothing(db, "release", **own(job))
    assert incidents(db, job["job_id"])[-1] == "write_refused"


def test_the_token_of_another_job_releases_nothing(db: Db) -> None:
    one, two = leased(db), leased(db)
    gets_nothing(db, "release", job_id=one["job_id"], lease_token=two["lease_token"])
    gets_nothing(db, "release", job_id=uuid4(), lease_token=two["lease_token"])


def test_an_expired_lease_that_nobody_took_over_may_be_released(db: Db) -> None:
    job = leased(db)
    expire(db, job["job_id"])
    assert len(call(db, "release", **own(job))) == 1
    assert claim_one(db)["lost_leases"] == 0


def test_of_two_releases_at_once_one_counts(db: Db, connect: Callable[..., Db]) -> None:
    job = leased(db)
    one, two = connect(), connect()
    one.execute("begin")
    assert len(call(one, "release", **own(job), delay="1 h")) == 1
    with blocked(db, two, "release", **own(job)) as answer:
        one.execute("commit")
        assert answer.result() == []
    assert state(db, job["job_id"]) == "scheduled"


def test_a_job_that_was_asked_to_stop_ends_as_cancelled(db: Db) -> None:
    job = leased(db)
    call(db, "cancel", job_id=job["job_id"], reason="customer left")
    (row,) = call(db, "release", **own(job))
    assert (row["state"], row["claimable_at"]) == ("cancelled", None)
    kept = ended(db, job["job_id"])
    assert (kept["state"], kept["error"]) == ("cancelled", "customer left")
    assert kept["lease_token"] == job["lease_token"]


def test_in_an_old_transaction_the_delay_counts_from_the_call(db: Db) -> None:
    one, two = leased(db), leased(db)
    with old_transaction(db):
        called = clock(db)
        (row,) = call(db, "release", **own(one), delay="1 s")
        assert row["claimable_at"] >= called + timedelta(seconds=1)
        (row,) = call(db, "release", **own(two))
        assert row["claimable_at"] >= called


def test_absurd_arguments_are_refused_and_release_nothing(db: Db) -> None:
    job = leased(db)
    refuses(
        db,
        "release",
        own(job),
        [
            ({"job_id": None}, "22004"),
            ({"lease_token": None}, "22004"),
            ({"delay": "-1 s"}, "22023"),
            ({"delay": "367 days"}, "22023"),
            ({"delay": "1000000 years"}, "22023"),
        ],
    )
    if db.info.server_version >= 170000:
        refuses(db, "release", own(job), [({"delay": "infinity"}, "22023")])
    assert len(call(db, "renew", **own(job))) == 1
