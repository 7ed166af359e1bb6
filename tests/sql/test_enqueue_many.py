from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from psycopg.types.json import Jsonb
from verbs import (
    Db,
    Row,
    blocked,
    call,
    claim,
    claim_one,
    clock,
    enqueue,
    everything,
    gets_nothing,
    old_transaction,
    own,
    query,
    raises,
    refuses,
    row_of,
    set_default,
    states,
)

pytestmark = pytest.mark.rows_only

# As text, because Python has no array with nulls inside a nested or shifted one.
ABSURD: list[tuple[Row, str]] = [
    ({"kind": None}, "22004"),
    ({"kind": ""}, "22023"),
    ({"queue": None}, "22004"),
    ({"queue": "q" * 201}, "22023"),
    ({"priority": None}, "22023"),
    ({"priority": 10}, "22023"),
    ({"payloads": None}, "22004"),
    ({"payloads": "{1,null}"}, "22004"),
    ({"payloads": "{{1,2},{3,4}}"}, "22023"),
    ({"unique_keys": "{a}"}, "22023"),
    ({"unique_keys": "{a,b,c}"}, "22023"),
    ({"unique_keys": "{{a,b}}"}, "22023"),
    ({"unique_keys": '{a,""}'}, "22023"),
    ({"serial_keys": "{a}"}, "22023"),
    ({"serial_keys": "{}"}, "22023"),
    ({"serial_keys": "{{a},{b}}"}, "22023"),
    ({"serial_keys": f"{{a,{'b' * 201}}}"}, "22023"),
    ({"unique_for": "1 day"}, "22023"),
    ({"unique_for": "1 day", "unique_keys": "{null,null}"}, "22023"),
    ({"unique_for": "-1 day", "unique_keys": "{a,b}"}, "22023"),
    ({"run_at": "infinity"}, "22023"),
    ({"run_at": "2020-01-01Z", "delay": "1 s"}, "22023"),
    ({"delay": "-1 s"}, "22023"),
    ({"delay": "400 days"}, "22023"),
    ({"max_attempts": 0}, "22023"),
    ({"max_lost_leases": -1}, "22023"),
    ({"lease": "0.01 s"}, "22023"),
    ({"timeout": "-1 s"}, "22023"),
    ({"on_unknown": None}, "22023"),
    ({"on_unknown": ""}, "22023"),
    ({"headers": Jsonb("text")}, "22023"),
]


def enqueue_many(db: Db, payloads: list[dict[str, Any]], **options: Any) -> list[Row]:
    return call(db, "enqueue_many", kind="mail", payloads=payloads, **options)


def numbered(count: int) -> list[dict[str, Any]]:
    return [{"n": n} for n in range(count)]


def test_each_payload_gets_its_own_job_in_input_order(db: Db) -> None:
    answer = enqueue_many(db, numbered(20))
    assert all(row["created"] for row in answer)
    assert [row_of(db, row["job_id"])["payload"]["n"] for row in answer] == list(range(20))
    assert len(claim(db, max_jobs=100)) == 20


def test_in_a_batch_with_keys_each_payload_still_gets_its_own_job_in_input_order(db: Db) -> None:
    # Keys sort against the input.
    keys = [f"k{9 - n}" for n in range(10)]
    answer = enqueue_many(db, numbered(10), unique_keys=keys, serial_keys=keys)
    jobs = [row_of(db, row["job_id"]) for row in answer]
    assert [job["payload"]["n"] for job in jobs] == list(range(10))
    assert [job["unique_key"] for job in jobs] == keys
    assert [job["serial_key"] for job in jobs] == keys


def test_the_options_hold_for_every_job(db: Db) -> None:
    before = clock(db)
    answer = enqueue_many(
        db, numbered(2), queue="slow", priority=0, delay="1 hour", max_attempts=2,
        max_lost_leases=3, lease="4 s", timeout="5 s", on_unknown="hold", headers={"trace": "x"},
    )  # fmt: skip
    for row in answer:
        job, (shown,) = row_of(db, row["job_id"]), call(db, "job", job_id=row["job_id"])
        assert (shown["queue"], shown["priority"], shown["state"]) == ("slow", 0, "scheduled")
        assert (shown["max_attempts"], shown["max_lost_leases"]) == (2, 3)
        assert (job["lease"], job["timeout"]) == (timedelta(seconds=4), timedelta(seconds=5))
        assert (job["on_unknown"], job["headers"]) == ("hold", {"trace": "x"})
        assert job["run_at"] >= before + timedelta(hours=1)


@pytest.mark.parametrize("keys", [{}, {"unique_keys": "{}"}, {"serial_keys": "{}"}])
def test_an_empty_batch_adds_nothing(db: Db, keys: Row) -> None:
    enqueue(db)
    gets_nothing(db, "enqueue_many", kind="mail", payloads=[], **keys)


def test_a_key_that_stands_twice_in_a_batch_goes_to_the_first(db: Db) -> None:
    answer = enqueue_many(db, numbered(4), unique_keys=["b", "a", "b", "a"])
    assert [row["created"] for row in answer] == [True, True, False, False]
    assert answer[2]["job_id"] == answer[0]["job_id"]
    assert answer[3]["job_id"] == answer[1]["job_id"]
    assert row_of(db, answer[0]["job_id"])["payload"] == {"n": 0}
    assert len(claim(db, max_jobs=10)) == 2


def test_a_key_held_outside_the_batch_returns_its_holder(db: Db) -> None:
    holder = enqueue(db, unique_key="a")
    answer = enqueue_many(db, numbered(3), unique_keys=["z", "a", "a"])
    assert [row["created"] for row in answer] == [True, False, False]
    assert [row["job_id"] for row in answer[1:]] == [holder, holder]
    assert row_of(db, holder)["payload"] == {}


def test_a_duplicate_takes_no_place_behind_its_serial_key(db: Db) -> None:
    enqueue_many(db, numbered(3), unique_keys=["u", "u", "v"], serial_keys=["s", "s", "s"])
    first = claim_one(db)
    call(db, "complete", **own(first))
    second = claim_one(db)
    assert [first["payload"]["n"], second["payload"]["n"]] == [0, 2]


def test_a_null_stands_for_no_key(db: Db) -> None:
    answer = enqueue_many(
        db, numbered(3), unique_keys=[None, "a", None], serial_keys=["s", None, "s"]
    )
    assert all(row["created"] for row in answer)
    assert states(db, *(row["job_id"] for row in answer)) == ["ready", "ready", "blocked"]


def test_jobs_of_a_serial_key_run_in_input_order(db: Db) -> None:
    enqueue_many(db, numbered(6), serial_keys=["b", "a", "b", "a", "b", "a"])
    order: list[int] = []
    while jobs := claim(db, max_jobs=10):
        assert len(jobs) == 2, "one job at a time for each key"
        order += sorted(job["payload"]["n"] for job in jobs)
        for job in jobs:
            call(db, "complete", **own(job))
    assert order == [0, 1, 2, 3, 4, 5]


def test_arrays_that_do_not_begin_at_one_match_by_place(db: Db) -> None:
    answer = call(
        db, "enqueue_many", kind="mail", payloads='[0:1]={"1","2"}',
        unique_keys="[5:6]={a,b}", serial_keys="[0:1]={s,t}",
    )  # fmt: skip
    jobs = [row_of(db, row["job_id"]) for row in answer]
    assert [job["payload"] for job in jobs] == [1, 2]
    assert [job["unique_key"] for job in jobs] == ["a", "b"]
    assert [job["serial_key"] for job in jobs] == ["s", "t"]
    # The keys are held by the jobs that carry them, not by their neighbours.
    for key, row in zip("ab", answer, strict=True):
        (again,) = call(db, "enqueue", kind="mail", unique_key=key)
        assert again == {"job_id": row["job_id"], "created": False}


def test_in_an_old_transaction_the_due_time_counts_from_the_call(db: Db) -> None:
    with old_transaction(db):
        called = clock(db)
        for keys in ({}, {"unique_keys": ["a", "b"]}):
            for row in enqueue_many(db, numbered(2), **keys):
                assert row_of(db, row["job_id"])["claimable_at"] >= called
        assert len(claim(db, max_jobs=10)) == 4


def test_absurd_arguments_are_refused_and_add_nothing(db: Db) -> None:
    refuses(db, "enqueue_many", {"kind": "mail", "payloads": "{1,2}"}, ABSURD)


def test_one_document_over_the_limit_keeps_the_whole_batch_out(db: Db) -> None:
    huge = [{"n": 1}, {"text": "x" * 1_100_000}]
    raises(db, "22023", "enqueue_many", kind="mail", payloads=huge)


def test_more_documents_than_the_limit_are_refused(db: Db) -> None:
    set_default(db, "bulk_jobs", 3)
    assert len(enqueue_many(db, numbered(3))) == 3
    raises(db, "22023", "enqueue_many", kind="mail", payloads=numbered(4))


def test_a_rolled_back_batch_leaves_nothing(db: Db) -> None:
    before = everything(db)
    with db.transaction(force_rollback=True):
        enqueue_many(db, numbered(3), unique_keys=["a", "b", "c"], serial_keys=["s", "s", "s"])
    assert everything(db) == before


def test_batches_with_the_same_keys_in_opposite_order_do_not_deadlock(
    db: Db, connect: Callable[..., Db]
) -> None:
    one, two = connect(), connect()
    options = {"kind": "mail", "payloads": numbered(2)}
    one.execute("begin")
    first = call(one, "enqueue_many", unique_keys=["a", "b"], serial_keys=["s", "t"], **options)
    with blocked(
        db, two, "enqueue_many", unique_keys=["b", "a"], serial_keys=["t", "s"], **options
    ) as answer:
        one.execute("commit")
        second = answer.result()
    assert [row["created"] for row in second] == [False, False]
    assert [row["job_id"] for row in second] == [row["job_id"] for row in reversed(first)]


def test_rows_of_another_kind_are_untouched(db: Db) -> None:
    enqueue(db, "bill", unique_key="a")
    before = query(db, "select * from taskboard.jobs")
    answer = enqueue_many(db, numbered(1), unique_keys=["a"])
    assert answer[0]["created"]
    assert before[0] in query(db, "select * from taskboard.jobs")
