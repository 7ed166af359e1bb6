from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from verbs import (
    Db,
    Row,
    call,
    claim,
    claim_one,
    clock,
    enqueue,
    everything,
    gets_nothing,
    incidents,
    leased,
    own,
    pairs,
    query,
    refuses,
    state,
)

from support import expire

pytestmark = pytest.mark.rows_only


def next_at(db: Db, **arguments: object) -> object:
    (row,) = call(db, "next_claimable_at", **arguments)
    return row["next_claimable_at"]


def stats(db: Db) -> Row:
    (row,) = query(db, "select * from taskboard.queue_stats")
    return row


@pytest.mark.parametrize("queue", ["slow", None])
def test_from_a_paused_queue_nothing_is_claimed_until_it_is_resumed(
    db: Db, queue: str | None
) -> None:
    job_id = enqueue(db, queue="slow")
    before = clock(db)
    (row,) = call(db, "pause", queue=queue)
    assert row["queue"] == queue and before < row["paused_at"] < clock(db)
    gets_nothing(db, "claim", max_jobs=10)
    gets_nothing(db, "claim", queues=["slow"], max_jobs=10)
    assert stats(db)["paused"] is True and stats(db)["ready"] == 1
    assert next_at(db) is None
    assert call(db, "resume", queue=queue) == [{"queue": queue, "paused_at": None}]
    assert stats(db)["paused"] is False
    assert claim_one(db)["job_id"] == job_id
    assert incidents(db) == ["queue_paused", "queue_resumed"]


def test_other_queues_go_on(db: Db) -> None:
    enqueue(db, queue="slow")
    job_id = enqueue(db, queue="fast")
    call(db, "pause", queue="slow")
    assert next_at(db) is not None
    assert claim_one(db, max_jobs=10)["job_id"] == job_id


def test_what_runs_in_a_paused_queue_goes_on_and_new_jobs_are_taken_in(db: Db) -> None:
    jobs = [leased(db) for _ in range(4)]
    call(db, "pause")
    call(db, "pause", queue="default")
    assert len(call(db, "renew_many", **pairs(*jobs))) == 4
    assert len(call(db, "renew", **own(jobs[0]))) == 1
    assert call(db, "begin_effect", **own(jobs[0]))[0]["state"] == "fresh"
    assert len(call(db, "complete", **own(jobs[0]))) == 1
    assert len(call(db, "fail", **own(jobs[1]))) == 1
    assert len(call(db, "release", **own(jobs[2]))) == 1
    assert state(db, enqueue(db)) == "ready"
    expire(db, jobs[3]["job_id"])
    gets_nothing(db, "claim", max_jobs=10)


def test_a_repeat_keeps_the_first_instant(db: Db) -> None:
    for queue in ("slow", None):
        first = call(db, "pause", queue=queue)
        before = everything(db)
        assert call(db, "pause", queue=queue) == first
        assert everything(db) == before
        for _ in range(2):
            assert call(db, "resume", queue=queue)[0]["paused_at"] is None


def test_resuming_all_leaves_a_queue_paused_that_was_paused_by_name(db: Db) -> None:
    enqueue(db)
    call(db, "pause", queue="default")
    call(db, "pause")
    call(db, "resume")
    assert claim(db) == []
    call(db, "resume", queue="default")
    assert len(claim(db)) == 1


def test_a_queue_may_be_paused_before_it_has_jobs(db: Db) -> None:
    call(db, "pause", queue="new")
    enqueue(db, queue="new")
    assert claim(db) == []


def test_a_pause_counts_from_its_commit_for_claims_that_come_later(
    db: Db, connect: Callable[..., Db]
) -> None:
    enqueue(db)
    enqueue(db)
    operator = connect()
    operator.execute("begin")
    call(operator, "pause", queue="default")
    assert len(claim(db)) == 1
    operator.execute("commit")
    assert claim(db) == []


def test_exhausted_jobs_of_a_paused_queue_are_ended_by_maintenance(db: Db) -> None:
    job = leased(db, max_lost_leases=1)
    expire(db, job["job_id"])
    call(db, "pause", queue="default")
    call(db, "maintain")
    assert state(db, job["job_id"]) == "failed"


@pytest.mark.parametrize("verb", ["pause", "resume"])
def test_absurd_names_are_refused(db: Db, verb: str) -> None:
    refuses(
        db, verb, {}, [({"queue": ""}, "22023"), ({"queue": "q" * 201}, "22023")]
    )  # fmt: skip


# Limits


def test_no_more_than_max_running_hold_an_unexpired_lease(db: Db) -> None:
    for _ in range(4):
        enqueue(db)
    call(db, "limit_queue", queue="default", max_running=2)
    jobs = claim(db, max_jobs=10)
    assert len(jobs) == 2
    assert claim(db, max_jobs=10) == []
    call(db, "complete", **own(jobs[0]))
    assert len(claim(db, max_jobs=10)) == 1
    expire(db, jobs[1]["job_id"])
    assert [job["job_id"] for job in claim(db, max_jobs=10)] == [jobs[1]["job_id"]]


def test_no_more_than_max_starts_in_the_interval(db: Db) -> None:
    for _ in range(5):
        enqueue(db)
    call(db, "limit_queue", queue="default", max_starts=2, starts_per="1 hour")
    jobs = claim(db, max_jobs=10)
    assert len(jobs) == 2
    call(db, "complete_many", **pairs(*jobs))
    assert claim(db, max_jobs=10) == []
    query(
        db,
        "update taskboard.queue_starts set started_at = started_at - %(hour)s",
        hour=timedelta(hours=1),
    )
    assert len(claim(db, max_jobs=10)) == 2


def test_a_limited_queue_holds_up_no_other(db: Db) -> None:
    enqueue(db, queue="limited")
    job_id = enqueue(db)
    call(db, "limit_queue", queue="limited", max_running=0)
    assert [job["job_id"] for job in claim(db, max_jobs=10)] == [job_id]


def test_limits_left_out_are_lifted_and_a_pause_stays(db: Db) -> None:
    enqueue(db)
    call(db, "pause", queue="default")
    call(db, "limit_queue", queue="default", max_running=0)
    call(db, "limit_queue", queue="default", lease="7 s")
    assert claim(db) == []
    call(db, "resume", queue="default")
    assert claim_one(db)["lease"] == timedelta(seconds=7)


def test_absurd_limits_are_refused(db: Db) -> None:
    refuses(
        db,
        "limit_queue",
        {"queue": "slow"},
        [
            ({"queue": None}, "22004"),
            ({"queue": ""}, "22023"),
            ({"max_running": -1}, "22023"),
            ({"max_starts": -1, "starts_per": "1 s"}, "22023"),
            ({"max_starts": 1}, "22023"),
            ({"starts_per": "1 s"}, "22023"),
            ({"max_starts": 1, "starts_per": "0"}, "22023"),
            ({"max_starts": 1, "starts_per": "-1 s"}, "22023"),
            ({"max_starts": 1, "starts_per": "1 year"}, "22023"),
            ({"lease": "0"}, "22023"),
            ({"lease": "25 hours"}, "22023"),
        ],
    )
