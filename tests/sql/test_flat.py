"""What a held snapshot costs ends with it: counted in pages, by sessions that remember nothing."""

from __future__ import annotations

from collections.abc import Callable

from test_plans import touched
from verbs import Db, call, claim, pairs, query

Connect = Callable[..., Db]


def churn(db: Db, rounds: int) -> None:
    """Let so many hundreds of jobs be enqueued, claimed and completed."""
    for _ in range(rounds):
        query(db, "select taskboard.enqueue_many('mail', array_fill('{}'::jsonb, array[100]))")
        call(db, "complete_many", **pairs(*claim(db, max_jobs=100)))


def fresh_claim(connect: Connect, name: str) -> int:
    """The pages that the second claim of a new session touches; the job is given back."""
    session = connect(name)
    query(session, "begin")
    touched(session, arguments="max_jobs => 1")  # reads of the catalogue, once a session
    query(session, "rollback")
    query(session, "discard all")
    query(session, "begin")
    cost = touched(session, arguments="max_jobs => 1")
    query(session, "rollback")
    return cost


def test_once_an_old_snapshot_is_released_and_vacuumed_a_new_session_claims_as_before(
    db: Db, connect: Connect
) -> None:
    query(db, "alter table taskboard.jobs set (autovacuum_enabled = off)")
    churn(db, 1)
    query(db, "vacuum taskboard.jobs")
    call(db, "enqueue", kind="mail")
    before = fresh_claim(connect, "before")
    claim(db)
    reader = connect("reader")
    query(reader, "begin isolation level repeatable read")
    query(reader, "select count(*) from taskboard.jobs")
    churn(db, 30)
    query(db, "vacuum taskboard.jobs")
    call(db, "enqueue", kind="mail")
    held = fresh_claim(connect, "while it is held")
    query(reader, "rollback")
    query(db, "vacuum taskboard.jobs")
    after = fresh_claim(connect, "after")
    assert held > 2 * before, "there was nothing to step over: this shows nothing"
    assert after <= before + 10
