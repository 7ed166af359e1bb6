"""Progress: what a worker reports with a renewal, and observers see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from verbs import Db, call, change, claim_one, enqueue, gets_nothing, leased, own, query, raises

from support import expire

pytestmark = pytest.mark.rows_only


def progress(db: Db, job_id: UUID) -> Any:
    (row,) = call(db, "job", job_id=job_id)
    (listed,) = query(
        db, "select progress from taskboard.job_list where job_id = %(id)s", id=job_id
    )
    assert row["progress"] == listed["progress"]
    return row["progress"]


def test_progress_is_there_for_observers_until_the_next_report(db: Db) -> None:
    job = leased(db)
    assert progress(db, job["job_id"]) is None
    for report in ({"done": 1, "of": 9}, {"done": 2}):
        assert len(call(db, "renew", **own(job), progress=report)) == 1
        assert progress(db, job["job_id"]) == report
    query(db, "set role taskboard_observer")
    assert progress(db, job["job_id"]) == {"done": 2}
    query(db, "reset role")


def test_a_renewal_without_a_report_leaves_the_last_one(db: Db) -> None:
    job = leased(db)
    call(db, "renew", **own(job), progress={"done": 1})
    call(db, "renew", **own(job))
    call(db, "renew_many", job_ids=[job["job_id"]], lease_tokens=[job["lease_token"]])
    assert progress(db, job["job_id"]) == {"done": 1}


def test_a_report_renews_the_lease(db: Db) -> None:
    job = leased(db, lease="10 s")
    (row,) = call(db, "renew", **own(job), progress={"done": 1})
    assert row["lease_expires_at"] > job["lease_expires_at"]
    (row,) = call(db, "renew", **own(job), progress={"done": 1}, lease="1 h")
    assert (row["lease_expires_at"] - job["lease_expires_at"]).total_seconds() > 3000


def test_s2_only_the_current_owner_reports(db: Db) -> None:
    """S2: an accepted renew carries the then-current token."""
    stale = leased(db)
    expire(db, stale["job_id"])
    gets_nothing(db, "renew", **own(stale), progress={"by": "a lapsed lease"})
    current = claim_one(db)
    call(db, "renew", **own(current), progress={"by": "b"})
    gets_nothing(db, "renew", **own(stale), progress={"by": "a"})
    assert progress(db, stale["job_id"]) == {"by": "b"}


def test_past_its_timeout_an_attempt_reports_nothing(db: Db) -> None:
    job = leased(db, timeout="10 min")
    change(db, job["job_id"], "claimed_at = claimed_at - interval '10 min'")
    gets_nothing(db, "renew", **own(job), progress={"done": 1})


def test_what_an_attempt_reported_is_there_after_it_failed(db: Db) -> None:
    job = leased(db)
    call(db, "renew", **own(job), progress={"done": 1})
    call(db, "fail", **own(job), retry_in="0")
    assert progress(db, job["job_id"]) == {"done": 1}
    claim_one(db)
    assert progress(db, job["job_id"]) == {"done": 1}


def test_a_finished_job_shows_no_progress(db: Db) -> None:
    job = leased(db)
    call(db, "renew", **own(job), progress={"done": 1})
    call(db, "complete", **own(job))
    assert progress(db, job["job_id"]) is None


@pytest.mark.parametrize("report", ["null", '"half"', "[1]", "7", "{}"])
def test_any_document_is_a_report(db: Db, report: str) -> None:
    job = leased(db)
    call(db, "renew", **own(job), progress=report)
    (row,) = query(
        db, "select progress::text as text from taskboard.job_list where job_id = %(id)s",
        id=job["job_id"],
    )  # fmt: skip
    assert row["text"] == report


def test_a_report_of_more_than_8_kb_is_refused_and_the_lease_is_as_it_was(db: Db) -> None:
    job = leased(db)
    call(db, "renew", **own(job), progress={"text": "x" * 8000})
    for size in (8200, 2_000_000):
        raises(db, "22023", "renew", **own(job), progress={"text": "x" * size})
    # A long row of one letter is small once compressed; it is measured as it is read.
    assert len(progress(db, job["job_id"])["text"]) == 8000


def test_a_report_of_another_transaction_is_seen_when_that_commits(
    db: Db, connect: Callable[..., Db]
) -> None:
    job, worker = leased(db), connect("worker")
    query(worker, "begin")
    call(worker, "renew", **own(job), progress={"done": 1})
    assert progress(db, job["job_id"]) is None
    query(worker, "rollback")
    assert progress(db, job["job_id"]) is None
    enqueue(db)
