from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from verbs import (
    Db,
    Row,
    blocked,
    call,
    claim,
    claim_one,
    clock,
    ended,
    enqueue,
    everything,
    incidents,
    leased,
    own,
    query,
    raises,
    refuses,
    row_of,
    state,
    states,
)

from support import expire

pytestmark = pytest.mark.rows_only


def failed(db: Db, **options: Any) -> Row:
    """A job that ended as failed; the row of its last claim."""
    job = leased(db, **options)
    call(db, "fail", **own(job), error="boom", permanent=True)
    return job


@pytest.mark.parametrize(
    ("final", "verb", "arguments"),
    [
        ("failed", "fail", {"permanent": True, "error": "boom"}),
        ("completed", "complete", {"result": {"n": 1}}),
        ("cancelled", "cancel", {"force": True}),
    ],
)
def test_a_finished_job_comes_back_as_it_was_enqueued(
    db: Db, final: str, verb: str, arguments: Row
) -> None:
    job_id = enqueue(
        db, "bill", payload={"n": 1}, queue="slow", priority=2, run_at="2020-01-01Z",
        unique_key="u", serial_key="s", max_attempts=3, max_lost_leases=2, lease="5 s",
        timeout="7 s", on_unknown="hold", headers={"h": 1},
    )  # fmt: skip
    before = row_of(db, job_id)
    (shown_before,) = call(db, "job", job_id=job_id)
    proof = {"job_id": job_id} if verb == "cancel" else own(claim_one(db))
    call(db, verb, **proof, **arguments)
    assert state(db, job_id) == final
    called = clock(db)
    (row,) = call(db, "retry", job_id=job_id)
    assert row == {"job_id": job_id, "state": "ready"}
    after = row_of(db, job_id)
    for name in (
        "run_at", "created_at", "lease", "timeout", "max_attempts", "max_lost_leases",
        "on_unknown", "unique_key", "serial_key", "headers", "payload",
    ):  # fmt: skip
        assert after[name] == before[name], name
    (shown,) = call(db, "job", job_id=job_id)
    for name in ("queue", "kind", "priority"):
        assert shown[name] == shown_before[name], name
    assert called <= after["claimable_at"] <= clock(db)
    assert query(db, "select * from taskboard.history") == []
    assert incidents(db, job_id)[-1] == "job_retried"


def test_a_retried_job_has_a_new_budget_and_counts_its_attempts_on(db: Db) -> None:
    job_id = enqueue(db, max_attempts=2, max_lost_leases=3)
    expire(db, claim_one(db)["job_id"])
    for _ in range(2):
        call(db, "fail", **own(claim_one(db)), retry_in="0")
    assert state(db, job_id) == "failed"
    call(db, "retry", job_id=job_id)
    job = claim_one(db)
    assert (job["attempt"], job["failures"], job["lost_leases"]) == (4, 0, 0)
    (row,) = call(db, "fail", **own(job))
    assert row["state"] == "scheduled"


def test_a_job_that_used_up_its_leases_has_new_ones(db: Db) -> None:
    job = leased(db, max_lost_leases=1)
    expire(db, job["job_id"])
    assert claim(db) == []
    call(db, "retry", job_id=job["job_id"])
    assert claim_one(db)["lost_leases"] == 0


def test_a_repeat_makes_no_second_job(db: Db) -> None:
    job_id = failed(db)["job_id"]
    first = call(db, "retry", job_id=job_id)
    before, recorded = everything(db), incidents(db)
    assert call(db, "retry", job_id=job_id) == first
    assert everything(db) == before and incidents(db) == recorded
    assert len(claim(db, max_jobs=10)) == 1


def test_two_retries_at_once_make_one_live_job(db: Db, connect: Callable[..., Db]) -> None:
    job_id = failed(db)["job_id"]
    one, two = connect(), connect()
    one.execute("begin")
    call(one, "retry", job_id=job_id)
    with blocked(db, two, "retry", job_id=job_id) as answer:
        one.execute("commit")
        assert answer.result() == [{"job_id": job_id, "state": "ready"}]
    assert len(claim(db, max_jobs=10)) == 1


def test_a_retry_that_is_rolled_back_leaves_the_history(db: Db) -> None:
    job_id = failed(db, unique_key="u")["job_id"]
    before = everything(db)
    with db.transaction(force_rollback=True):
        call(db, "retry", job_id=job_id)
    assert everything(db) == before


def test_a_running_job_is_not_retried(db: Db) -> None:
    running, expired = leased(db), leased(db)
    expire(db, expired["job_id"])
    for job in (running, expired):
        raises(db, "TB003", "retry", job_id=job["job_id"])


def test_a_job_that_waits_is_returned_as_it_is(db: Db) -> None:
    scheduled, ready = enqueue(db, delay="1 h"), enqueue(db, serial_key="s")
    waits = enqueue(db, serial_key="s")
    before = everything(db)
    for job_id, now in ((scheduled, "scheduled"), (ready, "ready"), (waits, "blocked")):
        assert call(db, "retry", job_id=job_id) == [{"job_id": job_id, "state": now}]
    assert everything(db) == before and incidents(db) == []


def test_while_another_job_holds_its_unique_key_a_job_is_not_retried(db: Db) -> None:
    job_id = failed(db, unique_key="u")["job_id"]
    holder = enqueue(db, unique_key="u")
    raises(db, "TB003", "retry", job_id=job_id)
    call(db, "cancel", job_id=holder)
    assert call(db, "retry", job_id=job_id)[0]["state"] == "ready"
    assert call(db, "enqueue", kind="mail", unique_key="u") == [
        {"job_id": job_id, "created": False}
    ]


def test_a_key_held_past_the_end_is_the_jobs_own_when_it_comes_back(db: Db) -> None:
    job_id = failed(db, unique_key="u", unique_for="1 hour")["job_id"]
    assert call(db, "retry", job_id=job_id)[0]["state"] == "ready"
    call(db, "complete", **own(claim_one(db)))
    # It is still held for the rest of the hour, from when it was enqueued.
    (row,) = call(db, "enqueue", kind="mail", unique_key="u")
    assert row == {"job_id": job_id, "created": False}


def test_a_key_held_by_another_job_past_its_end_keeps_a_job_from_being_retried(db: Db) -> None:
    job_id = failed(db, unique_key="u")["job_id"]
    done = leased(db, unique_key="u", unique_for="1 hour")
    call(db, "complete", **own(done))
    raises(db, "TB003", "retry", job_id=job_id)
    query(
        db,
        "update taskboard.unique_keys set held_until = held_until - %(hour)s",
        hour=timedelta(hours=1),
    )
    assert call(db, "retry", job_id=job_id)[0]["state"] == "ready"


def test_a_retried_job_queues_up_again_behind_its_serial_key(db: Db) -> None:
    job_id = failed(db, serial_key="s")["job_id"]
    following = [enqueue(db, serial_key="s") for _ in range(2)]
    assert call(db, "retry", job_id=job_id)[0]["state"] == "blocked"
    order = []
    while jobs := claim(db, max_jobs=10):
        (job,) = jobs
        order.append(job["job_id"])
        call(db, "complete", **own(job))
    assert order == [*following, job_id]


def test_a_retry_keeps_the_effects(db: Db) -> None:
    job = leased(db)
    call(db, "begin_effect", **own(job))
    call(db, "complete", **own(job))
    call(db, "retry", job_id=job["job_id"])
    (row,) = call(db, "begin_effect", **own(claim_one(db)))
    assert row["state"] == "done"


def test_unknown_jobs_and_null_are_refused(db: Db) -> None:
    job_id = failed(db)["job_id"]
    refuses(
        db,
        "retry",
        {"job_id": job_id},
        [({"job_id": None}, "22004"), ({"job_id": uuid4()}, "TB002")],
    )


def ids(rows: list[Row]) -> set[UUID]:
    return {row["job_id"] for row in rows}


def test_all_failed_jobs_of_a_queue_or_kind_come_back(db: Db) -> None:
    mail = failed(db, kind="mail", queue="x")["job_id"]
    bill = failed(db, kind="bill", queue="x")["job_id"]
    other = failed(db, kind="bill", queue="y")["job_id"]
    call(db, "complete", **own(leased(db)))
    call(db, "cancel", job_id=enqueue(db))
    assert ids(call(db, "retry_failed", queue="x", kind="bill")) == {bill}
    assert ids(call(db, "retry_failed", queue="y")) == {other}
    assert ids(call(db, "retry_failed", kind="fax")) == set()
    assert ids(call(db, "retry_failed")) == {mail}
    assert call(db, "retry_failed") == []
    assert states(db, mail, bill, other) == ["ready"] * 3


def test_the_reason_is_kept_with_the_incident_of_each_and_a_long_one_is_cut(db: Db) -> None:
    first, second, long, silent = (failed(db)["job_id"] for _ in range(4))
    call(db, "retry", job_id=long, reason="long" * 1000)
    call(db, "retry", job_id=silent)
    call(db, "retry_failed", reason="printer is back")
    rows = query(db, "select job_id, detail from taskboard.incident_list"
                 " where what = 'job_retried'")  # fmt: skip
    assert {row["job_id"]: row["detail"] for row in rows} == {
        first: "was failed; printer is back", second: "was failed; printer is back",
        long: ("was failed; " + "long" * 1000)[:1000], silent: "was failed",
    }  # fmt: skip


def test_the_oldest_failures_come_back_first(db: Db) -> None:
    first, second, third = (failed(db)["job_id"] for _ in range(3))
    assert ids(call(db, "retry_failed", max_jobs=2)) == {first, second}
    assert state(db, third) == "failed"


def test_a_failed_job_whose_key_another_job_holds_is_passed_over(db: Db) -> None:
    stuck = failed(db, unique_key="u")["job_id"]
    free = failed(db)["job_id"]
    enqueue(db, unique_key="u")
    assert ids(call(db, "retry_failed")) == {free}
    assert state(db, stuck) == "failed"


def test_of_two_failed_jobs_with_one_unique_key_the_older_comes_back(db: Db) -> None:
    older, newer = (failed(db, unique_key="u")["job_id"] for _ in range(2))
    other = failed(db)["job_id"]
    assert ids(call(db, "retry_failed")) == {older, other}
    assert state(db, newer) == "failed"


def test_a_key_that_another_job_held_long_ago_stops_nobody(db: Db) -> None:
    job_id = failed(db, unique_key="u")["job_id"]
    call(db, "complete", **own(leased(db, unique_key="u", unique_for="1 hour")))
    query(
        db,
        "update taskboard.unique_keys set held_until = held_until - %(hour)s",
        hour=timedelta(hours=1),
    )
    assert ids(call(db, "retry_failed")) == {job_id}


def test_absurd_arguments_of_retry_failed_are_refused(db: Db) -> None:
    failed(db)
    refuses(
        db,
        "retry_failed",
        {},
        [
            ({"max_jobs": 0}, "22023"),
            ({"max_jobs": -1}, "22023"),
            ({"max_jobs": 10**9}, "22023"),
            ({"max_jobs": None}, "22023"),
        ],
    )


def test_an_old_result_is_gone_when_the_job_ends_again(db: Db) -> None:
    job = leased(db)
    call(db, "complete", **own(job), result={"n": 1})
    call(db, "retry", job_id=job["job_id"])
    call(db, "complete", **own(claim_one(db)))
    assert ended(db, job["job_id"])["result"] is None
