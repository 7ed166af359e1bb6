from __future__ import annotations

import pytest
from verbs import (
    Db,
    call,
    claim,
    claim_one,
    clock,
    gets_nothing,
    incidents,
    lease_status,
    leased,
    old_transaction,
    own,
    query,
    refuses,
    row_of,
    states,
)

from support import expire

pytestmark = pytest.mark.rows_only


def test_all_leases_of_the_worker_lapse_now_and_nobody_elses(db: Db) -> None:
    dead = [leased(db, worker="dead") for _ in range(2)]
    alive = leased(db, worker="alive")
    before = row_of(db, alive["job_id"])
    rows = call(db, "evict", worker="dead")
    assert {row["job_id"] for row in rows} == {job["job_id"] for job in dead}
    assert {row["state"] for row in rows} == {"expired"}
    assert states(db, *(job["job_id"] for job in dead)) == ["expired", "expired"]
    assert row_of(db, alive["job_id"]) == before
    (incident,) = query(db, "select * from taskboard.incident_list")
    assert (incident["what"], incident["worker"]) == ("worker_evicted", "dead")


def test_s3_after_an_eviction_anybody_may_claim_at_once(db: Db) -> None:
    """S3: the next claim comes only after the last granted deadline, or after evict."""
    job = leased(db, worker="dead")
    assert claim(db) == []
    call(db, "evict", worker="dead")
    again = claim_one(db, worker="b")
    assert again["lease_token"] != job["lease_token"]
    assert (again["attempt"], again["lost_leases"]) == (2, 1)


def test_an_evicted_worker_cannot_renew_but_complete_until_somebody_claims(db: Db) -> None:
    one, two = leased(db, worker="dead"), leased(db, worker="dead")
    call(db, "evict", worker="dead")
    gets_nothing(db, "renew", **own(one))
    gets_nothing(db, "begin_effect", **own(one))
    assert lease_status(db, one) == "expired"
    assert len(call(db, "complete", **own(one))) == 1
    assert claim_one(db)["job_id"] == two["job_id"]
    gets_nothing(db, "complete", **own(two))


def test_an_exhausted_job_of_an_evicted_worker_ends(db: Db) -> None:
    job = leased(db, worker="dead", max_lost_leases=1)
    call(db, "evict", worker="dead")
    assert claim(db) == []
    assert states(db, job["job_id"]) == ["failed"]


def test_leases_that_have_lapsed_already_are_not_touched(db: Db) -> None:
    job = leased(db, worker="dead")
    expire(db, job["job_id"])
    gets_nothing(db, "evict", worker="dead")
    gets_nothing(db, "evict", worker="nobody")
    assert incidents(db) == []


def test_a_repeat_gets_nothing(db: Db) -> None:
    leased(db, worker="dead")
    call(db, "evict", worker="dead")
    gets_nothing(db, "evict", worker="dead")


def test_in_an_old_transaction_the_leases_lapse_at_the_call(db: Db) -> None:
    job = leased(db, worker="dead")
    with old_transaction(db):
        called = clock(db)
        call(db, "evict", worker="dead")
        assert called <= row_of(db, job["job_id"])["claimable_at"] <= clock(db)


def test_absurd_arguments_are_refused_and_evict_nobody(db: Db) -> None:
    leased(db, worker="dead")
    refuses(
        db,
        "evict",
        {},
        [({"worker": None}, "22004"), ({"worker": ""}, "22023"), ({"worker": "w" * 201}, "22023")],
    )
