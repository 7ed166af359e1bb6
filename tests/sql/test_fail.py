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
)

from support import expire

pytestmark = pytest.mark.rows_only

ABSURD: list[tuple[Row, str]] = [
    ({"job_id": None}, "22004"),
    ({"lease_token": None}, "22004"),
    ({"permanent": None}, "22004"),
    ({"retry_in": "-1 s"}, "22023"),
    ({"retry_in": "367 days"}, "22023"),
    ({"retry_in": "1000000 years"}, "22023"),
]


def stored_error(db: Db, job_id: object) -> str:
    (row,) = query(db, "select error from taskboard.job_documents(%(id)s)", id=job_id)
    error: str = row["error"]
    return error


def test_a_failed_attempt_is_tried_again_later(db: Db) -> None:
    job = leased(db)
    (row,) = call(db, "fail", **own(job), error="no route to host")
    assert (row["job_id"], row["state"]) == (job["job_id"], "scheduled")
    kept = row_of(db, job["job_id"])
    assert row["claimable_at"] == kept["claimable_at"] > clock(db)
    assert (kept["attempt"], kept["failures"], kept["lost_leases"]) == (1, 1, 0)
    assert (kept["lease_token"], kept["leased_by"]) == (None, None)
    assert kept["run_at"] == job["run_at"]
    assert stored_error(db, job["job_id"]) == "no route to host"
    assert lease_status(db, job) == "given_back"
    assert claim(db) == [] and incidents(db) == []
    expire(db, job["job_id"])
    again = claim_one(db)
    assert (again["attempt"], again["failures"]) == (2, 1)
    assert again["lease_token"] != job["lease_token"]


def test_the_wait_doubles_with_each_failure_up_to_an_hour_and_never_overflows(db: Db) -> None:
    job_id = enqueue(db, max_attempts=1_000_000)
    for failures in (0, 1, 2, 5, 9, 10, 29, 31, 46, 70, 1000, 999_998):
        job = claim_one(db)
        change(db, job_id, f"failures = {failures}")
        before = clock(db)
        (row,) = call(db, "fail", **own(job))
        wait = min(5 * 2**failures, 3600)
        assert timedelta(seconds=wait * 0.75) <= row["claimable_at"] - before
        assert row["claimable_at"] - clock(db) <= timedelta(seconds=wait * 1.25)
        change(db, job_id, "claimable_at = clock_timestamp()")


def test_the_wait_varies_so_that_failures_do_not_come_back_together(db: Db) -> None:
    waits = set()
    for _ in range(12):
        before = clock(db)
        (row,) = call(db, "fail", **own(leased(db)))
        waits.add(round((row["claimable_at"] - before).total_seconds(), 1))
    assert len(waits) > 2


def test_the_wait_grows_with_failures_not_with_attempts(db: Db) -> None:
    enqueue(db)
    for _ in range(10):
        call(db, "release", **own(claim_one(db)))
    (row,) = call(db, "fail", **own(claim_one(db)))
    assert row["claimable_at"] < clock(db) + timedelta(seconds=6.25)


def test_backoff_is_a_setting(db: Db) -> None:
    set_default(db, "backoff", timedelta(seconds=100))
    set_default(db, "backoff_max", timedelta(seconds=120))
    for failures, wait in ((0, 100), (1, 120), (50, 120)):
        job = leased(db, max_attempts=100)
        change(db, job["job_id"], f"failures = {failures}")
        before = clock(db)
        (row,) = call(db, "fail", **own(job))
        assert timedelta(seconds=wait * 0.75) <= row["claimable_at"] - before
        assert row["claimable_at"] - clock(db) <= timedelta(seconds=wait * 1.25)


def test_retry_in_is_kept_to_the_letter(db: Db) -> None:
    for wait in (timedelta(seconds=3), timedelta(days=365)):
        before = clock(db)
        (row,) = call(db, "fail", **own(leased(db)), retry_in=wait)
        assert before < row["claimable_at"] - wait < clock(db)
        assert row["state"] == "scheduled"


def test_retry_in_zero_makes_the_job_ready_at_once(db: Db) -> None:
    job = leased(db)
    (row,) = call(db, "fail", **own(job), retry_in="0")
    assert row["state"] == "ready"
    assert claim_one(db)["job_id"] == job["job_id"]


def test_a_permanent_failure_ends_the_job(db: Db) -> None:
    job = leased(db, worker="a", payload={"n": 1})
    before = clock(db)
    (row,) = call(db, "fail", **own(job), error="card declined", permanent=True)
    assert (row["job_id"], row["state"]) == (job["job_id"], "failed")
    assert row["claimable_at"] is None
    kept = ended(db, job["job_id"])
    assert (kept["state"], kept["error"], kept["result"]) == ("failed", "card declined", None)
    assert (kept["lease_token"], kept["finished_by"]) == (job["lease_token"], "a")
    assert (kept["attempt"], kept["failures"], kept["payload"]) == (1, 1, {"n": 1})
    assert before < kept["finished_at"] < clock(db)


@pytest.mark.parametrize("budget", [1, 3])
def test_the_last_attempt_of_the_budget_ends_the_job(db: Db, budget: int) -> None:
    job_id = enqueue(db, max_attempts=budget)
    for n in range(1, budget + 1):
        (row,) = call(db, "fail", **own(claim_one(db)), error=f"error {n}", retry_in="0")
    assert row["state"] == "failed"
    kept = ended(db, job_id)
    assert (kept["failures"], kept["error"]) == (budget, f"error {budget}")
    assert claim(db) == []


def test_a_repeat_gets_zero_rows_and_makes_no_second_record(db: Db) -> None:
    final, retried = leased(db), leased(db)
    call(db, "fail", **own(final), permanent=True)
    call(db, "fail", **own(retried), error="first")
    for job in (final, retried):
        gets_nothing(db, "fail", **own(job), permanent=True)
        gets_nothing(db, "fail", **own(job), error="second")
    assert ended(db, final["job_id"])["failures"] == 1
    assert stored_error(db, retried["job_id"]) == "first"


def test_of_two_failures_at_once_one_counts(db: Db, connect: Callable[..., Db]) -> None:
    job = leased(db)
    one, two = connect(), connect()
    one.execute("begin")
    assert len(call(one, "fail", **own(job), permanent=True)) == 1
    with blocked(db, two, "fail", **own(job), permanent=True) as answer:
        one.execute("commit")
        assert answer.result() == []
    assert ended(db, job["job_id"])["failures"] == 1


def test_s2_a_superseded_token_cannot_fail_the_job_of_the_owner(db: Db) -> None:
    """S2: an accepted fail carries the then-current token."""
    job = leased(db)
    expire(db, job["job_id"])
    claim_one(db, worker="b")
    gets_nothing(db, "fail", **own(job), error="late")
    gets_nothing(db, "fail", **own(job), permanent=True)
    assert incidents(db, job["job_id"])[-2:] == ["write_refused"] * 2


def test_the_token_of_another_job_cannot_fail_it(db: Db) -> None:
    one, two, waiting = leased(db), leased(db), enqueue(db)
    gets_nothing(db, "fail", job_id=one["job_id"], lease_token=two["lease_token"])
    gets_nothing(db, "fail", job_id=waiting, lease_token=two["lease_token"])
    gets_nothing(db, "fail", job_id=uuid4(), lease_token=two["lease_token"])


def test_an_expired_lease_that_nobody_took_over_may_still_say_fail(db: Db) -> None:
    job = leased(db)
    expire(db, job["job_id"])
    assert len(call(db, "fail", **own(job), error="late")) == 1
    assert row_of(db, job["job_id"])["lost_leases"] == 0


def test_a_job_that_was_asked_to_stop_ends_as_cancelled_with_both_reasons(db: Db) -> None:
    job = leased(db)
    call(db, "cancel", job_id=job["job_id"], reason="customer left")
    (row,) = call(db, "fail", **own(job), error="interrupted")
    assert (row["state"], row["claimable_at"]) == ("cancelled", None)
    kept = ended(db, job["job_id"])
    assert (kept["state"], kept["lease_token"]) == ("cancelled", job["lease_token"])
    assert "customer left" in kept["error"] and "interrupted" in kept["error"]


@pytest.mark.parametrize("arguments", [{"permanent": True}, {}])
def test_a_job_that_would_fail_with_an_unknown_effect_under_hold_is_held(
    db: Db, arguments: Row
) -> None:
    job = leased(db, on_unknown="hold", max_attempts=1)
    call(db, "begin_effect", **own(job), step="charge")
    (row,) = call(db, "fail", **own(job), error="lost answer", **arguments)
    assert (row["state"], row["claimable_at"]) == ("held", None)
    kept = row_of(db, job["job_id"])
    assert (kept["held_step"], kept["lease_token"], kept["failures"]) == ("charge", None, 1)
    assert stored_error(db, job["job_id"]) == "lost answer"
    assert incidents(db, job["job_id"]) == ["job_held"]
    assert claim(db) == []


def test_under_retry_an_unknown_effect_keeps_no_job_from_failing(db: Db) -> None:
    job = leased(db)
    call(db, "begin_effect", **own(job))
    (row,) = call(db, "fail", **own(job), permanent=True)
    assert row["state"] == "failed"


def test_an_effect_known_not_to_have_happened_holds_nothing(db: Db) -> None:
    job = leased(db, on_unknown="hold")
    call(db, "begin_effect", **own(job))
    call(db, "end_effect", **own(job), happened=False)
    (row,) = call(db, "fail", **own(job), permanent=True)
    assert row["state"] == "failed"


@pytest.mark.parametrize("letter", ["x", "ü", "\U0001f600"])
def test_a_long_error_is_cut_at_the_limit_with_a_mark(db: Db, letter: str) -> None:
    text = letter * (1_000_000 // len(letter.encode()))
    final, retried = leased(db), leased(db)
    call(db, "fail", **own(final), error=text, permanent=True)
    call(db, "fail", **own(retried), error=text)
    for job in (final, retried):
        kept = stored_error(db, job["job_id"])
        assert len(kept.encode()) < 8300
        assert len(kept) > 8000 or letter != "x", "cut long before the limit"
        assert kept.startswith(letter * 100) and kept.endswith("(cut)")


def test_an_error_within_the_limit_is_kept_as_it_is(db: Db) -> None:
    for text in ("", "x" * 8192, "tab\tline\nbell\a ü ☃ \U0001f600"):
        job = leased(db)
        call(db, "fail", **own(job), error=text)
        assert stored_error(db, job["job_id"]) == text
    call(db, "fail", **own(leased(db)))


def test_a_thousand_stored_errors_leave_one(db: Db) -> None:
    job_id = enqueue(db, max_attempts=1000)
    for n in range(30):
        call(db, "fail", **own(claim_one(db)), error=f"{n}" * 1000, retry_in="0")
    assert stored_error(db, job_id) == "29" * 1000


def test_in_an_old_transaction_the_wait_counts_from_the_call(db: Db) -> None:
    one, two = leased(db), leased(db)
    with old_transaction(db):
        called = clock(db)
        (row,) = call(db, "fail", **own(one), retry_in="1 s")
        assert row["claimable_at"] >= called + timedelta(seconds=1)
        (row,) = call(db, "fail", **own(two), retry_in="0")
        assert row["claimable_at"] >= called


def test_a_failure_that_is_rolled_back_leaves_the_lease(db: Db) -> None:
    job = leased(db)
    before = row_of(db, job["job_id"])
    with db.transaction(force_rollback=True):
        call(db, "fail", **own(job), permanent=True)
    assert row_of(db, job["job_id"]) == before


def test_absurd_arguments_are_refused_and_the_job_can_still_fail(db: Db) -> None:
    job = leased(db)
    refuses(db, "fail", own(job), ABSURD)
    if db.info.server_version >= 170000:
        refuses(db, "fail", own(job), [({"retry_in": "infinity"}, "22023")])
    call(db, "fail", **own(job))
    assert state(db, job["job_id"]) == "scheduled"
