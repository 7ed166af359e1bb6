"""The fixture of the races: sessions with names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest

from races.sessions import Session, session


@pytest.fixture
def named(
    db: psycopg.Connection[Any], connect: Callable[..., psycopg.Connection[Any]]
) -> Iterator[Callable[[str], Session]]:
    """Give out sessions by name, each with a connection of its own."""
    with ExitStack() as stack:
        yield lambda name: stack.enter_context(session(name, connect(name), db))
