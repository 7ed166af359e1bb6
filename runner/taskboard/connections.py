"""Connections to a database that may be slow, away or restarting. Nothing here knows of jobs."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar
from uuid import UUID

import psycopg
from psycopg import AsyncConnection, IsolationLevel
from psycopg.conninfo import conninfo_to_dict
from psycopg.errors import Diagnostic
from psycopg.rows import args_row
from psycopg_pool import AsyncConnectionPool

log = logging.getLogger(__name__)

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
# What a server, or libpq, says where waiting will not help; these errors have no SQLSTATE.
REFUSED = re.compile(
    "password|does not exist|no pg_hba.conf entry|not permitted to log in"
    "|authentication failed|no such (?:user|database)"
    "|unsupported startup parameter"  # a pooler's words
    r"|invalid [\w ]*(?:value|number)\b|could not match \d|definition of service|service file"
)
REFUSED_PAUSE = 60.0  # seconds, until the database is asked again for what it has refused
SAID_EVERY = 60.0  # seconds, between two lines about a database that stays away

P = ParamSpec("P")
T = TypeVar("T")


class Connection(AsyncConnection[tuple[Any, ...]]):
    """A connection in autocommit mode whose explicit transactions are READ COMMITTED."""

    begin = False  # the role's default level is another one: claim in an explicit transaction
    most = 1000  # jobs in one claim
    doubtful = False  # a commit was said to have succeeded that no standby has confirmed


Pool = AsyncConnectionPool[Connection]
Dial = Callable[[], Awaitable[Connection]]
Call = Callable[..., Coroutine[Any, Any, T]]  # of a connection and the arguments of a function


class Weather(Exception):
    """The database gave no answer: whether the call took effect is not known. Try again."""


class Unconfirmed(psycopg.OperationalError):
    """Somebody ended the wait for the synchronous standby: it may not have what was committed."""


class InTheWay(Weather):
    """The connection is fine: a lock or a limit was in the way, and nothing has changed."""


async def connect(url: str, name: str) -> Connection:
    """Open a connection; `name` is its application_name. Raises psycopg.Error."""
    conn = await Connection.connect(url, **connect_arguments(url, name))
    await _configure(conn)
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


async def _configure(conn: Connection) -> None:
    conn.add_notice_handler(partial(_heed, conn))
    await conn.set_isolation_level(IsolationLevel.READ_COMMITTED)


def _heed(conn: Connection, notice: Diagnostic) -> None:
    conn.doubtful |= notice.source_function == "SyncRepWaitForLSN"


async def _check(conn: Connection) -> None:
    with bounded(conn, 5):
        await AsyncConnectionPool.check_connection(conn)


def handler_pool(url: str, name: str, size: int) -> Pool:
    """Make the pool that handlers borrow from, not open yet; connections come as needed."""
    return AsyncConnectionPool(
        url, connection_class=Connection, kwargs=connect_arguments(url, name), min_size=0,
        max_size=size, open=False, configure=_configure, check=_check, name="handlers",
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


def is_harmless(exc: BaseException) -> bool:
    """Tell whether it left the connection fit for use, with nothing changed: a lock, a limit."""
    return HARMLESS.match(getattr(exc, "sqlstate", None) or "") is not None


class Link:
    """One connection for short calls, taken in turn; opened when needed, reopened when lost.

    Dialling and each call are bounded by `within` seconds. After a loss, calls are refused until a
    pause is over, which grows from `first` to `cap` seconds: no caller can make it spin. Of a
    series of losses it logs the first, one a minute, and the end. `answered_at`: when a call was
    answered last; `losses`: how often the database was lost.
    """

    def __init__(
        self, name: str, dial: Dial, *, within: float, cap: float, first: float = 0.1
    ) -> None:
        self.within = within
        self.conn: Connection | None = None
        self._name, self._dial, self._first, self._cap = name, dial, first, cap
        self._turn = asyncio.Lock()
        self._lost_at: float | None = None
        self._pause, self._open_at, self._say_at = 0.0, 0.0, 0.0
        self.answered_at, self.losses = 0.0, 0

    @property
    def delay(self) -> float:
        """Seconds until another try makes sense, after Weather."""
        return (self._pause + 0.02) * random.uniform(1, 1.2)

    @property
    def lost_for(self) -> float:
        """Seconds since the database was lost; zero while it is not."""
        lost_at = self._lost_at
        return 0.0 if lost_at is None else time.monotonic() - lost_at

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
                if self.conn is None:
                    async with asyncio.timeout(self.within):
                        self.conn = await self._dial()
                with bounded(self.conn, self.within):
                    answer = await function(self.conn, *args, **kwargs)
            except (psycopg.Error, OSError) as exc:
                if not is_transient(exc):
                    raise
                raise self._weather(exc) from exc
            if self._lost_at is not None:
                away = time.monotonic() - self._lost_at
                log.info("%s: the database is back after %.1f s", self._name, away)
            self._lost_at, self._pause = None, 0.0
            self.answered_at = time.monotonic()
            return answer

    def _weather(self, exc: Exception) -> Weather:
        text, before = one_line(exc) or type(exc).__name__, self._pause
        self._pause = min(max(before * 2, self._first), self._cap)
        if is_harmless(exc):
            if before == 0:
                log.warning("%s: in the way, trying again: %s", self._name, text)
            return InTheWay(text)
        self._drop()
        if self._lost_at is None:
            self._lost_at = self._say_at = time.monotonic()
            self.losses += 1
        if time.monotonic() >= self._say_at:
            self._say_at = time.monotonic() + SAID_EVERY
            log.warning("%s: the database does not answer; trying again: %s", self._name, text)
        self._open_at = time.monotonic() + self._pause * random.uniform(0.5, 1)
        return Weather(text)

    def _drop(self) -> None:
        if self.conn is not None:
            self.conn.pgconn.finish()
            self.conn = None

    def close(self) -> None:
        """Close the connection without waiting; a call under way ends with Weather."""
        if self.conn is not None and self._turn.locked():
            cut(self.conn)
        else:
            self._drop()


def every(call: str, shape: Callable[..., T]) -> Call[list[T]]:
    """Make a coroutine of a call, which is its docstring; it answers all rows, each in a shape."""

    async def ask(conn: Connection, *arguments: Any) -> list[T]:
        # In binary: a pooler may hand us a session whose styles of dates somebody has changed.
        cursor = conn.cursor(binary=True, row_factory=args_row(shape))
        found = await (await cursor.execute(call, arguments)).fetchall()
        if conn.doubtful:
            conn.doubtful = False
            raise Unconfirmed("the standby has not confirmed the commit")
        return found

    ask.__doc__ = call
    return ask


def one(call: str, shape: Callable[..., T]) -> Call[T | None]:
    """Make a coroutine of a call; it answers the first row, or None: the function's zero rows."""
    ask_all = every(call, shape)

    async def ask(conn: Connection, *arguments: Any) -> T | None:
        found = await ask_all(conn, *arguments)
        return found[0] if found else None

    ask.__doc__ = call
    return ask


def array(ids: Iterable[UUID]) -> str:
    """Make the text of an array: many times quicker than an adapter for each element."""
    return f"{{{','.join(map(str, ids))}}}"


def as_it_is(value: T) -> T:
    return value


@asynccontextmanager
async def lent(pool: Pool, wait: float | None = None) -> AsyncIterator[Connection]:
    """Borrow a pooled connection for the block; wait for it so many seconds.

    Not pool.connection(): the pool loses a connection that it gives to a waiter who is just being
    cancelled. So nobody who waits in it is cancelled, and what comes too late is given back.
    """
    asked = asyncio.ensure_future(pool.getconn(wait))
    try:
        conn = await asyncio.shield(asked)
    except asyncio.CancelledError:
        asked.add_done_callback(partial(_give_back, pool))
        raise
    try:
        async with conn:
            yield conn
    finally:
        await asyncio.shield(pool.putconn(conn))


def _give_back(pool: Pool, asked: asyncio.Future[Connection]) -> None:
    if not asked.cancelled() and asked.exception() is None:
        asyncio.ensure_future(pool.putconn(asked.result()))  # noqa: RUF006, it does not wait


async def borrow(
    pool: Pool, call: Call[T], *arguments: Any, wait: float, within: float
) -> T:
    """Make a call on a pooled connection; wait for it, and then for the answer, so many seconds."""
    async with lent(pool, wait) as conn:
        with bounded(conn, within):
            return await call(conn, *arguments)


async def ask(
    pool: Pool, link: Link, call: Call[T], *arguments: Any, wait: float = 0.2
) -> T:
    """Make a call on a pooled connection: calls at once share a commit, and none waits for others.

    Where none can be had within `wait`, or one was left unfit, the link decides; but it, which has
    to be there for all, waits for no lock that was in the way. Raises what Link.call does.
    """
    try:
        return await borrow(pool, call, *arguments, wait=wait, within=link.within)
    except (psycopg.Error, OSError) as exc:
        if is_harmless(exc):
            raise InTheWay(one_line(exc)) from exc
    return await link.call(call, *arguments)


async def keep_on(
    name: str, link: Link, step: Callable[[], Awaitable[object]], every: float
) -> None:
    """Do something for ever, every so many seconds, whatever the weather; log a refusal once."""
    refused = ""
    while True:
        pause = every
        try:
            await step()
        except Weather:
            pause = max(every, link.delay)
        except (psycopg.Error, OSError) as exc:
            pause = REFUSED_PAUSE
            if refused != (refused := one_line(exc)):
                log.warning("%s: %s", name, refused)
        await asyncio.sleep(pause * random.uniform(0.9, 1.1))


def one_line(said: object) -> str:
    """Put a text, or what an error says, on one line, for the log."""
    if isinstance(said, psycopg.Error):
        said = said.diag.message_primary or said
    return " ".join(str(said).split())[:300]
