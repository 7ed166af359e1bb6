"""Schedules: each occurrence is enqueued once, however many advance it, and misses are a choice."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from verbs import (
    Db,
    Row,
    blocked,
    call,
    claim_one,
    clock,
    everything,
    gets_nothing,
    own,
    query,
    raises,
    refuses,
    state,
)

pytestmark = pytest.mark.rows_only

Connect = Callable[..., Db]

START = datetime(2020, 1, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


def schedule(db: Db, name: str = "report", **options: Any) -> None:
    call(db, "schedule", **{"name": name, "cron": "* * * * *", "kind": "mail"} | options)


def begun(db: Db, name: str = "report", **options: Any) -> None:
    """A schedule of which a runner has worked out the first date."""
    schedule(db, name, **options)
    assert advance(db, None, START, name=name) is None


def advance(
    db: Db, due_at: datetime | None, next_at: datetime | None = None, name: str = "report",
    **options: Any,
) -> UUID | None:  # fmt: skip
    if next_at is None:
        assert due_at is not None
        next_at = due_at + MINUTE
    (row,) = call(db, "advance_schedule", name=name, due_at=due_at, next_at=next_at, **options)
    job_id: UUID | None = row["advance_schedule"]
    return job_id


def row_of(db: Db, name: str = "report") -> Row:
    (row,) = query(db, "select * from taskboard.schedules where name = %(name)s", name=name)
    return row


def due(db: Db) -> list[str]:
    return [row["name"] for row in call(db, "due_schedules")]


def jobs(db: Db) -> list[Row]:
    return query(
        db,
        "select id, payload, headers, queue, kind, priority from taskboard.live_jobs"
        " order by created_at",
    )


def test_a_new_schedule_waits_for_a_runner_to_work_out_its_first_date(db: Db) -> None:
    schedule(db, misfire="all", time_zone="Europe/Berlin")
    before = clock(db)
    (row,) = call(db, "due_schedules")
    assert before < row.pop("now") < clock(db)
    assert row == {
        "name": "report", "cron": "* * * * *", "time_zone": "Europe/Berlin", "misfire": "all",
        "due_at": None,
    }  # fmt: skip
    future = clock(db) + timedelta(hours=1)
    assert advance(db, None, future) is None
    assert (jobs(db), due(db), row_of(db)["next_at"]) == ([], [], future)
    assert row_of(db)["last_at"] is None


def test_an_occurrence_becomes_a_job_that_says_which_it_is(db: Db) -> None:
    begun(db, payload={"n": 1}, queue="slow", kind="bill", priority=2)
    assert due(db) == ["report"]
    job_id = advance(db, START)
    (job,) = jobs(db)
    headers = job.pop("headers")
    assert headers["schedule"] == "report"
    assert datetime.fromisoformat(headers["occurrence"]) == START
    assert job == {
        "id": job_id, "payload": {"n": 1}, "queue": "slow", "kind": "bill", "priority": 2
    }  # fmt: skip
    row = row_of(db)
    assert (row["next_at"], row["last_at"]) == (START + MINUTE, START)
    assert row["last_job_id"] == job_id
    (shown,) = query(db, "select * from taskboard.schedule_list")
    assert (shown["next_at"], shown["last_job_id"]) == (START + MINUTE, job_id)
    assert claim_one(db)["job_id"] == job_id


def test_of_many_sessions_that_advance_one_schedule_each_occurrence_is_taken_once(
    db: Db, connect: Connect
) -> None:
    begun(db)
    end = START + 100 * MINUTE

    def run(session: Db) -> list[UUID]:
        taken: list[UUID] = []
        while True:
            for row in call(session, "due_schedules"):
                if row["due_at"] >= end:
                    return taken
                if (job_id := advance(session, row["due_at"])) is not None:
                    taken.append(job_id)

    with ThreadPoolExecutor(8) as threads:
        taken = [
            job_id
            for each in threads.map(run, [connect(f"runner {n}") for n in range(8)])
            for job_id in each
        ]
    found = jobs(db)
    assert sorted(taken) == sorted(job["id"] for job in found) and len(set(taken)) == 100
    occurrences = sorted(datetime.fromisoformat(job["headers"]["occurrence"]) for job in found)
    assert occurrences == [START + n * MINUTE for n in range(100)]


def test_of_two_first_looks_one_sets_the_date(db: Db) -> None:
    schedule(db)
    advance(db, None, START)
    assert advance(db, None, START + MINUTE) is None
    assert row_of(db)["next_at"] == START


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_who_advances_second_waits_and_then_takes_only_what_the_first_left(
    db: Db, connect: Connect, end: str
) -> None:
    begun(db)
    first, second = connect("first"), connect("second")
    query(first, "begin")
    assert advance(first, START) is not None
    step = {"name": "report", "due_at": START, "next_at": START + MINUTE}
    with blocked(db, second, "advance_schedule", **step) as answer:
        query(first, end)
        taken = answer.result()[0]["advance_schedule"]
    assert (taken is None) == (end == "commit")
    assert len(jobs(db)) == 1 and row_of(db)["next_at"] == START + MINUTE


def test_an_occurrence_whose_transaction_is_undone_is_due_again(
    db: Db, connect: Connect
) -> None:
    begun(db)
    runner = connect()
    query(runner, "begin")
    advance(runner, START)
    query(runner, "rollback")
    assert (jobs(db), due(db)) == ([], ["report"])
    assert advance(db, START) is not None


def test_a_date_that_somebody_else_has_moved_gives_nothing(db: Db) -> None:
    begun(db)
    advance(db, START)
    before = everything(db)
    for late in (START, START - MINUTE, START + 2 * MINUTE):
        assert advance(db, late, START + timedelta(days=9)) is None
    assert advance(db, START, name="unknown") is None
    assert everything(db) == before and row_of(db)["next_at"] == START + MINUTE


def test_passing_over_an_occurrence_enqueues_nothing_and_keeps_what_was_last(db: Db) -> None:
    begun(db)
    job_id = advance(db, START)
    assert advance(db, START + MINUTE, START + 9 * MINUTE, enqueue=False) is None
    row = row_of(db)
    assert len(jobs(db)) == 1
    assert (row["next_at"], row["last_at"], row["last_job_id"]) == (
        START + 9 * MINUTE, START, job_id,
    )  # fmt: skip


def test_what_falls_due_during_a_pause_is_not_made_up_for(db: Db) -> None:
    begun(db)
    assert call(db, "pause_schedule", name="report") == [{"pause_schedule": True}]
    paused_at = row_of(db)["paused_at"]
    assert due(db) == [] and advance(db, START) is None
    call(db, "pause_schedule", name="report")
    assert row_of(db)["paused_at"] == paused_at
    assert jobs(db) == []
    assert call(db, "pause_schedule", name="report", paused=False) == [{"pause_schedule": True}]
    assert advance(db, START) is None, "the old date is gone"
    (row,) = call(db, "due_schedules")
    assert row["due_at"] is None
    advance(db, None, START + MINUTE)
    assert advance(db, START + MINUTE) is not None


def test_ending_a_pause_that_there_is_not_skips_nothing(db: Db) -> None:
    begun(db)
    call(db, "pause_schedule", name="report", paused=False)
    assert row_of(db)["next_at"] == START
    assert advance(db, START) is not None


def test_a_schedule_repeated_by_a_deployment_keeps_its_date_and_takes_what_is_new(db: Db) -> None:
    begun(db)
    job_id = advance(db, START)
    schedule(db, payload={"new": True}, queue="slow")
    row = row_of(db)
    assert (row["next_at"], row["last_at"], row["last_job_id"]) == (START + MINUTE, START, job_id)
    advance(db, START + MINUTE)
    assert [job["queue"] for job in jobs(db)] == ["default", "slow"]
    assert jobs(db)[1]["payload"] == {"new": True}


@pytest.mark.parametrize("change", [{"cron": "0 0 * * *"}, {"time_zone": "Asia/Kolkata"}])
def test_a_schedule_with_another_rule_gets_a_new_date(db: Db, change: Row) -> None:
    begun(db)
    schedule(db, **change)
    assert row_of(db)["next_at"] is None
    assert advance(db, START) is None, "a runner that saw the old rule comes too late"
    assert jobs(db) == []


def test_a_pause_outlives_a_deployment(db: Db) -> None:
    begun(db)
    call(db, "pause_schedule", name="report")
    schedule(db)
    assert row_of(db)["paused_at"] is not None and due(db) == []


def test_a_schedule_that_is_removed_leaves_its_jobs_and_nobody_advances_it(db: Db) -> None:
    begun(db)
    job_id = advance(db, START)
    assert call(db, "unschedule", name="report") == [{"unschedule": True}]
    assert call(db, "unschedule", name="report") == [{"unschedule": False}]
    assert call(db, "pause_schedule", name="report") == [{"pause_schedule": False}]
    assert advance(db, START + MINUTE) is None
    assert job_id is not None and state(db, job_id) == "ready"
    gets_nothing(db, "due_schedules")


def test_several_due_schedules_come_in_the_order_of_their_dates(db: Db) -> None:
    for name, shift in (("c", 2), ("a", 1), ("b", 1), ("future", 10**8)):
        schedule(db, name)
        advance(db, None, START + shift * MINUTE, name=name)
    schedule(db, "new")
    assert due(db) == ["a", "b", "c", "new"]


def test_jobs_of_a_schedule_may_overlap_and_each_ends_for_itself(db: Db) -> None:
    begun(db)
    for n in range(3):
        advance(db, START + n * MINUTE)
    for _ in range(3):
        assert len(call(db, "complete", **own(claim_one(db)))) == 1


def test_the_zone_of_a_session_moves_no_date(db: Db, connect: Connect) -> None:
    begun(db)
    session = connect()
    query(session, "set timezone = 'America/New_York'")
    advance(session, START)
    (job,) = jobs(db)
    assert datetime.fromisoformat(job["headers"]["occurrence"]) == START
    assert row_of(db)["next_at"] == START + MINUTE


def test_absurd_schedules_are_refused(db: Db) -> None:
    refuses(
        db,
        "schedule",
        {"name": "report", "cron": "* * * * *", "kind": "mail"},
        [
            *(({name: None}, "22004") for name in ("name", "cron", "kind", "queue", "payload")),
            *(({name: ""}, "22023") for name in ("name", "cron", "kind", "queue", "time_zone")),
            *(({name: "x" * 201}, "22023") for name in ("name", "cron", "kind", "queue")),
            ({"time_zone": None}, "22023"),
            ({"time_zone": "Europe/Nowhere"}, "22023"),
            ({"priority": None}, "22023"),
            ({"priority": 10}, "22023"),
            ({"priority": -1}, "22023"),
            ({"misfire": None}, "22023"),
            ({"misfire": "some"}, "22023"),
            ({"payload": {"large": "x" * 2_000_000}}, "22023"),
        ],
    )


def test_absurd_steps_are_refused(db: Db) -> None:
    begun(db)
    refuses(
        db,
        "advance_schedule",
        {"name": "report", "due_at": START, "next_at": START + MINUTE},
        [
            ({"name": None}, "22004"),
            ({"next_at": None}, "22023"),
            ({"next_at": START}, "22023"),
            ({"next_at": START - MINUTE}, "22023"),
            ({"next_at": "infinity"}, "22023"),
            ({"next_at": "-infinity"}, "22023"),
            ({"enqueue": None}, "22023"),
        ],
    )


def test_a_null_does_not_end_a_pause(db: Db) -> None:
    begun(db)
    call(db, "pause_schedule", name="report")
    raises(db, "22004", "pause_schedule", name="report", paused=None)
    for verb in ("pause_schedule", "unschedule"):
        raises(db, "22004", verb, name=None)
