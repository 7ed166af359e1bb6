from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
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
    gets_nothing,
    leased,
    own,
    pairs,
    refuses,
    row_of,
    state,
)

from support import expire

pytestmark = pytest.mark.rows_only

ABSURD: list[tuple[Row, str]] = [
    ({"job_ids": None}, "22004"),
    ({"lease_tokens": None}, "22004"),
    ({"job_ids": []}, "22023"),
    ({"lease_tokens": [None]}, "22023"),
    ({"lease_tokens": [uuid4(), uuid4()]}, "22023"),
    ({"job_ids": [uuid4()] * 1001, "lease_tokens": [uuid4()] * 1001}, "22023"),
    ({"errors": []}, "22023"),
    ({"errors": ["a", "b"]}, "22023"),
    ({"retry_ins": [timedelta(seconds=1)] * 2}, "22023"),
    ({"retry_ins": [timedelta(days=-1)]}, "22023"),
    ({"permanents": [True, False]}, "22023"),
    ({"permanents": [None]}, "22004"),
]


def test_each_attempt_fails_as_is_said_at_its_place(db: Db) -> None:
    later, final, soon = (leased(db) for _ in range(3))
    rows = call(
        db, "fail_many", **pairs(later, final, soon), errors=["later", "no", None],
        retry_ins=[timedelta(hours=1), None, timedelta(0)], permanents=[False, True, False],
    )  # fmt: skip
    assert {row["job_id"]: row["state"] for row in rows} == {
        later["job_id"]: "scheduled", final["job_id"]: "failed", soon["job_id"]: "ready",
    }  # fmt: skip
    assert row_of(db, later["job_id"])["last_error"] == "later"
    assert ended(db, final["job_id"])["error"] == "no"
    assert row_of(db, soon["job_id"])["last_error"] is None
    assert row_of(db, soon["job_id"])["failures"] == 1


def test_without_more_than_the_pairs_each_waits_its_backoff(db: Db) -> None:
    jobs = [leased(db) for _ in range(2)]
    rows = call(db, "fail_many", **pairs(*jobs))
    assert [row["state"] for row in rows] == ["scheduled", "scheduled"]


def test_a_superseded_pair_changes_nothing_and_its_neighbours_count(db: Db) -> None:
    stale, good = leased(db), leased(db)
    expire(db, stale["job_id"])
    owner = claim_one(db, worker="b")
    rows = call(db, "fail_many", **pairs(stale, good), errors=["late", "mine"])
    assert [row["job_id"] for row in rows] == [good["job_id"]]
    assert row_of(db, stale["job_id"])["failures"] == 0
    assert row_of(db, stale["job_id"])["lease_token"] == owner["lease_token"]
    gets_nothing(db, "fail_many", **pairs(stale))


def test_one_pair_given_twice_fails_once(db: Db) -> None:
    job = leased(db)
    assert len(call(db, "fail_many", **pairs(job, job))) == 1
    assert row_of(db, job["job_id"])["failures"] == 1


def test_failing_for_good_hands_the_turn_of_each_serial_key_on(db: Db) -> None:
    first = [enqueue(db, serial_key=key) for key in ("k", "l")]
    second = [enqueue(db, serial_key=key) for key in ("k", "l")]
    jobs = call(db, "claim", max_jobs=2, worker="a")
    assert {job["job_id"] for job in jobs} == {*first}
    call(db, "fail_many", **pairs(*jobs), permanents=[True, True])
    assert [state(db, job) for job in second] == ["ready", "ready"]


def test_two_batches_in_opposite_order_do_not_block_each_other(
    db: Db, connect: Callable[..., Db]
) -> None:
    one, two = connect("one", autocommit=False), connect("two")
    jobs = sorted((leased(db) for _ in range(2)), key=lambda job: job["job_id"])
    first = call(one, "fail_many", **pairs(*reversed(jobs)))
    with blocked(db, two, "fail_many", **pairs(*jobs)) as answer:
        one.commit()
    assert len(first) == 2
    assert answer.result() == []


def test_a_batch_waits_for_a_completion_and_leaves_it_alone(
    db: Db, connect: Callable[..., Db]
) -> None:
    one, two = connect("one", autocommit=False), connect("two")
    done, failing = leased(db), leased(db)
    call(one, "complete", **own(done))
    with blocked(db, two, "fail_many", **pairs(done, failing)) as answer:
        one.commit()
    assert [row["job_id"] for row in answer.result()] == [failing["job_id"]]
    assert state(db, done["job_id"]) == "completed"


def test_no_pairs_are_zero_rows(db: Db) -> None:
    gets_nothing(db, "fail_many", job_ids=[], lease_tokens=[])


def test_arguments_out_of_bounds_are_refused_and_change_nothing(db: Db) -> None:
    refuses(db, "fail_many", pairs(leased(db)), ABSURD)
