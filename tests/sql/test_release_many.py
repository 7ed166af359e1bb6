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
    ({"delays": []}, "22023"),
    ({"delays": [timedelta(seconds=1)] * 2}, "22023"),
    ({"delays": [timedelta(days=-1)]}, "22023"),
    ({"delays": [timedelta(days=4000)]}, "22023"),
]


def test_each_job_is_given_back_for_the_delay_at_its_place_and_nothing_is_charged(db: Db) -> None:
    later, soon, at_once = (leased(db) for _ in range(3))
    delays = [timedelta(hours=1), timedelta(0), None]
    rows = call(db, "release_many", **pairs(later, soon, at_once), delays=delays)
    assert {row["job_id"]: row["state"] for row in rows} == {
        later["job_id"]: "scheduled", soon["job_id"]: "ready", at_once["job_id"]: "ready",
    }  # fmt: skip
    for job in (later, soon, at_once):
        row = row_of(db, job["job_id"])
        assert (row["failures"], row["lost_leases"], row["lease_token"]) == (0, 0, None)


def test_without_delays_all_are_ready_at_once(db: Db) -> None:
    jobs = [leased(db) for _ in range(3)]
    rows = call(db, "release_many", **pairs(*jobs))
    assert [row["job_id"] for row in rows] == sorted(job["job_id"] for job in jobs)
    assert len(call(db, "claim", max_jobs=10, worker="b")) == 3


def test_a_superseded_pair_changes_nothing_and_its_neighbours_count(db: Db) -> None:
    stale, good = leased(db), leased(db)
    expire(db, stale["job_id"])
    owner = claim_one(db, worker="b")
    rows = call(db, "release_many", **pairs(stale, good))
    assert [row["job_id"] for row in rows] == [good["job_id"]]
    assert row_of(db, stale["job_id"])["lease_token"] == owner["lease_token"]
    gets_nothing(db, "release_many", **pairs(stale))


def test_one_pair_given_twice_is_given_back_once(db: Db) -> None:
    job = leased(db)
    assert len(call(db, "release_many", **pairs(job, job))) == 1


def test_one_whose_cancel_was_asked_for_ends_as_cancelled(db: Db) -> None:
    unwanted, other = leased(db), leased(db)
    call(db, "cancel", job_id=unwanted["job_id"])
    rows = call(db, "release_many", **pairs(unwanted, other))
    assert {row["state"] for row in rows} == {"cancelled", "ready"}
    assert state(db, unwanted["job_id"]) == "cancelled"


def test_two_batches_in_opposite_order_do_not_block_each_other(
    db: Db, connect: Callable[..., Db]
) -> None:
    one, two = connect("one", autocommit=False), connect("two")
    jobs = sorted((leased(db) for _ in range(2)), key=lambda job: job["job_id"])
    first = call(one, "release_many", **pairs(*reversed(jobs)))
    with blocked(db, two, "release_many", **pairs(*jobs)) as answer:
        one.commit()
    assert len(first) == 2
    assert answer.result() == []


def test_a_batch_waits_for_a_completion_and_leaves_it_alone(
    db: Db, connect: Callable[..., Db]
) -> None:
    one, two = connect("one", autocommit=False), connect("two")
    done, given_back = leased(db), leased(db)
    call(one, "complete", **own(done))
    with blocked(db, two, "release_many", **pairs(done, given_back)) as answer:
        one.commit()
    assert [row["job_id"] for row in answer.result()] == [given_back["job_id"]]
    assert state(db, done["job_id"]) == "completed"


def test_no_pairs_are_zero_rows(db: Db) -> None:
    gets_nothing(db, "release_many", job_ids=[], lease_tokens=[])


def test_arguments_out_of_bounds_are_refused_and_change_nothing(db: Db) -> None:
    refuses(db, "release_many", pairs(leased(db)), ABSURD)
