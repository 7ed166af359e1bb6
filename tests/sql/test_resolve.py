from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from verbs import (
    Db,
    Row,
    blocked,
    call,
    claim_one,
    clock,
    enqueue,
    everything,
    incidents,
    leased,
    old_transaction,
    own,
    query,
    raises,
    refuses,
    row_of,
    state,
)

from support import expire

pytestmark = pytest.mark.rows_only


def held(db: Db, step: str = "charge", **options: Any) -> Row:
    """A job held for a step that A began; the row of A's claim."""
    job = leased(db, worker="a", on_unknown="hold", **options)
    call(db, "begin_effect", **own(job), step=step)
    expire(db, job["job_id"])
    call(db, "begin_effect", **own(claim_one(db, worker="b")), step=step)
    assert state(db, job["job_id"]) == "held"
    return job


def told(db: Db, step: str = "charge") -> str:
    """What the next owner is told about the step."""
    (row,) = call(db, "begin_effect", **own(claim_one(db)), step=step)
    found: str = row["state"]
    return found


@pytest.mark.parametrize(("happened", "then"), [(True, "done"), (False, "fresh")])
def test_an_answer_makes_the_job_ready_and_the_step_known(
    db: Db, happened: bool, then: str
) -> None:
    job_id = held(db)["job_id"]
    before = clock(db)
    (row,) = call(db, "resolve", job_id=job_id, step="charge", happened=happened)
    assert row == {"job_id": job_id, "state": "ready"}
    kept = row_of(db, job_id)
    assert before <= kept["claimable_at"] <= clock(db)
    assert (kept["waits_for"], kept["held_step"]) == (None, None)
    assert incidents(db, job_id)[-1] == "job_resolved"
    assert told(db) == then


@pytest.mark.parametrize("happened", [True, False])
def test_the_same_answer_again_changes_nothing(db: Db, happened: bool) -> None:
    job_id = held(db)["job_id"]
    answer = {"job_id": job_id, "step": "charge", "happened": happened}
    first = call(db, "resolve", **answer)
    before, recorded = everything(db), incidents(db)
    assert call(db, "resolve", **answer) == first
    assert everything(db) == before and incidents(db) == recorded
    raises(db, "TB003", "resolve", **answer | {"happened": not happened})


def test_an_answer_after_evidence_that_says_the_same_is_no_mistake(db: Db) -> None:
    job = held(db)
    call(db, "end_effect", **own(job), step="charge")
    assert state(db, job["job_id"]) == "ready"
    answer = {"job_id": job["job_id"], "step": "charge"}
    assert call(db, "resolve", **answer, happened=True)[0]["state"] == "ready"
    raises(db, "TB003", "resolve", **answer, happened=False)


def test_happened_accounts_for_every_open_beginning(db: Db) -> None:
    job = leased(db)
    for _ in range(3):
        call(db, "begin_effect", **own(job), step="charge")
        expire(db, job["job_id"])
        job = claim_one(db)
    query(db, "update taskboard.jobs set on_unknown = 'hold'")
    call(db, "begin_effect", **own(job), step="charge")
    call(db, "resolve", job_id=job["job_id"], step="charge", happened=False)
    assert told(db) == "fresh"


def test_evidence_after_an_answer_may_correct_it_to_happened(db: Db) -> None:
    job = held(db)
    call(db, "resolve", job_id=job["job_id"], step="charge", happened=False)
    (row,) = call(db, "end_effect", **own(job), step="charge", result={"id": "ch_1"})
    assert row["state"] == "done" and told(db) == "done"


def test_a_job_held_for_its_last_attempt_is_resolved_into_one_more(db: Db) -> None:
    job = leased(db, on_unknown="hold", max_attempts=1)
    call(db, "begin_effect", **own(job))
    call(db, "fail", **own(job))
    call(db, "resolve", job_id=job["job_id"], step="main", happened=True)
    again = claim_one(db)
    assert call(db, "begin_effect", **own(again))[0]["state"] == "done"
    call(db, "complete", **own(again))
    assert state(db, job["job_id"]) == "completed"


def test_a_job_held_for_its_last_lease_is_resolved_into_one_more(db: Db) -> None:
    job = leased(db, on_unknown="hold", max_lost_leases=1)
    call(db, "begin_effect", **own(job))
    expire(db, job["job_id"])
    call(db, "maintain")
    call(db, "resolve", job_id=job["job_id"], step="main", happened=False)
    again = claim_one(db)
    assert again["attempt"] == 2
    assert call(db, "begin_effect", **own(again))[0]["state"] == "fresh"


def test_a_job_that_is_not_held_for_the_step_raises(db: Db) -> None:
    held_job, running, done = held(db)["job_id"], leased(db), leased(db)
    call(db, "complete", **own(done))
    waiting = enqueue(db)
    raises(db, "TB003", "resolve", job_id=held_job, step="main", happened=True)
    for job_id in (running["job_id"], waiting, done["job_id"]):
        raises(db, "TB003", "resolve", job_id=job_id, step="charge", happened=True)
    raises(db, "TB002", "resolve", job_id=uuid4(), step="charge", happened=True)


def test_of_two_answers_at_once_the_first_counts(db: Db, connect: Callable[..., Db]) -> None:
    job_id = held(db)["job_id"]
    one, two = connect(), connect()
    one.execute("begin")
    call(one, "resolve", job_id=job_id, step="charge", happened=True)
    with blocked(db, two, "resolve", job_id=job_id, step="charge", happened=False) as answer:
        one.execute("commit")
        assert getattr(answer.exception(), "sqlstate", None) == "TB003"
    assert told(db) == "done"


def test_in_an_old_transaction_the_job_is_ready_from_the_call_on(db: Db) -> None:
    job_id = held(db)["job_id"]
    with old_transaction(db):
        called = clock(db)
        call(db, "resolve", job_id=job_id, step="charge", happened=True)
        assert row_of(db, job_id)["claimable_at"] >= called


def test_absurd_arguments_are_refused_and_resolve_nothing(db: Db) -> None:
    job_id = held(db)["job_id"]
    refuses(
        db,
        "resolve",
        {"job_id": job_id, "step": "charge", "happened": True},
        [
            ({"job_id": None}, "22004"),
            ({"step": None}, "22004"),
            ({"happened": None}, "22004"),
            ({"step": ""}, "22023"),
            ({"step": "No Step"}, "22023"),
        ],
    )
