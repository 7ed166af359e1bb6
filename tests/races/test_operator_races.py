"""People and housekeeping against workers: cancel, retry, evict, maintain."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest

from races.sessions import Session, sqlstate
from support import Connection, expire, rows

Named = Callable[[str], Session]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_cancel_waits_for_a_claim_and_asks_the_new_owner_to_stop(named: Named, end: str) -> None:
    a, operator = named("A"), named("operator")
    job_id = a.enqueue()
    a.begin()
    job = a.claim()
    cancel = operator.start("cancel", job_id=job_id).blocks()
    a.end(end)
    if end == "commit":
        assert [row.state for row in cancel.rows()] == ["running"]
        (renewed,) = a.call("renew", job_id=job_id, lease_token=job.lease_token)
        assert renewed.cancel_requested
        assert [
            row.state for row in a.call("fail", job_id=job_id, lease_token=job.lease_token)
        ] == ["cancelled"]
    else:
        assert [row.state for row in cancel.rows()] == ["cancelled"]
        assert a.call("claim") == []


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_claim_passes_over_a_job_that_is_just_being_cancelled(named: Named, end: str) -> None:
    a, operator = named("A"), named("operator")
    job_id = a.enqueue()
    operator.begin()
    operator.call("cancel", job_id=job_id)
    assert a.at_once("claim") == []
    operator.end(end)
    assert len(a.call("claim")) == (0 if end == "commit" else 1)


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_forced_cancel_and_completion_exclude_each_other(named: Named, end: str) -> None:
    a, operator = named("A"), named("operator")
    job_id = a.enqueue()
    job = a.claim()
    operator.begin()
    operator.call("cancel", job_id=job_id, force=True)
    completion = a.start("complete", job_id=job_id, lease_token=job.lease_token).blocks()
    operator.end(end)
    assert len(completion.rows()) == (0 if end == "commit" else 1)
    state = "cancelled" if end == "commit" else "completed"
    assert a.sql("select state from taskboard.history") == [(state,)]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_cancel_behind_a_completion_reports_how_the_job_ended(named: Named, end: str) -> None:
    a, operator = named("A"), named("operator")
    job_id = a.enqueue()
    job = a.claim()
    a.begin()
    a.call("complete", job_id=job_id, lease_token=job.lease_token)
    cancel = operator.start("cancel", job_id=job_id, force=True).blocks()
    a.end(end)
    state = "completed" if end == "commit" else "cancelled"
    assert [row.state for row in cancel.rows()] == [state]
    assert a.sql("select state from taskboard.history") == [(state,)]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_two_retries_at_once_bring_one_job_back(named: Named, end: str) -> None:
    a, b = named("A"), named("B")
    job_id = a.enqueue()
    a.call("cancel", job_id=job_id)
    a.begin()
    a.call("retry", job_id=job_id)
    second = b.start("retry", job_id=job_id).blocks()
    a.end(end)
    assert [row.state for row in second.rows()] == ["ready"]
    assert a.sql("select count(*) from taskboard.jobs") == [(1,)]
    assert a.sql("select count(*) from taskboard.history") == [(0,)]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_repeated_completion_behind_a_retry_gets_its_row_only_if_that_rolls_back(
    named: Named, end: str
) -> None:
    a, operator = named("A"), named("operator")
    job_id = a.enqueue()
    job = a.claim()
    done = a.call("complete", job_id=job_id, lease_token=job.lease_token)
    operator.begin()
    operator.call("retry", job_id=job_id)
    # A repeat reads; it neither waits for the retry nor undoes it.
    assert a.at_once("complete", job_id=job_id, lease_token=job.lease_token) == done
    operator.end(end)
    repeat = a.call("complete", job_id=job_id, lease_token=job.lease_token)
    assert repeat == ([] if end == "commit" else done)


def test_retry_failed_beside_a_worker_that_retried_one_of_them_brings_the_rest_back(
    named: Named,
) -> None:
    a, operator = named("A"), named("operator")
    jobs = [a.enqueue() for _ in range(2)]
    for job in a.call("claim", max_jobs=2):
        a.call("fail", job_id=job.job_id, lease_token=job.lease_token, permanent=True)
    a.begin()
    a.call("retry", job_id=jobs[0])
    bulk = operator.start("retry_failed").blocks()
    a.claim()
    a.end("commit")
    assert jobs[1] in {row.job_id for row in bulk.rows()}


def test_retry_failed_and_a_batch_of_completions_do_not_deadlock_over_serial_keys(
    named: Named,
) -> None:
    a, operator, producer = named("A"), named("operator"), named("producer")
    for by in (a, operator):
        by.sql("set deadlock_timeout = '50ms'")
    for key in ("t", "s"):
        a.enqueue(serial_key=key)
        job = a.claim()
        a.call("fail", job_id=job.job_id, lease_token=job.lease_token, permanent=True)
    for key in ("s", "t"):
        a.enqueue(serial_key=key)
    jobs = a.call("claim", max_jobs=2)
    producer.begin()
    producer.enqueue(serial_key="s")
    batch = a.start(
        "complete_many",
        job_ids=[job.job_id for job in jobs],
        lease_tokens=[job.lease_token for job in jobs],
    ).blocks()
    bulk = operator.start("retry_failed").blocks()
    producer.end("commit")
    assert len(batch.rows()) == 2
    assert len(bulk.rows()) == 2


def test_retry_failed_and_a_producer_do_not_deadlock_over_unique_keys(named: Named) -> None:
    a, b = named("A"), named("B")
    for key in "ba":
        a.enqueue(unique_key=key)
        job = a.claim()
        a.call("fail", job_id=job.job_id, lease_token=job.lease_token, permanent=True)
    b.begin()
    b.enqueue(unique_key="a")
    retry = a.start("retry_failed").blocks()
    assert b.at_once("enqueue", kind="k", unique_key="b")[0].created
    b.end("commit")
    assert retry.rows() == []


def test_retry_failed_passes_over_the_second_of_two_jobs_with_one_unique_key(
    named: Named,
) -> None:
    a = named("A")
    for _ in range(2):
        job_id = a.enqueue(unique_key="u")
        job = a.claim()
        a.call("fail", job_id=job_id, lease_token=job.lease_token, permanent=True)
    assert len(a.call("retry_failed")) == 1
    assert a.sql("select count(*) from taskboard.jobs") == [(1,)]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_retry_of_a_job_that_is_just_being_retried_and_claimed_is_refused(
    named: Named, end: str
) -> None:
    a, operator = named("A"), named("operator")
    job_id = a.enqueue()
    a.call("cancel", job_id=job_id)
    a.begin()
    a.call("retry", job_id=job_id)
    a.claim()
    second = operator.start("retry", job_id=job_id).blocks()
    a.end(end)
    if end == "commit":
        assert sqlstate(second) == "TB003"
    else:
        assert [row.state for row in second.rows()] == ["ready"]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_eviction_leaves_what_is_being_completed_and_says_so(named: Named, end: str) -> None:
    a, operator = named("A"), named("operator")
    for _ in range(2):
        a.enqueue()
    first, second = a.call("claim", max_jobs=2, worker="dead")
    a.begin()
    a.call("complete", job_id=first.job_id, lease_token=first.lease_token)
    found = operator.at_once("evict", worker="dead")
    assert {row.job_id: row.state for row in found} == {
        first.job_id: "busy", second.job_id: "expired"
    }  # fmt: skip
    a.end(end)
    again = [(row.job_id, row.state) for row in operator.call("evict", worker="dead")]
    assert again == ([] if end == "commit" else [(first.job_id, "expired")])


def test_eviction_is_not_held_up_by_a_transaction_that_the_dead_host_left_open(
    named: Named,
) -> None:
    dead, operator = named("dead"), named("operator")
    for _ in range(3):
        dead.enqueue()
    first, *others = dead.call("claim", max_jobs=3, worker="dead", lease="1 hour")
    dead.begin()
    dead.call("require_lease", job_id=first.job_id, lease_token=first.lease_token)
    found = operator.at_once("evict", worker="dead")
    assert [row.job_id for row in found if row.state == "busy"] == [first.job_id]
    assert {job.job_id for job in operator.call("claim", max_jobs=5)} == {
        job.job_id for job in others
    }
    details = "select detail from taskboard.incident_list where what = 'worker_evicted'"
    assert operator.sql(details) == [("2 leases lapse; 1 are left, locked",)]


def test_eviction_beside_a_reclaim_leaves_the_new_lease_alone(named: Named) -> None:
    a, b, operator = named("A"), named("B"), named("operator")
    job_id = a.enqueue()
    a.claim(worker="dead")
    b.begin()
    b.sql("update taskboard.jobs set claimable_at = clock_timestamp()")
    theirs = b.claim(worker="alive")
    assert [row.state for row in operator.at_once("evict", worker="dead")] == ["busy"]
    b.end("commit")
    assert operator.call("evict", worker="dead") == []
    assert len(b.call("renew", job_id=job_id, lease_token=theirs.lease_token)) == 1


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_housekeeping_passes_over_an_exhausted_job_that_somebody_holds(
    named: Named, end: str
) -> None:
    a, keeper = named("A"), named("keeper")
    job_id = a.enqueue(max_lost_leases=1)
    job = a.claim()
    expire(a.conn, job_id)
    a.begin()
    a.call("require_lease", job_id=job_id, lease_token=job.lease_token)
    keeper.at_once("maintain")
    assert [row.state for row in keeper.call("job", job_id=job_id)] == ["expired"]
    a.end(end)
    keeper.call("maintain")
    assert [row.state for row in keeper.call("job", job_id=job_id)] == ["failed"]


def test_housekeeping_in_two_sessions_at_once_does_not_wait(named: Named) -> None:
    a, b = named("A"), named("B")
    a.begin()
    a.call("maintain")
    b.at_once("maintain")
    a.end("commit")


def test_pause_does_not_wait_for_work_and_work_does_not_wait_for_a_pause(named: Named) -> None:
    a, operator = named("A"), named("operator")
    for _ in range(2):
        a.enqueue()
    a.begin()
    job = a.claim()
    operator.begin()
    operator.at_once("pause", queue="default")
    operator.at_once("pause")
    assert len(a.at_once("complete", job_id=job.job_id, lease_token=job.lease_token)) == 1
    a.end("commit")
    assert len(a.at_once("claim")) == 1
    assert len(a.at_once("enqueue", kind="k")) == 1
    operator.end("commit")
    assert a.call("claim") == []


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_right_given_while_the_last_one_is_taken_limits_its_role(named: Named, end: str) -> None:
    a, b = named("A"), named("B")
    a.call("allow_queue", role_name="taskboard_worker", queue="first")
    a.begin()
    a.call("disallow_queue", role_name="taskboard_worker", queue="first")
    giving = b.start("allow_queue", role_name="taskboard_producer", queue="second").blocks()
    a.end(end)
    giving.rows()
    assert a.sql("select queue_rights from taskboard.settings") == [(True,)]


@pytest.mark.parametrize("verb", ["cancel", "retry"])
def test_job_that_nobody_knows_is_TB002(named: Named, verb: str) -> None:
    a = named("A")
    with pytest.raises(psycopg.Error) as refused:
        a.call(verb, job_id="00000000-0000-7000-8000-000000000000")
    assert refused.value.sqlstate == "TB002"


@pytest.mark.parametrize(
    ("verb", "before", "answer"),
    [
        ("retry", "select j.state into v_state from taskboard.live_jobs", "ready"),
        ("cancel", "v_state := taskboard.finished_state(cancel.job_id)", "cancelled"),
        ("resolve", "v_state := taskboard.finished_state(resolve.job_id)", "TB003"),
    ],
)
def test_verb_between_whose_looks_the_job_moves_looks_again(
    named: Named, db: Connection, verb: str, before: str, answer: str
) -> None:
    ((text,),) = rows(db, "select pg_get_functiondef(%s::regproc)", [f"taskboard.{verb}"])
    assert text.count(before) == 1
    db.execute(text.replace(before, f"perform pg_advisory_xact_lock_shared(1); {before}"))
    a, operator, gate = named("A"), named("operator"), named("gate")
    job_id = a.enqueue()
    options = {"step": "main", "happened": True} if verb == "resolve" else {}
    if verb == "retry":
        owner = {"job_id": job_id, "lease_token": a.claim().lease_token}
    else:
        a.call("cancel", job_id=job_id)
    gate.begin()
    gate.sql("select pg_advisory_xact_lock(1)")
    pending = operator.start(verb, job_id=job_id, **options).blocks()
    if verb == "retry":  # it was running, and is finished
        a.call("complete", **owner)
    else:  # it was finished, and is back
        a.call("retry", job_id=job_id)
    gate.end("commit")
    if answer == "TB003":
        assert sqlstate(pending) == answer
    else:
        assert [row.state for row in pending.rows()] == [answer]
