"""Everything here needs PgBouncer, and a server that it can reach: one of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from console.conftest import console
from poolers.bouncer import pgbouncer
from support import Connection, session

__all__ = ["console"]


@pytest.fixture
def bouncer(dsn: str) -> Iterator[Callable[..., str]]:
    """Put a pooler before the test's database, `bouncer(size=1, …)`; answers its DSN."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(pgbouncer(dsn, **options))


@pytest.fixture
def client() -> Iterator[Callable[..., Connection]]:
    """Open sessions of a plain driver's, `client(pooled, "A")`: a pooler refuses options."""
    with ExitStack() as stack:

        def open_session(dsn: str, name: str = "test", **options: Any) -> Connection:
            return stack.enter_context(session(dsn, name, **{"options": ""} | options))

        yield open_session
