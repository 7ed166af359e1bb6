from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid4

import pytest
from verbs import (
    Db,
    Row,
    blocked,
    call,
    change,
    claim,
    claim_one,
    enqueue,
    gets_nothing,
    incidents,
    lease_status,
    leased,
    own,
    query,
    raises,
    refuses,
    row_of,
    set_default,
    state,
)

from support import expire

pytestmark = pytest.mark.rows_only

BAD_STEPS: list[tuple[Row, str]] = [
    ({"job_id": None}, "22004"),
    ({"lease_token": None}, "22004"),
    ({"step": None}, "22004"),
    ({"step": ""}, "22023"),
    ({"step": "Main"}, "22023"),
    ({"step": "-x"}, "22023"),
    ({"step": "a b"}, "22023"),
    ({"step": "a\n"}, "22023"),
    ({"step": "ü"}, "22023"),
    ({"step": "s" * 101}, "22023"),
]


def begin(db: Db, job: Row, **options: Any) -> Row:
    (row,) = call(db, "begin_effect", **own(job), **options)
    return row


def end(db: Db, job: Row, **options: Any) -> str:
    """Testify; what the step is then."""
    (row,) = call(db, "end_effect", **own(job), **options)
    found: str = row["state"]
    return found


def reclaim(db: Db, job: Row, worker: str = "b") -> Row:
    """Let the lease lapse and another worker take over."""
    expire(db, job["job_id"])
    again = claim_one(db, worker=worker)
    assert again["job_id"] == job["job_id"]
    return again


def interrupted(db: Db, **options: Any) -> tuple[Row, Row]:
    """A job whose effect A began and never reported, and which B has now: (A, B)."""
    a = leased(db, worker="a", max_lost_leases=100, **options)
    assert begin(db, a)["state"] == "fresh"
    return a, reclaim(db, a)


def held(db: Db, **options: Any) -> tuple[Row, Row]:
    """A job that is held because of what A left open: (A, B), both tokens void."""
    a, b = interrupted(db, on_unknown="hold", **options)
    assert begin(db, b)["state"] == "held"
    return a, b


def records(db: Db, job_id: UUID) -> list[tuple[str, int, str]]:
    return [
        (row["step"], row["attempt"], row["state"])
        for row in query(
            db,
            "select * from taskboard.effect_list where job_id = %(id)s order by begun_at",
            id=job_id,
        )
    ]


# The gate


def test_the_first_to_begin_finds_the_step_fresh(db: Db) -> None:
    job = leased(db)
    row = begin(db, job)
    assert row == {
        "job_id": job["job_id"],
        "step": "main",
        "idempotency_key": f"{job['job_id']}/main",
        "state": "fresh",
        "result": None,
    }
    assert records(db, job["job_id"]) == [("main", 1, "open")]


def test_the_same_token_asking_again_gets_the_same_answer(db: Db) -> None:
    job = leased(db)
    assert begin(db, job) == begin(db, job)
    _, b = interrupted(db)
    assert begin(db, b) == begin(db, b)
    assert begin(db, b)["state"] == "unknown"
    assert len(records(db, b["job_id"])) == 2


def test_e1_the_key_is_the_same_on_every_attempt_and_after_a_retry(db: Db) -> None:
    """E1: a key never changes and never serves two jobs."""
    a, b = interrupted(db)
    keys = {begin(db, b)["idempotency_key"]}
    call(db, "fail", **own(b), permanent=True)
    call(db, "retry", job_id=a["job_id"])
    c = claim_one(db)
    keys.add(begin(db, c)["idempotency_key"])
    query(db, "delete from taskboard.effects")
    keys.add(begin(db, c)["idempotency_key"])
    assert keys == {f"{a['job_id']}/main"}
    assert begin(db, leased(db))["idempotency_key"] not in keys
    assert begin(db, c, step="send/2")["idempotency_key"] == f"{a['job_id']}/send/2"


def test_s2_the_gate_is_shut_for_a_token_that_is_not_current_and_unexpired(db: Db) -> None:
    """S2: an accepted begin_effect carries the then-current token."""
    stale = leased(db)
    expire(db, stale["job_id"])
    gets_nothing(db, "begin_effect", **own(stale))
    claim_one(db, worker="b")
    gets_nothing(db, "begin_effect", **own(stale))
    done = leased(db)
    call(db, "complete", **own(done))
    gets_nothing(db, "begin_effect", **own(done))
    released = leased(db)
    call(db, "release", **own(released), delay="1 h")
    gets_nothing(db, "begin_effect", **own(released))
    late = leased(db, timeout="10 s")
    change(db, late["job_id"], "claimed_at = claimed_at - interval '10 seconds'")
    gets_nothing(db, "begin_effect", **own(late))
    gets_nothing(db, "begin_effect", **own(late) | {"lease_token": uuid4()})
    for job in (stale, done, released, late):
        assert incidents(db, job["job_id"]).count("write_refused") >= 1


def test_a_lease_that_lapses_while_the_gate_waits_for_the_row_is_refused(
    db: Db, connect: Callable[..., Db]
) -> None:
    job = leased(db)
    holder, worker = connect(), connect()
    change(db, job["job_id"], "claimable_at = clock_timestamp() + interval '0.1 seconds'")
    holder.execute("begin")
    query(holder, "select 1 from taskboard.jobs where id = %(id)s for update", id=job["job_id"])
    with blocked(db, worker, "begin_effect", **own(job)) as answer:
        query(db, "select pg_sleep(0.11)")
        holder.execute("rollback")
        assert answer.result() == []
    assert records(db, job["job_id"]) == []


def test_between_the_gate_and_its_commit_nobody_takes_over_but_renewals_pass(
    db: Db, connect: Callable[..., Db]
) -> None:
    job = leased(db)
    worker = connect()
    worker.execute("begin")
    begin(worker, job)
    assert len(call(db, "renew", **own(job))) == 1
    expire(db, job["job_id"])
    assert claim(db) == []
    worker.execute("commit")
    assert begin(db, claim_one(db))["state"] == "unknown"


# What earlier attempts left


def test_e1_after_done_no_attempt_is_ever_told_fresh(db: Db) -> None:
    """E1: after done, no attempt is ever told fresh."""
    a, b = interrupted(db)
    assert begin(db, b)["state"] == "unknown"
    assert end(db, b, result={"id": "ch_1"}) == "done"
    told = [begin(db, b)]
    assert end(db, b, happened=False) == "done", "the first testimony stays"
    assert end(db, a, happened=False) == "done"
    told.append(begin(db, b))
    c = reclaim(db, b)
    told.append(begin(db, c))
    call(db, "fail", **own(c), permanent=True)
    call(db, "retry", job_id=a["job_id"])
    d = claim_one(db)
    told.append(begin(db, d))
    call(db, "complete", **own(d))
    call(db, "retry", job_id=a["job_id"])
    told.append(begin(db, claim_one(db)))
    assert [(row["state"], row["result"]) for row in told] == [("done", {"id": "ch_1"})] * 5


def test_begun_and_never_reported_is_unknown_to_the_next(db: Db) -> None:
    a, b = interrupted(db)
    assert begin(db, b)["state"] == "unknown"
    assert records(db, a["job_id"]) == [("main", 1, "open"), ("main", 2, "open")]


@pytest.mark.parametrize("verb", ["fail", "release"])
def test_a_job_given_back_with_an_open_effect_leaves_it_unknown(db: Db, verb: str) -> None:
    job = leased(db)
    begin(db, job)
    call(db, verb, **own(job))
    expire(db, job["job_id"])
    assert begin(db, claim_one(db))["state"] == "unknown"


def test_known_not_to_have_happened_makes_the_step_fresh_again(db: Db) -> None:
    job = leased(db)
    begin(db, job)
    assert end(db, job, happened=False) == "fresh"
    assert records(db, job["job_id"]) == [("main", 1, "refused")]
    assert begin(db, job)["state"] == "fresh"
    assert records(db, job["job_id"]) == [("main", 1, "open")]
    assert end(db, job, happened=False) == "fresh"
    assert begin(db, reclaim(db, job))["state"] == "fresh"


def test_beginning_again_after_a_refusal_and_vanishing_leaves_it_unknown(db: Db) -> None:
    job = leased(db)
    begin(db, job)
    end(db, job, happened=False)
    begin(db, job)
    assert begin(db, reclaim(db, job))["state"] == "unknown"


def test_steps_are_told_apart(db: Db) -> None:
    job = leased(db)
    begin(db, job, step="send/1")
    end(db, job, step="send/1", result={"n": 1})
    begin(db, job, step="send/2")
    again = reclaim(db, job)
    told = [begin(db, again, step=f"send/{n}") for n in (1, 2, 3)]
    assert [row["state"] for row in told] == ["done", "unknown", "fresh"]
    assert [row["result"] for row in told] == [{"n": 1}, None, None]


def test_a_completion_closes_the_effects_of_its_own_token_only(db: Db) -> None:
    a = leased(db, worker="a")
    begin(db, a, step="old")
    b = reclaim(db, a)
    begin(db, b, step="new")
    begin(db, b, step="refused")
    end(db, b, step="refused", happened=False)
    call(db, "complete", **own(b))
    assert records(db, a["job_id"]) == [
        ("old", 1, "open"), ("new", 2, "done"), ("refused", 2, "refused"),
    ]  # fmt: skip
    call(db, "retry", job_id=a["job_id"])
    c = claim_one(db)
    told = [begin(db, c, step=step)["state"] for step in ("old", "new", "refused")]
    assert told == ["unknown", "done", "fresh"]


# Testimony


def test_a_repeated_testimony_changes_nothing(db: Db) -> None:
    job = leased(db)
    begin(db, job)
    assert end(db, job, result={"n": 1}) == "done"
    before = query(db, "select * from taskboard.effects")
    assert end(db, job, result={"n": 2}) == "done"
    call(db, "complete", **own(job))
    assert end(db, job, result={"n": 3}) == "done"
    assert query(db, "select * from taskboard.effects") == before
    assert incidents(db) == []


def test_happened_corrects_not_happened(db: Db) -> None:
    job = leased(db)
    begin(db, job)
    assert end(db, job, happened=False) == "fresh"
    assert end(db, job, happened=True, result={"n": 1}) == "done"
    assert begin(db, reclaim(db, job))["result"] == {"n": 1}


def test_who_never_began_cannot_testify(db: Db) -> None:
    a, b = interrupted(db)
    gets_nothing(db, "end_effect", **own(b))
    gets_nothing(db, "end_effect", **own(a), step="other")
    gets_nothing(db, "end_effect", **own(a) | {"lease_token": uuid4()})
    gets_nothing(db, "end_effect", **own(a) | {"job_id": uuid4()})
    assert incidents(db, a["job_id"]).count("write_refused") == 3


def test_late_evidence_after_a_reclaim_keeps_the_new_owner_from_repeating(db: Db) -> None:
    a, b = interrupted(db)
    before = row_of(db, a["job_id"])
    assert end(db, a, result={"id": "m1"}) == "done"
    assert row_of(db, a["job_id"]) == before, "the testimony touches nothing of the owner"
    row = begin(db, b)
    assert (row["state"], row["result"]) == ("done", {"id": "m1"})


def test_late_evidence_that_it_did_not_happen_makes_the_step_fresh(db: Db) -> None:
    a, b = interrupted(db)
    assert end(db, a, happened=False) == "fresh"
    assert begin(db, b)["state"] == "fresh"


def test_late_evidence_after_the_end_counts_when_the_job_comes_back(db: Db) -> None:
    a, b = interrupted(db)
    call(db, "fail", **own(b), permanent=True)
    assert end(db, a, result={"id": "m1"}) == "done"
    assert state(db, a["job_id"]) == "failed"
    call(db, "retry", job_id=a["job_id"])
    assert begin(db, claim_one(db))["state"] == "done"


# Unknown, and what to do about it


def test_under_hold_an_unknown_effect_holds_the_job_and_voids_the_token(db: Db) -> None:
    a, b = interrupted(db, on_unknown="hold")
    row = begin(db, b)
    assert (row["state"], row["result"]) == ("held", None)
    assert row["idempotency_key"] == f"{a['job_id']}/main"
    assert state(db, a["job_id"]) == "held"
    assert [lease_status(db, job) for job in (a, b)] == ["held", "held"]
    for verb in ("complete", "fail", "release", "renew", "begin_effect"):
        gets_nothing(db, verb, **own(b))
    raises(db, "TB001", "require_lease", **own(b))
    assert claim(db, max_jobs=10) == []
    assert records(db, a["job_id"]) == [("main", 1, "open")], "B began nothing"
    assert incidents(db, a["job_id"]).count("job_held") == 1


def test_under_hold_what_is_fresh_or_done_goes_on(db: Db) -> None:
    a = leased(db, on_unknown="hold")
    begin(db, a)
    assert begin(db, a)["state"] == "fresh", "its own record is not somebody else's"
    end(db, a, happened=False)
    b = reclaim(db, a)
    assert begin(db, b)["state"] == "fresh"
    end(db, b)
    assert begin(db, reclaim(db, b))["state"] == "done"


def test_evidence_on_a_held_job_frees_it_in_the_same_call(db: Db) -> None:
    a, _ = held(db)
    assert end(db, a, result={"id": "m1"}) == "done"
    assert state(db, a["job_id"]) == "ready"
    row = begin(db, claim_one(db))
    assert (row["state"], row["result"]) == ("done", {"id": "m1"})
    assert incidents(db, a["job_id"]).count("evidence_arrived") == 1
    end(db, a)
    assert incidents(db, a["job_id"]).count("evidence_arrived") == 1


def test_evidence_that_it_did_not_happen_frees_a_held_job_with_a_fresh_step(db: Db) -> None:
    a, _ = held(db)
    assert end(db, a, happened=False) == "fresh"
    assert begin(db, claim_one(db))["state"] == "fresh"


def test_evidence_about_another_step_leaves_a_job_held(db: Db) -> None:
    a = leased(db, on_unknown="hold")
    begin(db, a, step="one")
    begin(db, a, step="two")
    assert begin(db, reclaim(db, a), step="two")["state"] == "held"
    assert end(db, a, step="one") == "done"
    assert state(db, a["job_id"]) == "held"
    assert end(db, a, step="two") == "done"
    assert state(db, a["job_id"]) == "ready"


def test_a_job_stays_held_until_every_open_beginning_is_accounted_for(db: Db) -> None:
    a, b = interrupted(db)
    begin(db, b)
    change(db, a["job_id"], "on_unknown = 'hold'")
    assert begin(db, reclaim(db, b))["state"] == "held"
    assert end(db, a, happened=False) == "unknown"
    assert state(db, a["job_id"]) == "held"
    assert end(db, b, happened=False) == "fresh"
    assert state(db, a["job_id"]) == "ready"


def test_one_happened_frees_a_held_job_whatever_else_is_open(db: Db) -> None:
    a, b = interrupted(db)
    begin(db, b)
    change(db, a["job_id"], "on_unknown = 'hold'")
    begin(db, reclaim(db, b))
    assert end(db, b) == "done"
    assert state(db, a["job_id"]) == "ready"


def test_a_held_job_keeps_its_counters_and_goes_on_where_it_was(db: Db) -> None:
    a, b = held(db)
    end(db, a)
    job = claim_one(db)
    assert (job["attempt"], job["failures"]) == (b["attempt"] + 1, 0)
    assert job["lost_leases"] == b["lost_leases"]


def test_a_key_that_is_no_longer_valid_holds_the_job_though_it_would_retry(db: Db) -> None:
    a, b = interrupted(db)
    query(db, "update taskboard.effects set begun_at = begun_at - interval '23 hours'")
    assert begin(db, b, key_valid_for="24 hours")["state"] == "unknown"
    c = reclaim(db, b)
    # It counts from the earliest begin of any attempt, not from B's just now.
    assert begin(db, c, key_valid_for="23 hours")["state"] == "held"
    assert state(db, a["job_id"]) == "held"


def test_a_key_that_is_no_longer_valid_is_no_matter_for_fresh_and_done(db: Db) -> None:
    job = leased(db)
    assert begin(db, job, key_valid_for="0")["state"] == "fresh"
    assert begin(db, job, key_valid_for="0")["state"] == "fresh"
    end(db, job)
    assert begin(db, reclaim(db, job), key_valid_for="0")["state"] == "done"


@pytest.mark.parametrize("happened", [True, False])
def test_evidence_in_the_moment_of_holding_is_seen(
    db: Db, connect: Callable[..., Db], happened: bool
) -> None:
    a, b = interrupted(db, on_unknown="hold")
    witness, worker = connect(), connect()
    witness.execute("begin")
    end(witness, a, happened=happened)
    with blocked(db, worker, "begin_effect", **own(b)) as answer:
        witness.execute("commit")
        (row,) = answer.result()
    assert row["state"] == ("done" if happened else "fresh")
    assert len(call(db, "renew", **own(b))) == 1


def test_evidence_right_after_the_moment_of_holding_frees_the_job(
    db: Db, connect: Callable[..., Db]
) -> None:
    a, b = interrupted(db, on_unknown="hold")
    witness, worker = connect(), connect()
    worker.execute("begin")
    assert begin(worker, b)["state"] == "held"
    with blocked(db, witness, "end_effect", **own(a)) as answer:
        worker.execute("commit")
        assert answer.result()[0]["state"] == "done"
    assert state(db, a["job_id"]) == "ready"


def test_evidence_while_the_job_finishes_is_kept(db: Db, connect: Callable[..., Db]) -> None:
    a, b = interrupted(db)
    witness, worker = connect(), connect()
    worker.execute("begin")
    call(worker, "complete", **own(b))
    with blocked(db, witness, "end_effect", **own(a)) as answer:
        worker.execute("commit")
        assert answer.result()[0]["state"] == "done"
    assert state(db, a["job_id"]) == "completed"
    assert records(db, a["job_id"]) == [("main", 1, "done")]


def test_evidence_that_is_rolled_back_is_none(db: Db) -> None:
    a, b = interrupted(db)
    with db.transaction(force_rollback=True):
        end(db, a)
    assert begin(db, b)["state"] == "unknown"


# Arguments


def test_absurd_arguments_of_begin_effect_are_refused_and_begin_nothing(db: Db) -> None:
    refuses(
        db,
        "begin_effect",
        own(leased(db)),
        [
            *BAD_STEPS,
            ({"key_valid_for": "-1 s"}, "22023"),
            ({"key_valid_for": "1000000 years"}, "22023"),
        ],
    )


def test_absurd_arguments_of_end_effect_are_refused_and_end_nothing(db: Db) -> None:
    job = leased(db)
    begin(db, job)
    refuses(
        db,
        "end_effect",
        own(job),
        [
            *BAD_STEPS,
            ({"happened": None}, "22004"),
            ({"result": {"text": "x" * 1_100_000}}, "22023"),
        ],
    )


def test_step_names_may_be_as_long_as_a_key_carries(db: Db) -> None:
    job = leased(db)
    for step in ("0", "send/2", "a_b.c-d/e", "s" * 100):
        assert begin(db, job, step=step)["idempotency_key"] == f"{job['job_id']}/{step}"


def test_the_size_of_a_result_is_a_setting(db: Db) -> None:
    job = leased(db)
    begin(db, job)
    set_default(db, "payload_bytes", 50)
    raises(db, "22023", "end_effect", **own(job), result={"text": "x" * 51})
    assert end(db, job, result={"n": 1}) == "done"


def test_waiting_jobs_have_no_gate(db: Db) -> None:
    gets_nothing(db, "begin_effect", job_id=enqueue(db), lease_token=uuid4())
