from __future__ import annotations

from collections.abc import Callable
from uuid import uuid4

import pytest
from verbs import (
    Db,
    Row,
    blocked,
    call,
    claim_one,
    ended,
    enqueue,
    everything,
    gets_nothing,
    incidents,
    leased,
    own,
    pairs,
    query,
    raises,
    refuses,
    state,
    states,
)

from support import expire

pytestmark = pytest.mark.rows_only

ABSURD: list[tuple[Row, str]] = [
    ({"job_ids": None}, "22004"),
    ({"lease_tokens": None}, "22004"),
    ({"job_ids": []}, "22023"),
    ({"job_ids": [None]}, "22023"),
    ({"lease_tokens": [None]}, "22023"),
    ({"lease_tokens": [uuid4(), uuid4()]}, "22023"),
    ({"job_ids": [uuid4()] * 1001, "lease_tokens": [uuid4()] * 1001}, "22023"),
    ({"job_ids": [[uuid4()]], "lease_tokens": [[uuid4()]]}, "22023"),
    ({"results": []}, "22023"),
    ({"results": [{}, {}]}, "22023"),
]


def test_each_job_is_recorded_with_the_result_at_its_place(db: Db) -> None:
    jobs = [leased(db) for _ in range(3)]
    rows = call(db, "complete_many", **pairs(*jobs), results=[{"n": 0}, None, {"n": 2}])
    assert {row["job_id"] for row in rows} == {job["job_id"] for job in jobs}
    kept = [ended(db, job["job_id"]) for job in jobs]
    assert [row["result"] for row in kept] == [{"n": 0}, None, {"n": 2}]
    assert [row["lease_token"] for row in kept] == [job["lease_token"] for job in jobs]
    assert {row["state"] for row in kept} == {"completed"}
    assert {row["job_id"]: row["finished_at"] for row in rows} == {
        row["id"]: row["finished_at"] for row in kept
    }


def test_a_repeat_gives_the_same_rows_and_changes_nothing(db: Db) -> None:
    jobs = [leased(db) for _ in range(3)]
    first = call(db, "complete_many", **pairs(*jobs))
    before = everything(db)
    again = call(db, "complete_many", **pairs(*jobs))
    assert sorted(again, key=str) == sorted(first, key=str)
    assert everything(db) == before and incidents(db) == []


def test_a_repeat_together_with_new_jobs_gives_a_row_for_each(db: Db) -> None:
    old, new = leased(db), leased(db)
    first = call(db, "complete", **own(old))
    rows = call(db, "complete_many", **pairs(new, old))
    assert len(rows) == 2 and first[0] in rows


def test_s2_superseded_tokens_get_no_row_and_the_others_are_recorded(db: Db) -> None:
    """S2: an accepted complete carries the then-current token."""
    good, expired, taken, wrong = (leased(db) for _ in range(4))
    expire(db, taken["job_id"])
    owner = claim_one(db, worker="b")
    expire(db, expired["job_id"])
    wrong = wrong | {"lease_token": good["lease_token"]}
    lost = [taken, wrong, {"job_id": uuid4(), "lease_token": uuid4()}]
    rows = call(db, "complete_many", **pairs(good, expired, *lost))
    assert {row["job_id"] for row in rows} == {good["job_id"], expired["job_id"]}
    assert incidents(db, taken["job_id"])[-1] == "write_refused"
    assert incidents(db, good["job_id"]) == []
    gets_nothing(db, "complete_many", **pairs(*lost))
    assert len(call(db, "complete", **own(owner))) == 1


def test_s5_a_finished_job_is_not_completed_by_another_token(db: Db) -> None:
    """S5: nothing is accepted after a final state."""
    failed, cancelled, stale = (leased(db) for _ in range(3))
    call(db, "fail", **own(failed), permanent=True)
    call(db, "cancel", job_id=cancelled["job_id"], force=True)
    expire(db, stale["job_id"])
    call(db, "complete", **own(claim_one(db)))
    gets_nothing(db, "complete_many", **pairs(failed, cancelled, stale))


def test_a_job_named_twice_is_recorded_once(db: Db) -> None:
    job = leased(db)
    rows = call(db, "complete_many", **pairs(job, job, job | {"lease_token": uuid4()}))
    assert [row["job_id"] for row in rows] == [job["job_id"]]
    assert ended(db, job["job_id"])["state"] == "completed"


def test_keys_are_freed_and_turns_handed_on(db: Db) -> None:
    one = leased(db, unique_key="u", serial_key="s")
    two = leased(db, unique_key="v", serial_key="t")
    following = [enqueue(db, serial_key="s"), enqueue(db, serial_key="t")]
    assert states(db, *following) == ["blocked", "blocked"]
    call(db, "complete_many", **pairs(two, one))
    assert states(db, *following) == ["ready", "ready"]
    enqueue(db, unique_key="u")
    enqueue(db, unique_key="v")


def test_only_the_effects_of_the_completing_token_are_closed(db: Db) -> None:
    stale = leased(db)
    call(db, "begin_effect", **own(stale), step="old")
    expire(db, stale["job_id"])
    owner = claim_one(db, worker="b")
    call(db, "begin_effect", **own(owner), step="new")
    call(db, "complete_many", **pairs(owner, stale))
    effects = query(db, "select step, state from taskboard.effect_list order by step")
    assert effects == [{"step": "new", "state": "done"}, {"step": "old", "state": "open"}]


def test_batches_in_opposite_order_wait_and_do_not_deadlock(
    db: Db, connect: Callable[..., Db]
) -> None:
    jobs = [leased(db, serial_key=f"s{n}") for n in range(3)]
    one, two = connect(), connect()
    one.execute("begin")
    first = call(one, "complete_many", **pairs(*jobs))
    with blocked(db, two, "complete_many", **pairs(*reversed(jobs))) as answer:
        one.execute("commit")
        again = answer.result()
    assert sorted(again, key=str) == sorted(first, key=str)


def test_a_batch_in_a_transaction_that_is_rolled_back_leaves_the_leases(db: Db) -> None:
    jobs = [leased(db), leased(db)]
    with db.transaction(force_rollback=True):
        assert len(call(db, "complete_many", **pairs(*jobs))) == 2
    assert states(db, *(job["job_id"] for job in jobs)) == ["running", "running"]


def test_an_empty_batch_gets_nothing(db: Db) -> None:
    leased(db)
    gets_nothing(db, "complete_many", job_ids=[], lease_tokens=[])
    gets_nothing(db, "complete_many", job_ids=[], lease_tokens=[], results=[])


def test_absurd_arguments_are_refused_and_complete_nothing(db: Db) -> None:
    job = leased(db)
    refuses(db, "complete_many", pairs(job), ABSURD)
    huge = [{"text": "x" * 1_100_000}]
    raises(db, "22023", "complete_many", **pairs(job), results=huge)
    assert state(db, job["job_id"]) == "running"
