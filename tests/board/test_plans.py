"""A page of jobs reads as much as it shows, however many there are: no sort, no whole table."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from psycopg.rows import dict_row

from support import Connection, Databases, rows, session
from taskboard.console.board import queries
from taskboard.console.board.queries import ALONG_THE_IDS, HELD, LOOK, MINUTE, WINDOW_ENDS

MANY, LIVE, WINDOW, PAGE = 40_000, 4_000, 1_000, 51
KEYED = "select * from taskboard.jobs_with_key(%(key)s)"

FINISHED = """
insert into taskboard.history (id, finished_at, attempt, priority, failures, lost_leases,
  lease_token, run_at, created_at, claimed_at, state, queue, kind, on_unknown, finished_by,
  unique_key, serial_key, payload)
select taskboard.new_job_id(taskboard.job_id_head(d.at), gen_random_uuid(), 0, '0000'), d.at, 1, 5,
  0, 0, gen_random_uuid(), d.at, d.at, d.at,
  case when n %% 500 = 0 then 'failed' else 'completed' end, 'default',
  case when n %% 2000 = 0 then 'rare' else 'mail' end, 'retry', 'w' || n %% 7, 'order-' || n,
  case when n %% 10000 = 0 then 'customer' end, '{}'
from generate_series(1, %(many)s) as n
cross join lateral (
  select clock_timestamp() - interval '3 days' + n * interval '5 s' as at) as d
"""
LIVING = """
insert into taskboard.jobs (id, lane_id, run_at, created_at, payload, claimable_at, attempt)
select taskboard.new_job_id(taskboard.job_id_head(clock_timestamp()), gen_random_uuid(), 0, '0000'),
  l.id, clock_timestamp(), clock_timestamp(), '{}', clock_timestamp(), 0
from generate_series(1, %(live)s) as n
cross join (select l.id from taskboard.lanes as l where not l.returning limit 1) as l
"""


@pytest.fixture(scope="module")
def filled(databases: Databases, template: str) -> str:
    """A database with a long history, which these tests only read."""
    dsn = databases.server.dsn(databases.create(template))
    with session(dsn) as db:
        rows(db, "select taskboard.enqueue('mail')")
        rows(db, FINISHED, {"many": MANY})
        rows(db, LIVING, {"live": LIVE})
        rows(
            db, "update taskboard.jobs set waits_for = 'person', claimable_at = 'infinity',"
            " held_step = 'main' where id = (select min(id::text)::uuid from taskboard.jobs)",
        )  # fmt: skip
        db.execute("vacuum analyze taskboard.history")
        db.execute("vacuum analyze taskboard.jobs")
    return dsn


@pytest.fixture
def full(filled: str) -> Iterator[Connection]:
    """The owner's session in it."""
    with session(filled) as db:
        yield db


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for part in plan.get("Plans", []):
        yield from nodes(part)


def explained(db: Connection, query: str, **values: Any) -> tuple[list[dict[str, Any]], int]:
    """Run a query as the board does; answer the nodes of its plan, and how many pages it read."""
    with db.transaction(), db.cursor(row_factory=dict_row) as cursor:
        for name in ALONG_THE_IDS if query != MINUTE else ("jit",):
            cursor.execute(f"set local {name} = off")
        cursor.execute(f"explain (analyze, buffers, format json) {query}".encode(), values)
        row = cursor.fetchone()
    assert row is not None
    found = row["QUERY PLAN"]
    plan = (json.loads(found) if isinstance(found, str) else found)[0]["Plan"]
    return list(nodes(plan)), plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]


def rows_read(plan: list[dict[str, Any]]) -> float:
    """How many rows the scans of jobs gave or threw away."""
    return sum(
        (one["Actual Rows"] + one.get("Rows Removed by Filter", 0)) * one["Actual Loops"]
        for one in plan
        if one.get("Relation Name", "").startswith(("history", "jobs"))
    )


WANTED = {
    "all": (queries.Wanted(), PAGE * 2),
    "common kind": (queries.Wanted(kind="mail"), PAGE * 2),
    "rare kind": (queries.Wanted(kind="rare"), WINDOW * 2),
    "worker": (queries.Wanted(worker="w3"), PAGE * 20),
    "nobody's queue": (queries.Wanted(queue="none"), WINDOW * 2),
    "completed": (queries.Wanted(state="completed"), PAGE * 2),
    "failed": (queries.Wanted(state="failed"), PAGE * 2),
    "failed, of a rare kind": (queries.Wanted(state="failed", kind="rare"), MANY / 500 + 10),
    "cancelled": (queries.Wanted(state="cancelled"), 0),
    "held": (queries.Wanted(state="held"), 10),
    "ready": (queries.Wanted(state="ready"), WINDOW * 2),
}


@pytest.mark.parametrize("what", ["page", "where the window ends"])
def test_a_page_of_jobs_sorts_nothing_and_reads_no_more_than_its_window(
    what: str, full: Connection
) -> None:
    for name, (wanted, most) in WANTED.items():
        values: dict[str, Any] = {
            "before": queries.LAST_ID, "since": queries.FIRST_ID, "window": WINDOW, "most": PAGE,
        }  # fmt: skip
        within, where = queries.conditions(wanted, values)
        query = LOOK if what == "page" else WINDOW_ENDS
        most = most if what == "page" else WINDOW * 2
        plan, pages = explained(full, query.format(within=within, where=where), **values)
        assert not [one for one in plan if one["Node Type"] in ("Seq Scan", "Sort")
                    and one.get("Relation Name") not in ("settings", "lanes")], name  # fmt: skip
        assert rows_read(plan) <= most, (name, rows_read(plan))
        assert pages <= most * 8 + 100, (name, pages)


def test_the_list_of_held_jobs_reads_held_jobs_alone(full: Connection) -> None:
    plan, pages = explained(full, HELD, before=queries.LAST_ID, most=PAGE)
    assert rows_read(plan) <= 2 and pages < 30


def test_who_had_a_key_is_found_without_reading_the_others(full: Connection) -> None:
    [(whole,)] = rows(
        full, "select sum(pg_relation_size(inhrelid)) / 8192 from pg_inherits"
        " where inhparent = 'taskboard.history'::regclass",
    )  # fmt: skip
    for key, jobs in (("order-777", 1), ("customer", 4), ("nobody", 0)):
        assert len(rows(full, KEYED, {"key": key})) == jobs
        _, pages = explained(full, KEYED, key=key)
        assert pages < whole / 2, (key, pages, whole)


def test_a_minute_is_counted_without_reading_the_others(full: Connection) -> None:
    [(at,)] = rows(full, "select clock_timestamp() - interval '2 days'")
    [(until,)] = rows(full, "select clock_timestamp() - interval '2 days' + interval '1 minute'")
    plan, _ = explained(full, MINUTE, since=at, until=until)
    assert rows_read(plan) < MANY / 10


def test_a_page_says_how_far_it_has_looked_and_goes_on_from_there(
    filled: str, board: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "WINDOW", WINDOW)
    monkeypatch.setattr(queries, "LOOKS_FOR", 0.0)
    text = board(filled).get("/jobs?kind=rare").text
    assert "jobs were looked at" in text and "Look further back" in text
    monkeypatch.setattr(queries, "LOOKS_FOR", 60.0)
    text = board(filled).get("/jobs?kind=rare").text
    assert text.count('<span class="state') == MANY / 2000 and "Look further back" not in text
