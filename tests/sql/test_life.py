"""Every verb in every state, and what only time or a circumstance brings about."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from life import BY_CIRCUMSTANCE, BY_VERB, ENDED, LIVE, VERBS, Step
from verbs import call, claim_one, enqueue, leased, own, state

from support import Connection, expire

pytestmark = pytest.mark.rows_only

AFTER = {(step.before, step.how): step.after for step in BY_VERB}


def with_open_effect(db: Connection, kind: str = "mail") -> dict[str, Any]:
    """A job that another worker has claimed, after one that began its effect and said no more."""
    job = leased(db, kind, on_unknown="hold")
    call(db, "begin_effect", **own(job))
    expire(db, job["job_id"])
    return job


def job_in(db: Connection, wanted: str) -> dict[str, Any]:
    """Bring a job into a state; what proves the last claim it had, or a stranger's."""
    match wanted:
        case "ready" | "scheduled" | "blocked":
            key = "k" if wanted == "blocked" else None
            if key:
                enqueue(db, "first", serial_key=key, delay="1 h")
            delay = "1 h" if wanted == "scheduled" else "0"
            job_id = enqueue(db, serial_key=key, delay=delay)
            return {"job_id": job_id, "lease_token": job_id}
        case "held":
            job = with_open_effect(db)
            second = claim_one(db)
            call(db, "begin_effect", **own(second))
            return own(second)
    job = leased(db)
    if wanted == "expired":
        expire(db, job["job_id"])
    elif wanted == "completed":
        call(db, "complete", **own(job))
    elif wanted == "failed":
        call(db, "fail", **own(job), permanent=True)
    elif wanted == "cancelled":
        call(db, "cancel", job_id=job["job_id"], force=True)
    return own(job)


def do(db: Connection, verb: str, job: dict[str, Any]) -> None:
    """Call a verb; that it refuses is an answer, too."""
    job_id = {"job_id": job["job_id"]}
    match verb:
        case "claim":
            call(db, "claim", kinds=["mail"], worker="b")
        case "fail for good":
            call(db, "fail", **job, permanent=True)
        case "cancel" | "cancel by force":
            call(db, "cancel", **job_id, force=verb != "cancel")
        case "evict":
            call(db, "evict", worker="a")
        case "retry" | "resolve":
            more = {"step": "main", "happened": True} if verb == "resolve" else {}
            try:
                call(db, verb, **job_id, **more)
            except psycopg.Error as error:
                assert error.sqlstate == "TB003", error
        case _:
            call(db, verb, **job)


@pytest.mark.parametrize("before", LIVE + ENDED)
def test_each_verb_leads_where_the_table_says_and_otherwise_nowhere(
    db: Connection, before: str
) -> None:
    wrong = {}
    for verb in VERBS:
        job = job_in(db, before)
        assert state(db, job["job_id"]) == before
        do(db, verb, job)
        after = state(db, job["job_id"])
        if after != AFTER.get((before, verb), before):
            wrong[verb] = after
        db.execute("delete from taskboard.jobs; delete from taskboard.serial_keys")
    assert wrong == {}


def play(db: Connection, step: Step) -> str:
    """Bring a circumstance about; the state that the job is in then."""
    match step.how:
        case "enqueue":
            return state(db, enqueue(db))
        case "enqueue, due later":
            return state(db, enqueue(db, delay="1 h"))
        case "enqueue, behind its serial key":
            return state(db, job_in(db, "blocked")["job_id"])
        case "its turn comes":
            first, job_id = leased(db, serial_key="k"), enqueue(db, serial_key="k")
            assert state(db, job_id) == step.before
            call(db, "complete", **own(first))
            return state(db, job_id)
        case "fail, the last attempt":
            job = leased(db, max_attempts=1)
            call(db, "fail", **own(job))
        case "claim, lost too often":
            job = leased(db, max_lost_leases=1)
            expire(db, job["job_id"])
            assert state(db, job["job_id"]) == step.before
            call(db, "claim")
        case "fail or release, after a cancel":
            job, other = leased(db), leased(db)
            for one, verb in ((job, "fail"), (other, "release")):
                call(db, "cancel", job_id=one["job_id"])
                assert state(db, one["job_id"]) == step.before
                call(db, verb, **own(one))
            assert state(db, other["job_id"]) == step.after
        case "fail, an outcome is unknown":
            job = with_open_effect(db)
            call(db, "fail", **own(claim_one(db)), permanent=True)
        case "begin_effect, unknown before":
            job = with_open_effect(db)
            second = claim_one(db)
            assert state(db, job["job_id"]) == step.before
            call(db, "begin_effect", **own(second))
        case "end_effect, late evidence":
            job = with_open_effect(db)
            call(db, "begin_effect", **own(claim_one(db)))
            assert state(db, job["job_id"]) == step.before
            call(db, "end_effect", **own(job))
        case _:  # the two that only time brings about
            job = job_in(db, step.before)
            expire(db, job["job_id"])
    return state(db, job["job_id"])


@pytest.mark.parametrize("step", BY_CIRCUMSTANCE, ids=lambda step: f"{step.before}: {step.how}")
def test_each_circumstance_leads_where_the_table_says(db: Connection, step: Step) -> None:
    assert play(db, step) == step.after
