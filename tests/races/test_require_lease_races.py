"""The fence around a worker's own transaction."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest

from races.sessions import Session, sqlstate
from support import expire

Named = Callable[[str], Session]


def test_stale_owner_cannot_commit_business_rows(named: Named) -> None:
    a, b = named("A"), named("B")
    a.sql("create table orders (id integer primary key)")
    job_id = a.enqueue()
    job = a.claim()
    expire(a.conn, job_id)
    b.claim()
    a.begin()
    a.sql("insert into orders values (1)")
    with pytest.raises(psycopg.Error) as lost:
        a.call("require_lease", job_id=job_id, lease_token=job.lease_token)
    assert lost.value.sqlstate == "TB001"
    a.end("commit")
    assert b.sql("select from orders") == []


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_fence_waits_for_a_reclaim_and_raises_only_if_that_commits(named: Named, end: str) -> None:
    a, b = named("A"), named("B")
    job_id = a.enqueue()
    job = a.claim()
    expire(a.conn, job_id)
    b.begin()
    b.claim()
    fence = a.start("require_lease", job_id=job_id, lease_token=job.lease_token).blocks()
    b.end(end)
    if end == "commit":
        assert sqlstate(fence) == "TB001"
    else:
        assert [row.job_id for row in fence.rows()] == [job_id]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_fence_holds_off_a_reclaim_until_its_transaction_ends(named: Named, end: str) -> None:
    a, b = named("A"), named("B")
    job_id = a.enqueue()
    job = a.claim()
    a.begin()
    a.call("require_lease", job_id=job_id, lease_token=job.lease_token)
    expire(b.conn, job_id)
    assert b.at_once("claim") == []
    assert [row.state for row in b.call("job", job_id=job_id)] == ["expired"]
    a.end(end)
    assert [row.job_id for row in b.call("claim")] == [job_id]


@pytest.mark.parametrize("verb", ["renew", "renew_many"])
def test_fence_lets_renewals_pass(named: Named, verb: str) -> None:
    a, renewer = named("A"), named("renewer")
    job_id = a.enqueue()
    job = a.claim()
    a.begin()
    a.call("require_lease", job_id=job_id, lease_token=job.lease_token)
    if verb == "renew":
        found = renewer.at_once("renew", job_id=job_id, lease_token=job.lease_token)
    else:
        found = renewer.at_once("renew_many", job_ids=[job_id], lease_tokens=[job.lease_token])
        assert [row.outcome for row in found] == ["renewed"]
    assert found[0].lease_expires_at > job.lease_expires_at
    # And the transaction still completes, although the row was changed in between.
    assert len(a.call("complete", job_id=job_id, lease_token=job.lease_token)) == 1
    a.end("commit")


def test_fence_holds_off_a_forced_cancel_until_the_work_is_committed(named: Named) -> None:
    a, operator = named("A"), named("operator")
    job_id = a.enqueue()
    job = a.claim()
    a.begin()
    a.call("require_lease", job_id=job_id, lease_token=job.lease_token)
    cancel = operator.start("cancel", job_id=job_id, force=True).blocks()
    a.call("complete", job_id=job_id, lease_token=job.lease_token)
    a.end("commit")
    assert [row.state for row in cancel.rows()] == ["completed"]


def test_cancel_does_not_wait_for_fenced_work_and_that_still_completes(named: Named) -> None:
    a, operator = named("A"), named("operator")
    job_id = a.enqueue(serial_key="s")
    job = a.claim()
    a.begin()
    a.call("require_lease", job_id=job_id, lease_token=job.lease_token)
    cancel = operator.at_once("cancel", job_id=job_id)
    assert [row.state for row in cancel] == ["running"]
    assert len(a.call("complete", job_id=job_id, lease_token=job.lease_token)) == 1
    a.end("commit")


@pytest.mark.parametrize("verb", ["cancel", "fail", "release"])
def test_fenced_work_on_a_serial_job_does_not_deadlock_with_whoever_ends_the_job(
    named: Named, verb: str
) -> None:
    a, other = named("A"), named("other")
    for by in (a, other):
        by.sql("set deadlock_timeout = '50ms'")
    job_id = a.enqueue(serial_key="s")
    owner = {"job_id": job_id, "lease_token": a.claim().lease_token}
    a.begin()
    a.call("require_lease", **owner)
    if verb == "cancel":
        ending = other.start("cancel", job_id=job_id, force=True)
    else:
        ending = other.start(verb, **owner)
    # It waits by trying again, with nothing in hand that the fenced transaction needs.
    assert len(a.call("complete", **owner)) == 1
    a.end("commit")
    states = [row.state for row in ending.rows()]
    assert states == (["completed"] if verb == "cancel" else [])


def test_fence_at_repeatable_read_raises_40001_first_and_then_says_lost(named: Named) -> None:
    a, b = named("A"), named("B")
    job_id = a.enqueue()
    job = a.claim()
    expire(a.conn, job_id)
    owner = {"job_id": job_id, "lease_token": job.lease_token}
    a.begin("repeatable read")
    b.claim()
    with pytest.raises(psycopg.Error) as first:
        a.call("require_lease", **owner)
    assert first.value.sqlstate == "40001"
    a.end("rollback")
    a.begin("repeatable read")
    with pytest.raises(psycopg.Error) as repeated:
        a.call("require_lease", **owner)
    assert repeated.value.sqlstate == "TB001"
    a.end("rollback")
