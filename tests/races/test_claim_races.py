"""Claims against claims, and against whatever else happens to a job at that moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Event
from time import sleep
from typing import Any
from uuid import UUID

import pytest
from psycopg.types.json import Jsonb

from races.sessions import Session
from support import expire

Named = Callable[[str], Session]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_second_claim_passes_over_a_job_that_is_just_being_claimed(named: Named, end: str) -> None:
    a, b = named("A"), named("B")
    job_id = a.enqueue()
    a.begin()
    assert a.claim().job_id == job_id
    assert b.at_once("claim") == []
    a.end(end)
    assert [job.job_id for job in b.call("claim")] == ([] if end == "commit" else [job_id])


def test_second_claim_takes_the_next_job_while_the_first_is_being_claimed(named: Named) -> None:
    a, b = named("A"), named("B")
    first, second = a.enqueue(), a.enqueue()
    a.begin()
    assert a.claim().job_id == first
    assert [job.job_id for job in b.at_once("claim")] == [second]
    a.end("rollback")


def test_eight_sessions_get_each_of_many_jobs_once_and_never_wait(named: Named) -> None:
    sessions = [named(f"worker {n}") for n in range(8)]
    observer = named("observer")
    jobs = 400
    observer.call("enqueue_many", kind="k", payloads=[Jsonb(n) for n in range(jobs)])

    def drain(by: Session) -> list[UUID]:
        got: list[UUID] = []
        while found := by.call("claim", max_jobs=7):
            got += [job.job_id for job in found]
        return got

    done, seen = Event(), list[Any]()

    def watch() -> None:
        while not done.is_set():
            seen.extend(
                observer.sql(
                    # Whoever waits for a row queues up for its tuple lock. Behind a transaction
                    # alone skip locked waits, too: PostgreSQL does so ("while locking updated
                    # version") when the row's last change is committed just as it is looked at
                    # and somebody has locked the new version already.
                    "select l.mode, a.query, pg_blocking_pids(l.pid)"
                    " from pg_locks as l join pg_stat_activity as a on a.pid = l.pid"
                    " where not l.granted and l.locktype = 'tuple'"
                    " and a.datname = current_database()"
                )
            )

    with ThreadPoolExecutor(len(sessions) + 1) as threads:
        watcher = threads.submit(watch)
        got = list(threads.map(drain, sessions))
        done.set()
        watcher.result()
    counts = Counter(job_id for ids in got for job_id in ids)
    assert len(counts) == jobs
    assert set(counts.values()) == {1}
    assert seen == []
    tokens = observer.sql("select count(distinct lease_token), max(attempt) from taskboard.jobs")
    assert tokens == [(jobs, 1)]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_completion_waits_for_a_reclaim_and_counts_only_if_that_rolls_back(
    named: Named, end: str
) -> None:
    a, b = named("A"), named("B")
    job_id = a.enqueue()
    job = a.claim()
    expire(a.conn, job_id)
    b.begin()
    theirs = b.claim()
    completion = a.start("complete", job_id=job_id, lease_token=job.lease_token).blocks()
    b.end(end)
    if end == "commit":
        assert completion.rows() == []
        assert len(b.call("complete", job_id=job_id, lease_token=theirs.lease_token)) == 1
    else:
        assert [row.job_id for row in completion.rows()] == [job_id]
        assert b.call("claim") == []


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_reclaim_passes_over_an_expired_job_that_is_just_being_completed(
    named: Named, end: str
) -> None:
    a, b = named("A"), named("B")
    job_id = a.enqueue()
    job = a.claim()
    expire(a.conn, job_id)
    a.begin()
    assert len(a.call("complete", job_id=job_id, lease_token=job.lease_token)) == 1
    assert b.at_once("claim") == []
    a.end(end)
    assert len(b.call("claim")) == (0 if end == "commit" else 1)


@pytest.mark.parametrize(
    ("order", "completed_by"),
    [
        ("expire claim complete", "B"),
        ("expire complete claim", "A"),
        ("claim expire complete", "A"),
        ("claim complete expire", "A"),
        ("complete expire claim", "A"),
        ("complete claim expire", "A"),
    ],
)
def test_expiry_claim_and_completion_in_every_order_complete_a_job_once(
    named: Named, order: str, completed_by: str
) -> None:
    a, b = named("A"), named("B")
    job_id = a.enqueue()
    job = a.claim(worker="A")
    theirs, completed = [], []
    for step in order.split():
        match step:
            case "expire":
                expire(a.conn, job_id)
            case "claim":
                theirs = b.call("claim", worker="B")
            case "complete":
                completed = a.call("complete", job_id=job_id, lease_token=job.lease_token)
    assert bool(completed) == (completed_by == "A")
    assert bool(theirs) == (completed_by == "B")
    for row in theirs:
        assert row.attempt == 2
        assert len(b.call("complete", job_id=job_id, lease_token=row.lease_token)) == 1
    assert a.sql("select state, finished_by from taskboard.history") == [
        ("completed", completed_by)
    ]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_claim_passes_over_a_job_whose_lease_is_just_being_extended(named: Named, end: str) -> None:
    a, b = named("A"), named("B")
    a.enqueue()
    job = a.claim()
    a.begin()
    # The lease lapses while the renewal is not yet committed.
    a.call("renew", job_id=job.job_id, lease_token=job.lease_token)
    assert b.at_once("claim") == []
    a.end(end)
    assert b.call("claim") == []


def test_first_registration_in_an_open_transaction_makes_nobody_wait(named: Named) -> None:
    a, b, worker = named("A"), named("B"), named("worker")
    a.begin()
    first = a.enqueue(kind="new")
    second = b.at_once("enqueue", kind="new")[0].job_id
    assert [job.job_id for job in worker.call("claim", max_jobs=5)] == [second]
    a.end("commit")
    assert [job.job_id for job in worker.call("claim", max_jobs=5)] == [first]
    # Both lanes stay in use, and a claim finds what goes to either.
    more = {worker.enqueue(kind="new"), worker.enqueue(kind="new")}
    assert {job.job_id for job in worker.call("claim", max_jobs=5)} == more


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_stale_completion_waits_while_its_exhausted_job_is_being_ended(
    named: Named, end: str
) -> None:
    a, b = named("A"), named("B")
    job_id = a.enqueue(max_lost_leases=1)
    job = a.claim()
    expire(a.conn, job_id)
    b.begin()
    assert b.call("claim") == []
    assert [row.state for row in b.call("job", job_id=job_id)] == ["failed"]
    completion = a.start("complete", job_id=job_id, lease_token=job.lease_token).blocks()
    b.end(end)
    assert len(completion.rows()) == (0 if end == "commit" else 1)
    state = "failed" if end == "commit" else "completed"
    assert [row.state for row in a.call("job", job_id=job_id)] == [state]


def test_exhausted_job_that_is_just_being_completed_is_left_alone(named: Named) -> None:
    a, b = named("A"), named("B")
    job_id = a.enqueue(max_lost_leases=1)
    job = a.claim()
    expire(a.conn, job_id)
    a.begin()
    assert len(a.call("complete", job_id=job_id, lease_token=job.lease_token)) == 1
    assert b.at_once("claim") == []
    a.end("commit")
    assert b.call("claim") == []
    assert [row.state for row in b.call("job", job_id=job_id)] == ["completed"]


def test_exhausted_job_whose_serial_key_is_held_does_not_hide_what_is_ready(named: Named) -> None:
    producer, worker = named("producer"), named("worker")
    worker.enqueue(serial_key="s", max_lost_leases=1)
    exhausted = worker.claim()
    expire(worker.conn, exhausted.job_id)
    ready = worker.enqueue()
    producer.begin()
    producer.enqueue(serial_key="s", queue="elsewhere")
    assert [job.job_id for job in worker.at_once("claim")] == [ready]
    producer.end("rollback")


def test_housekeeping_waits_in_line_for_the_serial_key_of_an_exhausted_job(named: Named) -> None:
    producer, keeper = named("producer"), named("keeper")
    keeper.enqueue(serial_key="s", max_lost_leases=1)
    exhausted = keeper.claim()
    expire(keeper.conn, exhausted.job_id)
    producer.begin()
    producer.enqueue(serial_key="s")
    # Not for long, but other producers come behind it.
    assert [row.touched for row in keeper.call("maintain") if "exhausted" in row.step] == [0]
    keeper.begin()
    waiting = keeper.start("take_exhausted_turns").blocks()
    producer.end("commit")
    waiting.rows()
    assert [row.touched for row in keeper.call("maintain") if "exhausted" in row.step] == [1]
    keeper.end("commit")
    assert [job.attempt for job in producer.call("claim")] == [1]


def test_exhausted_job_that_another_claim_is_ending_does_not_hide_what_is_ready(
    named: Named,
) -> None:
    a, b = named("A"), named("B")
    for _ in range(2):
        a.enqueue(max_lost_leases=1)
    first, second = a.call("claim", max_jobs=2)
    ready = {a.enqueue(), a.enqueue()}
    expire(a.conn, first.job_id)
    a.begin()
    taken = a.claim().job_id
    expire(b.conn, second.job_id)
    assert {taken, *(job.job_id for job in b.at_once("claim"))} == ready
    a.end("commit")


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_claim_above_read_committed_is_refused(named: Named, level: str) -> None:
    a = named("A")
    a.enqueue()
    a.begin(level)
    with pytest.raises(Exception, match="read committed") as refused:
        a.call("claim")
    assert getattr(refused.value, "sqlstate", None) == "0A000"
    a.end("rollback")


SLOW_WRITERS = ["enqueue", "release", "fail", "retry", "hand over", "evidence", "resolve", "evict"]


@pytest.mark.parametrize("verb", SLOW_WRITERS)
def test_job_made_claimable_in_a_slow_transaction_is_found_by_a_session_that_went_on_claiming(
    named: Named, verb: str
) -> None:
    slow, worker, producer = named("slow"), named("worker"), named("producer")

    def go_on_claiming() -> None:
        for _ in range(4):
            new = producer.enqueue()
            job = worker.claim(worker="w")
            assert job.job_id == new
            # The job goes round the returning lane once, so that both lanes have their floors.
            worker.call("release", job_id=new, lease_token=job.lease_token)
            again = worker.claim(worker="w")
            worker.call("complete", job_id=new, lease_token=again.lease_token)
            sleep(0.11)  # floors are looked at no more often

    go_on_claiming()
    job_id = slow.enqueue(serial_key="s", on_unknown="hold")
    job = slow.claim(worker="slow")
    owner = {"job_id": job_id, "lease_token": job.lease_token}
    match verb:
        case "retry":
            slow.call("cancel", job_id=job_id, force=True)
        case "evidence" | "resolve":
            slow.call("begin_effect", **owner)
            slow.call("fail", **owner, permanent=True)
    slow.begin()
    match verb:
        case "enqueue":
            job_id = slow.enqueue()
        case "release":
            slow.call("release", **owner)
        case "fail":
            slow.call("fail", **owner, retry_in=timedelta(0))
        case "retry":
            slow.call("retry", job_id=job_id)
        case "hand over":
            job_id = slow.enqueue(serial_key="s")
            slow.call("complete", **owner)
        case "evidence":
            slow.call("end_effect", **owner)
        case "resolve":
            slow.call("resolve", job_id=job_id, step="main", happened=False)
        case _:
            slow.call("evict", worker="slow")
    go_on_claiming()
    slow.end("commit")
    assert worker.claim().job_id == job_id


def test_batch_takes_all_of_a_priority_before_the_next_though_all_of_it_returns(
    named: Named,
) -> None:
    a = named("A")
    urgent = {a.enqueue(priority=0) for _ in range(10)}
    for job in a.call("claim", max_jobs=10):
        a.call("release", job_id=job.job_id, lease_token=job.lease_token)
    for _ in range(10):
        a.enqueue(priority=5)
    assert {job.job_id for job in a.call("claim", max_jobs=10)} == urgent
