"""Renewals that meet somebody else on the row: a lapsed lease is never revived."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from time import sleep

import pytest

from races.sessions import Session

Named = Callable[[str], Session]
SOON = timedelta(milliseconds=250)


def lapse_soon(by: Session) -> None:
    """Let the one running job's lease run out in a moment."""
    by.sql("update taskboard.jobs set claimable_at = clock_timestamp() + %s", SOON)


def wait_until_lapsed(by: Session) -> None:
    """Sleep until the committed deadline of the one job has passed."""
    while not by.sql("select claimable_at < clock_timestamp() from taskboard.jobs")[0][0]:
        sleep(0.01)


@pytest.mark.parametrize("verb", ["renew", "begin_effect"])
@pytest.mark.parametrize("holder", ["commits a change", "rolls a change back", "merely locks"])
def test_gate_that_was_reached_in_time_but_passed_too_late_is_refused(
    named: Named, verb: str, holder: str
) -> None:
    a, b, observer = named("A"), named("B"), named("observer")
    job_id = a.enqueue()
    job = a.claim()
    lapse_soon(a)
    b.begin()
    b.sql("select from taskboard.jobs for update")
    if holder != "merely locks":
        b.call("cancel", job_id=job_id)
    gate = a.start(verb, job_id=job_id, lease_token=job.lease_token).blocks()
    wait_until_lapsed(observer)
    b.end("rollback" if holder == "rolls a change back" else "commit")
    assert gate.rows() == []
    assert [row.state for row in a.call("job", job_id=job_id)] == ["expired"]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_renewal_behind_another_renewal_of_the_token_uses_what_that_one_left(
    named: Named, end: str
) -> None:
    a, b, observer = named("A"), named("B"), named("observer")
    job_id = a.enqueue()
    job = a.claim()
    b.begin()
    lapse_soon(a)
    assert len(b.call("renew", job_id=job_id, lease_token=job.lease_token)) == 1
    renewal = a.start("renew", job_id=job_id, lease_token=job.lease_token).blocks()
    wait_until_lapsed(observer)
    b.end(end)
    assert len(renewal.rows()) == (1 if end == "commit" else 0)


def test_renewal_grants_its_length_from_after_the_wait(named: Named) -> None:
    a, b = named("A"), named("B")
    job_id = a.enqueue()
    job = a.claim()
    b.begin()
    b.sql("select from taskboard.jobs for update")
    renewal = a.start("renew", job_id=job_id, lease_token=job.lease_token).blocks()
    sleep(0.1)
    b.sql("create temp table freed as select clock_timestamp() as at")
    b.end("commit")
    (row,) = renewal.rows()
    assert b.sql("select %s >= at + %s from freed", row.lease_expires_at, job.lease) == [(True,)]


def test_deadline_of_a_claim_late_in_a_transaction_lies_a_whole_lease_ahead(named: Named) -> None:
    a, b = named("A"), named("B")
    a.enqueue(lease=timedelta(seconds=1))
    a.begin()
    sleep(0.2)
    before = b.sql("select clock_timestamp()")[0][0]
    job = a.claim()
    a.end("commit")
    assert job.lease_expires_at >= before + timedelta(seconds=1)
    assert b.call("claim") == []


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_one_locked_row_is_busy_and_holds_up_no_other_renewal(named: Named, end: str) -> None:
    a, renewer = named("A"), named("renewer")
    for _ in range(3):
        a.enqueue()
    jobs = a.call("claim", max_jobs=3)
    locked = jobs[1]
    a.begin()
    a.call("complete", job_id=locked.job_id, lease_token=locked.lease_token)
    batch = {
        "job_ids": [job.job_id for job in jobs],
        "lease_tokens": [job.lease_token for job in jobs],
    }
    found = renewer.at_once("renew_many", **batch)
    assert {row.job_id: row.outcome for row in found} == {
        job.job_id: "busy" if job is locked else "renewed" for job in jobs
    }
    assert [row.lease_expires_at for row in found if row.outcome == "busy"] == [None]
    a.end(end)
    after = {row.job_id: row.outcome for row in renewer.call("renew_many", **batch)}
    assert after.pop(locked.job_id, "lost") == ("lost" if end == "commit" else "renewed")
    assert set(after.values()) == {"renewed"}


def test_renewal_after_the_timeout_of_the_attempt_is_refused_though_the_lease_is_current(
    named: Named,
) -> None:
    a = named("A")
    job_id = a.enqueue(timeout=timedelta(minutes=1))
    job = a.claim()
    owner = {"job_id": job_id, "lease_token": job.lease_token}
    a.sql("update taskboard.jobs set claimed_at = claimed_at - interval '1 minute'")
    assert a.call("renew", **owner) == []
    assert a.call("renew_many", job_ids=[job_id], lease_tokens=[job.lease_token]) == []
    assert a.call("begin_effect", **owner) == []
    assert len(a.call("fail", **owner)) == 1


def test_renewal_after_completion_changes_nothing(named: Named) -> None:
    a, b = named("A"), named("B")
    job_id = a.enqueue()
    job = a.claim()
    a.begin()
    (done,) = a.call("complete", job_id=job_id, lease_token=job.lease_token)
    renewal = b.start("renew", job_id=job_id, lease_token=job.lease_token).blocks()
    a.end("commit")
    assert renewal.rows() == []
    assert a.sql("select id, finished_at from taskboard.history") == [(job_id, done.finished_at)]
