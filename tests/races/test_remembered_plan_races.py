"""Claims that do with the plan which their session remembers: the quick way through `claim`.

The fixture `quick` closes the thorough way: what these claims find, they found by the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from races.sessions import Session
from support import expire, rows

Named = Callable[[str], Session]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_remembered_second_claim_passes_over_a_job_just_being_claimed(
    quick: Named, end: str
) -> None:
    a, b = quick("A"), quick("B")
    job_id = a.enqueue()
    a.begin()
    assert a.claim().job_id == job_id
    assert b.at_once("claim") == []
    a.end(end)
    assert [job.job_id for job in b.call("claim")] == ([] if end == "commit" else [job_id])


def test_remembered_second_claim_takes_the_next_job_meanwhile(
    quick: Named,
) -> None:
    a, b = quick("A"), quick("B")
    first, second = a.enqueue(), a.enqueue()
    a.begin()
    assert a.claim().job_id == first
    assert [job.job_id for job in b.at_once("claim")] == [second]
    a.end("rollback")


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_remembered_claim_passes_over_a_lease_just_being_extended(
    quick: Named, end: str
) -> None:
    a, b = quick("A"), quick("B")
    a.enqueue()
    job = a.claim(lease="30 s")
    assert b.at_once("claim") == []
    a.begin()
    assert a.call("renew", job_id=job.job_id, lease_token=job.lease_token, lease="1 h")
    assert b.at_once("claim") == []
    a.end(end)


def test_remembered_claim_takes_over_an_expired_lease_and_records_it(
    quick: Named, db: psycopg.Connection[Any]
) -> None:
    a, b = quick("A"), quick("B")
    job_id = a.enqueue()
    first = a.claim(worker="a")
    expire(db, job_id)
    second = b.claim(worker="b")
    assert (second.job_id, second.attempt, second.lost_leases) == (job_id, 2, 1)
    assert second.lease_token != first.lease_token
    ((what, worker),) = rows(db, "select what, worker from taskboard.incidents")
    assert (what, worker) == ("lease_lapsed", "a")
    assert rows(db, "select lapsed_by, leased_by from taskboard.jobs") == [("a", "b")]


def test_remembered_claim_frees_a_key_that_was_held_only_until_claimed(quick: Named) -> None:
    a, b = quick("A"), quick("B")
    waiting = a.enqueue(unique_key="u", unique_until="claim")
    assert b.enqueue(unique_key="u", unique_until="claim") == waiting
    assert a.claim().job_id == waiting
    assert b.enqueue(unique_key="u", unique_until="claim") != waiting


def test_remembered_claim_passes_over_what_is_exhausted_or_to_be_cancelled(
    quick: Named, db: psycopg.Connection[Any]
) -> None:
    a, b = quick("A"), quick("B")
    for options in ({"max_lost_leases": 1}, {}):
        a.enqueue(**options)
        job = a.claim()
        if not options:
            a.call("cancel", job_id=job.job_id)
        expire(db, job.job_id)
        assert b.at_once("claim") == []
        db.execute("delete from taskboard.jobs")


def test_remembered_claim_leaves_half_of_a_batch_to_fresh_jobs_and_fills_it_from_either_side(
    quick: Named, db: psycopg.Connection[Any]
) -> None:
    a, b = quick("A"), quick("B")
    back = {a.enqueue() for _ in range(8)}
    for job in a.call("claim", max_jobs=8):
        expire(db, job.job_id)
    fresh = {a.enqueue() for _ in range(8)}
    batch = {job.job_id for job in b.call("claim", max_jobs=8)}
    assert (len(batch & back), len(batch & fresh)) == (4, 4)
    assert len(b.call("claim", max_jobs=8)) == 8


def test_remembered_claim_late_in_a_transaction_grants_a_whole_lease(
    quick: Named, db: psycopg.Connection[Any]
) -> None:
    a = quick("A")
    a.enqueue()
    a.begin()
    a.sql("select pg_sleep(0.3)")
    job = a.claim(lease="10 s")
    ((left,),) = rows(
        db, "select extract(epoch from %s - clock_timestamp())", (job.lease_expires_at,)
    )
    a.end("commit")
    assert left > 9.8
    with pytest.raises(psycopg.errors.FeatureNotSupported):
        a.begin("repeatable read")
        a.call("claim")
    a.end("rollback")


def test_remembered_plan_is_not_followed_into_a_queue_that_is_paused_or_limited(
    quick: Named,
) -> None:
    a, b = quick("A"), quick("B")
    job_id = a.enqueue()
    for verb, options in (
        ("pause", {"queue": "default"}), ("pause", {}), ("limit_queue", {"queue": "default"}),
    ):  # fmt: skip
        a.call(verb, **options, **({"max_running": 0} if verb == "limit_queue" else {}))
        assert b.at_once("claim") == []
        a.call("resume" if verb == "pause" else verb, **options)
    assert b.claim().job_id == job_id
