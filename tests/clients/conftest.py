"""A login that may do no more than producers, workers and operators may: foreign clients use it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import quote

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from support import Server, session
from taskboard.localpg import binaries

pytest.register_assert_rewrite("clients.situations")
LOGIN = f"kit_{os.getpid()}"


@pytest.fixture(scope="session")
def login(server: Server, template: str) -> Iterator[str]:
    """The name, and the password, of a mere member of three roles."""
    with session(server.dsn()) as conn:
        conn.execute(
            f"create role {LOGIN} login password '{LOGIN}'"
            " in role taskboard_producer, taskboard_worker, taskboard_operator"
        )
        yield LOGIN
        with suppress(psycopg.Error):
            conn.execute(f"drop role {LOGIN}")


@pytest.fixture
def url(dsn: str, login: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A database with Taskboard, by TCP, since not every driver knows of sockets."""
    named = conninfo_to_dict(dsn)
    host = str(named.get("host") or "/")
    monkeypatch.setenv("PATH", f"{binaries()}{os.pathsep}{os.environ['PATH']}")
    return (
        f"postgresql://{login}:{login}@{'127.0.0.1' if host.startswith('/') else host}"
        f":{named.get('port', 5432)}/{quote(str(named['dbname']))}?sslmode=disable"
    )
