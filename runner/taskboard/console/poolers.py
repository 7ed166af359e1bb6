"""What doctor looks at behind a pooler: does it lend sessions, and what do others leave in them?"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import psycopg

from taskboard import db
from taskboard.connections import bounded, connect, one_line
from taskboard.console.checks import Finding, Look, is_pooled, note, wrong

LENDS_WITHIN = 3.0  # seconds

DRIVER = (
    "switch prepared statements off in that client's driver, or let PgBouncer (from 1.21) keep"
    " track of them: max_prepared_statements = 200"
)
LOCAL = "set local, within a transaction; or alter role … set …"


async def pooler(look: Look) -> list[Finding]:
    if not is_pooled(look):
        return []
    return await _lends(look) + await _left(look)


async def _lends(look: Look) -> list[Finding]:
    """Open as many connections as a runner does and make a call on each, while all stay open."""
    opens, got, why = look.settings.pool, 0, ""
    async with AsyncExitStack() as stack:
        try:
            for got in range(opens):  # noqa: B007
                async with asyncio.timeout(LENDS_WITHIN):
                    conn = await connect(look.settings.database_url, "taskboard doctor")
                stack.callback(conn.pgconn.finish)
                with bounded(conn, LENDS_WITHIN):
                    await db.version(conn)
        except (psycopg.Error, OSError) as exc:
            why = one_line(exc) or f"no answer within {LENDS_WITHIN:g} s"
    if not why:
        return []
    what = f"a runner opens {opens} connections, and the pooler serves {got} at once ({why})"
    fix = "pool_mode = transaction, and a max_client_conn of all clients together"
    return [wrong(f"{what}: renewals may starve, so leases lapse", fix)]


async def _left(look: Look) -> list[Finding]:
    """Look at what is in the session that we were lent; another one may hold more."""
    ((role, asleep, prepared, locks, settings),) = [
        row.values() for row in await look.rows("pooled")
    ]
    found: list[Finding] = []
    if role:
        found.append(wrong(f"somebody's set role stays: calls are made as {role}", LOCAL))
    if prepared:
        what = f"{prepared} statements are prepared: one client may run another's by its name"
        found.append(wrong(what, DRIVER))
    if settings:
        found.append(note(f"settings of somebody stay in a shared session: {settings}", LOCAL))
    if asleep:
        what = "somebody called listen() here: producers notify, and nobody hears it"
        found.append(note(what, "listen on a direct connection; here: select taskboard.unlisten()"))
    elif locks:
        what = f"{locks} advisory locks of somebody stay in a shared session"
        found.append(note(what, "pg_advisory_xact_lock, which ends with its transaction"))
    return found
