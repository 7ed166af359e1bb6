"""A client program under test: one JSON request a line to it, one JSON answer a line from it."""

from __future__ import annotations

import json
import os
import select
import shlex
import subprocess
import time
from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

PATIENCE = 60.0  # seconds; the first answer of a virtual machine may take a few
OF_LIBPQ = {
    "PGHOST": "host", "PGPORT": "port", "PGDATABASE": "dbname", "PGUSER": "user",
    "PGPASSWORD": "password", "PGAPPNAME": "application_name",
}  # fmt: skip


class Silent(AssertionError):
    """The program ended, or gave no answer that can be read."""


def environment(dsn: str, **more: str) -> dict[str, str]:
    """What a program is told of the database: a URL as it was given, and libpq's variables."""
    told = conninfo_to_dict(dsn)
    libpq = {name: str(told[key]) for name, key in OF_LIBPQ.items() if key in told}
    return os.environ | libpq | {"TASKBOARD_DATABASE_URL": dsn} | more


def named(dsn: str, application_name: str) -> str:
    """A DSN, or a URL, whose sessions carry a name."""
    if "://" not in dsn:
        return make_conninfo(dsn, application_name=application_name)
    return f"{dsn}{'&' if '?' in dsn else '?'}application_name={application_name}"


def own_session(dsn: str) -> psycopg.Connection[Any]:
    """A session of the kit's; it prepares nothing, for there may be a pooler."""
    return psycopg.connect(dsn, autocommit=True, prepare_threshold=None, application_name="kit")


class Client:
    """A running client program; it has one session of the database."""

    def __init__(self, command: str, env: Mapping[str, str]) -> None:
        self._rest, self.answers = b"", 0
        self._process = subprocess.Popen(
            shlex.split(command), env=dict(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self.send(request)
        return self.answer()

    def send(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps(request, ensure_ascii=False).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Silent("the program has ended") from None

    def answer(self) -> dict[str, Any]:
        """The next line, as JSON."""
        assert self._process.stdout
        pieces, deadline = [self._rest], time.monotonic() + PATIENCE
        while b"\n" not in pieces[-1]:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._process.stdout], [], [], left)[0]:
                raise Silent(f"no answer within {PATIENCE:g} s")
            pieces.append(os.read(self._process.stdout.fileno(), 1 << 16))
            if not pieces[-1]:
                raise Silent("the program has ended without an answer")
        line, _, self._rest = b"".join(pieces).partition(b"\n")
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise Silent(f"not a JSON object: {line[:200]!r}")
        self.answers += 1
        return found

    def close(self) -> None:
        """End it by the end of its input; a program that does not mind that is killed."""
        assert self._process.stdin and self._process.stdout
        try:
            self._process.communicate(timeout=5)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait()
