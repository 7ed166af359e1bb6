"""Two producers and one unique key: always an id, never an error, never two jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Barrier, Event
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg.types.json import Jsonb

from races.sessions import Session, sqlstate

Named = Callable[[str], Session]
ORDER: dict[str, Any] = {"kind": "charge", "unique_key": "order-1"}
MANY: dict[str, Any] = {"kind": "charge", "payloads": [Jsonb(1)], "unique_keys": ["order-1"]}
ENQUEUE = {"enqueue": ORDER, "enqueue_many": MANY}


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("verb", ["enqueue", "enqueue_many"])
def test_second_producer_waits_and_gets_the_first_ones_job_if_that_commits(
    named: Named, verb: str, end: str
) -> None:
    a, b = named("A"), named("B")
    a.begin()
    first = a.enqueue(**ORDER)
    second = b.start(verb, **ENQUEUE[verb]).blocks()
    a.end(end)
    (got,) = second.rows()
    assert got.created == (end == "rollback")
    assert (got.job_id == first) == (end == "commit")
    assert a.sql("select id from taskboard.jobs") == [(got.job_id,)]


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("last", ["complete", "cancel"])
def test_producer_waits_for_a_holder_that_is_just_finishing(
    named: Named, last: str, end: str
) -> None:
    a, b = named("A"), named("B")
    holder = a.enqueue(**ORDER)
    job = a.claim()
    a.begin()
    if last == "complete":
        a.call("complete", job_id=holder, lease_token=job.lease_token)
    else:
        a.call("cancel", job_id=holder, force=True)
    second = b.start("enqueue", **ORDER).blocks()
    a.end(end)
    (got,) = second.rows()
    assert got.created == (end == "commit")
    assert (got.job_id == holder) == (end == "rollback")


def test_producers_meet_two_holders_that_finish_in_between(named: Named) -> None:
    a, b, c = named("A"), named("B"), named("C")
    a.begin()
    first = a.enqueue(**ORDER)
    second = b.start("enqueue", **ORDER).blocks()
    third = c.start("enqueue", **ORDER).blocks()
    # The holder is there and gone before either of them looks.
    a.call("cancel", job_id=first)
    a.end("commit")
    created = [second.rows()[0], third.rows()[0]]
    assert Counter(row.created for row in created) == {True: 1, False: 1}
    assert {row.job_id for row in created} == {a.sql("select id from taskboard.jobs")[0][0]}


def test_producers_always_get_an_id_while_holders_come_and_go(named: Named) -> None:
    producers = [named(f"producer {n}") for n in range(3)]
    worker = named("worker")
    done = Event()

    def produce(by: Session) -> list[tuple[UUID, bool]]:
        got: list[tuple[UUID, bool]] = []
        while not done.is_set():
            (row,) = by.call("enqueue", **ORDER)
            got.append((row.job_id, row.created))
        return got

    with ThreadPoolExecutor(len(producers)) as threads:
        futures = [threads.submit(produce, by) for by in producers]
        completed = 0
        while completed < 150:
            for job in worker.call("claim"):
                worker.call("complete", job_id=job.job_id, lease_token=job.lease_token)
                completed += 1
        done.set()
        got = [row for future in futures for row in future.result()]
    assert all(job_id is not None for job_id, _ in got)
    created = [job_id for job_id, was_created in got if was_created]
    assert len(created) == len(set(created))
    known = {row.job_id for row in worker.sql("select job_id from taskboard.job_list")}
    assert {job_id for job_id, _ in got} == set(created) == known


def test_fifty_producers_at_once_make_one_job(named: Named) -> None:
    producers = [named(f"producer {n}") for n in range(50)]
    start = Barrier(len(producers))

    def produce(by: Session) -> Any:
        start.wait()
        (row,) = by.call("enqueue", **ORDER)
        return row

    with ThreadPoolExecutor(len(producers)) as threads:
        got = list(threads.map(produce, producers))
    assert len({row.job_id for row in got}) == 1
    assert sum(row.created for row in got) == 1
    assert producers[0].sql("select count(*) from taskboard.jobs") == [(1,)]


@pytest.mark.parametrize("level", ["read committed", "repeatable read", "serializable"])
def test_fifty_producers_at_any_level_get_an_id_each_time_while_holders_finish(
    named: Named, level: str
) -> None:
    producers = [named(f"producer {n}") for n in range(50)]
    worker = named("worker")
    start, done = Barrier(len(producers)), Event()

    def produce(by: Session) -> list[Any]:
        start.wait()
        got: list[Any] = []
        while len(got) < 3:
            try:
                by.begin(level)
                rows = by.call("enqueue", **ORDER)
                by.end("commit")
                got += rows
            except psycopg.errors.SerializationFailure:
                by.end("rollback")
        return got

    def work() -> int:
        completed = 0
        while not done.is_set():
            for job in worker.call("claim"):
                worker.call("complete", job_id=job.job_id, lease_token=job.lease_token)
                completed += 1
        return completed

    with ThreadPoolExecutor(len(producers) + 1) as threads:
        working = threads.submit(work)
        try:
            got = [row for rows in threads.map(produce, producers) for row in rows]
        finally:
            done.set()
        completed = working.result()
    created = [row.job_id for row in got if row.created]
    assert len(got) == 150 and len(created) == len(set(created)) >= completed > 0
    known = {row.job_id for row in worker.sql("select job_id from taskboard.job_list")}
    assert {row.job_id for row in got} == set(created) == known
    assert worker.sql("select count(*) from taskboard.jobs")[0].count <= 1


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_producer_at_repeatable_read_repeats_and_then_gets_the_holder(
    named: Named, end: str
) -> None:
    a, b = named("A"), named("B")
    a.begin()
    first = a.enqueue(**ORDER)
    b.begin("repeatable read")
    second = b.start("enqueue", **ORDER).blocks()
    a.end(end)
    if end == "commit":
        assert sqlstate(second) == "40001"
        b.end("rollback")
        b.begin("repeatable read")
        assert b.call("enqueue", **ORDER) == [(first, False)]
    else:
        assert [row.created for row in second.rows()] == [True]
    b.end("commit")
    assert a.sql("select count(*) from taskboard.jobs") == [(1,)]


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_key_that_was_taken_after_the_snapshot_raises_40001(named: Named, level: str) -> None:
    a, b = named("A"), named("B")
    b.begin(level)
    a.enqueue(**ORDER)
    with pytest.raises(psycopg.Error) as refused:
        b.call("enqueue", **ORDER)
    assert refused.value.sqlstate == "40001"
    b.end("rollback")


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_key_that_was_freed_after_the_snapshot_is_taken(named: Named, level: str) -> None:
    a, b = named("A"), named("B")
    holder = a.enqueue(**ORDER)
    b.begin(level)
    a.call("cancel", job_id=holder)
    try:
        (got,) = b.call("enqueue", **ORDER)
        b.end("commit")
    except psycopg.errors.SerializationFailure:
        b.end("rollback")
        (got,) = b.call("enqueue", **ORDER)
    assert got.created
    assert a.sql("select id from taskboard.jobs") == [(got.job_id,)]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_two_producers_take_over_a_key_whose_time_has_passed_one_after_the_other(
    named: Named, end: str
) -> None:
    a, b = named("A"), named("B")
    old = a.enqueue(**ORDER, unique_for=timedelta(hours=1))
    job = a.claim()
    a.call("complete", job_id=old, lease_token=job.lease_token)
    assert a.call("enqueue", **ORDER) == [(old, False)]
    a.sql("update taskboard.unique_keys set held_until = clock_timestamp()")
    a.begin()
    (first,) = a.call("enqueue", **ORDER, unique_for=timedelta(hours=1))
    assert first.created
    second = b.start("enqueue", **ORDER, unique_for=timedelta(hours=1)).blocks()
    a.end(end)
    (got,) = second.rows()
    assert got.created == (end == "rollback")
    assert (got.job_id == first.job_id) == (end == "commit")
    assert a.sql("select id from taskboard.jobs") == [(got.job_id,)]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_retry_and_a_new_job_with_the_same_key_exclude_each_other(named: Named, end: str) -> None:
    a, operator = named("A"), named("operator")
    old = a.enqueue(**ORDER)
    a.call("cancel", job_id=old)
    a.begin()
    new = a.enqueue(**ORDER)
    retry = operator.start("retry", job_id=old).blocks()
    a.end(end)
    if end == "commit":
        assert sqlstate(retry) == "TB003"
        assert a.sql("select id from taskboard.jobs") == [(new,)]
    else:
        assert [row.state for row in retry.rows()] == ["ready"]
        assert a.sql("select id from taskboard.jobs") == [(old,)]


def test_batches_with_the_same_keys_in_opposite_orders_do_not_deadlock(named: Named) -> None:
    a, b = named("A"), named("B")
    keys = [f"key-{n}" for n in range(10)]

    def produce(by: Session, order: list[str]) -> None:
        by.sql("set deadlock_timeout = '20ms'")
        for _ in range(100):
            by.begin()
            by.call(
                "enqueue_many",
                kind="k",
                payloads=[Jsonb(1)] * len(order),
                unique_keys=order,
                serial_keys=order,
            )
            by.end("rollback")

    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(produce, a, keys), threads.submit(produce, b, keys[::-1])]
        for future in futures:
            future.result()


EVENT: dict[str, Any] = {"kind": "sync", "unique_key": "u", "unique_until": "claim"}


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_events_without_a_gap_do_not_keep_their_job_from_being_claimed_for_ever(
    named: Named, end: str
) -> None:
    a, b, worker = named("A"), named("B"), named("worker")
    first = a.enqueue(**EVENT)
    a.begin()
    assert a.enqueue(**EVENT) == first
    # Not due for long, it is relied upon: nobody may claim it before A has committed.
    assert b.enqueue(**EVENT) == first
    assert worker.at_once("claim", max_jobs=9) == []
    due = "update taskboard.jobs set claimable_at = claimable_at - interval '2 s' where id = %s"
    b.sql(due, first)
    b.begin()
    second = b.enqueue(**EVENT)
    assert second != first
    a.end("commit")
    (job,) = worker.at_once("claim", max_jobs=9)
    assert job.job_id == first
    b.end(end)
    # Whatever became of that: an event that comes while the job runs leads to another run.
    later = a.enqueue(**EVENT)
    assert (later == second) == (end == "commit")
    assert later != first and b.enqueue(**EVENT) == later
    worker.call("complete", job_id=first, lease_token=job.lease_token)
    assert b.enqueue(**EVENT) == later
    assert [job.job_id for job in worker.at_once("claim", max_jobs=9)] == [later]


@pytest.mark.parametrize("how", ["complete", "release"])
def test_key_whose_taking_over_came_to_nothing_goes_with_its_job(named: Named, how: str) -> None:
    a, b, worker = named("A"), named("B"), named("worker")
    first = a.enqueue(**EVENT)
    b.sql("update taskboard.jobs set claimable_at = claimable_at - interval '2 s'")
    a.begin()
    a.enqueue(**EVENT)
    b.begin()
    b.enqueue(**EVENT)
    a.end("commit")
    job = worker.at_once("claim")[0]
    b.end("rollback")
    worker.call(how, job_id=first, lease_token=job.lease_token)
    assert (b.enqueue(**EVENT) == first) == (how == "release")
    assert b.sql("select count(*) from taskboard.unique_keys") == [(1,)]


def test_job_that_waits_behind_others_or_for_nobody_keeps_its_key(named: Named) -> None:
    a, b = named("A"), named("B")
    ahead, first = a.enqueue(kind="sync"), a.enqueue(**EVENT)
    b.sql("update taskboard.jobs set claimable_at = claimable_at - interval '2 s'")
    a.begin()
    for _ in range(2):  # locked, behind another; then not locked
        a.enqueue(**EVENT)
        assert b.enqueue(**EVENT) == first
        a.end("commit")
        b.sql("delete from taskboard.jobs where id = %s", ahead)
