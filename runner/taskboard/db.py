"""What the runner asks of the database: one coroutine per function, in the order of sql/.

This is the only file with SQL in it, and all of it is calls. Arguments are those of the function,
in its order; documents are JSON texts. Instants stay in the database: durations come back.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from uuid import UUID

from psycopg.errors import FeatureNotSupported, InvalidParameterValue

from taskboard.connections import Call, Connection, as_it_is, every, one
from taskboard.job import Effect, Failed, Job, Renewed

LEASE_LOST = "TB001"  # raised by require_lease
version = one("select taskboard.version()", str)
may_claim = one(
    "select has_function_privilege('taskboard.claim(text[], text[], integer, interval, text)',"
    " 'execute') from taskboard.version()",
    bool,
)
_backend_pid = one("select pg_backend_pid() from taskboard.version()", int)
listen = one("select taskboard.listen(%s)", bool)  # False: no mark yet, call again soon
unlisten = one("select taskboard.unlisten()", bool)
# The token, then the job, whose documents stay text: one that is unreadable spoils no other.
_claim = every(
    "select lease_token, job_id, queue, kind, payload::text, attempt, max_attempts, failures,"
    " lease, timeout, headers::text from taskboard.claim(%s, %s, %s, %s, %s)",
    lambda token, *job: (token, Job(*job)),
)
renew = one("select job_id from taskboard.renew(%s, %s)", bool)
renew_many = every(
    "select job_id, outcome, cancel_requested from taskboard.renew_many(%s::uuid[], %s::uuid[])",
    Renewed,
)
require_lease = one("select job_id from taskboard.require_lease(%s, %s)", bool)
lease_status = one("select taskboard.lease_status(%s, %s)", str)
next_claimable_in: Call[float | None] = one(  # seconds from now, by the database's clock
    "select extract(epoch from next_claimable_at - clock_timestamp())::float8"
    " from taskboard.next_claimable_at(%s, %s)",
    as_it_is,
)
complete = one("select job_id from taskboard.complete(%s, %s, %s)", bool)
complete_many: Call[list[UUID]] = every(
    "select job_id from taskboard.complete_many(%s::uuid[], %s::uuid[], %s::jsonb[])", as_it_is
)
fail = one(
    "select job_id, state, case when isfinite(claimable_at)"
    " then extract(epoch from claimable_at - clock_timestamp())::float8 end"
    " from taskboard.fail(%s, %s, %s, %s, %s)",
    Failed,
)
fail_many = every(
    "select job_id, state, case when isfinite(claimable_at)"
    " then extract(epoch from claimable_at - clock_timestamp())::float8 end"
    " from taskboard.fail_many(%s::uuid[], %s::uuid[], %s, %s, %s)",
    Failed,
)
release = one("select state from taskboard.release(%s, %s, %s)", str)
release_many: Call[list[UUID]] = every(
    "select job_id from taskboard.release_many(%s::uuid[], %s::uuid[], %s)", as_it_is
)
begin_effect = one(
    "select step, idempotency_key, state, result from taskboard.begin_effect(%s, %s, %s, %s)",
    Effect,
)
end_effect = one("select state from taskboard.end_effect(%s, %s, %s, %s, %s)", str)
maintain = every("select * from taskboard.maintain()", lambda *row: row)
count_ready = every("select kind, jobs from taskboard.count_ready(%s)", lambda *row: row)


async def is_pooled(conn: Connection) -> bool:
    """Tell whether a pooler stands between: it announces process ids of its own."""
    return await _backend_pid(conn) != conn.info.backend_pid


async def claim(
    conn: Connection, queues: Any, kinds: Any, max_jobs: int, *more: Any
) -> list[tuple[UUID, Job]]:
    """Claim in the way that the role's isolation level asks for, and no more than is allowed."""
    most = min(max_jobs, conn.most)
    try:
        async with conn.transaction() if conn.begin else nullcontext():
            return await _claim(conn, queues, kinds, most, *more)
    except FeatureNotSupported:
        if conn.begin:
            raise
        conn.begin = True
    except InvalidParameterValue:
        if most == 1:
            raise
        conn.most = most // 2  # settings.claim_jobs is lower
    return await claim(conn, queues, kinds, max_jobs, *more)
