"""A client that takes nothing for granted: a call is answered, or its outcome is unknown."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg
from psycopg.errors import Diagnostic
from psycopg.rows import namedtuple_row

CONNECT = {
    "autocommit": True,
    "prepare_threshold": None,
    "connect_timeout": 5,
    "options": "-c statement_timeout=20s",
}


class Unanswered(Exception):
    """The connection ended during a call: it happened entirely or not at all."""


class Client:
    """One connection, made anew whenever it broke; `give_up` ends the waiting for a server."""

    def __init__(
        self, dsn: str, name: str, give_up: Callable[[], bool] = lambda: False,
        patience: float = math.inf,
    ) -> None:  # fmt: skip
        """`patience`: after so many seconds a call counts as unanswered, if somebody looks."""
        self.dsn, self.name, self.give_up, self.patience = dsn, name, give_up, patience
        self.deadline, self.unconfirmed = math.inf, False
        self._conn: psycopg.Connection[Any] | None = None

    def connect(self, patience: float = 30.0) -> psycopg.Connection[Any]:
        """Have a connection that may write. Raises psycopg.OperationalError: none in time."""
        until = time.monotonic() + patience
        while self._conn is None or self._conn.closed:
            try:
                self._conn = psycopg.connect(
                    self.dsn, **CONNECT, application_name=self.name, row_factory=namedtuple_row
                )
                self._conn.add_notice_handler(self._heed)
            except psycopg.OperationalError:
                if time.monotonic() > until or self.give_up():
                    raise
                time.sleep(0.02)
        return self._conn

    def sql(self, text: str, arguments: Any = None) -> list[Any]:
        """Run a statement. Raises Unanswered, or psycopg.Error: refused, nothing has changed."""
        conn = self.connect()
        self.deadline = time.monotonic() + self.patience
        try:
            cursor = conn.execute(text, arguments)
            if self.unconfirmed:
                self.unconfirmed = False
                raise Unanswered("the standby has not confirmed the commit")
            return cursor.fetchall() if cursor.description is not None else []
        except psycopg.OperationalError as exc:
            if conn.closed:
                raise Unanswered(str(exc)) from exc
            raise
        finally:
            self.deadline = math.inf

    def _heed(self, notice: Diagnostic) -> None:
        """A commit whose wait for the standby was ended is answered, with a warning."""
        self.unconfirmed |= notice.source_function == "SyncRepWaitForLSN"

    def look(self) -> None:
        """From another thread: end a connection whose call takes too long, without a word."""
        if time.monotonic() > self.deadline and self._conn is not None:
            self.deadline = math.inf
            with suppress(OSError, psycopg.Error), socket.socket(
                fileno=os.dup(self._conn.fileno())
            ) as sock:
                sock.shutdown(socket.SHUT_RDWR)

    def call(self, verb: str, **arguments: Any) -> list[Any]:
        """Call a function of the schema and return its rows, as `sql` does."""
        named = ", ".join(f"{name} => %({name})s" for name in arguments)
        return self.sql(f"select * from taskboard.{verb}({named})", arguments)

    def close(self) -> None:
        if self._conn is not None:
            with suppress(psycopg.Error):
                self._conn.close()
