from __future__ import annotations

from collections.abc import Callable
from uuid import uuid4

import pytest
from verbs import (
    Db,
    Row,
    call,
    claim_one,
    enqueue,
    everything,
    incidents,
    lease_status,
    leased,
    own,
    refuses,
)

from support import expire

pytestmark = pytest.mark.rows_only


def taken_over(db: Db, job: Row) -> Row:
    """Let somebody else claim the job."""
    expire(db, job["job_id"])
    return claim_one(db, worker="b")


def completed_by_other(db: Db, job: Row) -> None:
    call(db, "complete", **own(taken_over(db, job)))


def held(db: Db, job: Row) -> None:
    call(db, "begin_effect", **own(job))
    call(db, "begin_effect", **own(taken_over(db, job)))


def retried(db: Db, job: Row) -> None:
    call(db, "complete", **own(job))
    call(db, "retry", job_id=job["job_id"])


# What happens to a job after A claimed it, and what A is then told about its token.
STATUSES: list[tuple[str, Callable[[Db, Row], object]]] = [
    ("current", lambda db, job: None),
    ("current", lambda db, job: call(db, "renew", **own(job))),
    ("current", lambda db, job: call(db, "cancel", job_id=job["job_id"])),
    ("expired", lambda db, job: expire(db, job["job_id"])),
    ("expired", lambda db, job: call(db, "evict", worker="a")),
    ("given_back", lambda db, job: call(db, "release", **own(job))),
    ("given_back", lambda db, job: call(db, "fail", **own(job))),
    ("given_back", lambda db, job: call(db, "fail", **own(job), permanent=True)),
    ("not_current", taken_over),
    ("not_current", retried),
    ("completed_by_you", lambda db, job: call(db, "complete", **own(job))),
    ("finished_by_other", completed_by_other),
    ("cancelled", lambda db, job: call(db, "cancel", job_id=job["job_id"], force=True)),
    ("held", held),
]


@pytest.mark.parametrize(("status", "happens"), STATUSES)
def test_a_worker_is_told_what_became_of_its_token(
    db: Db, status: str, happens: Callable[[Db, Row], object]
) -> None:
    job = leased(db, worker="a", on_unknown="hold")
    happens(db, job)
    before, recorded = everything(db), incidents(db)
    assert lease_status(db, job) == status
    assert everything(db) == before and incidents(db) == recorded


def test_a_job_given_back_stays_given_back_when_somebody_else_has_it(db: Db) -> None:
    job = leased(db)
    call(db, "release", **own(job))
    other = claim_one(db, worker="b")
    assert (lease_status(db, job), lease_status(db, other)) == ("given_back", "current")


def test_a_job_that_lost_its_lease_too_often_was_finished_by_somebody_else(db: Db) -> None:
    job = leased(db, max_lost_leases=1)
    expire(db, job["job_id"])
    call(db, "claim")
    assert lease_status(db, job) == "finished_by_other"


def test_a_token_that_was_never_given_out_is_not_current(db: Db) -> None:
    job = leased(db)
    waiting = enqueue(db)
    assert lease_status(db, job | {"lease_token": uuid4()}) == "not_current"
    assert lease_status(db, job | {"job_id": waiting}) == "not_current"
    assert lease_status(db, job | {"job_id": uuid4()}) == "unknown_job"


def test_null_arguments_are_refused(db: Db) -> None:
    refuses(
        db,
        "lease_status",
        own(leased(db)),
        [({"job_id": None}, "22004"), ({"lease_token": None}, "22004")],
    )
