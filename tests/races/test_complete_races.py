"""Completion: repeated, in the caller's transaction, and while history is busy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

import psycopg
import pytest
from psycopg import sql

from races.sessions import Session, sqlstate
from support import expire

Named = Callable[[str], Session]


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("repeat", ["complete", "complete_many"])
def test_completion_repeated_while_the_first_is_committing_gets_the_same_row(
    named: Named, repeat: str, end: str
) -> None:
    a, again = named("A"), named("A again")
    job_id = a.enqueue()
    job = a.claim()
    a.begin()
    first = a.call("complete", job_id=job_id, lease_token=job.lease_token)
    if repeat == "complete":
        second = again.start("complete", job_id=job_id, lease_token=job.lease_token)
    else:
        second = again.start("complete_many", job_ids=[job_id], lease_tokens=[job.lease_token])
    second.blocks()
    a.end(end)
    if end == "commit":
        assert second.rows() == first
    else:
        assert [row.job_id for row in second.rows()] == [job_id]
    assert a.sql("select count(*) from taskboard.history") == [(1,)]


def test_completion_repeated_by_anybody_else_gets_nothing(named: Named) -> None:
    a, b = named("A"), named("B")
    job_id = a.enqueue()
    stale = a.claim()
    expire(a.conn, job_id)
    current = b.claim()
    b.begin()
    b.call("complete", job_id=job_id, lease_token=current.lease_token)
    late = a.start("complete", job_id=job_id, lease_token=stale.lease_token)
    assert late.rows_at_once() == []
    b.end("commit")
    assert a.call("complete", job_id=job_id, lease_token=stale.lease_token) == []


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_completion_at_repeatable_read_behind_another_is_repeated_and_then_agrees(
    named: Named, end: str
) -> None:
    a, again = named("A"), named("A again")
    job_id = a.enqueue()
    job = a.claim()
    owner = {"job_id": job_id, "lease_token": job.lease_token}
    a.begin()
    first = a.call("complete", **owner)
    again.begin("repeatable read")
    second = again.start("complete", **owner).blocks()
    a.end(end)
    if end == "commit":
        assert sqlstate(second) == "40001"
        again.end("rollback")
        again.begin("repeatable read")
        assert again.call("complete", **owner) == first
    else:
        assert [row.job_id for row in second.rows()] == [job_id]
    again.end("commit")


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("level", ["read committed", "repeatable read", "serializable"])
def test_completion_and_business_rows_are_one_atom(named: Named, level: str, end: str) -> None:
    a, b = named("A"), named("B")
    a.sql("create table orders (id integer primary key)")
    job_id = a.enqueue()
    job = a.claim()
    a.begin(level)
    a.call("require_lease", job_id=job_id, lease_token=job.lease_token)
    a.sql("insert into orders values (1)")
    a.call("complete", job_id=job_id, lease_token=job.lease_token)
    assert b.sql("select from orders") == []
    assert [row.state for row in b.call("job", job_id=job_id)] == ["running"]
    a.end(end)
    done = end == "commit"
    assert len(b.sql("select from orders")) == int(done)
    assert [row.state for row in b.call("job", job_id=job_id)] == [
        "completed" if done else "running"
    ]
    assert len(b.call("complete", job_id=job_id, lease_token=job.lease_token)) == 1


def test_completion_in_a_savepoint_that_is_rolled_back_leaves_the_lease(named: Named) -> None:
    a = named("A")
    job_id = a.enqueue()
    job = a.claim()
    a.begin()
    a.sql("savepoint s")
    a.call("complete", job_id=job_id, lease_token=job.lease_token)
    a.sql("rollback to s")
    assert len(a.call("renew", job_id=job_id, lease_token=job.lease_token)) == 1
    a.end("commit")
    assert [row.state for row in a.call("job", job_id=job_id)] == ["running"]


def test_completion_ends_an_effect_that_its_token_is_just_beginning(named: Named) -> None:
    a, again = named("A"), named("A again")
    job_id = a.enqueue()
    job = a.claim()
    owner = {"job_id": job_id, "lease_token": job.lease_token}
    a.begin()
    a.call("begin_effect", **owner)
    completion = again.start("complete", **owner).blocks()
    a.end("commit")
    assert len(completion.rows()) == 1
    assert a.sql("select state from taskboard.effect_list") == [("done",)]


@pytest.fixture
def old_days(db: psycopg.Connection[tuple[object, ...]]) -> Iterator[list[str]]:
    """Make three partitions of history that are due to be dropped, each with a job."""
    days = ["20200101", "20200102", "20200103"]
    owner = db.execute("select tableowner from pg_tables where tablename = 'history'").fetchone()
    assert owner is not None
    db.execute(sql.SQL("set role {}").format(sql.Identifier(str(owner[0]))))
    for day in days:
        db.execute(
            f"create table taskboard.history_{day} partition of taskboard.history"
            f" for values from ('{day} 00:00 utc') to ('{day} 24:00 utc')"
        )
        db.execute(
            "insert into taskboard.history (id, finished_at, attempt, priority, failures,"
            " lost_leases, max_attempts, max_lost_leases, run_at, created_at, state, queue, kind,"
            " on_unknown, payload) select gen_random_uuid(), at, 1, 5, 0, 0, 1, 1, at, at,"
            " 'completed', 'default', 'k', 'retry', '1'"
            f" from (select '{day} 12:00 utc'::timestamptz as at) as t"
        )
    db.execute("reset role")
    yield days


def test_completion_never_waits_for_a_long_read_of_history(
    named: Named, old_days: list[str]
) -> None:
    a, reader = named("A"), named("reader")
    a.enqueue()
    job = a.claim()
    reader.begin()
    reader.sql("select count(*) from taskboard.history")
    assert len(a.at_once("complete", job_id=job.job_id, lease_token=job.lease_token)) == 1
    reader.end("commit")


@pytest.mark.parametrize("verb", ["prune", "maintain"])
@pytest.mark.parametrize("other", ["a long read", "an open completion"])
def test_retention_beside_an_open_transaction_makes_no_completion_wait(
    named: Named, old_days: list[str], other: str, verb: str
) -> None:
    a, b, keeper = named("A"), named("B"), named("keeper")
    for _ in range(2):
        a.enqueue()
    jobs = a.call("claim", max_jobs=2)
    b.begin()
    if other == "a long read":
        b.sql("select count(*) from taskboard.history")
    else:
        b.call("complete", job_id=jobs[0].job_id, lease_token=jobs[0].lease_token)
    housekeeping = keeper.start(verb)
    # As long as it runs, whether it waits itself or not, nobody waits for it.
    while not housekeeping.future.done():
        completion = a.start("complete", job_id=jobs[1].job_id, lease_token=jobs[1].lease_token)
        assert not completion.waits()
        assert len(completion.rows()) == 1
    housekeeping.rows()
    b.end("commit")


def test_retention_leaves_a_day_that_is_being_read_to_the_next_call(
    named: Named, old_days: list[str]
) -> None:
    reader, keeper = named("reader"), named("keeper")
    days = "select count(*) from pg_tables where tablename ~ '^history_2020'"
    reader.begin()
    reader.sql("select count(*) from taskboard.history")
    keeper.at_once("prune")
    assert keeper.sql(days) == [(3,)]
    reader.end("commit")
    keeper.call("prune")
    assert keeper.sql(days) == [(0,)]


def test_retention_from_many_sessions_at_once_ends_well(named: Named, old_days: list[str]) -> None:
    keepers = [named(f"keeper {n}") for n in range(4)]
    pending = [keeper.start(verb) for verb in ("prune", "maintain") for keeper in keepers]
    for call in pending:
        call.rows()
    keepers[0].call("prune")
    assert keepers[0].sql("select count(*) from taskboard.history") == [(0,)]


def test_housekeeping_leaves_a_job_alone_that_was_completed_after_it_looked(named: Named) -> None:
    a, keeper = named("A"), named("keeper")
    job_id = a.enqueue(max_lost_leases=1)
    job = a.claim()
    expire(a.conn, job_id)
    a.begin()
    a.call("complete", job_id=job_id, lease_token=job.lease_token)
    keeper.at_once("maintain")
    a.end("commit")
    keeper.call("maintain")
    assert a.sql("select state from taskboard.history") == [("completed",)]


def test_completion_after_a_renewal_within_the_same_transaction_is_recorded(named: Named) -> None:
    a = named("A")
    job_id = a.enqueue(lease=timedelta(seconds=30))
    job = a.claim()
    a.begin()
    a.call("renew", job_id=job_id, lease_token=job.lease_token)
    assert len(a.call("complete", job_id=job_id, lease_token=job.lease_token)) == 1
    a.end("commit")
