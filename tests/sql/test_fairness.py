"""Strict priority says whom it lets wait; jobs that fail never fill every slot."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from verbs import Db, call, claim, enqueue, own, pairs, query, state

pytestmark = pytest.mark.rows_only

BATCH, BAD, GOOD = 8, 8, 200


def fill(db: Db, kind: str, count: int) -> None:
    call(db, "enqueue_many", kind=kind, payloads=[{}] * count, max_attempts=1000)


def rounds(db: Db, batch: int, **how: Any) -> tuple[int, int]:
    """Work until good jobs are done and bad ones were tried; how many batches, and failures."""
    done = batches = failures = 0
    while done < GOOD or failures < BAD:
        jobs = claim(db, max_jobs=batch)
        batches += 1
        good = [job for job in jobs if job["kind"] == "good"]
        done += len(call(db, "complete_many", **pairs(*good)))
        for job in jobs:
            if job["kind"] == "bad":
                call(db, "fail", **own(job), error="no such mailbox", **how)
                failures += 1
        assert batches <= 10 * GOOD
    return batches, failures


def test_less_urgent_jobs_wait_while_more_urgent_ones_keep_coming_and_a_figure_says_how_long(
    db: Db,
) -> None:
    low = enqueue(db, priority=9)
    query(
        db, "update taskboard.jobs set claimable_at = claimable_at - interval '1 hour'"
        " where id = %(low)s", low=low,
    )  # fmt: skip
    for _ in range(50):
        for _ in range(2):
            enqueue(db, priority=1)
        (job,) = claim(db)
        assert job["priority"] == 1
        call(db, "complete", **own(job))
    (figure,) = query(
        db, "select clock_timestamp() - oldest_ready_at as waits from taskboard.queue_stats"
        " where priority = 9"
    )  # fmt: skip
    assert figure["waits"] > timedelta(hours=1)
    assert state(db, low) == "ready"
    # Once the urgent ones end, it is its turn.
    call(db, "complete_many", **pairs(*claim(db, max_jobs=50)))
    assert claim(db)[0]["job_id"] == low


@pytest.mark.parametrize("batch", [1, BATCH])
def test_jobs_that_always_fail_wait_their_backoff_and_hardly_slow_down_the_others(
    db: Db, batch: int
) -> None:
    call(db, "configure", setting="backoff", value="10 minutes")  # however slow the machine is
    fill(db, "bad", BAD)
    fill(db, "good", GOOD)
    batches, failures = rounds(db, batch)
    assert failures == BAD, "each waits for its backoff until it is tried again"
    assert batches <= 1.2 * GOOD / batch


def test_jobs_that_fail_and_are_tried_again_at_once_take_at_most_half_of_each_batch(
    db: Db,
) -> None:
    fill(db, "bad", BAD)
    fill(db, "good", GOOD)
    batches, _ = rounds(db, BATCH, retry_in="0")
    assert batches <= 2 * GOOD / BATCH + 2


def test_jobs_that_fail_in_front_of_a_limited_queue_leave_room_for_others(db: Db) -> None:
    call(db, "configure", setting="backoff", value="10 minutes")
    call(db, "limit_queue", queue="default", max_running=BATCH)
    fill(db, "bad", BAD)
    fill(db, "good", GOOD)
    batches, failures = rounds(db, BATCH)
    assert failures == BAD and batches <= 1.2 * GOOD / BATCH
