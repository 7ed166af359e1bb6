"""All that the board asks of the database: views, and one call for each verb.

Reading happens in read-only transactions whose statements are bounded in time. A page of jobs
walks the ids from the newest, as `job_list` is made for, and looks at no more than WINDOW of them
in a statement: so it costs the same however long the history is, and whatever is asked for.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import DictRow, dict_row
from psycopg_pool import AsyncConnectionPool

from taskboard.connections import connect_arguments

Row = dict[str, Any]
Ask = Callable[..., Awaitable[list[Row]]]

PAGE = 50  # rows
WINDOW = 20_000  # jobs that one statement looks at
OF_A_KEY = 2_000  # … before an index of keys is asked
LOOKS_FOR = 0.6  # seconds; then a page shows what it has, and offers to look further
ANSWERS_WITHIN = 5000  # milliseconds a statement
POOL_OF, POOL_WAITS = 4, 5.0

# Plans that cost the same at ten thousand jobs and at ten million: along the ids, without a sort.
ALONG_THE_IDS = ("enable_seqscan", "enable_bitmapscan", "enable_sort", "jit")

JOB = (
    "job_id, state, queue, kind, priority, attempt, failures, worker, created_at, claimable_at,"
    " finished_at, unique_key, serial_key"
)

ABOUT = """
select current_user as login, taskboard.version() as version,
  current_database() as database, clock_timestamp() as now,
  has_function_privilege('taskboard.resolve(uuid,text,boolean,text)', 'execute') as operator,
  has_table_privilege('taskboard.job_list', 'select') as observer
"""
QUEUES = """
select s.queue, s.kind, s.priority, s.paused, s.ready, s.scheduled, s.running, s.expired,
  s.blocked, s.held, s.oldest_ready_at
from taskboard.queue_stats as s
order by s.queue, s.priority, s.kind
"""
DEPTH = """
select coalesce(sum(s.ready + s.expired), 0)::bigint as ready,
  coalesce(sum(s.running), 0)::bigint as running,
  coalesce(sum(s.scheduled), 0)::bigint as scheduled,
  coalesce(sum(s.held), 0)::bigint as held
from taskboard.queue_stats as s
"""
MINUTE = """
select count(*) filter (where j.state = 'completed') as completed,
  count(*) filter (where j.state = 'failed') as failed,
  count(*) filter (where j.state = 'cancelled') as cancelled,
  percentile_cont(0.5) within group (
    order by extract(epoch from j.finished_at - j.claimed_at)) as half,
  percentile_cont(0.95) within group (
    order by extract(epoch from j.finished_at - j.claimed_at)) as most
from taskboard.job_list as j
where j.finished_at >= %(since)s and j.finished_at < %(until)s
"""
HELD = f"""
select {JOB}, held_step, cancel_requested_at
from taskboard.job_list
where held_step is not null and job_id < %(before)s
order by job_id desc
limit %(most)s
"""
LOOK = f"""
select {JOB}
from (
  select {JOB}
  from taskboard.job_list
  where job_id < %(before)s and job_id >= %(since)s{{within}}
  order by job_id desc
  limit %(window)s) as looked_at
where true{{where}}
order by job_id desc
limit %(most)s
"""
WINDOW_ENDS = """
select job_id
from taskboard.job_list
where job_id < %(before)s and job_id >= %(since)s{within}
order by job_id desc
offset %(window)s - 1
limit 1
"""
WITH_KEY = f"""
select {JOB}
from taskboard.jobs_with_key(%(key)s, before => %(before)s)
where job_id >= %(since)s{{where}}
order by job_id desc
limit %(most)s
"""
ONE_JOB = "select * from taskboard.job(%(job_id)s)"
DOCUMENTS = "select * from taskboard.job_documents(%(job_id)s)"
EFFECTS = """
select step, attempt, state, begun_at, ended_at, idempotency_key
from taskboard.effect_list
where job_id = %(job_id)s
order by begun_at, step
limit 500
"""
INCIDENTS_OF_JOB = """
select id, happened_at, what, worker, by_role, detail
from taskboard.incident_list
where job_id = %(job_id)s
order by id desc
limit 500
"""
INCIDENTS = """
select id, happened_at, what, job_id, queue, kind, worker, by_role, detail
from taskboard.incident_list
where id < %(before)s
order by id desc
limit %(most)s
"""
WORKERS = "select * from taskboard.worker_list order by worker limit 1000"
SCHEDULES = """
select name, cron, time_zone, queue, kind, priority, misfire, next_at, last_at, last_job_id,
  paused_at
from taskboard.schedule_list
order by name
limit 1000
"""

# One call each, with the person's name in the reason.
VERBS = {
    "retry": "select * from taskboard.retry(%(job_id)s, reason => %(reason)s)",
    "retry_failed": "select * from taskboard.retry_failed("
    "queue => %(queue)s, kind => %(kind)s, reason => %(reason)s)",
    "cancel": "select * from taskboard.cancel("
    "%(job_id)s, reason => %(reason)s, force => %(force)s)",
    "resolve": "select * from taskboard.resolve("
    "%(job_id)s, step => %(step)s, happened => %(happened)s, reason => %(reason)s)",
    "evict": "select * from taskboard.evict(%(worker)s, reason => %(reason)s)",
    "pause": "select * from taskboard.pause(%(queue)s, reason => %(reason)s)",
    "resume": "select * from taskboard.resume(%(queue)s, reason => %(reason)s)",
    "pause_schedule": "select taskboard.pause_schedule(%(name)s, paused => %(paused)s) as found",
}

LIVE = ("scheduled", "ready", "running", "expired", "blocked", "held")
FINAL = ("completed", "failed", "cancelled")
FIRST_ID, LAST_ID = UUID(int=0), UUID(int=2**128 - 1)


def texts() -> Iterator[tuple[str, str]]:
    """List all statements, by name, as `--show-sql` prints them."""
    found = {name.lower(): value for name, value in globals().items() if name.isupper()} | VERBS
    for name, text in found.items():
        if isinstance(text, str) and "taskboard." in text:
            plain = text.format(within="", where="")
            yield name, re.sub(r"%\((\w+)\)s", r":\1", plain)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a page of jobs is to show; what is empty does not matter. Older than `before`."""

    state: str = ""
    queue: str = ""
    kind: str = ""
    worker: str = ""
    key: str = ""
    since: datetime | None = None
    until: datetime | None = None
    before: UUID | None = None


@dataclass(slots=True)
class Found:
    """A page of jobs, the newest first.

    `older`: from where the next page goes on, if there may be one. `looked_at`: how many jobs were
    looked at, if the search has stopped before it was full.
    """

    jobs: list[Row] = field(default_factory=list)
    older: UUID | None = None
    looked_at: int = 0


class Database:
    """The connections of the board."""

    def __init__(self, url: str, name: str = "taskboard board") -> None:
        self.pool: AsyncConnectionPool[AsyncConnection[DictRow]] = AsyncConnectionPool(
            url, kwargs=connect_arguments(url, name) | {"row_factory": dict_row}, min_size=0,
            max_size=POOL_OF, timeout=POOL_WAITS, open=False, name="board",
            check=AsyncConnectionPool.check_connection, reconnect_timeout=30,
        )  # fmt: skip

    @asynccontextmanager
    async def reading(self, *without: str) -> AsyncIterator[Ask]:
        """Open a read-only transaction, one snapshot for a page; `without` these kinds of plans."""
        off = "".join(f", set_config('{name}', 'off', true)" for name in without)
        bound = f"select set_config('statement_timeout', '{ANSWERS_WITHIN}', true){off}"
        async with self.pool.connection() as conn, conn.transaction():
            await conn.execute("set transaction isolation level repeatable read, read only")
            await conn.execute(bound.encode())

            async def ask(query: str, **values: Any) -> list[Row]:
                return await (await conn.execute(query.encode(), values)).fetchall()

            yield ask

    async def call(self, verb: str, **values: Any) -> list[Row]:
        """Make the one call of a verb, which is a transaction."""
        async with self.pool.connection() as conn:
            return await (await conn.execute(VERBS[verb].encode(), values)).fetchall()

    async def jobs(self, wanted: Wanted, most: int = PAGE) -> Found:
        """Find a page of jobs."""
        async with self.reading(*ALONG_THE_IDS) as ask:
            return await find(ask, wanted, most)


async def find(ask: Ask, wanted: Wanted, most: int) -> Found:
    """Look for jobs, window by window, until a page is full or its time is up."""
    before = min(wanted.before or LAST_ID, first_id(wanted.until) if wanted.until else LAST_ID)
    values = {
        "before": before, "most": most + 1, "window": WINDOW,
        "since": first_id(wanted.since) if wanted.since else FIRST_ID,
    }  # fmt: skip
    within, where = conditions(wanted, values)
    found, ends_at = Found(), time.monotonic() + LOOKS_FOR
    if wanted.key:  # of a common one the newest jobs are at hand; of others an index knows
        values["key"] = wanted.key
        newest = f"{where} and (unique_key = %(key)s or serial_key = %(key)s)"
        rows = await ask(LOOK.format(within=within, where=newest), **values | {"window": OF_A_KEY})
        if len(rows) <= most:
            rows = await ask(WITH_KEY.format(where=within + where), **values)
        return page(rows, most)
    while True:
        values["most"] = most + 1 - len(found.jobs)
        found.jobs += await ask(LOOK.format(within=within, where=where), **values)
        if len(found.jobs) > most:
            return page(found.jobs, most)
        rest = await ask(WINDOW_ENDS.format(within=within), **values)
        if not rest:  # that was the last of them
            found.older, found.looked_at = None, 0
            return found
        found.looked_at += WINDOW
        found.older = values["before"] = rest[0]["job_id"]
        if time.monotonic() > ends_at:
            return found


def page(rows: list[Row], most: int) -> Found:
    return Found(rows[:most], rows[most - 1]["job_id"] if len(rows) > most else None)


def conditions(wanted: Wanted, values: dict[str, Any]) -> tuple[str, str]:
    """Make conditions: those that an index answers, then those that are looked for row by row."""
    within = where = ""
    if wanted.state == "held":
        within = " and held_step is not null"  # true of no finished job: history is not read
    elif wanted.state in ("failed", "cancelled"):
        within = f" and finished_at is not null and state = '{wanted.state}'"
    elif wanted.state == "completed":
        within = " and finished_at is not null"
    elif wanted.state in LIVE:
        within = " and finished_at is null"
    if wanted.state and wanted.state not in ("held", "failed", "cancelled"):
        where = f" and state = '{wanted.state}'"
    for name in ("queue", "kind", "worker"):
        if given := getattr(wanted, name):
            where += f" and {name} = %({name})s"
            values[name] = given
    return within, where


def first_id(at: datetime) -> UUID:
    """Answer the lowest id that a job made at this time can have: ids begin with it."""
    milliseconds = int(at.astimezone(UTC).timestamp() * 1000)
    return UUID(int=min(max(milliseconds, 0), 2**48 - 1) << 80)
