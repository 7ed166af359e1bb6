"""Evidence about an effect, at the moment when its job is held or resolved for want of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from races.sessions import Session, sqlstate
from support import expire

Named = Callable[[str], Session]


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """A job of B, whose effect A began and never ended, under on_unknown => hold."""

    job_id: UUID
    stale: UUID
    current: UUID

    @property
    def owner(self) -> dict[str, UUID]:
        return {"job_id": self.job_id, "lease_token": self.current}

    @property
    def witness(self) -> dict[str, UUID]:
        return {"job_id": self.job_id, "lease_token": self.stale}


def reclaimed(by: Session) -> Reclaimed:
    """Let A begin and lapse, then B claim."""
    job_id = by.enqueue(on_unknown="hold")
    stale = by.claim(worker="A").lease_token
    by.call("begin_effect", job_id=job_id, lease_token=stale)
    expire(by.conn, job_id)
    return Reclaimed(job_id, stale, by.claim(worker="B").lease_token)


def state(by: Session, job: Reclaimed) -> Any:
    """The state of the job."""
    return by.call("job", job_id=job.job_id)[0].state


def test_two_begins_of_one_token_hold_the_job_once_and_neither_is_a_deadlock(named: Named) -> None:
    a, b, c = named("A"), named("B"), named("C")
    job = reclaimed(a)
    a.begin()
    a.call("require_lease", **job.owner)
    one = b.start("begin_effect", **job.owner).blocks()
    two = c.start("begin_effect", **job.owner).blocks()
    a.end("commit")
    assert sorted(row.state for rows in (one.rows(), two.rows()) for row in rows) == ["held"]
    assert state(a, job) == "held"


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("happened", ["true", "false"])
def test_evidence_waits_for_the_hold_and_frees_the_job(
    named: Named, happened: str, end: str
) -> None:
    a, b = named("A"), named("B")
    job = reclaimed(a)
    b.begin()
    assert [row.state for row in b.call("begin_effect", **job.owner)] == ["held"]
    evidence = a.start("end_effect", **job.witness, happened=happened).blocks()
    b.end(end)
    known = "done" if happened == "true" else "fresh"
    assert [row.state for row in evidence.rows()] == [known]
    if end == "rollback":
        assert state(a, job) == "running"
        assert [row.state for row in b.call("begin_effect", **job.owner)] == [known]
        return
    assert state(a, job) == "ready"
    again = b.claim()
    assert [
        row.state
        for row in b.call("begin_effect", job_id=job.job_id, lease_token=again.lease_token)
    ] == [known]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_hold_waits_for_evidence_that_is_just_arriving_and_hears_it(named: Named, end: str) -> None:
    a, b = named("A"), named("B")
    job = reclaimed(a)
    a.begin()
    a.call("end_effect", **job.witness)
    hold = b.start("begin_effect", **job.owner).blocks()
    a.end(end)
    assert [row.state for row in hold.rows()] == ["done" if end == "commit" else "held"]
    assert state(a, job) == ("running" if end == "commit" else "held")


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_last_failure_waits_for_evidence_that_is_just_arriving(named: Named, end: str) -> None:
    a, b = named("A"), named("B")
    job = reclaimed(a)
    a.begin()
    a.call("end_effect", **job.witness)
    failure = b.start("fail", **job.owner, permanent=True).blocks()
    a.end(end)
    assert [row.state for row in failure.rows()] == ["failed" if end == "commit" else "held"]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_evidence_waits_for_a_resolution_and_corrects_it(named: Named, end: str) -> None:
    a, operator = named("A"), named("operator")
    job = reclaimed(a)
    a.call("begin_effect", **job.owner)
    operator.begin()
    operator.call("resolve", job_id=job.job_id, step="main", happened=False)
    evidence = a.start("end_effect", **job.witness).blocks()
    operator.end(end)
    assert [row.state for row in evidence.rows()] == ["done"]
    assert state(a, job) == "ready"


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("answer", ["true", "false"])
def test_resolution_waits_for_evidence_and_cannot_contradict_it(
    named: Named, answer: str, end: str
) -> None:
    a, operator = named("A"), named("operator")
    job = reclaimed(a)
    a.call("begin_effect", **job.owner)
    a.begin()
    a.call("end_effect", **job.witness)
    resolution = operator.start("resolve", job_id=job.job_id, step="main", happened=answer)
    resolution.blocks()
    a.end(end)
    if end == "rollback" or answer == "true":
        assert [row.state for row in resolution.rows()] == ["ready"]
    else:
        with pytest.raises(Exception, match="not held") as refused:
            resolution.rows()
        assert getattr(refused.value, "sqlstate", None) == "TB003"
    again = a.claim()
    known = "done" if end == "commit" or answer == "true" else "fresh"
    assert [
        row.state
        for row in a.call("begin_effect", job_id=job.job_id, lease_token=again.lease_token)
    ] == [known]


def test_late_witnesses_at_the_moment_of_the_hold_are_all_heard(named: Named) -> None:
    witnesses, holder, setup = [named(f"A{n}") for n in range(8)], named("B"), named("setup")
    for by in witnesses:
        by.sql("set deadlock_timeout = '20ms'")
    for _ in range(12):
        job_id = setup.enqueue(max_lost_leases=100)
        calls = []
        for by in witnesses:
            owner = {"job_id": job_id, "lease_token": setup.claim().lease_token}
            setup.call("begin_effect", **owner)
            calls.append((by, owner))
            expire(setup.conn, job_id)
        token = setup.claim().lease_token
        holder.begin()
        held = holder.call(
            "begin_effect", job_id=job_id, lease_token=token, key_valid_for=timedelta(0)
        )
        assert [row.state for row in held] == ["held"]
        evidence = [by.start("end_effect", **owner).blocks() for by, owner in calls]
        holder.end("commit")
        assert [row.state for call in evidence for row in call.rows()] == ["done"] * len(calls)
        # Whoever was heard first has freed the job, and nobody after it took it from a new owner.
        assert setup.claim().job_id == job_id
        setup.call("cancel", job_id=job_id, force=True)


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_evidence_finds_a_job_that_is_just_moving_to_history(named: Named, end: str) -> None:
    a, b = named("A"), named("B")
    job = reclaimed(a)
    b.begin()
    b.call("cancel", job_id=job.job_id, force=True)
    evidence = a.start("end_effect", **job.witness).blocks()
    b.end(end)
    assert [row.state for row in evidence.rows()] == ["done"]
    assert state(a, job) == ("cancelled" if end == "commit" else "running")


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_evidence_finds_a_job_that_is_just_coming_back_from_history(named: Named, end: str) -> None:
    a, operator = named("A"), named("operator")
    job = reclaimed(a)
    a.call("cancel", job_id=job.job_id, force=True)
    operator.begin()
    operator.call("retry", job_id=job.job_id)
    evidence = a.start("end_effect", **job.witness).blocks()
    operator.end(end)
    assert [row.state for row in evidence.rows()] == ["done"]
    assert state(a, job) == ("ready" if end == "commit" else "cancelled")


def test_evidence_lets_renewals_pass(named: Named) -> None:
    a, b = named("A"), named("B")
    job = reclaimed(a)
    a.begin()
    a.call("end_effect", **job.witness)
    assert len(b.at_once("renew", **job.owner)) == 1
    a.end("rollback")


def test_owner_that_begins_again_while_its_evidence_commits_is_told_done(named: Named) -> None:
    a, again = named("A"), named("A again")
    job_id = a.enqueue()
    token = a.claim().lease_token
    a.call("begin_effect", job_id=job_id, lease_token=token)
    a.begin()
    a.call("end_effect", job_id=job_id, lease_token=token, result=None)
    begin = again.start("begin_effect", job_id=job_id, lease_token=token).blocks()
    a.end("commit")
    assert [row.state for row in begin.rows()] == ["done"]


def test_state_of_an_effect_is_never_fresh_again_after_done_whoever_says_what(
    named: Named,
) -> None:
    a = named("A")
    job_id = a.enqueue(max_lost_leases=20)
    tokens = []
    for _ in range(3):
        tokens.append(a.claim().lease_token)
        a.call("begin_effect", job_id=job_id, lease_token=tokens[-1])
        expire(a.conn, job_id)
    a.call("end_effect", job_id=job_id, lease_token=tokens[1], happened=True)
    keys = set()
    for speaker in tokens:
        for happened in (False, True, False):
            a.call("end_effect", job_id=job_id, lease_token=speaker, happened=happened)
            owner = a.claim()
            (begun,) = a.call("begin_effect", job_id=job_id, lease_token=owner.lease_token)
            assert begun.state == "done"
            keys.add(begun.idempotency_key)
            expire(a.conn, job_id)
    assert keys == {f"{job_id}/main"}


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_retry_waits_for_housekeeping_that_forgets_what_its_job_has_done(
    named: Named, end: str
) -> None:
    a, operator = named("A"), named("operator")
    job_id = a.enqueue()
    job = a.claim()
    owner = {"job_id": job_id, "lease_token": job.lease_token}
    a.call("begin_effect", **owner)
    a.call("end_effect", **owner)
    a.call("fail", **owner, permanent=True)
    a.begin()
    ((day,),) = a.sql("select tableoid::regclass::text from taskboard.history")
    a.sql("select taskboard.forget_effects(%s, '{}', 10)", day.removeprefix("taskboard."))
    retry = operator.start("retry", job_id=job_id).blocks()
    a.end(end)
    if end == "commit":
        assert sqlstate(retry) == "TB002"
    else:
        assert [row.state for row in retry.rows()] == ["ready"]
        again = a.claim()
        (effect,) = a.call("begin_effect", job_id=job_id, lease_token=again.lease_token)
        assert effect.state == "done"
