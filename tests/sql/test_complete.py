from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg.types.json import Jsonb
from verbs import (
    Db,
    Row,
    blocked,
    call,
    change,
    claim,
    claim_one,
    clock,
    ended,
    enqueue,
    everything,
    gets_nothing,
    incidents,
    lease_status,
    leased,
    live,
    own,
    query,
    raises,
    refuses,
    row_of,
)

from support import expire

pytestmark = pytest.mark.rows_only

# Every way to end a job, and every call of a worker that must then be turned away.
FINAL = [
    ("completed", "complete", {}),
    ("failed", "fail", {"permanent": True}),
    ("cancelled", "cancel", {"force": True}),
]
AFTERWARDS: list[tuple[str, Row]] = [
    ("complete", {}),
    ("fail", {}),
    ("fail", {"permanent": True}),
    ("release", {}),
    ("renew", {}),
    ("begin_effect", {}),
]


def test_a_completed_job_leaves_for_history_with_the_token_that_finished_it(db: Db) -> None:
    job = leased(db, "bill", worker="a", payload={"n": 1}, queue="slow", headers={"h": 1})
    before = clock(db)
    (row,) = call(db, "complete", **own(job), result={"charge": "ch_1"})
    assert row["job_id"] == job["job_id"]
    assert before < row["finished_at"] < clock(db)
    kept = ended(db, job["job_id"])
    assert (kept["state"], kept["finished_at"]) == ("completed", row["finished_at"])
    assert (kept["lease_token"], kept["finished_by"]) == (job["lease_token"], "a")
    assert (kept["attempt"], kept["failures"], kept["lost_leases"]) == (1, 0, 0)
    assert (kept["queue"], kept["kind"], kept["priority"]) == ("slow", "bill", 5)
    assert (kept["payload"], kept["headers"]) == ({"n": 1}, {"h": 1})
    assert kept["result"] == {"charge": "ch_1"}
    assert kept["created_at"] == job["created_at"]


def test_a_result_may_be_any_json_document_or_none(db: Db) -> None:
    for result, kept in ((None, None), (Jsonb([1, "ü"]), [1, "ü"]), (Jsonb(0), 0)):
        job = leased(db)
        call(db, "complete", **own(job), result=result)
        assert ended(db, job["job_id"])["result"] == kept


def test_the_same_token_again_gives_the_same_row_and_changes_nothing(db: Db) -> None:
    job = leased(db)
    first = call(db, "complete", **own(job), result={"n": 1})
    before = everything(db)
    assert call(db, "complete", **own(job), result={"n": 2}) == first
    assert call(db, "complete", **own(job)) == first
    assert everything(db) == before
    assert incidents(db) == []


def test_s2_a_superseded_token_gets_zero_rows_and_touches_nothing_of_the_owner(db: Db) -> None:
    """S2: an accepted complete carries the then-current token."""
    job = leased(db)
    expire(db, job["job_id"])
    again = claim_one(db, worker="b")
    gets_nothing(db, "complete", **own(job), result={"from": "a"})
    assert incidents(db, job["job_id"])[-1] == "write_refused"
    (row,) = call(db, "complete", **own(again))
    assert row["job_id"] == job["job_id"]
    gets_nothing(db, "complete", **own(job))


def test_s2_a_token_that_was_never_given_out_gets_zero_rows(db: Db) -> None:
    """S2: an accepted complete carries the then-current token."""
    waiting, one, two = enqueue(db, delay="1 h"), leased(db), leased(db)
    gets_nothing(db, "complete", job_id=waiting, lease_token=uuid4())
    gets_nothing(db, "complete", job_id=one["job_id"], lease_token=two["lease_token"])
    gets_nothing(db, "complete", job_id=uuid4(), lease_token=one["lease_token"])


def test_an_expired_lease_that_nobody_took_over_completes(db: Db) -> None:
    job = leased(db)
    expire(db, job["job_id"])
    assert lease_status(db, job) == "expired"
    assert len(call(db, "complete", **own(job))) == 1
    assert claim(db) == []


def test_past_its_timeout_an_attempt_may_still_complete(db: Db) -> None:
    job = leased(db, timeout="1 s")
    change(db, job["job_id"], "claimed_at = claimed_at - interval '1 hour'")
    assert len(call(db, "complete", **own(job))) == 1


@pytest.mark.parametrize("arguments", [{"retry_in": "0"}, {"retry_in": "1 h"}, None])
def test_a_token_that_gave_the_job_back_completes_nothing(
    db: Db, arguments: dict[str, Any] | None
) -> None:
    job = leased(db)
    if arguments is None:
        call(db, "release", **own(job))
    else:
        call(db, "fail", **own(job), **arguments)
    gets_nothing(db, "complete", **own(job))


@pytest.mark.parametrize(("final", "verb", "arguments"), FINAL)
def test_s5_after_the_end_nothing_is_accepted(
    db: Db, final: str, verb: str, arguments: Row
) -> None:
    """S5: nothing is accepted after a final state (but the same completion repeated)."""
    job = leased(db)
    expire(db, job["job_id"])
    owner = claim_one(db, worker="b")
    proof = {"job_id": job["job_id"]} if verb == "cancel" else own(owner)
    call(db, verb, **proof, **arguments)
    assert ended(db, job["job_id"])["state"] == final
    for token in (job, owner):
        for after, options in AFTERWARDS:
            if (token, after, final) == (owner, "complete", "completed"):
                continue
            gets_nothing(db, after, **own(token), **options)
        raises(db, "TB001", "require_lease", **own(token))
    assert claim(db, max_jobs=10) == []


@pytest.mark.parametrize(("final", "verb", "arguments"), FINAL)
def test_s5_after_a_retry_the_old_tokens_stay_void(
    db: Db, final: str, verb: str, arguments: Row
) -> None:
    """S5, until an operator's retry: and then only for new tokens."""
    job = leased(db)
    proof = {"job_id": job["job_id"]} if verb == "cancel" else own(job)
    call(db, verb, **proof, **arguments)
    call(db, "retry", job_id=job["job_id"])
    for after, options in AFTERWARDS:
        gets_nothing(db, after, **own(job), **options)
    owner = claim_one(db)
    for after, options in AFTERWARDS:
        gets_nothing(db, after, **own(job), **options)
    assert len(call(db, "complete", **own(owner))) == 1


def test_a_job_that_was_asked_to_stop_may_still_complete(db: Db) -> None:
    job = leased(db)
    call(db, "cancel", job_id=job["job_id"])
    assert len(call(db, "complete", **own(job))) == 1
    assert ended(db, job["job_id"])["state"] == "completed"


def test_a_completion_that_is_rolled_back_leaves_the_lease(db: Db) -> None:
    job = leased(db, unique_key="u", serial_key="s")
    before = everything(db)
    with db.transaction(force_rollback=True):
        assert len(call(db, "complete", **own(job))) == 1
    assert everything(db) == before
    assert len(call(db, "renew", **own(job))) == 1


def test_a_completion_that_waits_looks_at_no_clock(db: Db, connect: Callable[..., Db]) -> None:
    job = leased(db)
    holder, worker = connect(), connect()
    change(db, job["job_id"], "claimable_at = clock_timestamp() + interval '0.1 seconds'")
    holder.execute("begin")
    query(holder, "select 1 from taskboard.jobs where id = %(id)s for update", id=job["job_id"])
    with blocked(db, worker, "complete", **own(job)) as answer:
        query(db, "select pg_sleep(0.11)")
        holder.execute("rollback")
        assert len(answer.result()) == 1


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_completion_that_waits_for_a_reclaim_counts_only_if_that_is_undone(
    db: Db, connect: Callable[..., Db], end: str
) -> None:
    job = leased(db)
    expire(db, job["job_id"])
    claimer, worker = connect(), connect()
    claimer.execute("begin")
    again = claim_one(claimer, worker="b")
    with blocked(db, worker, "complete", **own(job)) as answer:
        claimer.execute(end)
        rows = answer.result()
    if end == "commit":
        assert rows == []
        assert row_of(db, job["job_id"])["lease_token"] == again["lease_token"]
    else:
        assert len(rows) == 1
        assert ended(db, job["job_id"])["attempt"] == 1


def test_a_repeat_that_arrives_while_the_first_commits_gets_the_same_row(
    db: Db, connect: Callable[..., Db]
) -> None:
    job = leased(db)
    one, two = connect(), connect()
    one.execute("begin")
    first = call(one, "complete", **own(job))
    with blocked(db, two, "complete", **own(job)) as answer:
        one.execute("commit")
        assert answer.result() == first
    assert incidents(db) == []


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_above_read_committed_a_reclaim_shows_as_40001_and_then_as_zero_rows(
    db: Db, connect: Callable[..., Db], level: str
) -> None:
    job, other = leased(db), leased(db)
    worker = connect()
    worker.execute(f"begin isolation level {level}")
    query(worker, "select 1 from taskboard.settings")
    expire(db, job["job_id"])
    claim_one(db, worker="b")
    before = everything(db)
    with pytest.raises(psycopg.errors.SerializationFailure):
        call(worker, "complete", **own(job))
    worker.execute("rollback")
    assert everything(db) == before
    worker.execute(f"begin isolation level {level}")
    assert call(worker, "complete", **own(job)) == []
    assert len(call(worker, "complete", **own(other))) == 1
    worker.execute("commit")
    assert live(db, other["job_id"]) is None


def test_absurd_arguments_are_refused_and_complete_nothing(db: Db) -> None:
    waiting = enqueue(db, delay="1 h")
    job = leased(db)
    raises(db, "22004", "complete", job_id=waiting, lease_token=None)
    refuses(
        db,
        "complete",
        own(job),
        [
            ({"job_id": None}, "22004"),
            ({"lease_token": None}, "22004"),
            ({"result": {"text": "x" * 1_100_000}}, "22023"),
        ],
    )
    assert len(call(db, "complete", **own(job), result={"text": "x" * 1_000_000})) == 1
