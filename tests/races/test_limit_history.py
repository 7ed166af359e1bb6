"""Limits hold at every instant of the recorded history, whatever happens to jobs and sessions."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from races import limit_history as history
from races.limit_history import Limit, Run, violations
from races.sessions import Session
from support import rows, session

Named = Callable[[str], Session]

SLIDING = timedelta(seconds=0.25)
LIMITS = {
    "narrow": Limit(max_running=2),
    "slow": Limit(max_starts=6, starts_per=SLIDING),
    "both": Limit(max_running=3, max_starts=9, starts_per=SLIDING),
}
WORKERS = 6
LEASE = "0.12 s"  # so short that some lapse while their worker stalls


def set_limits(conn: psycopg.Connection[Any], limits: dict[str, Limit]) -> None:
    conn.execute(history.LOG)
    for queue, limit in limits.items():
        conn.execute(
            "select taskboard.limit_queue(%s, %s, %s, %s)",
            [queue, limit.max_running, limit.max_starts,
             limit.starts_per if limit.max_starts else None],
        )  # fmt: skip


def fill(conn: psycopg.Connection[Any], queue: str, count: int) -> None:
    conn.execute(
        "select taskboard.enqueue_many('k', %s, queue => %s, max_lost_leases => 1000,"
        " max_attempts => 1000)",
        [[Jsonb(n) for n in range(count)], queue],
    )


def work(dsn: str, seed: int, until: float) -> int:
    """Claim, and do with each job what comes; a session that was killed is made anew."""
    dice, killed = random.Random(seed), 0
    while time.monotonic() < until:
        try:
            with session(dsn, "worker") as conn:
                while time.monotonic() < until:
                    queues = dice.choice([None, ["narrow", "slow"], ["both"]])
                    owners = history.claim(conn, queues, dice.randint(1, 5), LEASE)
                    for owner in owners:
                        what = dice.choice(["complete"] * 4 + ["fail", "release", "renew", "stall"])
                        if what == "renew":
                            history.renew(conn, *owner)
                            what = "complete"
                        if what == "stall":  # now and then it comes back late
                            time.sleep(dice.choice([0.0, 0.15]))
                            what = dice.choice(["complete", ""])
                        if what:
                            time.sleep(dice.random() / 500)
                            history.end(conn, what, *owner)
        except psycopg.OperationalError:
            killed += 1
    return killed


def kill_workers(dsn: str, until: float) -> None:
    dice = random.Random("killer")
    with session(dsn, "killer") as conn:
        while time.monotonic() < until:
            time.sleep(0.1)
            pids = rows(
                conn, "select pid from pg_stat_activity where application_name = 'worker'"
                " and datname = current_database()",
            )  # fmt: skip
            if pids:
                with suppress(psycopg.Error):
                    conn.execute("select pg_terminate_backend(%s)", dice.choice(pids))


def test_limits_hold_at_every_instant_with_failures_lapses_and_sessions_that_are_killed(
    db: psycopg.Connection[Any], dsn: str
) -> None:
    set_limits(db, LIMITS)
    for queue in (*LIMITS, "free"):
        fill(db, queue, 2000)
    until = time.monotonic() + 4
    with ThreadPoolExecutor(WORKERS + 1) as threads:
        threads.submit(kill_workers, dsn, until)
        killed = sum(threads.map(work, [dsn] * WORKERS, range(WORKERS), [until] * WORKERS))
    runs = history.read(db)
    assert violations(runs, LIMITS) == []
    # The load was one: every queue was used up to its limit, and everything bad did happen.
    found = {queue: [run for run in runs if run.queue == queue] for queue in (*LIMITS, "free")}
    assert history.most_at_once(found["narrow"]) == 2
    assert history.most_starts(found["slow"], SLIDING) == 6
    assert history.most_starts(found["both"], SLIDING) <= 9
    assert history.most_at_once(found["free"]) > 3
    assert killed > 3
    ended = dict(rows(db, "select what, count(*) from public.log group by what"))
    assert ended.keys() == {"claim", "renew", *history.ENDS}
    lapsed = "select count(*) from taskboard.incident_list where what = 'lease_lapsed'"
    assert rows(db, lapsed)[0][0] > 3


TWO_AT_ONCE = {
    "running": Limit(max_running=3),
    "starts": Limit(max_starts=3, starts_per=timedelta(hours=1)),
}


@pytest.mark.parametrize("limit", TWO_AT_ONCE)
def test_two_claims_at_once_start_no_more_than_the_limit(named: Named, limit: str) -> None:
    a, b = named("A"), named("B")
    limits = {"q": TWO_AT_ONCE[limit]}
    set_limits(a.conn, limits)
    fill(a.conn, "q", 10)
    a.begin()
    history.claim(a.conn, max_jobs=2)
    history.claim(b.conn, max_jobs=2)
    a.end("commit")
    history.claim(b.conn, max_jobs=5)
    assert violations(history.read(a.conn), limits) == []
    assert history.most_at_once(history.read(a.conn)) == 3


def test_a_start_counts_from_the_claim_however_old_its_transaction_is(named: Named) -> None:
    a = named("A")
    set_limits(a.conn, {"q": Limit(max_starts=3, starts_per=timedelta(hours=1))})
    fill(a.conn, "q", 3)
    a.begin()
    a.sql("select pg_sleep(0.01)")
    history.claim(a.conn, max_jobs=3)
    a.end("commit")
    (counted,) = a.sql("select started_at from taskboard.queue_starts")[0]
    assert counted >= max(run.began for run in history.read(a.conn))


def test_a_renewal_whose_transaction_outlasts_the_old_deadline_is_that_of_a_stalled_worker(
    named: Named,
) -> None:
    a, b = named("A"), named("B")
    limits = {"q": Limit(max_running=1)}
    set_limits(a.conn, limits)
    fill(a.conn, "q", 2)
    ((job, token),) = history.claim(a.conn, lease="0.2 s")
    a.begin()
    history.renew(a.conn, job, token, "10 s")
    b.sql("select pg_sleep(extract(epoch from until - clock_timestamp()) + 0.01) from public.log")
    # Its lease counts as lapsed, and yet nobody can take the job from it.
    ((other, _),) = history.claim(b.conn)
    assert other != job
    a.end("commit")
    assert violations(history.read(a.conn), limits) == ["q: 2 at once"]


def at(seconds: float) -> datetime:
    return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)


def test_the_program_that_checks_histories_finds_what_is_wrong_in_one() -> None:
    limits = {"q": Limit(max_running=2, max_starts=2, starts_per=timedelta(seconds=10))}

    def judge(*spans: tuple[float, float]) -> list[str]:
        return violations([Run("q", at(begin), at(end)) for begin, end in spans], limits)

    assert judge((0, 5), (1, 30), (10, 20), (20, 21)) == []
    assert judge((0, 50), (1, 50), (20, 21)) == ["q: 3 at once"]
    assert judge((0, 1), (4, 5), (9.9, 11)) == ["q: 3 starts in 0:00:10"]
    assert judge((0, 1), (9.9, 11), (10, 12), (19.8, 20)) == ["q: 3 starts in 0:00:10"]
