"""Writes down who ran what from when to when, by the database's clock, and holds it against limits.

A verb and its line in the log are one statement: a session that is killed leaves both or neither.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg

LOG = """
create table public.log (
  job_id uuid, lease_token uuid, queue text, what text, at timestamptz, until timestamptz)"""

# A claim counts from when its lease began to when it ends; what a verb gave back, from when it did.
CLAIM = """
insert into public.log
select c.job_id, c.lease_token, c.queue, 'claim', c.lease_expires_at - c.lease, c.lease_expires_at
from taskboard.claim(%(queues)s, max_jobs => %(max_jobs)s, lease => %(lease)s) as c
returning job_id, lease_token"""
RENEW = """
insert into public.log (job_id, lease_token, what, until)
select r.job_id, %(token)s, 'renew', r.lease_expires_at
from taskboard.renew(%(job)s, %(token)s, %(lease)s) as r"""
ENDS = {
    "complete": "select job_id, finished_at as at from taskboard.complete(%(job)s, %(token)s)",
    "fail": "select job_id, claimable_at as at"
            " from taskboard.fail(%(job)s, %(token)s, 'no', retry_in => '0')",
    "release": "select job_id, claimable_at as at from taskboard.release(%(job)s, %(token)s)",
}  # fmt: skip
END = """
insert into public.log (job_id, lease_token, what, at)
select e.job_id, %(token)s, %(verb)s, e.at from ({}) as e"""


@dataclass(frozen=True, slots=True)
class Limit:
    """The limits of one queue; None is no limit."""

    max_running: int | None = None
    max_starts: int | None = None
    starts_per: timedelta = timedelta(0)


@dataclass(frozen=True, slots=True)
class Run:
    """One attempt: from its claim until it was given back or ended, or its lease lapsed."""

    queue: str
    began: datetime
    ended: datetime


def claim(
    conn: psycopg.Connection[Any], queues: list[str] | None = None, max_jobs: int = 1,
    lease: str = "10 s",
) -> list[tuple[UUID, UUID]]:  # fmt: skip
    return conn.execute(CLAIM, {"queues": queues, "max_jobs": max_jobs, "lease": lease}).fetchall()


def renew(
    conn: psycopg.Connection[Any], job: UUID, token: UUID, lease: str | None = None
) -> None:
    conn.execute(RENEW, {"job": job, "token": token, "lease": lease})


def end(conn: psycopg.Connection[Any], verb: str, job: UUID, token: UUID) -> None:
    conn.execute(END.format(ENDS[verb]), {"job": job, "token": token, "verb": verb})


def read(conn: psycopg.Connection[Any]) -> list[Run]:
    """Put the log together, one run for each lease token."""
    lines: dict[UUID, list[tuple[str, str, datetime, datetime]]] = defaultdict(list)
    for token, *line in conn.execute("select lease_token, queue, what, at, until from public.log"):
        lines[token].append(tuple(line))
    runs = []
    for of_token in lines.values():
        ((queue, began),) = [(queue, at) for queue, what, at, _ in of_token if what == "claim"]
        lapses = max(until for *_, until in of_token if until is not None)
        # A late completion is accepted, but what it ends did not run since its lease lapsed.
        ended = min([at for _, what, at, _ in of_token if what in ENDS] + [lapses])
        runs.append(Run(queue, began, ended))
    return runs


def most_at_once(runs: Sequence[Run]) -> int:
    """The most that ran at any instant; what ends as another begins makes room for it."""
    running = most = 0
    for _, step in sorted([(r.began, 1) for r in runs] + [(r.ended, -1) for r in runs]):
        running += step
        most = max(most, running)
    return most


def most_starts(runs: Sequence[Run], interval: timedelta) -> int:
    """The most starts in any interval of that length, wherever it begins."""
    starts = sorted(run.began for run in runs)
    first = most = 0
    for n, start in enumerate(starts):
        while start - starts[first] >= interval:
            first += 1
        most = max(most, n - first + 1)
    return most


def violations(runs: Sequence[Run], limits: Mapping[str, Limit]) -> list[str]:
    """Say where a history exceeds a limit."""
    found = []
    for queue, limit in limits.items():
        of_queue = [run for run in runs if run.queue == queue]
        running = most_at_once(of_queue)
        if limit.max_running is not None and running > limit.max_running:
            found.append(f"{queue}: {running} at once")
        if limit.max_starts is None:
            continue
        starts = most_starts(of_queue, limit.starts_per)
        if starts > limit.max_starts:
            found.append(f"{queue}: {starts} starts in {limit.starts_per}")
    return found
