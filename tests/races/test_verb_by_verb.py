"""Play every cell of the tables in verb_by_verb.py with two sessions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from races.sessions import Pending, Session
from races.verb_by_verb import NONE, TABLES, WAITS, Table
from support import expire


def start(by: Session, verb: str, job: Any) -> Pending:
    """Call a verb of the table on A's job."""
    match verb:
        case "claim":
            return by.start("claim", worker="B")
        case "renew_many":
            return by.start(verb, job_ids=[job.job_id], lease_tokens=[job.lease_token])
        case "cancel":
            return by.start("cancel", job_id=job.job_id)
        case "force":
            return by.start("cancel", job_id=job.job_id, force=True)
        case "evict":
            return by.start("evict", worker="A")
        case _:
            return by.start(verb, job_id=job.job_id, lease_token=job.lease_token)


def told(verb: str, pending: Pending) -> str:
    """Say in the table's words what a call returned."""
    try:
        found = pending.rows()
    except psycopg.Error as error:
        return error.sqlstate or str(error)
    if not found:
        return "0 rows"
    (row,) = found
    match verb:
        case "claim":
            return "leased"
        case "renew":
            return "stop" if row.cancel_requested else "renewed"
        case "renew_many":
            return str(row.outcome)
        case "complete":
            return "completed"
        case "require_lease":
            return "current"
        case _:
            return str(row.state)


def play(a: Session, b: Session, table: Table, first: str, second: str, end: str) -> str:
    """Run two verbs on one new job and return what the second one got, as a cell."""
    a.enqueue()
    job = a.claim(worker="A")
    a.call("begin_effect", job_id=job.job_id, lease_token=job.lease_token)
    if table.expired:
        expire(a.conn, job.job_id)
    a.begin()
    if first != NONE:
        told(first, start(a, first, job))
    pending = start(b, second, job)
    waited = pending.waits()
    a.end(end)
    cell = (WAITS if waited else "") + told(second, pending)
    a.sql("delete from taskboard.jobs")
    return cell


CASES = [pytest.param(table, id=table.title) for table in TABLES]


@pytest.mark.parametrize("table", CASES)
def test_second_verb_gets_what_the_table_says_when_the_first_commits(
    table: Table, named: Callable[[str], Session]
) -> None:
    a, b = named("A"), named("B")
    wrong = {
        (first, second): cell
        for first, cells in table.cells.items()
        for second, said in cells.items()
        if (cell := play(a, b, table, first, second, "commit")) != said
    }
    assert wrong == {}


@pytest.mark.parametrize("table", CASES)
def test_second_verb_gets_what_it_gets_alone_when_the_first_rolls_back(
    table: Table, named: Callable[[str], Session]
) -> None:
    a, b = named("A"), named("B")
    # These never wait: what they get is decided before the rollback.
    at_once = {"claim": "0 rows", "renew_many": "busy", "evict": "busy"}
    wrong = {
        (first, second): cell
        for first in table.cells
        for second, alone in table.cells[NONE].items()
        if (cell := play(a, b, table, first, second, "rollback").removeprefix(WAITS))
        not in (alone, at_once.get(second))
    }
    assert wrong == {}
