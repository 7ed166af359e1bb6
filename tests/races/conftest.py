"""The fixtures of the races: sessions with names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest

from races.sessions import Session, session
from support import rows


@pytest.fixture
def named(
    db: psycopg.Connection[Any], connect: Callable[..., psycopg.Connection[Any]]
) -> Iterator[Callable[[str], Session]]:
    """Give out sessions by name, each with a connection of its own."""
    with ExitStack() as stack:
        yield lambda name: stack.enter_context(session(name, connect(name), db))


@pytest.fixture
def quick(named: Callable[[str], Session], db: psycopg.Connection[Any]) -> Callable[[str], Session]:
    """Give out two sessions, A and B, whose claims have nothing but the plan they remember.

    A plan is believed for a tenth of a second; here for as long as a test takes.
    """
    ((text,),) = rows(db, "select pg_get_functiondef('taskboard.claim'::regproc)")
    for old, new in (
        ("between 0 and 30 * sign", "between 0 and 60 * sign"),
        ("v_set.age > v_plan[13]::float8", "v_set.age > 60"),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    db.execute(text)

    def remember(name: str) -> Session:
        session = named(name)
        session.enqueue()
        job = session.claim()
        session.call("complete", job_id=job.job_id, lease_token=job.lease_token)
        return session

    a, b = remember("A"), remember("B")
    db.execute(
        "create or replace function taskboard.pick_jobs(queues text[], kinds text[],"
        " max_jobs integer, key bigint, first boolean) returns tid[]"
        " language sql as 'select null::tid[]'"
    )
    return {"A": a, "B": b}.__getitem__
