from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest
from verbs import Db, call, claim_one, enqueue, everything, leased, own, query, refuses

from support import expire

pytestmark = pytest.mark.rows_only

Connect = Callable[..., Db]


def test_a_job_that_has_ended_is_answered_at_once_with_its_result(db: Db) -> None:
    job = leased(db)
    call(db, "complete", **own(job), result={"sum": 3})
    assert call(db, "wait_for", job_id=job["job_id"], at_most="0") == [
        {"job_id": job["job_id"], "state": "completed", "result": {"sum": 3}, "error": None}
    ]


@pytest.mark.parametrize("end", ["failed", "cancelled"])
def test_a_job_that_ended_otherwise_is_answered_with_its_state_and_reason(
    db: Db, end: str
) -> None:
    job = leased(db)
    if end == "failed":
        call(db, "fail", **own(job), error="no", permanent=True)
    else:
        call(db, "cancel", job_id=job["job_id"], reason="no", force=True)
    assert call(db, "wait_for", job_id=job["job_id"]) == [
        {"job_id": job["job_id"], "state": end, "result": None, "error": "no"}
    ]


def test_who_waits_is_answered_when_the_job_ends(db: Db, connect: Connect) -> None:
    job, producer = leased(db), connect("producer")
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(call, producer, "wait_for", job_id=job["job_id"], at_most="20 s")
        time.sleep(0.1)
        assert not answer.done()
        began = time.monotonic()
        call(db, "complete", **own(job), result={"n": 1})
        (row,) = answer.result()
    assert (row["state"], row["result"]) == ("completed", {"n": 1})
    assert time.monotonic() - began < 2


def test_a_failure_that_is_tried_again_is_no_end(db: Db, connect: Connect) -> None:
    job, producer = leased(db), connect("producer")
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(call, producer, "wait_for", job_id=job["job_id"], at_most="20 s")
        call(db, "fail", **own(job), retry_in="0")
        again = claim_one(db)
        expire(db, again["job_id"])
        last = claim_one(db)
        time.sleep(0.05)
        assert not answer.done()
        call(db, "complete", **own(last))
        assert answer.result()[0]["state"] == "completed"


def test_zero_rows_when_the_job_has_not_ended_in_time(db: Db) -> None:
    job_id = enqueue(db)
    for at_most in ("0", "0.05 s", "0.2 s"):
        began = time.monotonic()
        before = everything(db)
        assert call(db, "wait_for", job_id=job_id, at_most=at_most) == []
        assert everything(db) == before
        assert time.monotonic() - began < 2


def test_a_job_that_was_brought_back_is_waited_for_anew(db: Db) -> None:
    job = leased(db)
    call(db, "complete", **own(job), result={"n": 1})
    call(db, "retry", job_id=job["job_id"])
    assert call(db, "wait_for", job_id=job["job_id"], at_most="0.02 s") == []
    call(db, "complete", **own(claim_one(db)), result={"n": 2})
    assert call(db, "wait_for", job_id=job["job_id"])[0]["result"] == {"n": 2}


def test_a_job_of_a_queue_that_keeps_nothing_is_answered_without_a_result(db: Db) -> None:
    call(db, "keep_history", queue="default", completed=False)
    job = leased(db)
    call(db, "complete", **own(job), result={"n": 1})
    (row,) = call(db, "wait_for", job_id=job["job_id"])
    assert (row["state"], row["result"]) == ("completed", None)


def test_in_the_transaction_that_enqueued_the_job_nobody_runs_it_and_the_wait_is_bounded(
    db: Db, connect: Connect
) -> None:
    producer = connect("producer")
    query(producer, "begin")
    job_id = enqueue(producer)
    assert call(producer, "wait_for", job_id=job_id, at_most="0.1 s") == []
    query(producer, "commit")
    call(db, "complete", **own(claim_one(db)))
    assert len(call(producer, "wait_for", job_id=job_id, at_most="0.1 s")) == 1


def test_who_waits_holds_up_nobody(db: Db, connect: Connect) -> None:
    job, producer = leased(db), connect("producer")
    query(db, "set statement_timeout = '5 s'")
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(call, producer, "wait_for", job_id=job["job_id"], at_most="20 s")
        time.sleep(0.05)
        assert len(call(db, "renew", **own(job))) == 1
        assert call(db, "maintain") != []
        assert len(call(db, "release", **own(job))) == 1
        call(db, "cancel", job_id=job["job_id"])
        assert answer.result()[0]["state"] == "cancelled"


def test_pauses_between_looks_grow_with_the_time_waited(connect: Connect) -> None:
    producer = connect("producer")
    query(producer, "begin")
    call(producer, "wait_for", job_id=uuid4(), at_most="0.5 s")
    (row,) = query(
        producer,
        "select coalesce(seq_scan, 0) + coalesce(idx_scan, 0) as looks"
        " from pg_stat_xact_user_tables where relid = 'taskboard.history_default'::regclass",
    )
    # Ten in the first 50 ms, then one for each tenth more: no more than 36, on a busy host fewer.
    assert 4 <= row["looks"] <= 36


def test_a_wait_can_be_interrupted(db: Db, connect: Connect) -> None:
    job_id, producer = enqueue(db), connect("producer")
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(call, producer, "wait_for", job_id=job_id, at_most="30 s")
        time.sleep(0.05)
        producer.cancel_safe()
        assert getattr(answer.exception(timeout=5), "sqlstate", None) == "57014"


def test_an_unknown_job_is_answered_within_the_time(db: Db) -> None:
    assert call(db, "wait_for", job_id=uuid4(), at_most="0.05 s") == []


def test_absurd_arguments_are_refused(db: Db) -> None:
    query(db, "set statement_timeout = '1 s'")
    refuses(
        db,
        "wait_for",
        {"job_id": enqueue(db)},
        [
            ({"job_id": None}, "22004"),
            ({"at_most": "-1 s"}, "22023"),
            ({"at_most": "1 day"}, "22023"),
            ({"at_most": "1000000 years"}, "22023"),
            ({"at_most": None}, "22004"),
        ],
    )
