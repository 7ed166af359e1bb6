"""The database as the runner sees it: connections, and one coroutine per SQL function.

This is the only file with SQL in it, and all of it is calls. Instants stay in the database; what
comes back are durations.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import re
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, TypeVar
from uuid import UUID

import psycopg
from psycopg import AsyncConnection, IsolationLevel
from psycopg.conninfo import conninfo_to_dict
from psycopg.types.json import Jsonb
from psycopg_pool import AsyncConnectionPool

log = logging.getLogger(__name__)

LEASE_LOST = "TB001"  # raised by require_lease

# Used where neither the URL nor the environment says otherwise.
DEFAULTS: dict[str, tuple[str | int, str]] = {
    "connect_timeout": (10, "PGCONNECT_TIMEOUT"),
    # In any other encoding one document that it lacks a character for loses a whole claim.
    "client_encoding": ("UTF8", ""),
    "target_session_attrs": ("read-write", "PGTARGETSESSIONATTRS"),
    "keepalives_idle": (30, ""),
    "keepalives_interval": (10, ""),
    "keepalives_count": (3, ""),
    "tcp_user_timeout": (30_000, ""),
}
# Connection loss, no resources, restart or failover, server-side limits: the same call may work
# in a moment. Then, which of them leave the connection fit for use.
TRANSIENT = re.compile("08|53|58|57P|57014|25006|25P0[34]|40001|40P01|55P03")
HARMLESS = re.compile("57014|40001|40P01|55P03")
# What a server says to a client that waiting will not help; these errors have no SQLSTATE.
REFUSED = re.compile("password|does not exist|no pg_hba.conf entry|not permitted to log in")

P = ParamSpec("P")
T = TypeVar("T")


class Connection(AsyncConnection[tuple[Any, ...]]):
    """A connection in autocommit mode whose explicit transactions are READ COMMITTED."""

    begin = False  # the role's default level is another one: claim in an explicit transaction


class Weather(Exception):
    """The database gave no answer: whether the call took effect is not known. Try again.

    `passing`: the connection is fine, a lock or a limit was in the way.
    """

    def __init__(self, text: str, *, passing: bool = False) -> None:
        super().__init__(text)
        self.passing = passing


async def connect(url: str, name: str) -> Connection:
    """Open a connection; `name` is its application_name. Raises psycopg.Error."""
    kwargs = connect_arguments(url, name)
    conn = await Connection.connect(url, **kwargs)
    await conn.set_isolation_level(IsolationLevel.READ_COMMITTED)
    return conn


def connect_arguments(url: str, name: str) -> dict[str, Any]:
    """Make the keyword arguments for psycopg.connect(url, …)."""
    given = conninfo_to_dict(url)
    found: dict[str, Any] = {"application_name": name[:63]} if "PGAPPNAME" not in os.environ else {}
    found |= {k: v for k, (v, variable) in DEFAULTS.items() if variable not in os.environ}
    # Statements prepared behind the back go astray in poolers, and break when functions change.
    return {k: v for k, v in found.items() if k not in given} | {
        "autocommit": True,
        "prepare_threshold": None,
    }


def handler_pool(url: str, name: str, size: int) -> AsyncConnectionPool[Connection]:
    """Make the pool that handlers borrow from, not open yet; connections come as needed."""

    async def configure(conn: Connection) -> None:
        await conn.set_isolation_level(IsolationLevel.READ_COMMITTED)

    async def check(conn: Connection) -> None:
        with bounded(conn, 5):
            await AsyncConnectionPool.check_connection(conn)

    return AsyncConnectionPool(
        url, connection_class=Connection, kwargs=connect_arguments(url, name), min_size=0,
        max_size=size, open=False, configure=configure, check=check, name="handlers",
        reconnect_timeout=30,
    )  # fmt: skip


@contextmanager
def bounded(conn: AsyncConnection[Any], seconds: float) -> Iterator[None]:
    """Cut the connection when the block takes longer.

    A cancelled psycopg call asks the server first, over a network that may be dead. On a socket
    that was shut down it ends at once, with the OperationalError of a lost connection.
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def half() -> None:  # in two steps: a loop that was blocked has not yet seen its answer
        nonlocal timer
        timer = loop.call_later(seconds / 2, cut, conn)

    timer = loop.call_later(seconds / 2, half)
    try:
        yield
    finally:
        timer.cancel()


def cut(conn: AsyncConnection[Any]) -> None:
    """Shut a connection's socket down; whoever waits on it is told that it is lost."""
    with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(conn.fileno())) as sock:
        sock.shutdown(socket.SHUT_RDWR)


def is_transient(exc: BaseException) -> bool:
    """Tell bad weather from a bug. "too many clients", for one, has no SQLSTATE."""
    if isinstance(exc, psycopg.Error) and exc.sqlstate:
        return TRANSIENT.match(exc.sqlstate) is not None
    return isinstance(exc, psycopg.OperationalError | psycopg.InterfaceError | OSError)


class Link:
    """One connection for short calls, taken in turn; opened when needed, reopened when lost.

    Dialling and each call are bounded by `within` seconds. After a loss, calls are refused until a
    pause is over, which grows to `cap` seconds: no caller can make it spin. Of a series of losses
    it logs the first and the end.
    """

    def __init__(
        self, name: str, dial: Callable[[], Awaitable[Connection]], *, within: float, cap: float
    ) -> None:
        self.within = within
        self._name, self._dial, self._cap = name, dial, cap
        self._turn = asyncio.Lock()
        self._conn: Connection | None = None
        self._lost_at: float | None = None
        self._passing = 0
        self._noted_at = -math.inf
        self._pause, self._open_at = 0.1, 0.0

    @property
    def delay(self) -> float:
        """Seconds until another try makes sense, after Weather."""
        passing = min(0.02 * 2.0 ** min(self._passing, 9), self._cap)
        return max(self._open_at - time.monotonic(), passing) * random.uniform(1, 1.2)

    async def call(
        self,
        function: Callable[Concatenate[Connection, P], Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Make one call. Raises Weather, or psycopg.Error when it was refused for good."""
        async with self._turn:
            if self._open_at > time.monotonic():
                raise Weather("the database was lost a moment ago")
            try:
                if self._conn is None:
                    async with asyncio.timeout(self.within):
                        self._conn = await self._dial()
                with bounded(self._conn, self.within):
                    answer = await function(self._conn, *args, **kwargs)
            except (psycopg.Error, OSError) as exc:
                if not is_transient(exc):
                    raise
                raise self._weather(exc) from exc
            self._passing = 0
            if self._lost_at is not None:
                away = time.monotonic() - self._lost_at
                log.info("%s: the database is back after %.1f s", self._name, away)
                self._lost_at, self._pause = None, 0.1
            return answer

    def _weather(self, exc: Exception) -> Weather:
        text, at = one_line(exc) or type(exc).__name__, time.monotonic()
        if HARMLESS.match(getattr(exc, "sqlstate", None) or ""):
            self._passing += 1
            if at - self._noted_at > 60:
                self._noted_at = at
                log.warning("%s: in the way, trying again: %s", self._name, text)
            return Weather(text, passing=True)
        self._drop()
        if self._lost_at is None:
            self._lost_at = at
            log.warning("%s: the database does not answer: %s", self._name, text)
        self._open_at = at + self._pause * random.uniform(0.5, 1)
        self._pause = min(self._pause * 2, self._cap)
        return Weather(text)

    def _drop(self) -> None:
        if self._conn is not None:
            self._conn.pgconn.finish()
            self._conn = None

    def close(self) -> None:
        """Close the connection without waiting; a call under way ends with Weather."""
        if self._conn is not None and self._turn.locked():
            cut(self._conn)
        else:
            self._drop()


def one_line(text: object) -> str:
    """Put a text on one line, for the log."""
    return " ".join(str(text).split())[:300]


# The calls, in the order of the files in sql/. None (or a missing row) is a function's zero rows.
# An owner is a job id with a lease token; documents are JSON texts.

Owner = tuple[UUID, UUID]


async def call(
    conn: AsyncConnection[Any], /, columns: str, function: str, *owner: UUID, **arguments: Any
) -> list[tuple[Any, ...]]:
    """Select columns from a function of the schema taskboard, called with named arguments."""
    arguments |= zip(("job_id", "lease_token"), owner, strict=False)
    named = ", ".join(f"{name} => %({name})s" for name in arguments)
    cursor = await conn.execute(f"select {columns} from taskboard.{function}({named})", arguments)
    return await cursor.fetchall()


async def call_one(
    conn: AsyncConnection[Any], /, columns: str, function: str, *owner: UUID, **arguments: Any
) -> tuple[Any, ...] | None:
    rows = await call(conn, columns, function, *owner, **arguments)
    return rows[0] if rows else None


def document(text: str | None) -> Jsonb | None:
    return None if text is None else Jsonb(text, dumps=str)


async def version(conn: Connection) -> str:
    return str((await call(conn, "*", "version"))[0][0])


async def enqueue(
    conn: AsyncConnection[Any], kind: str, payload: str = "{}", **options: Any
) -> tuple[UUID, bool]:
    """Answer job_id and created. Works inside the caller's transaction."""
    columns = "job_id, created"
    rows = await call(conn, columns, "enqueue", kind=kind, payload=document(payload), **options)
    return rows[0][0], rows[0][1]


async def enqueue_many(
    conn: AsyncConnection[Any], kind: str, payloads: Sequence[str], **options: Any
) -> list[tuple[UUID, bool]]:
    """Answer job_id and created for each payload, in their order."""
    options |= {"kind": kind, "payloads": [document(payload) for payload in payloads]}
    return [(row[0], row[1]) for row in await call(conn, "*", "enqueue_many", **options)]


async def listen(conn: Connection, queues: list[str] | None) -> bool:
    """Take the channel and the sleeper's mark; False: no mark yet, call again soon."""
    return bool((await call(conn, "*", "listen", queues=queues))[0][0])


async def unlisten(conn: Connection) -> None:
    await call(conn, "*", "unlisten")


async def is_pooled(conn: Connection) -> bool:
    """Tell whether a pooler stands between: it announces process ids of its own."""
    cursor = await conn.execute("select pg_backend_pid()")
    return await cursor.fetchone() != (conn.info.backend_pid,)


@dataclass(frozen=True, slots=True)
class Claimed:
    """One row of claim. Documents are still text: one that cannot be read spoils no other."""

    job_id: UUID
    lease_token: UUID = field(repr=False)
    lease: timedelta
    timeout: timedelta
    queue: str
    kind: str
    payload: str = field(repr=False)
    attempt: int
    max_attempts: int
    failures: int
    headers: str | None = field(repr=False)


async def claim(conn: Connection, /, **arguments: Any) -> list[Claimed]:
    """Arguments: queues, kinds, max_jobs, lease, worker."""
    columns = (
        "job_id, lease_token, lease, timeout, queue, kind, payload::text, attempt, max_attempts,"
        " failures, headers::text"
    )
    if not conn.begin:
        try:
            return [Claimed(*row) for row in await call(conn, columns, "claim", **arguments)]
        except psycopg.errors.FeatureNotSupported:
            conn.begin = True
    async with conn.transaction():
        return [Claimed(*row) for row in await call(conn, columns, "claim", **arguments)]


async def renew(conn: Connection, *owner: UUID) -> bool:
    return bool(await call(conn, "job_id", "renew", *owner))


async def renew_many(
    conn: Connection, job_ids: list[UUID], lease_tokens: list[UUID]
) -> dict[UUID, tuple[str, bool]]:
    """Answer outcome ('renewed' or 'busy') and cancel_requested by job id; missing means lost."""
    columns = "job_id, outcome, cancel_requested"
    rows = await call(conn, columns, "renew_many", job_ids=job_ids, lease_tokens=lease_tokens)
    return {job_id: (outcome, cancel) for job_id, outcome, cancel in rows}


async def require_lease(conn: AsyncConnection[Any], *owner: UUID) -> None:
    """Fence the caller's transaction. Raises psycopg.Error with SQLSTATE LEASE_LOST."""
    await call(conn, "job_id", "require_lease", *owner)


async def lease_status(conn: Connection, *owner: UUID) -> str:
    return str((await call(conn, "*", "lease_status", *owner))[0][0])


async def next_claimable_in(conn: Connection, /, **arguments: Any) -> float | None:
    """Answer next_claimable_at as seconds from now, by the database's clock."""
    columns = "extract(epoch from next_claimable_at - clock_timestamp())::float8"
    found: float | None = (await call(conn, columns, "next_claimable_at", **arguments))[0][0]
    return found


async def complete(conn: Connection, *owner: UUID, result: str | None) -> bool:
    return bool(await call(conn, "job_id", "complete", *owner, result=document(result)))


async def complete_many(
    conn: Connection, job_ids: list[UUID], lease_tokens: list[UUID], results: list[str | None]
) -> set[UUID]:
    """Answer the ids whose completion is recorded."""
    arguments: dict[str, Any] = {"job_ids": job_ids, "lease_tokens": lease_tokens}
    if any(results):
        arguments["results"] = [document(result) for result in results]
    return {row[0] for row in await call(conn, "job_id", "complete_many", **arguments)}


async def fail(conn: Connection, /, *owner: UUID, **arguments: Any) -> tuple[Any, ...] | None:
    """Answer state and, if it is to run again, in how many seconds."""
    again = "extract(epoch from claimable_at - clock_timestamp())::float8"
    columns = f"state, case when isfinite(claimable_at) then {again} end"
    return await call_one(conn, columns, "fail", *owner, **arguments)


async def release(conn: Connection, /, *owner: UUID, **arguments: Any) -> tuple[Any, ...] | None:
    return await call_one(conn, "state", "release", *owner, **arguments)


async def begin_effect(
    conn: Connection, /, *owner: UUID, **arguments: Any
) -> tuple[Any, ...] | None:
    """Answer idempotency_key, state and result. Arguments: step, key_valid_for."""
    columns = "idempotency_key, state, result::text"
    return await call_one(conn, columns, "begin_effect", *owner, **arguments)


async def end_effect(
    conn: Connection, *owner: UUID, result: str | None, **arguments: Any
) -> tuple[Any, ...] | None:
    """Answer the step's state; zero rows when this token never began it."""
    arguments["result"] = document(result)
    return await call_one(conn, "state", "end_effect", *owner, **arguments)


async def maintain(conn: Connection) -> None:
    await call(conn, "*", "maintain")


async def jobs_waiting(conn: Connection) -> dict[str, int]:
    """Count the claimable jobs by kind, from the view queue_stats."""
    cursor = await conn.execute(
        "select kind, sum(ready + expired)::bigint from taskboard.queue_stats group by kind"
    )
    return {kind: count for kind, count in await cursor.fetchall()}
