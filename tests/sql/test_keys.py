"""Unique keys (one live job of a kind) and serial keys (one job at a time, in order)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest
from verbs import (
    Db,
    Row,
    blocked,
    call,
    change,
    claim,
    claim_one,
    clock,
    enqueue,
    leased,
    old_transaction,
    own,
    query,
    row_of,
    state,
    states,
)

from support import expire

pytestmark = pytest.mark.rows_only


def again(db: Db, key: str = "u", **options: Any) -> Row:
    """Enqueue with a unique key that may be taken."""
    (row,) = call(db, "enqueue", **{"kind": "mail", "unique_key": key} | options)
    return row


def hour_passes(db: Db) -> None:
    query(db, "update taskboard.unique_keys set held_until = held_until - interval '1 hour'")


def held_job(db: Db, **options: Any) -> Row:
    job = leased(db, on_unknown="hold", **options)
    call(db, "begin_effect", **own(job))
    call(db, "fail", **own(job), permanent=True)
    return job


# Unique keys


def make_ready(db: Db) -> UUID:
    return enqueue(db, unique_key="u")


def make_scheduled(db: Db) -> UUID:
    return enqueue(db, unique_key="u", delay="1 hour")


def make_blocked(db: Db) -> UUID:
    enqueue(db, serial_key="s")
    return enqueue(db, unique_key="u", serial_key="s")


def make_running(db: Db) -> UUID:
    return UUID(str(leased(db, unique_key="u")["job_id"]))


def make_expired(db: Db) -> UUID:
    job_id = make_running(db)
    expire(db, job_id)
    return job_id


def make_held(db: Db) -> UUID:
    return UUID(str(held_job(db, unique_key="u")["job_id"]))


def make_scheduled_by_failure(db: Db) -> UUID:
    job = leased(db, unique_key="u")
    call(db, "fail", **own(job))
    return UUID(str(job["job_id"]))


LIVE = [
    make_ready, make_scheduled, make_blocked, make_running, make_expired, make_held,
    make_scheduled_by_failure,
]  # fmt: skip


@pytest.mark.parametrize("make", LIVE)
def test_a_live_job_holds_its_key_and_the_caller_is_told_which(
    db: Db, make: Callable[[Db], UUID]
) -> None:
    job_id = make(db)
    assert state(db, job_id) == make.__name__.split("_")[1]
    before = row_of(db, job_id)
    for _ in range(2):
        assert again(db, payload={"other": 1}) == {"job_id": job_id, "created": False}
    assert row_of(db, job_id) == before


def completed(db: Db, job: Row) -> None:
    call(db, "complete", **own(job))


def failed(db: Db, job: Row) -> None:
    call(db, "fail", **own(job), permanent=True)


def cancelled(db: Db, job: Row) -> None:
    call(db, "cancel", job_id=job["job_id"], force=True)


def exhausted(db: Db, job: Row) -> None:
    change(db, job["job_id"], "max_lost_leases = 1")
    expire(db, job["job_id"])
    assert claim(db) == []


ENDS = [completed, failed, cancelled, exhausted]


@pytest.mark.parametrize("end", ENDS)
def test_a_key_is_free_when_its_job_has_ended(db: Db, end: Callable[[Db, Row], None]) -> None:
    job = leased(db, unique_key="u")
    end(db, job)
    row = again(db)
    assert row["created"] and row["job_id"] != job["job_id"]
    assert again(db) == row | {"created": False}


@pytest.mark.parametrize("end", ENDS)
def test_with_unique_for_a_key_is_held_past_the_end_until_then(
    db: Db, end: Callable[[Db, Row], None]
) -> None:
    job = leased(db, unique_key="u", unique_for="1 hour")
    end(db, job)
    assert again(db, unique_for="1 hour") == {"job_id": job["job_id"], "created": False}
    hour_passes(db)
    assert again(db)["created"]


def test_unique_for_counts_from_enqueue_and_a_repeat_does_not_prolong_it(db: Db) -> None:
    before = clock(db)
    job = leased(db, unique_key="u", unique_for="1 hour")
    again(db, unique_for="10 hours")
    call(db, "complete", **own(job))
    again(db, unique_for="10 hours")
    (key,) = query(db, "select held_until from taskboard.unique_keys")
    assert before < key["held_until"] - timedelta(hours=1) < clock(db)


def test_a_job_that_lives_longer_than_unique_for_holds_its_key_until_it_ends(db: Db) -> None:
    job = leased(db, unique_key="u", unique_for="1 hour")
    hour_passes(db)
    assert again(db)["job_id"] == job["job_id"]
    call(db, "complete", **own(job))
    assert again(db)["created"]


def test_kinds_do_not_share_keys_but_queues_do(db: Db) -> None:
    holder = again(db)
    assert again(db, kind="bill")["created"]
    assert again(db, queue="other", priority=0) == holder | {"created": False}


def test_a_rolled_back_job_holds_no_key(db: Db) -> None:
    with db.transaction(force_rollback=True):
        again(db)
    assert again(db)["created"]


def test_a_taken_key_leaves_the_callers_transaction_usable(
    orders: Callable[[], list[int]], db: Db
) -> None:
    holder = again(db)
    with db.transaction():
        db.execute("insert into orders values (1)")
        assert again(db) == holder | {"created": False}
        db.execute("insert into orders values (2)")
        other = enqueue(db)
    assert orders() == [1, 2]
    assert state(db, other) == "ready"


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_second_enqueue_waits_for_the_first_and_shares_or_takes_the_key(
    db: Db, connect: Callable[..., Db], end: str
) -> None:
    one, two = connect(), connect()
    one.execute("begin")
    first = again(one)
    with blocked(db, two, "enqueue", kind="mail", unique_key="u") as answer:
        one.execute(end)
        (second,) = answer.result()
    if end == "commit":
        assert second == first | {"created": False}
    else:
        assert second["created"] and second["job_id"] != first["job_id"]
    assert len(claim(db, max_jobs=10)) == 1


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_an_enqueue_waits_for_the_end_of_the_holder_that_is_under_way(
    db: Db, connect: Callable[..., Db], end: str
) -> None:
    job = leased(db, unique_key="u")
    worker, producer = connect(), connect()
    worker.execute("begin")
    call(worker, "complete", **own(job))
    with blocked(db, producer, "enqueue", kind="mail", unique_key="u") as answer:
        worker.execute(end)
        (row,) = answer.result()
    assert row["created"] == (end == "commit")
    assert (row["job_id"] == job["job_id"]) == (end == "rollback")


def test_an_enqueue_outlives_two_holders_in_a_row(db: Db, connect: Callable[..., Db]) -> None:
    job = leased(db, unique_key="u")
    worker, rival, producer = connect(), connect(), connect()
    worker.execute("begin")
    call(worker, "complete", **own(job))
    second = again(worker)
    assert second["created"]
    with blocked(db, producer, "enqueue", kind="mail", unique_key="u") as answer:
        worker.execute("commit")
        (row,) = answer.result()
    assert row == second | {"created": False}
    rival.execute("begin")
    call(rival, "cancel", job_id=second["job_id"])
    with blocked(db, producer, "enqueue", kind="mail", unique_key="u") as answer:
        rival.execute("commit")
        assert answer.result()[0]["created"]


def test_of_many_enqueues_with_one_key_one_creates_and_all_get_its_id(
    db: Db, connect: Callable[..., Db]
) -> None:
    first = connect()
    first.execute("begin")
    row = again(first)
    sessions = [connect() for _ in range(3)]
    with (
        blocked(db, sessions[0], "enqueue", kind="mail", unique_key="u") as a,
        blocked(db, sessions[1], "enqueue", kind="mail", unique_key="u") as b,
        blocked(db, sessions[2], "enqueue", kind="mail", unique_key="u") as c,
    ):
        first.execute("rollback")
        rows = [answer.result()[0] for answer in (a, b, c)]
    assert len({each["job_id"] for each in rows} - {row["job_id"]}) == 1
    assert sorted(each["created"] for each in rows) == [False, False, True]


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_above_read_committed_a_key_taken_meanwhile_raises_40001_and_is_shared_on_repeat(
    db: Db, connect: Callable[..., Db], level: str
) -> None:
    producer = connect()
    producer.execute(f"begin isolation level {level}")
    query(producer, "select 1 from taskboard.settings")
    holder = again(db)
    with pytest.raises(psycopg.errors.SerializationFailure):
        again(producer)
    producer.execute("rollback")
    producer.execute(f"begin isolation level {level}")
    assert again(producer) == holder | {"created": False}
    producer.execute("commit")


def test_ending_a_job_frees_no_key_that_another_has_taken_meanwhile(db: Db) -> None:
    old = leased(db, unique_key="u", unique_for="1 hour")
    call(db, "complete", **own(old))
    hour_passes(db)
    holder = again(db)
    call(db, "cancel", job_id=old["job_id"])
    call(db, "prune")
    assert again(db) == holder | {"created": False}


def test_a_key_held_only_until_the_claim_is_free_while_the_job_runs(db: Db) -> None:
    job_id = enqueue(db, unique_key="u", unique_until="claim")
    assert again(db, unique_until="claim") == {"job_id": job_id, "created": False}
    job = claim_one(db)
    row = again(db, unique_until="claim")
    assert row["created"]
    call(db, "complete", **own(job))
    assert again(db) == row | {"created": False}


def test_a_claim_that_is_rolled_back_leaves_the_key_with_the_job(db: Db) -> None:
    job_id = enqueue(db, unique_key="u", unique_until="claim")
    with db.transaction(force_rollback=True):
        claim_one(db)
    assert again(db) == {"job_id": job_id, "created": False}


# Serial keys


def finish_in_turn(db: Db) -> list[UUID]:
    """Claim and complete until nothing is left; the order in which jobs ran."""
    order: list[UUID] = []
    while jobs := claim(db, max_jobs=100):
        assert len(jobs) == 1, "one at a time"
        order.append(jobs[0]["job_id"])
        call(db, "complete", **own(jobs[0]))
    return order


def test_jobs_of_one_key_run_one_at_a_time_in_the_order_enqueued(db: Db) -> None:
    jobs = [enqueue(db, serial_key="s") for _ in range(4)]
    assert states(db, *jobs) == ["ready", "blocked", "blocked", "blocked"]
    assert finish_in_turn(db) == jobs
    assert query(db, "select * from taskboard.serial_keys") == []


def test_neither_priority_nor_queue_nor_kind_nor_due_time_changes_the_order(db: Db) -> None:
    jobs = [
        enqueue(db, serial_key="s", priority=9),
        enqueue(db, serial_key="s", priority=0, run_at="2020-01-01Z"),
        enqueue(db, "bill", serial_key="s", queue="fast"),
    ]
    assert finish_in_turn(db) == jobs


def test_other_keys_and_jobs_without_one_are_not_held_up(db: Db) -> None:
    first, _ = enqueue(db, serial_key="s"), enqueue(db, serial_key="s")
    other, free = enqueue(db, serial_key="t"), enqueue(db)
    assert {job["job_id"] for job in claim(db, max_jobs=10)} == {first, other, free}


def test_a_first_job_that_is_due_later_holds_up_the_rest(db: Db) -> None:
    first = enqueue(db, serial_key="s", delay="1 hour")
    second = enqueue(db, serial_key="s")
    assert claim(db, max_jobs=10) == []
    expire(db, first)
    assert finish_in_turn(db) == [first, second]


@pytest.mark.parametrize("end", ENDS)
def test_however_a_job_ends_the_next_one_has_the_turn(
    db: Db, end: Callable[[Db, Row], None]
) -> None:
    job = leased(db, serial_key="s")
    # The second is not due yet, so that the claim of an exhausted first cannot take it.
    second = enqueue(db, serial_key="s", delay="1 hour")
    third = enqueue(db, serial_key="s")
    end(db, job)
    assert states(db, second, third) == ["scheduled", "blocked"]
    expire(db, second)
    assert finish_in_turn(db) == [second, third]


def test_the_last_failure_of_a_budget_hands_the_turn_on(db: Db) -> None:
    job = leased(db, serial_key="s", max_attempts=1)
    second = enqueue(db, serial_key="s")
    call(db, "fail", **own(job))
    assert state(db, second) == "ready"


def test_cancelling_a_job_before_its_turn_keeps_the_order_of_the_rest(db: Db) -> None:
    first, second, third = (enqueue(db, serial_key="s") for _ in range(3))
    call(db, "cancel", job_id=second)
    assert states(db, first, third) == ["ready", "blocked"]
    assert finish_in_turn(db) == [first, third]


def test_cancelling_the_job_that_waits_with_the_turn_hands_it_on(db: Db) -> None:
    first, second = (enqueue(db, serial_key="s") for _ in range(2))
    call(db, "cancel", job_id=first)
    assert finish_in_turn(db) == [second]


@pytest.mark.parametrize("verb", ["fail", "release"])
def test_a_job_that_is_tried_again_keeps_its_turn(db: Db, verb: str) -> None:
    first = leased(db, serial_key="s")
    second = enqueue(db, serial_key="s")
    call(db, verb, **own(first))
    assert state(db, second) == "blocked"
    expire(db, first["job_id"])
    assert finish_in_turn(db) == [first["job_id"], second]


def test_a_job_whose_lease_lapses_keeps_its_turn(db: Db) -> None:
    first = leased(db, serial_key="s")
    second = enqueue(db, serial_key="s")
    expire(db, first["job_id"])
    assert finish_in_turn(db) == [first["job_id"], second]


def test_a_held_job_keeps_its_turn_until_it_is_resolved_or_cancelled(db: Db) -> None:
    job = held_job(db, serial_key="s")
    second = enqueue(db, serial_key="s")
    assert claim(db) == [] and state(db, second) == "blocked"
    call(db, "resolve", job_id=job["job_id"], step="main", happened=True)
    assert state(db, second) == "blocked"
    assert finish_in_turn(db) == [job["job_id"], second]
    job = held_job(db, serial_key="s")
    third = enqueue(db, serial_key="s")
    call(db, "cancel", job_id=job["job_id"])
    assert finish_in_turn(db) == [third]


def test_a_key_that_ran_empty_is_used_again(db: Db) -> None:
    for _ in range(2):
        assert len(finish_in_turn(db)) == 0
        jobs = [enqueue(db, serial_key="s") for _ in range(2)]
        assert finish_in_turn(db) == jobs


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_second_enqueue_waits_for_the_first_so_that_the_order_is_that_of_the_commits(
    db: Db, connect: Callable[..., Db], end: str
) -> None:
    one, two = connect(), connect()
    one.execute("begin")
    first = enqueue(one, serial_key="s")
    with blocked(db, two, "enqueue", kind="mail", serial_key="s") as answer:
        one.execute(end)
        second = answer.result()[0]["job_id"]
    assert finish_in_turn(db) == ([first, second] if end == "commit" else [second])


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_job_enqueued_while_the_last_one_ends_is_not_left_blocked(
    db: Db, connect: Callable[..., Db], end: str
) -> None:
    job = leased(db, serial_key="s")
    worker, producer = connect(), connect()
    worker.execute("begin")
    call(worker, "complete", **own(job))
    with blocked(db, producer, "enqueue", kind="mail", serial_key="s") as answer:
        worker.execute(end)
        second = answer.result()[0]["job_id"]
    assert state(db, second) == ("ready" if end == "commit" else "blocked")
    if end == "rollback":
        call(db, "complete", **own(job))
    assert finish_in_turn(db) == [second]


def test_a_job_that_ends_while_another_is_enqueued_hands_its_turn_to_that(
    db: Db, connect: Callable[..., Db]
) -> None:
    job = leased(db, serial_key="s")
    worker, producer = connect(), connect()
    producer.execute("begin")
    second = enqueue(producer, serial_key="s")
    with blocked(db, worker, "complete", **own(job)) as answer:
        producer.execute("commit")
        assert len(answer.result()) == 1
    assert finish_in_turn(db) == [second]


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_above_read_committed_a_turn_taken_meanwhile_raises_40001_and_is_joined_on_repeat(
    db: Db, connect: Callable[..., Db], level: str
) -> None:
    producer = connect()
    producer.execute(f"begin isolation level {level}")
    query(producer, "select 1 from taskboard.settings")
    first = enqueue(db, serial_key="s")
    with pytest.raises(psycopg.errors.SerializationFailure):
        enqueue(producer, serial_key="s")
    producer.execute("rollback")
    producer.execute(f"begin isolation level {level}")
    second = enqueue(producer, serial_key="s")
    producer.execute("commit")
    assert finish_in_turn(db) == [first, second]


def test_at_repeatable_read_a_completion_that_cannot_see_the_next_job_is_repeated(
    db: Db, connect: Callable[..., Db]
) -> None:
    job = leased(db, serial_key="s")
    worker = connect()
    worker.execute("begin isolation level repeatable read")
    query(worker, "select 1 from taskboard.settings")
    second = enqueue(db, serial_key="s")
    with pytest.raises(psycopg.errors.SerializationFailure):
        call(worker, "complete", **own(job))
    worker.execute("rollback")
    assert len(call(worker, "complete", **own(job))) == 1
    assert finish_in_turn(db) == [second]


def test_in_an_old_transaction_a_turn_is_handed_on_from_the_call_on(db: Db) -> None:
    job = leased(db, serial_key="s")
    second = enqueue(db, serial_key="s", run_at="2020-01-01Z")
    with old_transaction(db):
        called = clock(db)
        call(db, "complete", **own(job))
        row = row_of(db, second)
        assert called <= row["claimable_at"] <= clock(db)
        assert row["run_at"].year == 2020
    assert finish_in_turn(db) == [second]


def test_a_turn_that_comes_before_the_due_time_waits_for_it(db: Db) -> None:
    job = leased(db, serial_key="s")
    second = enqueue(db, serial_key="s", delay="1 hour")
    call(db, "complete", **own(job))
    row = row_of(db, second)
    assert row["claimable_at"] == row["run_at"] and state(db, second) == "scheduled"


def test_a_job_with_both_keys_is_found_by_one_and_waits_by_the_other(db: Db) -> None:
    first = enqueue(db, unique_key="u", serial_key="s")
    second = enqueue(db, unique_key="v", serial_key="s")
    assert again(db, "v", serial_key="s") == {"job_id": second, "created": False}
    assert finish_in_turn(db) == [first, second]
