from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from verbs import (
    Db,
    call,
    claim_one,
    clock,
    enqueue,
    everything,
    leased,
    own,
    query,
    refuses,
    row_of,
)

from support import expire

pytestmark = pytest.mark.rows_only


def next_at(db: Db, **arguments: Any) -> datetime | None:
    (row,) = call(db, "next_claimable_at", **arguments)
    found: datetime | None = row["next_claimable_at"]
    return found


def test_without_a_live_job_there_is_no_next_time(db: Db) -> None:
    assert next_at(db) is None
    call(db, "complete", **own(leased(db)))
    assert next_at(db) is None


def test_the_earliest_due_time_or_deadline_is_next(db: Db) -> None:
    enqueue(db, delay="3 hours")
    due = enqueue(db, "bill", queue="slow", priority=9, delay="1 hour")
    assert next_at(db) == row_of(db, due)["claimable_at"]
    job = leased(db)
    assert next_at(db) == job["lease_expires_at"]
    (row,) = call(db, "renew", **own(job), lease="10 min")
    assert next_at(db) == row["lease_expires_at"]
    (row,) = call(db, "fail", **own(job), retry_in="20 min")
    assert next_at(db) == row["claimable_at"]


def test_while_something_is_ready_the_next_time_is_past(db: Db) -> None:
    enqueue(db, delay="1 hour")
    ready = enqueue(db)
    at = next_at(db)
    assert at is not None and at <= clock(db)
    job = claim_one(db)
    assert job["job_id"] == ready
    expire(db, ready)
    at = next_at(db)
    assert at is not None and at <= clock(db)


def test_only_the_queues_and_kinds_that_are_named_count(db: Db) -> None:
    mail = enqueue(db, "mail", queue="x", delay="1 hour")
    bill = enqueue(db, "bill", queue="y", delay="2 hours")
    due = [row_of(db, job_id)["claimable_at"] for job_id in (mail, bill)]
    assert next_at(db) == due[0]
    assert next_at(db, queues=["x", "y"], kinds=["bill", "fax"]) == due[1]
    assert next_at(db, queues=["y"]) == due[1]
    assert next_at(db, queues=["x"], kinds=["bill"]) is None
    assert next_at(db, kinds=["fax"]) is None
    assert next_at(db, queues=[]) is None


def test_jobs_that_wait_for_a_turn_or_a_person_have_no_time(db: Db) -> None:
    job = leased(db, serial_key="s", on_unknown="hold")
    enqueue(db, serial_key="s")
    call(db, "begin_effect", **own(job))
    call(db, "fail", **own(job), permanent=True)
    assert next_at(db) is None
    call(db, "resolve", job_id=job["job_id"], step="main", happened=True)
    assert next_at(db) is not None


def test_a_paused_queue_has_no_time(db: Db) -> None:
    due = enqueue(db, queue="x", delay="1 hour")
    enqueue(db, queue="y", delay="1 min")
    call(db, "pause", queue="y")
    assert next_at(db) == row_of(db, due)["claimable_at"]
    call(db, "pause")
    assert next_at(db) is None


def test_it_changes_nothing_and_shows_times_in_every_zone_alike(db: Db) -> None:
    enqueue(db, delay="1 hour")
    before = everything(db)
    at = next_at(db)
    assert everything(db) == before
    query(db, "select set_config('timezone', 'Asia/Kolkata', false)")
    assert next_at(db) == at and at is not None
    assert at.astimezone(UTC) - clock(db) < timedelta(hours=1)


def test_nulls_among_the_names_are_refused_as_in_claim(db: Db) -> None:
    refuses(
        db,
        "next_claimable_at",
        {},
        [({"queues": [None]}, "22004"), ({"kinds": ["mail", None]}, "22004")],
    )
