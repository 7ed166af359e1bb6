"""Random lives of a few jobs, every verb in any order, beside a plain model of what is promised.

After each call the answer and the whole content of the tables are compared with the model: who
may write (S1, S2), attempts (S4), finality (S5), effects (E1), keys, counters, and that no job is
lost or stands twice. Hypothesis chooses, the same lives each time, and shortens one that goes
wrong before it is shown (for a minute, where it must). For long, and otherwise each time:

    LIVES=5000 pytest tests/sql/test_life_by_model.py --hypothesis-seed=$RANDOM
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar
from uuid import UUID, uuid4

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from sql.verbs import Row, call, set_default
from support import Connection, expire, rows

pytestmark = pytest.mark.rows_only

T = TypeVar("T")
QUEUES = ("default", "side")
KINDS = ("mail", "post")
EFFECTS = ("main", "send/2")
HOUR = "1 hour"
LEASED = ("running", "expired")
FINAL = ("completed", "failed", "cancelled")
A_LINE_FAILED = "two or more of a serial key failed"


@dataclass(slots=True, eq=False)
class Job:
    """What the model knows of one job."""

    id: UUID
    kind: str
    queue: str
    unique_key: str | None
    until_claim: bool
    serial_key: str | None
    delayed: bool
    holds: bool
    max_attempts: int
    max_lost_leases: int
    state: str = "ready"
    attempt: int = 0
    failures: int = 0
    lost_leases: int = 0
    token: UUID | None = None
    worker: str | None = None
    cancelling: bool = False
    held_step: str | None = None
    tokens: list[UUID] = field(default_factory=list)
    ended_by: UUID | None = None
    finished_at: datetime | None = None
    old: bool = False  # ended so long ago that it may be forgotten
    # (step, token): None open, True happened, False refused.
    effects: dict[tuple[str, UUID], bool | None] = field(default_factory=dict)
    # Of the first evidence that the step happened.
    results: dict[str, Any] = field(default_factory=dict)

    @property
    def live(self) -> bool:
        return self.state not in FINAL

    @property
    def exhausted(self) -> bool:
        return self.state == "expired" and (
            self.cancelling or self.lost_leases + 1 >= self.max_lost_leases
        )

    @property
    def claimable(self) -> bool:
        return self.state == "ready" or (self.state == "expired" and not self.exhausted)

    def owns(self, token: UUID) -> bool:
        return self.token == token

    def effect_state(self, step: str, token: UUID | None) -> str:
        told = {t: happened for (s, t), happened in self.effects.items() if s == step}
        if any(told.values()):
            return "done"
        return "unknown" if any(h is None and t != token for t, h in told.items()) else "fresh"

    def testify(self, step: str, token: UUID, happened: bool, result: Any = None) -> None:
        self.effects[step, token] = happened
        if happened:
            self.results.setdefault(step, result)

    def end_lease(self) -> None:
        self.token = self.worker = None


@dataclass(slots=True)
class Key:
    """Who holds a unique key."""

    job: Job
    live: bool
    lasting: bool  # held past the job's end, by unique_for
    over: bool = False  # unique_for has ended

    @property
    def free(self) -> bool:
        return not self.live and self.over


@dataclass(slots=True)
class Life:
    """The model, and the verbs that are tried on it and on the database."""

    workers: dict[str, Connection]
    dice: Iterator[int] = field(init=False)  # of this step, each 0 to 255
    log: list[str] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    keys: dict[tuple[str, str], Key] = field(default_factory=dict)
    turns: dict[str, list[Job]] = field(default_factory=dict)  # live jobs of a serial key, in order
    paused: set[str | None] = field(default_factory=set)
    limits: dict[str, int] = field(default_factory=dict)  # max_running of a queue

    @property
    def db(self) -> Connection:
        return self.workers["a"]

    # Choices

    def pick(self, options: Sequence[T]) -> T:
        return options[next(self.dice, 0) * len(options) // 256]

    def now_and_then(self, of_ten: int) -> bool:
        return self.pick(range(10)) >= 10 - of_ten

    def a_job(self, *states: str) -> Job:
        """Any job, more likely one in a state that the verb is meant for, and with a past."""
        likely = [job for job in self.jobs if job.state in states]
        if not likely or self.now_and_then(1):
            return self.pick(self.jobs)
        return self.pick(likely + [job for job in likely if job.effects] * 3)

    def a_token(self, job: Job) -> UUID:
        """The current token, more likely than a stale one, another job's, or nobody's."""
        foreign = [token for other in self.jobs for token in other.tokens if other is not job]
        if job.token is not None and not self.now_and_then(3):
            return job.token
        return self.pick([*job.tokens * 2, *foreign[-1:], uuid4()])

    def ask(self, verb: str, db: Connection | None = None, **arguments: Any) -> Any:
        """Call a verb; its rows, or the SQLSTATE of a refusal that the design names."""
        answer: Any
        try:
            answer = call(db or self.db, verb, **arguments)
        except psycopg.Error as error:
            if not (error.sqlstate or "").startswith("TB"):
                raise
            answer = error.sqlstate
        self.log.append(f"{verb} {arguments}\n    -> {answer}")
        return answer

    def step(self) -> None:
        """Try a verb that has something to do, or now and then any."""
        if not self.jobs:
            self.enqueue_many()
            return
        states = {job.state for job in self.jobs}
        failed = [job.serial_key for job in self.jobs if job.state == "failed" and job.serial_key]
        if len(failed) > len(set(failed)):
            states.add(A_LINE_FAILED)
        any_time = self.now_and_then(1)
        # Of all verbs, however few have something to do: then a choice means the same verb still
        # when what came before it is left out.
        for _ in range(12):
            verb, wanted = self.pick(CHOICES)
            if any_time or not wanted or states & {*wanted}:
                break
        verb(self)

    def rest(self) -> None:
        """The first choice, hence the simplest: a step that a failure does not need becomes it."""

    # What several verbs do

    def add(self, job: Job, lasting: bool) -> Job:
        """The holder of the unique key: a new job, which is added, or another."""
        if job.unique_key is not None and (holder := self.take_key(job, lasting)) is not job:
            return holder
        self.jobs.append(job)
        self.queue_up(job, "scheduled" if job.delayed else "ready")
        return job

    def take_key(self, job: Job, lasting: bool = False) -> Job:
        """The holder of the job's unique key: the job, if the key was free."""
        name = (job.kind, job.unique_key or "")
        if name not in self.keys or self.keys[name].free:
            self.keys[name] = Key(job, True, lasting)
        return self.keys[name].job

    def queue_up(self, job: Job, state: str) -> None:
        job.state = state
        if job.serial_key is not None:
            line = self.turns.setdefault(job.serial_key, [])
            if line:
                job.state = "blocked"
            line.append(job)

    def end(self, job: Job, state: str, by: UUID | None = None) -> None:
        job.end_lease()
        job.state, job.ended_by, job.held_step, job.cancelling = state, by, None, False
        job.finished_at = None  # noted at the first look
        self.free_key(job)
        if job.serial_key is not None:
            line = self.turns[job.serial_key]
            line.remove(job)
            if not line:
                del self.turns[job.serial_key]
            elif line[0].state == "blocked":
                line[0].state = "scheduled" if line[0].delayed else "ready"

    def free_key(self, job: Job) -> None:
        if job.unique_key is not None:
            key = self.keys[job.kind, job.unique_key]
            assert key.job is job
            if key.lasting and not key.over:
                key.live = False
            else:
                del self.keys[job.kind, job.unique_key]

    def hold(self, job: Job, step: str) -> None:
        job.end_lease()
        job.state, job.held_step = "held", step

    def end_failed(self, job: Job) -> None:
        # In the order of the begins, which is that of the dict.
        unknown = [s for (s, _), h in job.effects.items()
                   if h is None and job.effect_state(s, None) == "unknown"]  # fmt: skip
        if job.holds and unknown:
            self.hold(job, unknown[0])
        else:
            self.end(job, "failed")

    # Producers

    def a_new_job(self, kind: str, queue: str, options: Row) -> Job:
        return Job(
            uuid4(), kind, queue, None, options.get("unique_until") == "claim", None,
            "delay" in options, options["on_unknown"] == "hold",
            options.get("max_attempts", 20), options.get("max_lost_leases", 5),
        )  # fmt: skip

    def enqueue(self, many: bool = False) -> None:
        kind, queue = self.pick(KINDS), self.pick(QUEUES)
        # One lane each, as a claim takes from lanes of one priority in random order.
        priority = 3 * QUEUES.index(queue) + KINDS.index(kind)
        options: Row = {"priority": priority, "on_unknown": self.pick(("retry", "hold"))}
        if self.now_and_then(2):
            options["delay"] = HOUR
        if self.pick((False, True)):
            options |= {"max_attempts": 2, "max_lost_leases": self.pick((2, 1))}
        count = self.pick((2, 3, 4)) if many else 1
        unique = [self.pick((None, "u", "v")) for _ in range(count)]
        serial = [self.pick((None, None, None, "s", "s", "t")) for _ in range(count)]
        until = self.pick(("end", "claim", "for"))
        if until == "claim":
            options["unique_until"] = "claim"
        elif until == "for" and any(unique):
            options["unique_for"] = HOUR
        expected = []
        for unique_key, serial_key in zip(unique, serial, strict=True):
            job = self.a_new_job(kind, queue, options)
            job.unique_key, job.serial_key = unique_key, serial_key
            expected.append((job, self.add(job, "unique_for" in options)))
        if many:
            answer = self.ask(
                "enqueue_many", kind=kind, queue=queue, payloads=[{}] * count,
                unique_keys=unique, serial_keys=serial, **options,
            )  # fmt: skip
        else:
            answer = self.ask(
                "enqueue", kind=kind, queue=queue, unique_key=unique[0], serial_key=serial[0],
                **options,
            )  # fmt: skip
        known = {job.id for job in self.jobs}
        assert [row["created"] for row in answer] == [job is holder for job, holder in expected]
        for row, (job, holder) in zip(answer, expected, strict=True):
            if job is holder:
                assert row["job_id"] not in known, "an id was issued twice"
                job.id = row["job_id"]
        assert [row["job_id"] for row in answer] == [holder.id for _, holder in expected]

    def enqueue_many(self) -> None:
        self.enqueue(many=True)

    # Workers

    def claim(self) -> None:
        worker, most = self.pick(("a", "b")), self.pick((1, 2, 10, 10))
        queues = self.pick((None, None, None, [self.pick(QUEUES)]))
        kinds = self.pick((None, None, None, [self.pick(KINDS)]))
        self.claim_from(worker, most, queues, kinds)

    def claim_from(
        self, worker: str, most: int, queues: list[str] | None, kinds: list[str] | None
    ) -> None:
        # A claim looks at its floors, and for exhausted jobs, every 20 ms: here always.
        rows(
            self.workers[worker],
            "select set_config('taskboard.plan_' || n, '', false) from generate_series(0, 7) as n",
        )
        answer = self.ask(
            "claim", self.workers[worker], worker=worker, max_jobs=most, queues=queues, kinds=kinds
        )
        seen = [
            job for job in self.jobs
            if (queues is None or job.queue in queues) and (kinds is None or job.kind in kinds)
        ]  # fmt: skip
        # A claim may end exhausted jobs on its way, and must before it says that nothing is ready.
        gone = {
            id for (id,) in rows(
                self.db,
                "select id from taskboard.history union all"
                " select id from taskboard.jobs where waits_for = 'person'",
            )
        }  # fmt: skip
        for job in [job for job in seen if job.exhausted and job.id in gone]:
            job.lost_leases += 1
            if job.cancelling:
                self.end(job, "cancelled")
            else:
                self.end_failed(job)
        given = {token for job in self.jobs for token in job.tokens}
        before = {queue: self.running(queue) for queue in QUEUES}
        for row in answer:
            (job,) = [job for job in seen if job.id == row["job_id"]]
            assert job.claimable, f"claimed although {job.state}"
            assert not self.paused & {None, job.queue}, "claimed although paused"
            assert row["lease_token"] not in given, "a token was given twice"
            job.lost_leases += job.state == "expired"
            job.attempt += 1
            job.state, job.token, job.worker = "running", row["lease_token"], worker
            job.tokens.append(row["lease_token"])
            if job.until_claim:
                self.free_key(job)
                job.unique_key = None
            assert (row["attempt"], row["failures"], row["lost_leases"]) == (
                job.attempt, job.failures, job.lost_leases)  # fmt: skip
            assert (row["queue"], row["kind"]) == (job.queue, job.kind)
        assert len({row["job_id"] for row in answer}) == len(answer) <= most
        for queue, most_running in self.limits.items():
            assert self.running(queue) <= max(most_running, before[queue]), "too many run"
        if len(answer) < most:
            passed = [job for job in seen if not self.paused & {None, job.queue}
                      and self.running(job.queue) < self.limits.get(job.queue, 1000)
                      and (job.claimable or job.exhausted)]  # fmt: skip
            assert not passed, "a claim that was not full passed over jobs"

    def running(self, queue: str) -> int:
        return sum(job.state == "running" and job.queue == queue for job in self.jobs)

    def renew(self) -> None:
        job = self.a_job(*LEASED)
        token = self.a_token(job)
        answer = self.ask("renew", job_id=job.id, lease_token=token)
        renewed = job.state == "running" and job.owns(token)
        assert answer == [
            {"job_id": job.id, "cancel_requested": job.cancelling,
             "lease_expires_at": row["lease_expires_at"]} for row in answer
        ] and len(answer) == renewed  # fmt: skip

    def renew_many(self) -> None:
        pairs = {job: self.a_token(job) for job in (self.a_job(*LEASED), self.a_job(*LEASED))}
        answer = self.ask(
            "renew_many", job_ids=[job.id for job in pairs], lease_tokens=list(pairs.values())
        )
        assert {(row["job_id"], row["cancel_requested"], row["outcome"]) for row in answer} == {
            (job.id, job.cancelling, "renewed")
            for job, token in pairs.items() if job.state == "running" and job.owns(token)
        }  # fmt: skip

    def require_lease(self) -> None:
        job = self.a_job(*LEASED)
        token = self.a_token(job)
        answer = self.ask("require_lease", job_id=job.id, lease_token=token)
        if job.owns(token):
            assert [row["job_id"] for row in answer] == [job.id]
        else:
            assert answer == "TB001"

    def recorded(self, job: Job, token: UUID) -> bool:
        """Whether a completion must be accepted; if it is the first, the model takes it in."""
        if job.owns(token):
            for (step, by), happened in list(job.effects.items()):
                if by == token and happened is None:
                    job.testify(step, by, True)
            self.end(job, "completed", token)
            return True
        return job.state == "completed" and job.ended_by == token

    def complete(self) -> None:
        job = self.a_job(*LEASED, "completed")
        token = self.a_token(job)
        if job.ended_by is not None and self.pick((False, True)):
            token = job.ended_by
        before = job.finished_at
        recorded = self.recorded(job, token)
        answer = self.ask("complete", job_id=job.id, lease_token=token, result={"by": "a"})
        assert [row["job_id"] for row in answer] == [job.id] * recorded
        if recorded and job.finished_at is not None:
            assert answer[0]["finished_at"] == before, "a repeat gave another date"

    def complete_many(self) -> None:
        pairs = {job: self.a_token(job) for job in (self.a_job(*LEASED), self.a_job(*LEASED))}
        expected = {job.id for job, token in pairs.items() if self.recorded(job, token)}
        answer = self.ask(
            "complete_many", job_ids=[job.id for job in pairs], lease_tokens=list(pairs.values())
        )
        assert {row["job_id"] for row in answer} == expected
        assert len(answer) == len(expected)

    def give_back(self, job: Job, waits: bool) -> None:
        job.end_lease()
        job.state = "scheduled" if waits else "ready"

    def fail(self) -> None:
        job = self.a_job(*LEASED)
        token = self.a_token(job)
        retry_in = self.pick(("0", "0", None, HOUR))
        self.fail_with(job, token, retry_in, self.pick((False, False, False, True)))

    def fail_with(self, job: Job, token: UUID, retry_in: str | None, permanent: bool) -> None:
        answer = self.ask(
            "fail", job_id=job.id, lease_token=token, error="no", retry_in=retry_in,
            permanent=permanent,
        )  # fmt: skip
        recorded = self.failed(job, token, retry_in != "0", permanent)
        assert [(row["job_id"], row["state"]) for row in answer] == [(job.id, job.state)] * recorded

    def failed(self, job: Job, token: UUID, waits: bool, permanent: bool) -> bool:
        """Whether a failure must be accepted; then the model takes it in."""
        if not job.owns(token):
            return False
        job.failures += 1
        if job.cancelling:
            self.end(job, "cancelled")
        elif permanent or job.failures >= job.max_attempts:
            self.end_failed(job)
        else:
            self.give_back(job, waits)
        return True

    def fail_many(self) -> None:
        pairs = {job: self.a_token(job) for job in (self.a_job(*LEASED), self.a_job(*LEASED))}
        answer = self.ask(
            "fail_many", job_ids=[job.id for job in pairs], lease_tokens=list(pairs.values()),
            retry_ins=["0"] * len(pairs), permanents=[job.kind == "post" for job in pairs],
        )  # fmt: skip
        in_order = sorted(pairs, key=lambda job: job.id)
        recorded = [
            job for job in in_order if self.failed(job, pairs[job], False, job.kind == "post")
        ]
        assert [(row["job_id"], row["state"]) for row in answer] == [
            (job.id, job.state) for job in recorded
        ]

    def a_line_fails(self) -> None:
        """Job after job of a serial key, so that they come back together."""
        for job in list(self.pick(list(self.turns.values()) or [[]])):
            if job.claimable:
                self.claim_from("a", 10, None, None)
            if job.token is None:
                return
            self.fail_with(job, job.token, None, True)
            self.compare()

    def release(self) -> None:
        job = self.a_job(*LEASED)
        token = self.a_token(job)
        delay = self.pick((None, HOUR))
        answer = self.ask("release", job_id=job.id, lease_token=token, delay=delay)
        released = self.released(job, token, delay is not None)
        assert [(row["job_id"], row["state"]) for row in answer] == [(job.id, job.state)] * released

    def released(self, job: Job, token: UUID, waits: bool) -> bool:
        """Whether a job must be taken back; then the model takes it back."""
        if not job.owns(token):
            return False
        if job.cancelling:
            self.end(job, "cancelled")
        else:
            self.give_back(job, waits)
        return True

    def release_many(self) -> None:
        pairs = {job: self.a_token(job) for job in (self.a_job(*LEASED), self.a_job(*LEASED))}
        delays = [HOUR if job.kind == "post" else None for job in pairs]
        answer = self.ask(
            "release_many", job_ids=[job.id for job in pairs], lease_tokens=list(pairs.values()),
            delays=delays,
        )  # fmt: skip
        in_order = sorted(pairs, key=lambda job: job.id)
        back = [job for job in in_order if self.released(job, pairs[job], job.kind == "post")]
        assert [(row["job_id"], row["state"]) for row in answer] == [
            (job.id, job.state) for job in back
        ]

    def begin_effect(self) -> None:
        job = self.a_job(*LEASED)
        token = self.a_token(job)
        step = self.pick(("main", *EFFECTS))
        valid = self.pick((None, None, "0"))
        done = step in job.results
        answer = self.ask(
            "begin_effect", job_id=job.id, lease_token=token, step=step, key_valid_for=valid
        )
        if not (job.state == "running" and job.owns(token)):
            assert answer == []
            return
        state = job.effect_state(step, token)
        if state == "unknown" and (job.holds or valid == "0"):
            state = "held"
            self.hold(job, step)
        elif state != "done" and not job.effects.get((step, token)):
            job.effects[step, token] = None
        (row,) = answer
        assert row["state"] == state
        assert row["result"] == (job.results[step] if state == "done" else None)
        assert (row["state"] == "done") == done, "E1"
        assert row["idempotency_key"] == f"{job.id}/{step}", "E1"

    def end_effect(self) -> None:
        """Evidence, of the owner or late."""
        job = self.pick([job for job in self.jobs if job.effects] * 5 + self.jobs)
        step, token = self.pick([*job.effects, (self.pick(EFFECTS), self.a_token(job))])
        happened, result = self.pick((True, False)), {"n": self.pick((1, 2, 3))}
        answer = self.ask(
            "end_effect", job_id=job.id, lease_token=token, step=step, happened=happened,
            result=result,
        )  # fmt: skip
        if (step, token) not in job.effects:
            assert answer == []
            return
        told = job.effects[step, token]
        if told is None or (happened and not told):
            job.testify(step, token, happened, result)
        if job.held_step == step and job.effect_state(step, None) != "unknown":
            job.state, job.held_step = "ready", None
        assert [row["state"] for row in answer] == [job.effect_state(step, token)]

    # People, and time

    def cancel(self) -> None:
        job = self.a_job("running", "blocked")
        force = self.pick((False, False, True))
        answer = self.ask("cancel", job_id=job.id, force=force)
        if job.state == "running" and not force:
            job.cancelling = True
        elif job.live:
            self.end(job, "cancelled")
        assert answer == [{"job_id": job.id, "state": job.state}]

    def retry(self) -> None:
        job = self.a_job(*FINAL)
        answer = self.ask("retry", job_id=job.id)
        if job.state in LEASED:
            assert answer == "TB003"
            return
        if not job.live and not self.bring_back(job):
            assert answer == "TB003"
            return
        assert answer == [{"job_id": job.id, "state": job.state}]

    def bring_back(self, job: Job) -> bool:
        if job.unique_key is not None:
            if self.take_key(job) is not job:
                return False
            self.keys[job.kind, job.unique_key].live = True
        job.failures = job.lost_leases = 0
        job.ended_by, job.old = None, False
        self.queue_up(job, "ready")
        return True

    def retry_failed(self) -> None:
        queue = self.pick((None, None, None, *QUEUES))
        kind = self.pick((None, None, None, *KINDS))
        most = self.pick((100, 100, 1, 2))
        answer = self.ask("retry_failed", queue=queue, kind=kind, max_jobs=most)
        failed = [
            job for job in self.jobs
            if job.state == "failed" and queue in (None, job.queue) and kind in (None, job.kind)
            and (job.unique_key is None or (job.kind, job.unique_key) not in self.keys
                 or self.keys[job.kind, job.unique_key].job is job
                 or self.keys[job.kind, job.unique_key].free)
        ]  # fmt: skip
        # Oldest first; those of one serial key together.
        failed.sort(key=lambda job: job.finished_at or datetime.max.replace(tzinfo=UTC))
        failed = failed[:most]
        failed.sort(key=lambda job: job.serial_key or "")
        assert [(row["job_id"], row["state"]) for row in answer] == [
            (job.id, job.state) for job in failed if self.bring_back(job)
        ]

    def resolve(self) -> None:
        job = self.a_job("held")
        step = self.pick([job.held_step or "main", *EFFECTS])
        happened = self.pick((True, False))
        answer = self.ask("resolve", job_id=job.id, step=step, happened=happened)
        if job.held_step == step:
            for (about, token), told in list(job.effects.items()):
                if about == step and told is None:
                    job.testify(step, token, happened)
            job.state, job.held_step = "ready", None
        elif step not in {about for about, _ in job.effects} or (
            job.effect_state(step, None) != ("done" if happened else "fresh")
        ):
            assert answer == "TB003"
            return
        assert answer == [{"job_id": job.id, "state": job.state}]

    def evict(self) -> None:
        worker = self.pick(("a", "b"))
        lapsed = [job for job in self.jobs if job.state == "running" and job.worker == worker]
        answer = self.ask("evict", worker=worker)
        assert {row["job_id"] for row in answer} == {job.id for job in lapsed}
        for job in lapsed:
            job.state = "expired"

    def time_passes(self) -> None:
        """The deadline of one job, or of all that have one, is past."""
        for job in self.pick((self.jobs, [self.a_job("running")], [self.a_job("scheduled")])):
            if job.state in ("running", "scheduled"):
                self.log.append(f"time passes for {job.id}")
                expire(self.db, job.id)
                job.state = "expired" if job.state == "running" else "ready"

    def keys_time_passes(self) -> None:
        """unique_for ends."""
        self.log.append("time passes for unique keys")
        rows(self.db, "update taskboard.unique_keys set held_until = clock_timestamp()"
             " where held_until is not null")  # fmt: skip
        for key in self.keys.values():
            key.over = key.lasting

    def days_pass(self) -> None:
        """Some jobs ended eight days ago."""
        for job in [job for job in self.jobs if not job.live]:
            if self.pick((False, True)):
                self.log.append(f"days pass for {job.id}")
                rows(self.db, "update taskboard.history set finished_at = finished_at - interval"
                     " '192 hours' where id = %s", [job.id])  # fmt: skip
                job.finished_at = None  # noted at the next look
                job.old = True

    def forget(self, verb: str) -> None:
        answer = self.ask(verb)
        gone = [job for job in self.jobs if job.old]
        free = [name for name, key in self.keys.items() if key.free]
        self.jobs = [job for job in self.jobs if not job.old]
        for name in free:
            del self.keys[name]
        done = {row["step"]: row["touched"] for row in answer}
        assert done["single jobs deleted"] == len(gone)
        assert done["unique keys freed"] == len(free)
        assert not any(step.startswith("dropped") for step in done)

    def prune(self) -> None:
        self.forget("prune")

    def maintain(self) -> None:
        """Also ends what is exhausted, in paused queues, too."""
        self.forget("maintain")
        for job in [job for job in self.jobs if job.exhausted]:
            job.lost_leases += 1
            if job.cancelling:
                self.end(job, "cancelled")
            else:
                self.end_failed(job)

    def pause(self) -> None:
        queue = self.pick((None, *QUEUES))
        self.ask("pause", queue=queue)
        self.paused.add(queue)

    def resume(self) -> None:
        for queue in self.pick(((None, *QUEUES), (None, *QUEUES), QUEUES)):
            self.ask("resume", queue=queue)
            self.paused.discard(queue)

    def limit_queue(self) -> None:
        queue, most = self.pick(QUEUES), self.pick((None, None, 1, 3))
        self.ask("limit_queue", queue=queue, max_running=most)
        self.limits.pop(queue, None)
        if most is not None:
            self.limits[queue] = most

    # The look

    def compare(self) -> None:
        """The tables hold what the model says, and what must hold whatever the model says."""
        live = rows(
            self.db,
            "select id, state, attempt, failures, lost_leases, lease_token, leased_by, unique_key,"
            " serial_key, held_step, cancel_requested_at is not null, kind, serial_no"
            " from taskboard.live_jobs",
        )
        past = rows(
            self.db,
            "select id, state, attempt, failures, lost_leases, finished_at from taskboard.history",
        )
        ids = [row[0] for row in live + past]
        assert len(set(ids)) == len(ids), "a job stands twice"
        assert set(ids) == {job.id for job in self.jobs}, "a job is lost"
        assert {row[0]: row[1:11] for row in live} == {
            job.id: (
                job.state, job.attempt, job.failures, job.lost_leases, job.token, job.worker,
                job.unique_key, job.serial_key, job.held_step, job.cancelling,
            )
            for job in self.jobs if job.live
        }  # fmt: skip
        dates = {row[0]: row[5] for row in past}
        for job in self.jobs:
            if not job.live and job.finished_at is None:
                job.finished_at = dates.get(job.id)
        assert {row[0]: row[1:] for row in past} == {
            job.id: (job.state, job.attempt, job.failures, job.lost_leases, job.finished_at)
            for job in self.jobs if not job.live
        }  # fmt: skip

        unique = [(row[11], row[7]) for row in live if row[7] is not None]
        assert len(set(unique)) == len(unique), "two live jobs have one unique key"
        held = rows(
            self.db,
            "select kind, key, job_id, live, held_until is not null from taskboard.unique_keys",
        )
        assert {(kind, key): tuple(more) for kind, key, *more in held} == {
            name: (key.job.id, key.live, key.lasting) for name, key in self.keys.items()
        }

        lines: dict[str, list[tuple[int, UUID, str]]] = {}
        for row in live:
            if row[8] is not None:
                lines.setdefault(row[8], []).append((row[12], row[0], row[1]))
        for line in lines.values():
            line.sort()
            assert [state == "blocked" for _, _, state in line] == [False] + [True] * (
                len(line) - 1
            ), "not exactly the first of a serial key has its turn"
        assert {key: [id for _, id, _ in line] for key, line in lines.items()} == {
            key: [job.id for job in line] for key, line in self.turns.items()
        }
        assert dict(rows(self.db, "select key, turn_of from taskboard.serial_keys")) == {
            key: line[0].id for key, line in self.turns.items()
        }

        effects = rows(
            self.db,
            "select job_id, step, lease_token, happened, idempotency_key from taskboard.effects",
        )
        assert {row[:3]: row[3] for row in effects} == {
            (job.id, step, token): happened
            for job in self.jobs
            for (step, token), happened in job.effects.items()
        }
        assert all(row[4] == f"{row[0]}/{row[1]}" for row in effects), "E1"


# How often each is tried, and in which states it has something to do: mostly it is tried then.
VERBS: tuple[tuple[Callable[[Life], None], int, tuple[str, ...]], ...] = (
    (Life.rest, 1, ()),
    (Life.enqueue, 2, ()),
    (Life.enqueue_many, 1, ()),
    (Life.claim, 12, ("ready", "expired")),
    (Life.renew, 1, LEASED),
    (Life.renew_many, 1, LEASED),
    (Life.require_lease, 1, LEASED),
    (Life.complete, 3, (*LEASED, "completed")),
    (Life.complete_many, 1, LEASED),
    (Life.fail, 4, LEASED),
    (Life.fail_many, 2, LEASED),
    (Life.a_line_fails, 4, ("blocked",)),
    (Life.release, 2, LEASED),
    (Life.release_many, 1, LEASED),
    (Life.begin_effect, 8, LEASED),
    (Life.end_effect, 4, ()),
    (Life.cancel, 2, ()),
    (Life.retry, 2, FINAL),
    (Life.retry_failed, 1, ("failed",)),
    (Life.retry_failed, 12, (A_LINE_FAILED,)),
    (Life.resolve, 4, ("held",)),
    (Life.evict, 1, ("running",)),
    (Life.time_passes, 5, ("running", "scheduled")),
    (Life.keys_time_passes, 1, FINAL),
    (Life.days_pass, 1, FINAL),
    (Life.prune, 1, FINAL),
    (Life.maintain, 1, (*FINAL, "expired")),
    (Life.pause, 1, ()),
    (Life.resume, 2, ()),
    (Life.limit_queue, 1, ()),
)
CHOICES = [(verb, wanted) for verb, weight, wanted in VERBS for _ in range(weight)]


class Lives(RuleBasedStateMachine):
    """A life from an empty database: each step a verb, then the look."""

    def __init__(self, workers: dict[str, Connection], empty: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        empty()
        self.life = Life(workers)
        set_default(self.life.db, "backoff", "10 minutes")

    # All dice of a step at once, and always as many: the database is free to choose (which of two
    # lanes of one priority it serves first), and then the rest of a life goes another way. Bytes,
    # because integers come more often from the ends of their range.
    @rule(dice=st.binary(min_size=36, max_size=36))
    def step(self, dice: bytes) -> None:
        self.life.dice = iter(dice)
        try:
            self.life.step()
            self.life.compare()
        except (AssertionError, KeyError, ValueError, psycopg.Error) as error:
            raise AssertionError("\n".join([*self.life.log, f"{error!r}"])) from error


def test_every_life_goes_as_the_model_says(
    request: pytest.FixtureRequest, db: Connection, connect: Callable[..., Connection],
    empty: Callable[[], None], phases: Sequence[Phase], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # Were this to be named otherwise one day, it would be shortened for five minutes.
    monkeypatch.setattr(
        "hypothesis.internal.conjecture.engine.MAX_SHRINKING_SECONDS", 60, raising=False
    )
    workers = {"a": db, "b": connect("b")}
    seed = request.config.getoption("hypothesis_seed", None)
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        lambda: Lives(workers, empty),
        settings=settings(
            max_examples=int(os.environ.get("LIVES", "120")), stateful_step_count=40,
            derandomize=seed is None, database=None, deadline=None, phases=phases,
            suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
        ),
    )  # fmt: skip
