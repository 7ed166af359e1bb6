"""Named database sessions that can be left waiting in the background.

A race is told in steps: one session begins and calls, another calls and is *seen* to wait in
`pg_locks`, then the first commits or rolls back.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import namedtuple_row

PATIENCE = 4.0
"""Seconds that a call may take; less than the functions' lock_timeout of 5 s."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A call in the background, on the session named `name`."""

    name: str
    pid: int
    future: Future[list[Any]]
    observer: psycopg.Connection[Any]

    def waits(self) -> bool:
        """Tell whether the call waits for a lock: true once that is seen, false when it ended."""
        until = monotonic() + PATIENCE
        while monotonic() < until:
            if self.future.done():
                return False
            seen = self.observer.execute(
                "select cardinality(pg_blocking_pids(%s)) > 0", (self.pid,)
            ).fetchone()
            if seen is not None and seen[0]:
                return True
            sleep(0.002)
        raise AssertionError(f"{self.name} neither ended nor was seen to wait")

    def blocks(self) -> Pending:
        """Return once the call is seen to wait for a lock; fail when it ended instead."""
        if not self.waits():
            raise AssertionError(f"{self.name} did not wait: {self.future.result()}")
        return self

    def rows(self) -> list[Any]:
        """Wait for the call and return its rows; raises what the call raised."""
        return self.future.result(timeout=PATIENCE)

    def rows_at_once(self) -> list[Any]:
        """Return the rows of a call that must not wait until somebody's transaction ends."""
        patient_until = monotonic() + 1.0
        while self.waits():
            if monotonic() > patient_until:
                raise AssertionError(f"{self.name} waits for another transaction")
            sleep(0.01)
        return self.rows()


@dataclass(frozen=True, slots=True)
class Session:
    """One connection with a name, and one thread for calls that wait.

    `call` is a verb of the schema with named arguments; it returns rows as named tuples.
    """

    name: str
    conn: psycopg.Connection[Any]
    thread: ThreadPoolExecutor
    observer: psycopg.Connection[Any]

    def sql(self, text: str, *values: Any) -> list[Any]:
        """Run any statement and return its rows, if it has any."""
        with self.conn.cursor(row_factory=namedtuple_row) as cursor:
            cursor.execute(text, values or None)
            return cursor.fetchall() if cursor.description is not None else []

    def call(self, verb: str, **arguments: Any) -> list[Any]:
        """Call a function of the schema and return its rows."""
        named = ", ".join(f"{name} => %s" for name in arguments)
        return self.sql(f"select * from taskboard.{verb}({named})", *arguments.values())

    def start(self, verb: str, **arguments: Any) -> Pending:
        """Call a function in the background."""
        future = self.thread.submit(self.call, verb, **arguments)
        return Pending(self.name, self.conn.info.backend_pid, future, self.observer)

    def at_once(self, verb: str, **arguments: Any) -> list[Any]:
        """Call a function that must not wait for anybody's transaction."""
        return self.start(verb, **arguments).rows_at_once()

    def begin(self, isolation: str = "read committed") -> None:
        """Begin a transaction; its snapshot is taken at once."""
        self.sql(f"begin isolation level {isolation}")
        self.sql("select 1")

    def end(self, how: str) -> None:
        """End the transaction: `commit` or `rollback`."""
        self.sql(how)

    def enqueue(self, kind: str = "k", **options: Any) -> UUID:
        """Add a job and return its id."""
        job_id: UUID = self.call("enqueue", kind=kind, **options)[0].job_id
        return job_id

    def claim(self, **options: Any) -> Any:
        """Claim one job, which must be there, and return its row."""
        jobs = self.call("claim", **options)
        assert len(jobs) == 1, f"{self.name} found {len(jobs)} jobs"
        return jobs[0]


@contextmanager
def session(
    name: str, conn: psycopg.Connection[Any], observer: psycopg.Connection[Any]
) -> Iterator[Session]:
    """Lend a connection to a session; at the end nothing of it waits any more."""
    with ThreadPoolExecutor(1, thread_name_prefix=name) as thread:
        try:
            yield Session(name, conn, thread, observer)
        finally:
            # Whatever still waits is waiting for a transaction that a failed test left open.
            observer.execute(
                "select pg_cancel_backend(pid) from pg_stat_activity"
                " where pid = %s and state = 'active'",
                (conn.info.backend_pid,),
            )
    conn.rollback()


def sqlstate(pending: Pending) -> str | None:
    """Wait for a call that must fail and return its SQLSTATE."""
    try:
        found = pending.rows()
    except psycopg.Error as error:
        return error.sqlstate
    raise AssertionError(f"{pending.name} was accepted: {found}")
