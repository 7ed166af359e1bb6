"""Who has a key, or had it: among live jobs and finished ones, the newest first."""

from __future__ import annotations

from uuid import uuid4

import pytest
from verbs import Db, call, claim_one, enqueue, own, query, raises

pytestmark = pytest.mark.rows_only


def with_key(db: Db, **arguments: object) -> list[object]:
    return [row["job_id"] for row in call(db, "jobs_with_key", **arguments)]


def test_live_and_finished_jobs_with_a_key_of_either_sort_are_listed(db: Db) -> None:
    first = enqueue(db, kind="a", unique_key="k")
    call(db, "complete", **own(claim_one(db)))
    turn = enqueue(db, kind="a", serial_key="k")
    behind = enqueue(db, kind="a", serial_key="k")
    again = enqueue(db, kind="a", unique_key="k")
    other_kind = enqueue(db, kind="b", unique_key="k")
    enqueue(db, kind="b", unique_key="other", serial_key="another")
    everything = sorted([first, turn, behind, again, other_kind], reverse=True)
    assert with_key(db, key="k") == everything
    assert with_key(db, key="k", max_jobs=2) == everything[:2]
    assert with_key(db, key="k", before=everything[1]) == everything[2:]
    assert with_key(db, key="nobody") == []


def test_a_key_that_is_held_past_the_end_is_listed_once(db: Db) -> None:
    job_id = enqueue(db, unique_key="k", unique_for="1 day", serial_key="k")
    call(db, "complete", **own(claim_one(db)))
    assert with_key(db, key="k") == [job_id]
    query(db, "delete from taskboard.history")
    assert with_key(db, key="k") == [], "the key is held, its job is pruned"


def test_nonsense_is_refused(db: Db) -> None:
    raises(db, "22004", "jobs_with_key", key=None)
    raises(db, "22023", "jobs_with_key", key="")
    for max_jobs in (None, 0, -1, 1001):
        raises(db, "22023", "jobs_with_key", key="k", max_jobs=max_jobs)
    assert with_key(db, key="k", before=uuid4()) == []
