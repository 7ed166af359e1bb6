from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb
from verbs import (
    Db,
    call,
    claim,
    claim_one,
    clock,
    enqueue,
    live,
    old_transaction,
    raises,
    refuses,
    row_of,
    set_default,
    state,
)

pytestmark = pytest.mark.rows_only

ABSURD: list[tuple[dict[str, Any], str]] = [
    ({"kind": None}, "22004"),
    ({"kind": ""}, "22023"),
    ({"kind": "k" * 201}, "22023"),
    ({"kind": "a\nb"}, "22023"),
    ({"queue": None}, "22004"),
    ({"queue": ""}, "22023"),
    ({"queue": "q" * 201}, "22023"),
    ({"payload": None}, "22004"),
    ({"priority": None}, "22023"),
    ({"priority": -1}, "22023"),
    ({"priority": 10}, "22023"),
    ({"priority": 2**31 - 1}, "22023"),
    ({"run_at": "infinity"}, "22023"),
    ({"run_at": "-infinity"}, "22023"),
    ({"run_at": "9999-01-01Z"}, "22023"),
    ({"run_at": "2020-01-01Z", "delay": "1 s"}, "22023"),
    ({"delay": "-1 microsecond"}, "22023"),
    ({"delay": "367 days"}, "22023"),
    ({"delay": "170000000 years"}, "22023"),
    ({"unique_key": ""}, "22023"),
    ({"unique_key": "k" * 201}, "22023"),
    ({"unique_for": "1 day"}, "22023"),
    ({"unique_key": "k", "unique_for": "-1 s"}, "22023"),
    ({"unique_key": "k", "unique_for": "367 days"}, "22023"),
    ({"serial_key": ""}, "22023"),
    ({"serial_key": "k" * 201}, "22023"),
    ({"max_attempts": 0}, "22023"),
    ({"max_attempts": -1}, "22023"),
    ({"max_attempts": 2**31 - 1}, "22023"),
    ({"max_lost_leases": 0}, "22023"),
    ({"lease": "0"}, "22023"),
    ({"lease": "0.05 s"}, "22023"),
    ({"lease": "25 hours"}, "22023"),
    ({"lease": "-1 hour"}, "22023"),
    ({"timeout": "0"}, "22023"),
    ({"timeout": "400 days"}, "22023"),
    ({"on_unknown": None}, "22023"),
    ({"on_unknown": "panic"}, "22023"),
    ({"unique_key": "k", "unique_until": None}, "22023"),
    ({"unique_key": "k", "unique_until": "never"}, "22023"),
    ({"unique_key": "k", "unique_until": "claim", "unique_for": "1 h"}, "22023"),
    ({"headers": Jsonb([])}, "22023"),
    ({"headers": Jsonb(None)}, "22023"),
]


def test_a_job_with_defaults_is_ready_at_once(db: Db) -> None:
    before = clock(db)
    (row,) = call(db, "enqueue", kind="mail", payload={"to": "ada"})
    assert row["created"] is True
    job = row_of(db, row["job_id"])
    assert before <= job["run_at"] <= job["claimable_at"] <= clock(db)
    assert before <= job["created_at"] <= clock(db)
    assert (job["payload"], job["on_unknown"]) == ({"to": "ada"}, "retry")
    (shown,) = call(db, "job", job_id=row["job_id"])
    assert (shown["queue"], shown["kind"], shown["priority"]) == ("default", "mail", 5)
    assert (shown["attempt"], shown["failures"], shown["lost_leases"]) == (0, 0, 0)
    assert (shown["max_attempts"], shown["max_lost_leases"]) == (20, 5)
    assert shown["state"] == "ready"


def test_every_option_is_stored_with_the_job(db: Db) -> None:
    before = clock(db)
    job_id = enqueue(
        db, "bill", payload={"n": 1}, queue="slow", priority=9, delay="1 hour", unique_key="u",
        unique_for="2 hours", serial_key="s", max_attempts=3, max_lost_leases=2, lease="5 s",
        timeout="7 min", on_unknown="hold", headers={"trace": "x"},
    )  # fmt: skip
    job = row_of(db, job_id)
    assert job["payload"] == {"n": 1} and job["headers"] == {"trace": "x"}
    assert job["claimable_at"] == job["run_at"]
    assert before + timedelta(hours=1) <= job["run_at"] <= clock(db) + timedelta(hours=1)
    assert (job["unique_key"], job["serial_key"], job["on_unknown"]) == ("u", "s", "hold")
    assert (job["lease"], job["timeout"]) == (timedelta(seconds=5), timedelta(minutes=7))
    (shown,) = call(db, "job", job_id=job_id)
    assert (shown["queue"], shown["kind"], shown["priority"]) == ("slow", "bill", 9)
    assert (shown["max_attempts"], shown["max_lost_leases"]) == (3, 2)
    assert shown["state"] == "scheduled"


def test_without_a_key_a_repeat_is_another_job(db: Db) -> None:
    assert enqueue(db) != enqueue(db)


def test_ids_differ_and_carry_their_shard(db: Db) -> None:
    set_default(db, "shard", 0xBEEF)
    ids = [enqueue(db) for _ in range(50)]
    assert len(set(ids)) == 50
    assert all(str(job_id).endswith("beef") and job_id.version == 7 for job_id in ids)


def test_limits_left_out_come_from_the_settings(db: Db) -> None:
    set_default(db, "max_attempts", 7)
    set_default(db, "max_lost_leases", 8)
    (shown,) = call(db, "job", job_id=enqueue(db))
    assert (shown["max_attempts"], shown["max_lost_leases"]) == (7, 8)


def test_a_payload_may_be_any_json_document(db: Db) -> None:
    documents: list[Any] = [None, 7, "ümläut ☃ \U0001f600", [1, {"a": []}], {}]
    for document in documents:
        assert row_of(db, enqueue(db, payload=Jsonb(document)))["payload"] == document


def test_a_run_at_in_the_past_is_kept_but_the_job_queues_from_now(db: Db) -> None:
    before = clock(db)
    job = row_of(db, enqueue(db, run_at="2020-01-01Z"))
    assert job["run_at"].year == 2020
    assert before <= job["claimable_at"] <= clock(db)


@pytest.mark.parametrize("days", [120, 240])
def test_a_delay_in_days_is_exact_in_every_time_zone(db: Db, days: int) -> None:
    # One of the two lies across an odd number of clock changes.
    db.execute("set timezone = 'America/New_York'")
    before = clock(db).timestamp()
    due = row_of(db, enqueue(db, delay=f"{days} days"))["run_at"].timestamp()
    assert before <= due - days * 86400 <= clock(db).timestamp()


def test_in_an_old_transaction_the_delay_counts_from_the_call(db: Db) -> None:
    with old_transaction(db):
        called = clock(db)
        job = row_of(db, enqueue(db, delay="10 s"))
    assert job["created_at"] >= called
    assert job["claimable_at"] >= called + timedelta(seconds=10)


def test_a_job_due_at_the_start_of_an_old_transaction_is_claimable_in_it(db: Db) -> None:
    with old_transaction(db) as began:
        called = clock(db)
        job_id = enqueue(db, run_at=began)
        job = row_of(db, job_id)
        assert job["run_at"] == began and job["claimable_at"] >= called
        assert claim_one(db)["job_id"] == job_id


def test_nobody_can_claim_a_job_before_its_transaction_commits(
    db: Db, connect: Callable[..., Db]
) -> None:
    producer = connect()
    with producer.transaction():
        job_id = enqueue(producer)
        assert claim(db) == [] and live(db, job_id) is None
    assert claim_one(db)["job_id"] == job_id


def test_a_rolled_back_transaction_or_savepoint_takes_its_jobs_along(db: Db) -> None:
    with db.transaction(force_rollback=True):
        gone = enqueue(db)
    with db.transaction():
        with db.transaction(force_rollback=True):
            gone_too = enqueue(db)
        kept = enqueue(db)
    assert live(db, gone) is None and live(db, gone_too) is None
    assert state(db, kept) == "ready"


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_enqueue_works_at_every_isolation_level(db: Db, level: str) -> None:
    with db.transaction():
        db.execute(f"set transaction isolation level {level}")
        job_id = enqueue(db, unique_key="u", serial_key="s")
    assert state(db, job_id) == "ready"


def test_absurd_arguments_are_refused_and_add_nothing(db: Db) -> None:
    refuses(db, "enqueue", {"kind": "mail"}, ABSURD)


def test_an_infinite_duration_is_refused(db: Db) -> None:
    for option in ("delay", "lease", "timeout", "unique_for"):
        arguments = {"kind": "mail", "unique_key": "u"}
        if db.info.server_version < 170000:
            # Older servers have no such interval: they refuse the text itself.
            with pytest.raises(psycopg.errors.InvalidDatetimeFormat):
                call(db, "enqueue", **arguments, **{option: "infinity"})
        else:
            refuses(
                db, "enqueue", arguments,
                [({option: "infinity"}, "22023"), ({option: "-infinity"}, "22023")],
            )  # fmt: skip


def test_documents_over_the_limit_are_refused_and_shorter_ones_stored(db: Db) -> None:
    enqueue(db, payload={"text": "x" * 1_000_000})
    raises(db, "22023", "enqueue", kind="mail", payload={"text": "x" * 1_100_000})
    raises(db, "22023", "enqueue", kind="mail", headers={"text": "x" * 1_100_000})
    set_default(db, "payload_bytes", 100)
    raises(db, "22023", "enqueue", kind="mail", payload={"text": "x" * 101})


def test_many_jobs_of_one_kind_use_up_no_small_numbers(db: Db) -> None:
    enqueue(db, unique_key="u")
    before = db.execute("select last_value from taskboard.lane_ids").fetchone()
    for _ in range(20):
        call(db, "enqueue", kind="mail", unique_key="u")
        enqueue(db)
    assert db.execute("select last_value from taskboard.lane_ids").fetchone() == before


def test_first_jobs_of_a_kind_in_two_transactions_do_not_wait_for_each_other(
    db: Db, connect: Callable[..., Db]
) -> None:
    producer = connect()
    with producer.transaction():
        one = enqueue(producer)
        two = enqueue(db)
    assert {job["job_id"] for job in claim(db, max_jobs=5)} == {one, two}
