from __future__ import annotations

from collections.abc import Callable
from uuid import UUID, uuid4

import pytest
from verbs import (
    Db,
    blocked,
    call,
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
    own,
    query,
    raises,
    refuses,
    row_of,
    state,
)

from support import expire

pytestmark = pytest.mark.rows_only


def blocked_job(db: Db) -> UUID:
    leased(db, serial_key="s")
    return enqueue(db, serial_key="s")


def waiting_for_its_retry(db: Db) -> UUID:
    job = leased(db)
    call(db, "fail", **own(job))
    return UUID(str(job["job_id"]))


def expired_job(db: Db) -> UUID:
    job = leased(db)
    expire(db, job["job_id"])
    return UUID(str(job["job_id"]))


def held_job(db: Db) -> UUID:
    job = leased(db, on_unknown="hold")
    call(db, "begin_effect", **own(job))
    call(db, "fail", **own(job), permanent=True)
    return UUID(str(job["job_id"]))


WAITING: list[tuple[str, Callable[[Db], UUID]]] = [
    ("ready", enqueue),
    ("scheduled", lambda db: enqueue(db, delay="1 hour")),
    ("scheduled", waiting_for_its_retry),
    ("blocked", blocked_job),
    ("expired", expired_job),
    ("held", held_job),
]


@pytest.mark.parametrize(("before", "make"), WAITING)
@pytest.mark.parametrize("force", [False, True])
def test_a_job_that_does_not_run_is_cancelled_at_once(
    db: Db, before: str, make: Callable[[Db], UUID], force: bool
) -> None:
    job_id = make(db)
    assert state(db, job_id) == before
    asked = clock(db)
    (row,) = call(db, "cancel", job_id=job_id, reason="customer left", force=force)
    assert row == {"job_id": job_id, "state": "cancelled"}
    kept = ended(db, job_id)
    assert (kept["state"], kept["error"]) == ("cancelled", "customer left")
    assert asked < kept["finished_at"] < clock(db)
    assert kept["lease_token"] is None and kept["finished_by"] == db.info.user
    assert incidents(db, job_id)[-1] == "job_cancelled"
    assert claim(db, max_jobs=10) == []


def test_a_running_job_is_asked_to_stop_and_nothing_else_changes(db: Db) -> None:
    job = leased(db)
    before = row_of(db, job["job_id"])
    (row,) = call(db, "cancel", job_id=job["job_id"], reason="customer left")
    assert row["state"] == "running"
    after = row_of(db, job["job_id"])
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"cancel_requested_at", "cancel_reason"}
    assert lease_status(db, job) == "current"
    assert call(db, "renew", **own(job))[0]["cancel_requested"] is True
    assert incidents(db, job["job_id"]) == ["cancel_requested"]


def test_a_repeat_changes_nothing(db: Db) -> None:
    running, waiting = leased(db), enqueue(db)
    for job_id in (running["job_id"], waiting):
        first = call(db, "cancel", job_id=job_id, reason="first")
        before, recorded = everything(db), incidents(db)
        assert call(db, "cancel", job_id=job_id, reason="second") == first
        assert everything(db) == before and incidents(db) == recorded


def test_force_fences_a_running_job_at_once(db: Db) -> None:
    job = leased(db, worker="a")
    (row,) = call(db, "cancel", job_id=job["job_id"], force=True)
    assert row["state"] == "cancelled"
    for verb in ("complete", "fail", "release", "renew", "begin_effect"):
        gets_nothing(db, verb, **own(job))
    raises(db, "TB001", "require_lease", **own(job))
    assert lease_status(db, job) == "cancelled"
    (incident,) = query(db, "select * from taskboard.incident_list where what = 'job_cancelled'")
    assert (incident["worker"], incident["by_role"]) == ("a", db.info.user)


def test_force_fences_a_job_that_was_asked_to_stop_before(db: Db) -> None:
    job = leased(db)
    call(db, "cancel", job_id=job["job_id"])
    (row,) = call(db, "cancel", job_id=job["job_id"], force=True)
    assert row["state"] == "cancelled"
    gets_nothing(db, "complete", **own(job))


def test_late_evidence_about_a_cancelled_job_is_still_taken(db: Db) -> None:
    job = leased(db)
    call(db, "begin_effect", **own(job))
    call(db, "cancel", job_id=job["job_id"], force=True)
    assert call(db, "end_effect", **own(job))[0]["state"] == "done"


@pytest.mark.parametrize(
    ("final", "verb", "arguments"),
    [("completed", "complete", {}), ("failed", "fail", {"permanent": True})],
)
def test_a_job_that_has_ended_stays_as_it_is(
    db: Db, final: str, verb: str, arguments: dict[str, object]
) -> None:
    job = leased(db)
    call(db, verb, **own(job), **arguments)
    before = everything(db)
    for force in (False, True):
        (row,) = call(db, "cancel", job_id=job["job_id"], force=force)
        assert row["state"] == final
    assert everything(db) == before and incidents(db) == []


def test_a_cancelled_job_frees_its_unique_key_and_hands_its_turn_on(db: Db) -> None:
    job_id = enqueue(db, unique_key="u", serial_key="s")
    following = enqueue(db, serial_key="s")
    call(db, "cancel", job_id=job_id)
    assert state(db, following) == "ready"
    enqueue(db, unique_key="u")


def test_without_a_reason_there_still_is_one(db: Db) -> None:
    job_id = enqueue(db)
    call(db, "cancel", job_id=job_id)
    assert ended(db, job_id)["error"] == "cancelled"


def test_a_long_reason_is_cut(db: Db) -> None:
    job_id = enqueue(db)
    call(db, "cancel", job_id=job_id, reason="x" * 100_000)
    assert len(ended(db, job_id)["error"]) <= 1100


def test_a_cancel_that_waits_for_a_claim_finds_the_job_running(
    db: Db, connect: Callable[..., Db]
) -> None:
    job_id = enqueue(db)
    worker, operator = connect(), connect()
    worker.execute("begin")
    job = claim_one(worker)
    with blocked(db, operator, "cancel", job_id=job_id) as answer:
        worker.execute("commit")
        assert answer.result()[0]["state"] == "running"
    assert len(call(db, "complete", **own(job))) == 1


def test_a_cancel_that_waits_for_a_completion_finds_the_job_completed(
    db: Db, connect: Callable[..., Db]
) -> None:
    job = leased(db)
    worker, operator = connect(), connect()
    worker.execute("begin")
    call(worker, "complete", **own(job))
    with blocked(db, operator, "cancel", job_id=job["job_id"], force=True) as answer:
        worker.execute("commit")
        assert answer.result()[0]["state"] == "completed"


def test_a_cancelled_job_does_not_come_back_by_itself(db: Db) -> None:
    job = leased(db)
    call(db, "cancel", job_id=job["job_id"], force=True)
    call(db, "maintain")
    call(db, "evict", worker="a")
    assert claim(db) == [] and state(db, job["job_id"]) == "cancelled"


def test_a_retried_job_is_not_cancelled_again_by_the_old_request(db: Db) -> None:
    job = leased(db)
    call(db, "cancel", job_id=job["job_id"])
    call(db, "release", **own(job))
    call(db, "retry", job_id=job["job_id"])
    again = claim_one(db)
    assert call(db, "renew", **own(again))[0]["cancel_requested"] is False
    call(db, "release", **own(again))
    assert state(db, job["job_id"]) == "ready"


def test_unknown_jobs_and_null_arguments_are_refused(db: Db) -> None:
    job_id = enqueue(db)
    refuses(
        db,
        "cancel",
        {"job_id": job_id},
        [({"job_id": None}, "22004"), ({"force": None}, "22004"), ({"job_id": uuid4()}, "TB002")],
    )
