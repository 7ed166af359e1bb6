"""Batches over the same jobs in opposite orders, thousands of rounds, with a short fuse."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from typing import Any

from psycopg.types.json import Jsonb

from races.sessions import Session

Named = Callable[[str], Session]
JOBS = 8


def batch(jobs: list[Any]) -> dict[str, list[Any]]:
    """The arguments of a batch over these jobs."""
    return {
        "job_ids": [job.job_id for job in jobs],
        "lease_tokens": [job.lease_token for job in jobs],
    }


def claimed(by: Session) -> list[Any]:
    """Claim a batch of new jobs, in id order."""
    by.call("enqueue_many", kind="k", payloads=[Jsonb(n) for n in range(JOBS)])
    jobs = by.call("claim", max_jobs=JOBS, worker="w")
    assert len(jobs) == JOBS
    return sorted(jobs, key=lambda job: job.job_id)


def follow_the_batch(by: Session) -> None:
    """Let plans visit rows in the order of the arguments, wherever ours leave the order open."""
    for path in ("seqscan", "bitmapscan", "hashjoin", "mergejoin"):
        by.sql(f"set enable_{path} = off")
    by.sql("set jit = off")  # where such a path is the only one, its cost is a penalty


def rounds(by: Session, count: int, calls: list[tuple[str, dict[str, Any]]]) -> None:
    """Make calls in turn, each in a transaction that is rolled back, so that nothing is used up."""
    by.sql("set deadlock_timeout = '10ms'")
    follow_the_batch(by)
    for verb, arguments in islice(cycle(calls), count):
        by.begin()
        by.call(verb, **arguments)
        by.end("rollback")


def at_the_same_time(*work: Callable[[], None]) -> None:
    """Run all of it in threads; raise what the first of them raised."""
    with ThreadPoolExecutor(len(work)) as threads:
        for future in [threads.submit(one) for one in work]:
            future.result()


def test_completions_in_opposite_orders(named: Named) -> None:
    a, b = named("A"), named("B")
    jobs = claimed(a)
    at_the_same_time(
        lambda: rounds(a, 500, [("complete_many", batch(jobs))]),
        lambda: rounds(b, 500, [("complete_many", batch(jobs[::-1]))]),
    )


def test_completions_against_renewals_evictions_and_reclaims(named: Named) -> None:
    a, b, c, d = named("A"), named("B"), named("C"), named("D")
    jobs = claimed(a)
    backwards = batch(jobs[::-1])
    at_the_same_time(
        lambda: rounds(a, 400, [("complete_many", backwards), ("renew_many", backwards)]),
        lambda: rounds(b, 400, [("renew_many", batch(jobs)), ("complete_many", batch(jobs))]),
        lambda: rounds(c, 400, [("evict", {"worker": "w"})]),
        lambda: rounds(d, 400, [("claim", {"max_jobs": JOBS}), ("maintain", {})]),
    )


def test_batch_in_the_opposite_order_waits_for_the_first_row_and_holds_none(named: Named) -> None:
    a, b, observer = named("A"), named("B"), named("observer")
    first, *rest = claimed(a)
    a.begin()
    a.call("complete", job_id=first.job_id, lease_token=first.lease_token)
    follow_the_batch(b)
    pending = b.start("complete_many", **batch([*rest[::-1], first])).blocks()
    # Rows are locked in id order: it waits for the first of them and has no other yet.
    outcomes = {row.outcome for row in observer.at_once("renew_many", **batch(rest))}
    assert outcomes == {"renewed"}
    a.end("commit")
    assert len(pending.rows()) == JOBS
