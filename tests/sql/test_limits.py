"""Limits of a queue hold at every instant, however many claim at once."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from verbs import (
    Db,
    Row,
    call,
    claim,
    claim_one,
    enqueue,
    leased,
    own,
    pairs,
    query,
    state,
)

from support import expire, wait_for

pytestmark = pytest.mark.rows_only

Connect = Callable[..., Db]

CLAIMERS = 8


def add(db: Db, queue: str, count: int, **options: Any) -> None:
    call(db, "enqueue_many", kind="mail", payloads=[{}] * count, queue=queue, **options)


def waits_for_nobody(session: Db) -> Db:
    """Let a session's statements fail that wait for another transaction."""
    query(session, "set statement_timeout = '1 s'")
    return session


def run_down(session: Db, seed: int, until: float) -> int:
    """Claim and complete until nothing is left; how many jobs that were."""
    dice = random.Random(seed)
    done = 0
    while time.monotonic() < until:
        jobs = claim(session, max_jobs=dice.randint(1, 4))
        time.sleep(dice.random() / 100)
        done += len(call(session, "complete_many", **pairs(*jobs)))
        if not jobs and not query(session, "select 1 from taskboard.jobs limit 1"):
            break
    return done


def runs(db: Db, queue: str) -> list[tuple[datetime, datetime]]:
    """From when to when each job of a queue ran, by the history, in the order of the starts."""
    rows = query(
        db,
        "select claimed_at, finished_at from taskboard.history where queue = %(queue)s"
        " order by claimed_at",
        queue=queue,
    )
    return [(row["claimed_at"], row["finished_at"]) for row in rows]


def most_at_once(spans: list[tuple[datetime, datetime]]) -> int:
    """The most that ran at any instant."""
    steps = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    running = most = 0
    for _, step in steps:
        running += step
        most = max(most, running)
    return most


def most_starts(spans: list[tuple[datetime, datetime]], interval: timedelta) -> int:
    """The most starts in any interval of a length."""
    starts = [start for start, _ in spans]
    return max(sum(first <= start < first + interval for start in starts) for first in starts)


def test_with_eight_claimers_limits_hold_at_every_instant_and_in_every_interval(
    db: Db, connect: Connect
) -> None:
    interval = timedelta(seconds=0.3)
    call(db, "limit_queue", queue="narrow", max_running=3)
    call(db, "limit_queue", queue="slow", max_starts=5, starts_per=interval)
    call(db, "limit_queue", queue="both", max_running=2, max_starts=7, starts_per=interval)
    counts = {"narrow": 60, "slow": 20, "both": 20, "free": 100}
    for queue, count in counts.items():
        add(db, queue, count)
    sessions = [connect(f"claimer {n}") for n in range(CLAIMERS)]
    until = time.monotonic() + 15
    with ThreadPoolExecutor(CLAIMERS) as threads:
        done = threads.map(run_down, sessions, range(CLAIMERS), [until] * CLAIMERS)
    assert sum(done) == 200
    found = {queue: runs(db, queue) for queue in counts}
    assert {queue: len(spans) for queue, spans in found.items()} == counts
    assert most_at_once(found["narrow"]) == 3
    assert most_starts(found["slow"], interval) == 5
    assert most_at_once(found["both"]) <= 2
    assert most_starts(found["both"], interval) <= 7
    assert most_at_once(found["free"]) > 3, "too little happened at once: this shows nothing"


@pytest.mark.parametrize("holder", ["claim", "operator"])
def test_a_limits_row_that_is_busy_means_none_of_that_queue_and_never_a_wait(
    db: Db, connect: Connect, holder: str
) -> None:
    call(db, "limit_queue", queue="limited", max_running=10)
    add(db, "limited", 5)
    first, second = connect("first"), waits_for_nobody(connect("second"))
    query(first, "begin")
    if holder == "claim":
        assert len(claim(first)) == 1
    else:
        call(first, "limit_queue", queue="limited", max_running=1)
    assert claim(second, max_jobs=10) == []
    other = enqueue(db, queue="other")
    assert [job["job_id"] for job in claim(second, max_jobs=10)] == [other]
    query(first, "commit")
    assert len(claim(second, max_jobs=10)) == (4 if holder == "claim" else 1)


def test_a_claim_that_is_rolled_back_counts_neither_as_running_nor_as_a_start(
    db: Db, connect: Connect
) -> None:
    call(db, "limit_queue", queue="q", max_running=2, max_starts=2, starts_per="1 hour")
    add(db, "q", 4)
    session = connect()
    query(session, "begin")
    assert len(claim(session, max_jobs=10)) == 2
    query(session, "rollback")
    assert len(claim(db, max_jobs=10)) == 2


def test_a_job_given_back_counts_as_started_and_no_more_as_running(db: Db) -> None:
    call(db, "limit_queue", queue="q", max_running=1, max_starts=3, starts_per="1 hour")
    enqueue(db, queue="q")
    for verb in ("release", "fail"):
        job = claim_one(db)
        assert claim(db) == []
        call(db, verb, **own(job), **({"retry_in": "0"} if verb == "fail" else {}))
    assert len(claim(db)) == 1
    expire(db, job["job_id"])
    assert claim(db) == [], "that was the third start"


def test_expired_leases_do_not_count_so_that_stalled_workers_may_exceed_the_limit(
    db: Db,
) -> None:
    call(db, "limit_queue", queue="q", max_running=2)
    add(db, "q", 4, max_lost_leases=100)
    stalled = claim(db, max_jobs=10)
    assert len(stalled) == 2
    for job in stalled:
        expire(db, job["job_id"])
    assert len(claim(db, max_jobs=10)) == 2
    # Those who stalled may complete what nobody has taken over.
    assert claim(db, max_jobs=10) == []


def test_a_batch_takes_from_limited_and_other_queues_no_more_than_each_may_give(
    db: Db, connect: Connect
) -> None:
    call(db, "limit_queue", queue="two", max_running=2)
    call(db, "limit_queue", queue="three", max_starts=3, starts_per="1 hour")
    call(db, "pause", queue="paused")
    for queue in ("two", "three", "paused", "open"):
        add(db, queue, 4)
    assert len(claim(connect(), max_jobs=1)) == 1
    jobs = claim(db, max_jobs=100)
    assert len(jobs) == 8
    held = query(
        db,
        "select queue, count(*) as jobs from taskboard.live_jobs where state = 'running'"
        " group by queue order by queue",
    )
    assert {row["queue"]: row["jobs"] for row in held} == {"open": 4, "three": 3, "two": 2}


def test_a_limited_queue_gives_its_jobs_in_their_order(db: Db) -> None:
    call(db, "limit_queue", queue="q", max_running=1)
    jobs = [enqueue(db, queue="q", priority=priority) for priority in (7, 7, 1)]
    got: list[UUID] = []
    for _ in jobs:
        job = claim_one(db)
        got.append(job["job_id"])
        call(db, "complete", **own(job))
    assert got == [jobs[2], jobs[0], jobs[1]]


def test_a_backlog_elsewhere_does_not_starve_a_limited_queue_of_higher_priority(db: Db) -> None:
    call(db, "limit_queue", queue="limited", max_running=1)
    add(db, "open", 5, priority=9)
    urgent = enqueue(db, queue="limited", priority=0)
    assert claim_one(db)["job_id"] == urgent


def test_priorities_hold_across_limited_and_other_queues(db: Db) -> None:
    call(db, "limit_queue", queue="limited", max_running=3)
    call(db, "limit_queue", queue="slow", max_starts=2, starts_per="1 hour")
    for queue in ("limited", "open", "slow"):
        for priority in (9, 0, 5):
            add(db, queue, 2, priority=priority)
    got = [(job["queue"], job["priority"]) for _ in range(12) for job in claim(db)]
    assert [priority for _, priority in got] == sorted(priority for _, priority in got)
    assert sorted(got) == [
        *[("limited", priority) for priority in (0, 0, 5)],
        *[("open", priority) for priority in (0, 0, 5, 5, 9, 9)],
        *[("slow", priority) for priority in (0, 0)],
    ]


def test_an_urgent_job_comes_before_a_backlog_in_a_limited_queue(db: Db) -> None:
    call(db, "limit_queue", queue="bulk", max_running=100)
    add(db, "bulk", 50, priority=9)
    urgent = enqueue(db, queue="open", priority=0)
    assert claim_one(db)["job_id"] == urgent
    urgent = enqueue(db, queue="open", priority=0)
    assert urgent in {job["job_id"] for job in claim(db, max_jobs=8)}


def test_half_of_what_a_limited_queue_may_give_is_left_to_fresh_jobs(db: Db) -> None:
    call(db, "limit_queue", queue="q", max_running=4)
    add(db, "q", 8)
    call(db, "limit_queue", queue="q", max_running=8)
    back = claim(db, max_jobs=8)
    add(db, "q", 8)
    for job in back:
        call(db, "release", **own(job))
    call(db, "limit_queue", queue="q", max_running=4)
    attempts = [job["attempt"] for job in claim(db, max_jobs=100)]
    assert len(attempts) == 4 and set(attempts) == {1, 2}


def test_a_claim_holds_only_the_queues_from_which_it_takes(db: Db, connect: Connect) -> None:
    for queue in ("one", "two", "full", "idle"):
        call(db, "limit_queue", queue=queue, max_running=1)
    for queue in ("one", "two"):
        enqueue(db, queue=queue, priority=0)
    add(db, "full", 2, priority=0)
    running = claim(db, queues=["full"])
    first, second = connect("first"), waits_for_nobody(connect("second"))
    query(first, "begin")
    assert claim(first, kinds=["none"]) == []
    (taken,) = claim(first)
    for queue in {"one", "two", "full", "idle"} - {taken["queue"]}:
        call(second, "limit_queue", queue=queue, max_running=1)
    (other,) = claim(second, max_jobs=10)
    assert {taken["queue"], other["queue"]} == {"one", "two"}
    assert len(running) == 1


def test_a_paused_queue_elsewhere_leaves_claims_their_quick_way_and_a_pause_counts_at_once(
    db: Db, connect: Connect
) -> None:
    session = connect("worker")
    query(session, "set track_functions = 'all'")
    calls = (
        "select coalesce(sum(calls), 0) as calls from pg_stat_xact_user_functions"
        " where schemaname = 'taskboard' and funcname in ('pick_jobs', 'room_in')"
    )

    def claims() -> tuple[int, int]:
        """How many jobs a claim gets, and how often it goes the long way."""
        query(session, "begin")
        (before,) = query(session, calls)
        jobs = claim(session, queues=["default", "other"])
        (after,) = query(session, calls)
        query(session, "commit")
        return len(jobs), int(after["calls"] - before["calls"])

    add(db, "default", 400)
    call(db, "limit_queue", queue="elsewhere", max_running=1)
    call(db, "pause", queue="elsewhere")
    claims()
    wait_for(lambda: claims() == (1, 0), what="the quick way, once there is a new plan")
    call(db, "pause", queue="default")
    assert claims()[0] == 0
    call(db, "resume", queue="default")
    assert claims()[0] == 1
    wait_for(lambda: claims() == (1, 0), what="the quick way, once there is a new plan")
    call(db, "limit_queue", queue="default", max_running=0)
    assert claims()[0] == 0
    call(db, "limit_queue", queue="default")
    assert claims()[0] == 1
    call(db, "pause")
    assert claims()[0] == 0


def test_a_limit_may_be_lowered_under_what_runs_and_raised_again(db: Db) -> None:
    add(db, "q", 6)
    jobs = claim(db, max_jobs=3)
    call(db, "limit_queue", queue="q", max_running=2)
    assert claim(db, max_jobs=10) == []
    call(db, "complete", **own(jobs[0]))
    assert claim(db, max_jobs=10) == []
    call(db, "complete", **own(jobs[1]))
    assert len(claim(db, max_jobs=10)) == 1
    call(db, "limit_queue", queue="q", max_running=4)
    assert len(claim(db, max_jobs=10)) == 2
    call(db, "limit_queue", queue="q", max_running=0)
    assert claim(db, max_jobs=10) == []


def test_past_starts_are_forgotten_as_the_interval_moves_on(db: Db) -> None:
    call(db, "limit_queue", queue="q", max_starts=2, starts_per="0.1 s")
    add(db, "q", 6)
    got: list[Row] = []
    until = time.monotonic() + 5
    while len(got) < 6 and time.monotonic() < until:
        got += claim(db, max_jobs=10)
    assert len(got) == 6
    # Now and then what is past is deleted, too: by one claim in a hundred or so.
    add(db, "q", 3000)
    call(db, "limit_queue", queue="q", max_starts=3000, starts_per="0.01 s")
    counts = [0]
    until = time.monotonic() + 30
    while counts[-1] == max(counts) and time.monotonic() < until:
        claim(db)
        (row,) = query(db, "select count(*) as starts from taskboard.queue_starts")
        counts.append(row["starts"])
    assert counts[-1] < 20, "past starts are kept"


def test_a_claim_reads_nothing_of_the_starts_that_are_past_and_deleted(
    db: Db, connect: Connect
) -> None:
    call(db, "limit_queue", queue="q", max_starts=1000, starts_per="1 minute")
    add(db, "q", 20)
    reader = connect("reader")
    before = least_touched(db)
    query(reader, "begin isolation level repeatable read")
    query(reader, "select count(*) from taskboard.queue_starts")
    query(
        db,
        "insert into taskboard.queue_starts select 'q', now() - make_interval(mins => n), 1"
        " from generate_series(2, 20000) as n",
    )
    query(db, "delete from taskboard.queue_starts where started_at < now() - interval '1 minute'")
    assert least_touched(db) < before + 50
    query(reader, "rollback")


def least_touched(db: Db) -> int:
    """How many buffers a claim touches; the least of some, for one in many cleans up."""
    found = []
    for _ in range(5):
        (row,) = query(db, "explain (analyze, buffers, format json) select taskboard.claim()")
        (plan,) = row["QUERY PLAN"]
        found.append(plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"])
    return min(found)


def test_a_queue_without_limits_has_no_row_to_wait_for(db: Db, connect: Connect) -> None:
    for queue in ("default", "other"):
        enqueue(db, queue=queue)
    first, second = connect(), waits_for_nobody(connect())
    query(first, "begin")
    claim(first, queues=["other"])
    assert len(claim(second, queues=["default"])) == 1
    assert query(db, "select 1 from taskboard.queue_starts") == []


def test_a_claim_where_nothing_is_limited_calls_and_reads_nothing_of_limits(db: Db) -> None:
    for queue in ("default", "other"):
        enqueue(db, queue=queue)
    spent = (
        "select coalesce((select sum(f.calls) from pg_stat_xact_user_functions as f"
        " where f.schemaname = 'taskboard' and f.funcname in ('room_in', 'count_starts')), 0)"
        " + (select coalesce(t.seq_scan, 0) + coalesce(t.idx_scan, 0) + t.n_tup_ins + t.n_tup_del"
        " from pg_stat_xact_user_tables as t where t.relname = 'queue_starts') as spent"
    )

    def spends(queues: list[str] | None) -> int:
        query(db, "begin")
        query(db, "set local track_functions = 'all'")
        # Counted from here: what this session did before may not have been reported yet.
        (before,) = query(db, spent)
        assert len(claim(db, queues=queues)) == 1
        (after,) = query(db, spent)
        query(db, "rollback")
        return int(after["spent"] - before["spent"])

    assert spends(None) == spends(["other"]) == 0
    call(db, "limit_queue", queue="default", max_starts=5, starts_per="1 minute")
    assert spends(None) > 0, "else this measures nothing"


@pytest.mark.parametrize("queue", ["default", None])
def test_no_claim_that_begins_after_a_pause_gets_anything_until_it_is_ended(
    db: Db, connect: Connect, queue: str | None
) -> None:
    add(db, "default", 400)
    sessions = [connect(f"claimer {n}") for n in range(4)]
    until = time.monotonic() + 5
    calls: list[tuple[float, int]] = []

    def work(session: Db) -> None:
        while time.monotonic() < until:
            began = time.monotonic()
            jobs = claim(session)
            calls.append((began, len(jobs)))
            call(session, "complete_many", **pairs(*jobs))
            time.sleep(0.001)

    with ThreadPoolExecutor(4) as threads:
        working = [threads.submit(work, session) for session in sessions]
        time.sleep(0.15)
        call(db, "pause", queue=queue)
        paused = time.monotonic()
        time.sleep(0.15)
        resumed = time.monotonic()
        call(db, "resume", queue=queue)
        time.sleep(0.15)
        until = 0
        for each in working:
            each.result()
    assert sum(got for began, got in calls if began < paused) > 0
    during = [got for began, got in calls if paused < began < resumed - 0.05]
    assert len(during) > 3 and sum(during) == 0
    assert sum(got for began, got in calls if began > resumed) > 0


def test_what_runs_counts_while_a_queue_is_paused_and_limited(db: Db) -> None:
    add(db, "q", 3)
    call(db, "limit_queue", queue="q", max_running=1)
    job = claim_one(db)
    call(db, "pause", queue="q")
    assert claim(db) == []
    call(db, "resume", queue="q")
    assert claim(db) == []
    call(db, "complete", **own(job))
    assert len(claim(db)) == 1
    assert state(db, job["job_id"]) == "completed"


def test_a_held_job_does_not_count_as_running(db: Db) -> None:
    call(db, "limit_queue", queue="q", max_running=1)
    first = leased(db, queue="q", on_unknown="hold")
    call(db, "begin_effect", **own(first))
    expire(db, first["job_id"])
    assert call(db, "begin_effect", **own(claim_one(db)))[0]["state"] == "held"
    enqueue(db, queue="q")
    assert len(claim(db)) == 1
