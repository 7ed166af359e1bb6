from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest
from verbs import (
    Db,
    Row,
    call,
    change,
    claim,
    claim_one,
    clock,
    ended,
    enqueue,
    gets_nothing,
    incidents,
    lease_status,
    leased,
    old_transaction,
    own,
    query,
    refuses,
    row_of,
    set_default,
    state,
    states,
)

from support import expire

pytestmark = pytest.mark.rows_only

ABSURD: list[tuple[Row, str]] = [
    ({"max_jobs": None}, "22004"),
    ({"max_jobs": 0}, "22023"),
    ({"max_jobs": -1}, "22023"),
    ({"max_jobs": 1001}, "22023"),
    ({"max_jobs": 10**9}, "22023"),
    ({"lease": "0"}, "22023"),
    ({"lease": "0.05 s"}, "22023"),
    ({"lease": "-60 s"}, "22023"),
    ({"lease": "25 hours"}, "22023"),
    ({"lease": "1000000 years"}, "22023"),
    ({"queues": [None]}, "22004"),
    ({"queues": ["default", None]}, "22004"),
    ({"kinds": [None]}, "22004"),
    ({"kinds": "{{mail,bill},{a,b}}"}, "22023"),
    ({"worker": ""}, "22023"),
    ({"worker": "w" * 201}, "22023"),
]


def lapse(db: Db, worker: str = "a") -> Row:
    """Claim a job and let its lease lapse without an outcome."""
    job = claim_one(db, worker=worker)
    expire(db, job["job_id"])
    return job


def returning(db: Db, kind: str, count: int, **options: Any) -> set[UUID]:
    """Jobs that were claimed once and given back."""
    ids = {enqueue(db, kind, **options) for _ in range(count)}
    for job in claim(db, kinds=[kind], max_jobs=count):
        call(db, "release", **own(job))
    return ids


def test_a_claim_tells_everything_a_worker_needs(db: Db) -> None:
    job_id = enqueue(
        db, "bill", payload={"n": 1}, queue="slow", priority=3, run_at="2020-01-01Z",
        max_attempts=4, headers={"trace": "x"}, lease="30 s", timeout="10 min",
    )  # fmt: skip
    before = clock(db)
    job = claim_one(db, worker="a")
    assert list(job) == [
        "job_id", "lease_token", "lease_expires_at", "lease", "timeout", "queue", "kind",
        "payload", "attempt", "max_attempts", "headers", "failures", "lost_leases", "priority",
        "run_at", "created_at",
    ]  # fmt: skip
    assert job["job_id"] == job_id and isinstance(job["lease_token"], UUID)
    assert before < job["lease_expires_at"] - job["lease"] < clock(db)
    assert (job["lease"], job["timeout"]) == (timedelta(seconds=30), timedelta(minutes=10))
    assert (job["queue"], job["kind"], job["priority"]) == ("slow", "bill", 3)
    assert (job["payload"], job["headers"]) == ({"n": 1}, {"trace": "x"})
    assert (job["attempt"], job["max_attempts"]) == (1, 4)
    assert (job["failures"], job["lost_leases"]) == (0, 0)
    assert job["run_at"].year == 2020
    row = row_of(db, job_id)
    assert (row["lease_token"], row["leased_by"]) == (job["lease_token"], "a")
    assert (row["claimable_at"], row["created_at"]) == (job["lease_expires_at"], job["created_at"])


def test_defaults_apply_where_the_job_names_none(db: Db) -> None:
    enqueue(db)
    job = claim_one(db)
    assert (job["lease"], job["timeout"]) == (timedelta(seconds=60), timedelta(hours=1))
    assert (job["max_attempts"], job["payload"], job["headers"]) == (20, {}, None)


def test_s1_a_leased_job_is_leased_to_nobody_else(db: Db, connect: Callable[..., Db]) -> None:
    """S1: at any instant at most one valid token per job."""
    enqueue(db)
    claim_one(db)
    gets_nothing(connect(), "claim", max_jobs=10)


def test_s1_a_new_claim_voids_the_old_token(db: Db) -> None:
    """S1: at any instant at most one valid token per job."""
    enqueue(db, max_lost_leases=100)
    jobs = [lapse(db) for _ in range(5)]
    assert len({job["lease_token"] for job in jobs}) == 5
    assert [lease_status(db, job) for job in jobs] == ["not_current"] * 4 + ["expired"]


def test_s1_one_job_among_many_claimers_goes_to_one(db: Db, connect: Callable[..., Db]) -> None:
    """S1: with claims open at the same moment, too."""
    enqueue(db)
    claimers = [connect() for _ in range(4)]
    for claimer in claimers:
        claimer.execute("begin")
    assert sum(len(claim(claimer)) for claimer in claimers) == 1
    for claimer in claimers:
        claimer.execute("commit")
    assert claim(db) == []


def test_s3_no_early_reclaim(db: Db) -> None:
    """S3: the next claim comes only after the last granted deadline."""
    job_id = enqueue(db)
    job = claim_one(db)
    change(db, job_id, "claimable_at = clock_timestamp() + interval '2 seconds'")
    assert claim(db) == []
    call(db, "renew", **own(job))
    assert row_of(db, job_id)["claimable_at"] > clock(db) + timedelta(seconds=50)
    assert claim(db) == []
    expire(db, job_id)
    again = claim_one(db, worker="b")
    assert again["lease_token"] != job["lease_token"]
    assert again["lease_expires_at"] > clock(db)


def test_the_jobs_of_one_claim_have_one_deadline(db: Db) -> None:
    """Else whoever waits for the last of them finds that the first was taken over before."""
    for _ in range(40):
        enqueue(db)
    for _ in range(2):  # planned anew, and by the plan
        jobs = claim(db, max_jobs=20)
        assert len(jobs) == 20
        assert len({job["lease_expires_at"] for job in jobs}) == 1


def test_s4_the_kth_claim_is_attempt_k_however_the_earlier_ones_ended(db: Db) -> None:
    """S4: the k-th accepted claim of a job returns attempt k; retry does not reset it."""
    job_id = enqueue(db)
    lapse(db)
    call(db, "release", **own(claim_one(db)))
    call(db, "fail", **own(claim_one(db)), retry_in="0")
    with db.transaction(force_rollback=True):
        assert claim_one(db)["attempt"] == 4, "this claim is never committed"
    call(db, "fail", **own(claim_one(db)), permanent=True)
    call(db, "retry", job_id=job_id)
    assert claim_one(db)["attempt"] == 5


def test_a_lapsed_lease_counts_as_lost_and_names_who_had_it(db: Db) -> None:
    job_id = enqueue(db)
    lapse(db, worker="a")
    job = claim_one(db, worker="b")
    assert (job["attempt"], job["lost_leases"], job["failures"]) == (2, 1, 0)
    (shown,) = call(db, "job", job_id=job_id)
    assert (shown["worker"], shown["lapsed_by"]) == ("b", "a")
    (incident,) = query(db, "select * from taskboard.incident_list")
    assert (incident["what"], incident["job_id"]) == ("lease_lapsed", job_id)
    assert (incident["worker"], incident["kind"]) == ("a", "mail")


def test_an_orderly_return_counts_as_nothing_and_leaves_no_incident(db: Db) -> None:
    job_id = enqueue(db)
    call(db, "release", **own(claim_one(db)))
    call(db, "fail", **own(claim_one(db)), retry_in="0")
    call(db, "complete", **own(claim_one(db)))
    assert ended(db, job_id)["lost_leases"] == 0
    assert incidents(db) == []


def test_zero_rows_when_nothing_is_ready(db: Db) -> None:
    gets_nothing(db, "claim", max_jobs=10)
    enqueue(db, delay="1 hour")
    enqueue(db, serial_key="s")
    claim_one(db, max_jobs=10)
    enqueue(db, serial_key="s")
    call(db, "complete", **own(leased(db)))
    gets_nothing(db, "claim", max_jobs=10)


def test_a_kind_or_queue_that_is_not_named_is_never_claimed(db: Db) -> None:
    mail, bill = enqueue(db, "mail", queue="x"), enqueue(db, "bill", queue="y")
    expired = enqueue(db, "sms", queue="z", max_lost_leases=1)
    claim_one(db, kinds=["sms"])
    expire(db, expired)
    gets_nothing(db, "claim", kinds=["fax"], max_jobs=10)
    gets_nothing(db, "claim", queues=["default"], max_jobs=10)
    gets_nothing(db, "claim", kinds=["mail"], queues=["y"], max_jobs=10)
    gets_nothing(db, "claim", kinds=[], max_jobs=10)
    gets_nothing(db, "claim", queues=[], max_jobs=10)
    assert claim_one(db, kinds=["mail", "fax"], max_jobs=10)["job_id"] == mail
    assert claim_one(db, queues=["y", "x"], max_jobs=10)["job_id"] == bill


def test_lower_priority_numbers_first_then_the_oldest(db: Db) -> None:
    late = [enqueue(db, priority=5, run_at=f"2020-01-0{day}Z") for day in (1, 2)]
    last, first = enqueue(db, priority=9), enqueue(db, priority=0)
    assert [claim_one(db)["job_id"] for _ in range(4)] == [first, *late, last]


def test_never_more_than_max_jobs(db: Db) -> None:
    call(db, "enqueue_many", kind="mail", payloads=[{}] * 12)
    returning(db, "bill", 3)
    assert [len(claim(db, max_jobs=most)) for most in (1, 4, 7, 100, 100)] == [1, 4, 7, 3, 0]


def test_returning_jobs_get_up_to_half_of_a_batch_however_long_the_backlog(db: Db) -> None:
    back = returning(db, "mail", 8)
    fresh = {enqueue(db) for _ in range(20)}
    batch = {job["job_id"] for job in claim(db, max_jobs=6)}
    assert (len(batch & back), len(batch & fresh)) == (3, 3)


def test_jobs_that_fail_again_at_once_take_no_more_than_half_of_each_batch(db: Db) -> None:
    call(db, "enqueue_many", kind="mail", payloads=[{"bad": True}] * 8, max_attempts=1000)
    call(db, "enqueue_many", kind="mail", payloads=[{"bad": False}] * 100)
    sent = rounds = 0
    while sent < 100:
        rounds += 1
        for job in claim(db, max_jobs=8):
            if job["payload"]["bad"]:
                call(db, "fail", **own(job), retry_in="0")
            else:
                sent += len(call(db, "complete", **own(job)))
    # The first batch is all bad; from then on four places of eight are for the good ones.
    assert rounds <= 27


def test_returning_jobs_get_at_least_one_of_a_batch(db: Db) -> None:
    back = returning(db, "mail", 2)
    enqueue(db)
    assert claim_one(db, max_jobs=1)["job_id"] in back


def test_returning_jobs_of_several_kinds_leave_half_of_a_batch_to_fresh_ones(db: Db) -> None:
    back = returning(db, "mail", 8) | returning(db, "bill", 8) | returning(db, "sms", 8)
    fresh = {enqueue(db, kind) for kind in ("mail", "bill", "sms") for _ in range(8)}
    batch = {job["job_id"] for job in claim(db, max_jobs=8)}
    assert (len(batch & back), len(batch & fresh)) == (4, 4)


def test_nothing_of_a_lower_priority_is_taken_while_something_of_a_higher_one_is_left(
    db: Db,
) -> None:
    first = returning(db, "mail", 6, priority=0)
    for _ in range(6):
        enqueue(db, priority=9)
    assert {job["job_id"] for job in claim(db, max_jobs=6)} == first
    first = {enqueue(db, priority=0) for _ in range(6)}
    returning(db, "bill", 6, priority=9)
    assert {job["job_id"] for job in claim(db, max_jobs=6)} == first


def test_a_batch_is_filled_from_one_side_when_the_other_is_empty(db: Db) -> None:
    back = returning(db, "mail", 6)
    assert {job["job_id"] for job in claim(db, max_jobs=6)} == back
    fresh = {enqueue(db) for _ in range(6)}
    assert {job["job_id"] for job in claim(db, max_jobs=6)} == fresh


def test_the_lease_is_that_of_the_call_else_the_job_else_the_queue_else_the_setting(
    db: Db,
) -> None:
    query(db, "insert into taskboard.queues (name, lease) values ('slow', '7 min')")
    set_default(db, "lease", timedelta(seconds=11))
    jobs = [
        ({"queue": "slow", "lease": "8 s"}, {"lease": "9 s"}, 9),
        ({"queue": "slow", "lease": "8 s"}, {}, 8),
        ({"queue": "slow"}, {}, 420),
        ({}, {}, 11),
    ]
    for enqueued, claimed, seconds in jobs:
        enqueue(db, **enqueued)
        before = clock(db)
        job = claim_one(db, **claimed)
        assert job["lease"] == timedelta(seconds=seconds)
        assert before < job["lease_expires_at"] - job["lease"] < clock(db)


def test_the_worker_is_the_argument_else_the_application_name_else_the_pid(
    db: Db, connect: Callable[..., Db]
) -> None:
    named = connect(application_name="mailer@host")
    nameless = connect(application_name="")
    for session, arguments, worker in (
        (named, {"worker": "w1"}, "w1"),
        (named, {}, "mailer@host"),
        (nameless, {}, f"pid-{nameless.info.backend_pid}"),
    ):
        job_id = enqueue(db)
        claim_one(session, **arguments)
        (shown,) = call(db, "job", job_id=job_id)
        assert shown["worker"] == worker


@pytest.mark.parametrize("budget", [1, 3])
def test_a_job_that_kills_its_worker_ends_as_failed_after_so_many_starts(
    db: Db, budget: int
) -> None:
    job_id = enqueue(db, max_lost_leases=budget, max_attempts=100)
    for _ in range(budget):
        lapse(db, worker="victim")
    assert claim(db) == []
    row = ended(db, job_id)
    assert (row["state"], row["attempt"], row["lost_leases"]) == ("failed", budget, budget)
    assert row["failures"] == 0 and row["lease_token"] is None
    assert f"lease lost {budget} times" in row["error"]
    assert incidents(db, job_id)[-1] == "job_exhausted"
    assert claim(db) == []


def test_lost_leases_do_not_count_as_failures(db: Db) -> None:
    job_id = enqueue(db, max_attempts=1, max_lost_leases=4)
    for _ in range(3):
        lapse(db)
    job = claim_one(db)
    assert (job["attempt"], job["failures"], job["lost_leases"]) == (4, 0, 3)
    call(db, "fail", **own(job))
    assert (ended(db, job_id)["failures"], ended(db, job_id)["state"]) == (1, "failed")


def test_failures_do_not_count_as_lost_leases(db: Db) -> None:
    job_id = enqueue(db, max_attempts=100, max_lost_leases=1)
    for _ in range(5):
        call(db, "fail", **own(claim_one(db)), retry_in="0")
    assert row_of(db, job_id)["lost_leases"] == 0
    assert claim_one(db)["failures"] == 5


def test_a_claim_ends_exhausted_jobs_on_the_way_and_still_finds_the_ready_one(db: Db) -> None:
    doomed = [enqueue(db, priority=0, max_lost_leases=1) for _ in range(30)]
    assert len(claim(db, max_jobs=30)) == 30
    for job_id in doomed:
        expire(db, job_id)
    ready = enqueue(db, priority=9)
    assert claim_one(db)["job_id"] == ready
    assert claim(db) == []
    assert set(states(db, *doomed)) == {"failed"}


def test_ending_an_exhausted_job_frees_its_unique_key_and_hands_its_turn_on(db: Db) -> None:
    job_id = enqueue(db, unique_key="u", serial_key="s", max_lost_leases=1)
    following = enqueue(db, serial_key="s")
    lapse(db)
    assert claim_one(db)["job_id"] == following
    assert state(db, job_id) == "failed"
    enqueue(db, unique_key="u")


def test_an_exhausted_job_with_an_unknown_effect_under_hold_is_held(db: Db) -> None:
    job_id = enqueue(db, on_unknown="hold", max_lost_leases=1)
    job = claim_one(db)
    call(db, "begin_effect", **own(job))
    expire(db, job_id)
    assert claim(db) == []
    assert state(db, job_id) == "held"
    assert lease_status(db, job) == "held"
    assert "job_held" in incidents(db, job_id)


def test_a_job_that_lapses_after_a_cancel_was_asked_for_ends_as_cancelled(db: Db) -> None:
    job = leased(db)
    call(db, "cancel", job_id=job["job_id"], reason="not needed")
    expire(db, job["job_id"])
    assert claim(db) == []
    row = ended(db, job["job_id"])
    assert (row["state"], row["error"]) == ("cancelled", "not needed")


def test_a_claim_passes_over_locked_rows_without_waiting(
    db: Db, connect: Callable[..., Db]
) -> None:
    other = connect()
    busy, free = enqueue(db, run_at="2020-01-01Z"), enqueue(db)
    other.execute("begin")
    assert claim_one(other)["job_id"] == busy
    assert claim_one(db, max_jobs=10)["job_id"] == free
    other.execute("rollback")
    assert claim_one(db, max_jobs=10)["attempt"] == 1


def test_an_exhausted_job_that_is_just_completing_stays_completed(
    db: Db, connect: Callable[..., Db]
) -> None:
    job = leased(db, max_lost_leases=1)
    expire(db, job["job_id"])
    worker = connect()
    worker.execute("begin")
    call(worker, "complete", **own(job))
    assert claim(db, max_jobs=10) == []
    call(db, "maintain")
    worker.execute("commit")
    assert claim(db, max_jobs=10) == []
    assert ended(db, job["job_id"])["state"] == "completed"


def test_exhausted_jobs_that_somebody_holds_do_not_hide_a_ready_one(
    db: Db, connect: Callable[..., Db]
) -> None:
    doomed = leased(db, priority=0, max_lost_leases=1, serial_key="s")
    expire(db, doomed["job_id"])
    ready = enqueue(db, priority=9)
    producer = connect()
    producer.execute("begin")
    enqueue(producer, serial_key="s")
    assert [job["job_id"] for job in claim(db)] == [ready]
    producer.execute("rollback")


def test_in_an_old_transaction_the_deadline_lies_in_the_future(
    db: Db, connect: Callable[..., Db]
) -> None:
    enqueue(db)
    worker = connect()
    with old_transaction(worker):
        called = clock(worker)
        job = claim_one(worker, lease="0.1 s")
        assert job["lease_expires_at"] >= called + timedelta(seconds=0.1)
        assert row_of(worker, job["job_id"])["claimed_at"] >= called
    change(db, job["job_id"], "claimable_at = claimable_at + interval '1 minute'")
    assert claim(db) == []


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_a_claim_above_read_committed_is_refused(db: Db, level: str) -> None:
    enqueue(db)
    with pytest.raises(psycopg.errors.FeatureNotSupported) as caught, db.transaction():
        db.execute(f"set transaction isolation level {level}")
        claim(db)
    assert caught.value.diag.message_hint
    assert claim_one(db)["attempt"] == 1


def test_absurd_arguments_are_refused_and_claim_nothing(db: Db) -> None:
    enqueue(db)
    refuses(db, "claim", {}, ABSURD)
    if db.info.server_version >= 170000:
        refuses(db, "claim", {}, [({"lease": "infinity"}, "22023")])
    assert claim_one(db, max_jobs=1000, lease="24 hours")["attempt"] == 1


def test_a_job_due_later_than_a_lease_lasts_starts_once_and_not_before(
    db: Db, connect: Callable[..., Db]
) -> None:
    job_id = enqueue(db, delay="100 s", lease="10 s")
    claimers = [connect() for _ in range(5)]
    assert [claim(claimer) for claimer in claimers] == [[]] * 5
    change(db, job_id, "claimable_at = clock_timestamp()")
    found = [claim(claimer) for claimer in claimers]
    assert sum(map(len, found)) == 1
    (job,) = next(jobs for jobs in found if jobs)
    call(db, "fail", **own(job), retry_in="100 s")
    assert [claim(claimer) for claimer in claimers] == [[]] * 5


def test_a_claim_is_quick_where_the_server_compiles_expensive_plans(db: Db) -> None:
    # Up to 17 a plan without its usual scans looks expensive enough for the compiler.
    db.execute("set jit = on")
    call(db, "enqueue_many", kind="mail", payloads=[{}] * 50)
    took = []
    for _ in range(5):
        began = time.monotonic()
        claim_one(db)
        took.append(time.monotonic() - began)
    assert sorted(took)[2] < 0.15


def test_serial_numbers_may_outgrow_an_integer(db: Db) -> None:
    query(db, "alter table taskboard.incidents alter id restart 3000000000")
    first = enqueue(db, serial_key="s")
    query(db, "update taskboard.serial_keys set turn_no = 3000000000, last_no = 3000000000")
    second = enqueue(db, serial_key="s")
    job = claim_one(db)
    call(db, "complete", **own(job))
    assert call(db, "renew", **own(job)) == []
    assert (job["job_id"], claim_one(db)["job_id"]) == (first, second)


def test_the_limit_of_a_batch_is_a_setting(db: Db) -> None:
    set_default(db, "claim_jobs", 2)
    enqueue(db)
    refuses(db, "claim", {}, [({"max_jobs": 3}, "22023")])
    assert len(claim(db, max_jobs=2)) == 1
