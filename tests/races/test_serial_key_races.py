"""One serial key: its jobs run one at a time, in order, and the turn is never lost."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg.types.json import Jsonb

from races.sessions import Session, sqlstate
from support import expire

Named = Callable[[str], Session]


def states(by: Session) -> dict[UUID, str]:
    """The state of every live job, by id."""
    return dict(by.sql("select job_id, state from taskboard.job_list where finished_at is null"))


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_hand_over_waits_for_a_job_that_is_just_joining(named: Named, end: str) -> None:
    a, producer = named("A"), named("producer")
    first = a.enqueue(serial_key="s")
    job = a.claim()
    producer.begin()
    second = producer.enqueue(serial_key="s")
    completion = a.start("complete", job_id=first, lease_token=job.lease_token).blocks()
    producer.end(end)
    assert len(completion.rows()) == 1
    assert states(a) == ({second: "ready"} if end == "commit" else {})
    # Nothing is stuck behind the key either way.
    third = producer.enqueue(serial_key="s")
    assert states(a)[third] == ("blocked" if end == "commit" else "ready")


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_job_that_joins_while_the_last_one_finishes_gets_the_turn(named: Named, end: str) -> None:
    a, producer = named("A"), named("producer")
    first = a.enqueue(serial_key="s")
    job = a.claim()
    a.begin()
    a.call("complete", job_id=first, lease_token=job.lease_token)
    enqueue = producer.start("enqueue", kind="k", serial_key="s").blocks()
    a.end(end)
    (row,) = enqueue.rows()
    if end == "commit":
        assert states(a) == {row.job_id: "ready"}
    else:
        assert states(a) == {first: "running", row.job_id: "blocked"}


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_first_two_jobs_of_a_key_at_once_are_put_in_order(named: Named, end: str) -> None:
    a, b = named("A"), named("B")
    a.begin()
    first = a.enqueue(serial_key="s")
    enqueue = b.start("enqueue", kind="k", serial_key="s").blocks()
    a.end(end)
    (second,) = enqueue.rows()
    if end == "commit":
        assert states(a) == {first: "ready", second.job_id: "blocked"}
    else:
        assert states(a) == {second.job_id: "ready"}


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_hand_over_waits_for_a_cancel_of_the_next_job(named: Named, end: str) -> None:
    a, operator = named("A"), named("operator")
    first, second, third = (a.enqueue(serial_key="s") for _ in range(3))
    job = a.claim()
    operator.begin()
    operator.call("cancel", job_id=second)
    completion = a.start("complete", job_id=first, lease_token=job.lease_token).blocks()
    operator.end(end)
    assert len(completion.rows()) == 1
    if end == "commit":
        assert states(a) == {third: "ready"}
    else:
        assert states(a) == {second: "ready", third: "blocked"}


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_cancel_of_the_job_that_is_just_getting_the_turn_hands_it_on(
    named: Named, end: str
) -> None:
    a, operator = named("A"), named("operator")
    first, second, third = (a.enqueue(serial_key="s") for _ in range(3))
    job = a.claim()
    a.begin()
    a.call("complete", job_id=first, lease_token=job.lease_token)
    cancel = operator.start("cancel", job_id=second).blocks()
    a.end(end)
    assert [row.state for row in cancel.rows()] == ["cancelled"]
    if end == "commit":
        assert states(a) == {third: "ready"}
    else:
        assert states(a) == {first: "running", third: "blocked"}


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_hand_over_that_cannot_see_a_job_that_joined_raises_40001(named: Named, level: str) -> None:
    a, producer = named("A"), named("producer")
    first = a.enqueue(serial_key="s")
    job = a.claim()
    owner = {"job_id": first, "lease_token": job.lease_token}
    a.begin(level)
    second = producer.enqueue(serial_key="s")
    with pytest.raises(psycopg.Error) as refused:
        a.call("complete", **owner)
    assert refused.value.sqlstate == "40001"
    a.end("rollback")
    a.begin(level)
    assert len(a.call("complete", **owner)) == 1
    a.end("commit")
    assert states(a) == {second: "ready"}


@pytest.mark.parametrize("others", [0, 1])
def test_job_that_joins_at_repeatable_read_behind_a_finishing_one_is_not_stuck(
    named: Named, others: int
) -> None:
    a, producer = named("A"), named("producer")
    first = a.enqueue(serial_key="s")
    waiting = [a.enqueue(serial_key="s") for _ in range(others)]
    job = a.claim()
    a.begin()
    a.call("complete", job_id=first, lease_token=job.lease_token)
    producer.begin("repeatable read")
    enqueue = producer.start("enqueue", kind="k", serial_key="s").blocks()
    a.end("commit")
    if others:
        # The turn went to another job: that cannot be seen in the old snapshot.
        assert sqlstate(enqueue) == "40001"
        producer.end("rollback")
        producer.begin("repeatable read")
        last = producer.enqueue(serial_key="s")
    else:
        last = enqueue.rows()[0].job_id
    producer.end("commit")
    line = [*waiting, last]
    assert states(a) == {line[0]: "ready"} | dict.fromkeys(line[1:], "blocked")


def test_exhausted_job_hands_its_turn_on(named: Named) -> None:
    a, b = named("A"), named("B")
    first = a.enqueue(serial_key="s", max_lost_leases=1)
    second = a.enqueue(serial_key="s")
    a.claim()
    expire(a.conn, first)
    assert [job.job_id for job in b.call("claim")] == [second]


def test_batches_over_the_same_keys_in_opposite_orders_do_not_deadlock(named: Named) -> None:
    a, b, producer = named("A"), named("B"), named("producer")
    keys = [f"key-{n}" for n in range(6)]
    for _ in range(2):
        for key in keys:
            a.enqueue(serial_key=key)
    jobs = a.call("claim", max_jobs=6)
    assert len(jobs) == 6

    def complete(by: Session, order: list[Any]) -> None:
        by.sql("set deadlock_timeout = '20ms'")
        ids = [job.job_id for job in order]
        tokens = [job.lease_token for job in order]
        for _ in range(150):
            by.begin()
            by.call("complete_many", job_ids=ids, lease_tokens=tokens)
            by.end("rollback")

    def join() -> None:
        for _ in range(150):
            producer.begin()
            producer.call(
                "enqueue_many", kind="k", payloads=[Jsonb(1)] * len(keys), serial_keys=keys[::-1]
            )
            producer.end("rollback")

    with ThreadPoolExecutor(3) as threads:
        for future in [
            threads.submit(complete, a, jobs),
            threads.submit(complete, b, jobs[::-1]),
            threads.submit(join),
        ]:
            future.result()


def test_one_key_under_many_workers_runs_one_job_at_a_time_and_in_order(named: Named) -> None:
    workers = [named(f"worker {n}") for n in range(4)]
    producer = named("producer")
    jobs = [producer.enqueue(serial_key="s") for _ in range(60)]
    order: list[UUID] = []

    def work(by: Session) -> None:
        while len(order) < len(jobs):
            for job in by.call("claim", max_jobs=3):
                running = by.sql("select count(*) from taskboard.job_list where state = 'running'")
                assert running == [(1,)]
                order.append(job.job_id)
                by.call("complete", job_id=job.job_id, lease_token=job.lease_token)

    with ThreadPoolExecutor(len(workers)) as threads:
        for future in [threads.submit(work, by) for by in workers]:
            future.result()
    assert order == jobs
    assert producer.sql("select count(*) from taskboard.serial_keys") == [(0,)]
