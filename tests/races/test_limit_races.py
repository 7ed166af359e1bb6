"""Limits over all workers, schedules over all runners, and keys that are held until the claim."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from psycopg.types.json import Jsonb

from races.sessions import Session
from support import expire

Named = Callable[[str], Session]
EVENT: dict[str, Any] = {"kind": "sync", "unique_key": "account-1", "unique_until": "claim"}


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_claim_from_a_limited_queue_is_passed_over_while_another_is_in_progress(
    named: Named, end: str
) -> None:
    a, b = named("A"), named("B")
    a.call("limit_queue", queue="narrow", max_running=1)
    narrow = {a.enqueue(queue="narrow") for _ in range(2)}
    wide = a.enqueue(queue="wide")
    a.begin()
    first = a.claim(queues=["narrow"]).job_id
    # Never a wait, and what has no limit is not held up.
    assert [job.job_id for job in b.at_once("claim", max_jobs=5)] == [wide]
    a.end(end)
    found = [job.job_id for job in b.call("claim", max_jobs=5)]
    assert len(found) == (0 if end == "commit" else 1)
    assert {first, *found} <= narrow


def test_queue_never_runs_more_jobs_than_its_limit_under_many_workers(named: Named) -> None:
    workers = [named(f"worker {n}") for n in range(5)]
    observer = named("observer")
    limit, jobs = 3, 90
    observer.call("limit_queue", queue="default", max_running=limit)
    observer.call("enqueue_many", kind="k", payloads=[Jsonb(n) for n in range(jobs)])
    done: list[UUID] = []

    def work(by: Session) -> None:
        while len(done) < jobs:
            for job in by.call("claim", max_jobs=2):
                running = by.sql("select count(*) from taskboard.job_list where state = 'running'")
                assert running[0][0] <= limit
                by.call("complete", job_id=job.job_id, lease_token=job.lease_token)
                done.append(job.job_id)

    with ThreadPoolExecutor(len(workers)) as threads:
        for future in [threads.submit(work, by) for by in workers]:
            future.result()
    assert len(set(done)) == jobs


def test_queue_never_starts_more_jobs_in_an_interval_than_its_limit(named: Named) -> None:
    workers = [named(f"worker {n}") for n in range(4)]
    observer = named("observer")
    observer.call("limit_queue", queue="default", max_starts=7, starts_per=timedelta(hours=1))
    observer.call("enqueue_many", kind="k", payloads=[Jsonb(n) for n in range(40)])

    def work(by: Session) -> int:
        return sum(len(by.call("claim", max_jobs=3)) for _ in range(10))

    with ThreadPoolExecutor(len(workers)) as threads:
        assert sum(threads.map(work, workers)) == 7
    # A start stays a start, whatever became of the job.
    for job_id, token in observer.sql(
        "select id, lease_token from taskboard.jobs where lease_token is not null"
    ):
        observer.call("release", job_id=job_id, lease_token=token)
    assert observer.call("claim", max_jobs=5) == []


def test_lapsed_lease_frees_its_place_in_a_limited_queue(named: Named) -> None:
    a, b = named("A"), named("B")
    a.call("limit_queue", queue="default", max_running=1)
    for _ in range(2):
        a.enqueue()
    first = a.claim()
    assert b.call("claim") == []
    expire(a.conn, first.job_id)
    assert len(b.call("claim", max_jobs=5)) == 1
    assert b.call("claim") == []


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_second_runner_waits_and_advances_a_schedule_only_if_the_first_rolls_back(
    named: Named, end: str
) -> None:
    a, b = named("A"), named("B")
    a.call("schedule", name="nightly", cron="0 3 * * *", kind="k")
    due = datetime.now(UTC) - timedelta(minutes=1)
    a.call("advance_schedule", name="nightly", due_at=None, next_at=due)
    step = {"name": "nightly", "due_at": due, "next_at": due + timedelta(days=1)}
    a.begin()
    assert a.call("advance_schedule", **step)[0][0] is not None
    second = b.start("advance_schedule", **step).blocks()
    a.end(end)
    (moved,) = second.rows()
    assert (moved[0] is None) == (end == "commit")
    assert a.sql("select count(*) from taskboard.jobs") == [(1,)]


def test_schedule_that_is_removed_while_it_is_advanced_enqueues_nothing(named: Named) -> None:
    a, operator = named("A"), named("operator")
    a.call("schedule", name="nightly", cron="0 3 * * *", kind="k")
    due = datetime.now(UTC) - timedelta(minutes=1)
    a.call("advance_schedule", name="nightly", due_at=None, next_at=due)
    operator.begin()
    operator.call("unschedule", name="nightly")
    advance = a.start(
        "advance_schedule", name="nightly", due_at=due, next_at=due + timedelta(days=1)
    ).blocks()
    operator.end("commit")
    assert advance.rows() == [(None,)]
    assert a.sql("select count(*) from taskboard.jobs") == [(0,)]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_event_that_comes_while_its_job_is_being_claimed_leads_to_another_run(
    named: Named, end: str
) -> None:
    a, producer = named("A"), named("producer")
    first = a.enqueue(**EVENT)
    assert a.enqueue(**EVENT) == first
    a.begin()
    a.claim()
    event = producer.start("enqueue", **EVENT).blocks()
    a.end(end)
    (got,) = event.rows()
    assert got.created == (end == "commit")
    assert (got.job_id == first) == (end == "rollback")


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_claim_passes_over_a_keyed_job_that_is_just_being_added(named: Named, end: str) -> None:
    a, producer = named("A"), named("producer")
    producer.begin()
    first = producer.enqueue(**EVENT)
    assert a.at_once("claim") == []
    producer.end(end)
    assert [job.job_id for job in a.call("claim")] == ([first] if end == "commit" else [])


def test_events_and_claims_at_the_same_time_lose_no_event(named: Named) -> None:
    producers = [named(f"producer {n}") for n in range(2)]
    worker = named("worker")
    seen: list[int] = []
    numbers = iter(range(200))

    def produce(by: Session) -> None:
        for n in numbers:
            by.sql("insert into events values (%s)", n)
            by.call("enqueue", **EVENT)

    worker.sql("create table events (n integer)")
    with ThreadPoolExecutor(len(producers)) as threads:
        futures = [threads.submit(produce, by) for by in producers]
        while not all(future.done() for future in futures) or worker.sql(
            "select 1 from taskboard.jobs"
        ):
            for job in worker.call("claim"):
                # Each run handles what was there when it began.
                seen += [n for (n,) in worker.sql("delete from events returning n")]
                worker.call("complete", job_id=job.job_id, lease_token=job.lease_token)
        for future in futures:
            future.result()
    assert worker.sql("select count(*) from events") == [(0,)]
    assert len(seen) == 200


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_queue_that_keeps_nothing_still_answers_a_repeated_completion(
    named: Named, end: str
) -> None:
    a, again = named("A"), named("A again")
    a.enqueue()
    a.call("keep_history", queue="default", completed=False)
    job = a.claim()
    owner = {"job_id": job.job_id, "lease_token": job.lease_token}
    a.begin()
    first = a.call("complete", **owner, result=Jsonb("secret"))
    second = again.start("complete", **owner).blocks()
    a.end(end)
    if end == "commit":
        assert second.rows() == first
        again.call("maintain")
        assert again.call("complete", **owner) == first
    else:
        assert len(second.rows()) == 1
    assert a.sql("select payload, result from taskboard.history") == [(None, None)]
