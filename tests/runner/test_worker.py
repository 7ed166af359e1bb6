"""The runner's loop: outcomes, settling, fences, stopping and waking up, on a real database."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from harness import Context, drain, enqueue, process, running, settings, state, until
from psycopg.conninfo import make_conninfo
from tcp_proxy import TcpProxy

from support import expire, wait_for
from taskboard import attempts, wake
from taskboard import db as calls
from taskboard.attempts import Attempt
from taskboard.connections import connect_arguments
from taskboard.handlers import Held, LeaseLost, Permanent, Release, Retry, ThreadContext
from taskboard.job import Ending
from taskboard.leases import Lease, News, now
from taskboard.process import LEAVES_WITHIN, run
from taskboard.settings import Settings, SettingsError

Connection = psycopg.Connection[Any]


async def noop(ctx: Context) -> None:
    pass


def documents(db: Connection, job_id: Any) -> tuple[Any, str | None]:
    row = db.execute("select result, error from taskboard.job_documents(%s)", [job_id]).fetchone()
    assert row is not None
    return row[0], row[1]


def raiser(exc: BaseException) -> Callable[[Context], Any]:
    async def handler(ctx: Context) -> None:
        raise exc

    return handler


# Outcomes.


def test_what_a_handler_returns_is_the_result_also_in_a_batch(dsn: str, db: Connection) -> None:
    async def double(ctx: Context) -> Any:
        return ctx.job.payload["n"] * 2 if ctx.job.payload["n"] else None

    jobs = [enqueue(db, "double", {"n": n}) for n in range(9)]
    assert drain(dsn, {"double": double}) == 0
    assert [documents(db, job)[0] for job in jobs] == [None, *range(2, 18, 2)]
    assert {state(db, job)["state"] for job in jobs} == {"completed"}


@pytest.mark.parametrize(
    "result",
    [float("nan"), {"a": "x\0y"}, ["\ud800"], {1, 2}, 10**5000, "x" * 2_000_000],
    ids=["nan", "nul", "surrogate", "set", "digits", "size"],
)
def test_a_result_that_cannot_be_stored_is_dropped_and_the_completion_recorded(
    dsn: str, db: Connection, caplog: pytest.LogCaptureFixture, result: Any
) -> None:
    async def handler(ctx: Context) -> Any:
        return result if ctx.job.payload else "fine"

    caplog.set_level(logging.INFO)
    bad, good = enqueue(db, "k", {"bad": True}), enqueue(db, "k")
    assert drain(dsn, {"k": handler}) == 0
    assert state(db, bad)["state"] == state(db, good)["state"] == "completed"
    assert documents(db, bad)[0] is None and documents(db, good)[0] == "fine"
    assert "dropped" in caplog.text


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no")


@pytest.mark.parametrize(
    ("exc", "text"),
    [
        (RuntimeError("a\0b"), "RuntimeError: a\N{REPLACEMENT CHARACTER}b"),
        (RuntimeError("a\udcffb"), "RuntimeError: a\\udcffb"),
        (Unspeakable(), "Unspeakable: (its __str__ raised ValueError)"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
        (StopAsyncIteration(), "StopAsyncIteration: "),
        (asyncio.CancelledError(), "the handler was cancelled from within"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_whatever_a_handler_raises_is_one_failed_attempt_and_the_runner_goes_on(
    dsn: str, db: Connection, exc: BaseException, text: str
) -> None:
    bad, good = enqueue(db, "bad", max_attempts=1), enqueue(db, "good")
    assert drain(dsn, {"bad": raiser(exc), "good": noop}) == 3
    assert state(db, bad)["state"] == "failed" and documents(db, bad)[1] == text
    assert state(db, good)["state"] == "completed"


def test_a_thread_that_raises_stop_iteration_or_system_exit_is_one_failed_attempt(
    dsn: str, db: Connection
) -> None:
    def stop(ctx: ThreadContext) -> None:
        next(iter([]))

    def leave(ctx: ThreadContext) -> None:
        raise SystemExit

    jobs = [enqueue(db, kind, max_attempts=1) for kind in ("stop", "leave")]
    assert drain(dsn, {"stop": stop, "leave": leave}) == 3
    assert [documents(db, job)[1] for job in jobs] == ["StopIteration: ", "SystemExit: "]


def test_an_error_of_fifty_megabytes_is_recorded_cut(dsn: str, db: Connection) -> None:
    job = enqueue(db, "k", max_attempts=1)
    assert drain(dsn, {"k": raiser(RuntimeError("ä" * 50_000_000))}) == 3
    error = documents(db, job)[1]
    assert error is not None and error.startswith("RuntimeError: ää") and len(error) < 10_000


def test_outcomes_are_told_apart_by_the_type_of_what_is_raised(dsn: str, db: Connection) -> None:
    hour = timedelta(hours=1)
    handlers = {
        "permanent": raiser(Permanent("no such address")),
        "retry": raiser(Retry("busy", retry_in=hour)),
        "release": raiser(Release("rate limited", delay=hour)),
        "retry_at_will": raiser(Retry("busy", retry_in=timedelta(days=4000))),
        "release_at_will": raiser(Release("not yet", delay=timedelta(days=4000))),
        "lost": raiser(LeaseLost("gone")),
    }
    jobs = {kind: enqueue(db, kind) for kind in handlers}
    assert drain(dsn, handlers) == 3
    found = {kind: state(db, job) for kind, job in jobs.items()}
    assert {kind: (row["state"], row["failures"]) for kind, row in found.items()} == {
        "permanent": ("failed", 1),
        "retry": ("scheduled", 1),
        "release": ("scheduled", 0),
        "retry_at_will": ("scheduled", 1),  # the interval is refused, the failure is recorded
        "release_at_will": ("scheduled", 0),
        "lost": ("running", 0),  # nothing settled: the lease lapses
    }
    assert documents(db, jobs["permanent"])[1] == "no such address"


class Busy(Retry):
    def __init__(self) -> None:
        pass


class NotYet(Release):
    def __init__(self) -> None:
        pass


class Riddle(Busy):
    @property
    def retry_in(self) -> Any:
        raise ZeroDivisionError


def test_an_outcome_needs_no_init_of_ours_and_one_that_cannot_be_read_is_a_failed_attempt(
    dsn: str, db: Connection
) -> None:
    handlers = {"busy": raiser(Busy()), "riddle": raiser(Riddle()), "not_yet": raiser(NotYet())}
    jobs = [enqueue(db, kind, max_attempts=1) for kind in handlers]

    async def scenario() -> None:
        async with running(dsn, handlers, poll=60):
            ends = ["failed", "failed", "scheduled"]
            await until(lambda: [state(db, job)["state"] for job in jobs] == ends)

    asyncio.run(scenario())
    assert documents(db, jobs[1])[1] == "ZeroDivisionError"


def test_a_payload_that_cannot_be_read_fails_alone_in_its_batch(dsn: str, db: Connection) -> None:
    jobs = [enqueue(db, "k", {"n": n}) for n in range(3)]
    digits = '{"n": ' + "9" * 5000 + "}"
    row = db.execute("select job_id from taskboard.enqueue('k', %s)", [digits]).fetchone()
    assert row is not None
    assert drain(dsn, {"k": noop}) == 3
    assert {state(db, job)["state"] for job in jobs} == {"completed"}
    assert state(db, row[0])["state"] == "failed"
    assert "cannot be read" in str(documents(db, row[0])[1])


def test_a_kind_without_a_handler_is_left_alone_and_counted_at_the_start(
    dsn: str, db: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(3):
        enqueue(db, "stripe")
    job = enqueue(db, "later")

    async def start() -> None:
        await run(settings(dsn, until_empty=True), {"k": noop}, {"stripe": "set STRIPE_API_KEY"})

    asyncio.run(start())
    assert "stripe: off (set STRIPE_API_KEY), 3 jobs waiting" in caplog.messages
    assert "later: no handler here, 1 job waiting" in caplog.messages
    assert "k: on" in caplog.messages and "at most 7 connections" in caplog.text
    assert state(db, job)["attempt"] == 0


# Settling, when the answer or the lease is lost.


def test_a_completion_whose_answer_is_lost_is_told_from_a_lost_lease(
    dsn: str, db: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    calls: list[int] = []

    async def handler(ctx: Context) -> None:
        calls.append(ctx.job.attempt)
        proxy.lose_reply_to = b"taskboard.complete"

    for batch in (1, 4):  # complete, and complete_many
        calls.clear()
        jobs = [enqueue(db, "k") for _ in range(batch)]
        with TcpProxy(dsn) as proxy:
            assert drain(proxy.dsn, {"k": handler}) == 0
            assert proxy.replies_lost == 1
        assert calls == [1] * batch
        assert [state(db, job)["state"] for job in jobs] == ["completed"] * batch
    assert "lease lost" not in caplog.text


@pytest.mark.parametrize("max_attempts", [1, 2])
@pytest.mark.parametrize("verb, batch", [("fail", 1), ("fail_many", 4)])
def test_a_failure_whose_answer_is_lost_is_recorded_once(
    dsn: str, db: Connection, caplog: pytest.LogCaptureFixture, max_attempts: int, verb: str,
    batch: int,
) -> None:  # fmt: skip
    async def handler(ctx: Context) -> None:
        proxy.lose_reply_to = f"taskboard.{verb}(".encode()
        raise Retry("no", retry_in=timedelta(hours=1))

    jobs = [enqueue(db, "k", max_attempts=max_attempts) for _ in range(batch)]
    with TcpProxy(dsn) as proxy:
        assert drain(proxy.dsn, {"k": handler}) == 3
        assert proxy.replies_lost == 1
    for job in jobs:
        assert state(db, job)["failures"] == 1
        assert state(db, job)["state"] == ("failed" if max_attempts == 1 else "scheduled")
    assert "lease lost" not in caplog.text


def test_failures_that_come_together_keep_what_each_handler_said(
    dsn: str, db: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(ctx: Context) -> None:
        match ctx.job.payload["n"]:
            case 0:
                raise Permanent("never")
            case 1:
                raise Retry("later", retry_in=timedelta(hours=1))
            case _:
                raise ValueError("no\0pe")

    jobs = [enqueue(db, "k", {"n": n}) for n in range(3)]
    assert drain(dsn, {"k": handler}) == 3
    assert [state(db, job)["state"] for job in jobs] == ["failed", "scheduled", "scheduled"]
    assert documents(db, jobs[0])[1] == "never"
    assert f"job={jobs[1]} kind=k attempt=1 failed, again in 3600 s," in caplog.text
    assert f"job={jobs[0]} kind=k attempt=1 failed 0." in caplog.text


def take_over(db: Connection, job_id: Any) -> Any:
    """Claim a running job away from its owner; answer the new token."""
    with db.transaction():  # in one, or the owner's own process may be the one that claims it
        expire(db, job_id)
        row = db.execute(
            "select job_id, lease_token from taskboard.claim(worker => 'thief')"
        ).fetchone()
    assert row is not None and row[0] == job_id
    return row[1]


def test_a_completion_after_a_reclaim_changes_nothing_and_stops_nobody(
    dsn: str, db: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def handler(ctx: Context) -> str:
        if ctx.job.payload:
            take_over(db, ctx.job.id)
        return "mine"

    job, others = enqueue(db, "k", {"rob": True}), [enqueue(db, "k") for _ in range(3)]
    assert drain(dsn, {"k": handler}) == 0
    assert state(db, job)["state"] == "running" and state(db, job)["worker"] == "thief"
    assert {state(db, other)["state"] for other in others} == {"completed"}
    assert f"job={job} kind=k attempt=1 lease lost (not_current)" in caplog.text
    assert caplog.text.count("lease lost") == 1


@pytest.mark.parametrize("verb", ["complete", "fail"])
def test_of_two_attempts_of_a_job_that_end_together_only_the_last_counts(
    dsn: str, db: Connection, caplog: pytest.LogCaptureFixture, verb: str
) -> None:
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        async with running(dsn, {"other": noop}, listen=False) as runner:
            job, ended = enqueue(db, "k"), list[Attempt]()
            for _ in range(2):
                asked = None, ["k"], 1, None, "me"
                [(token, claimed)] = await runner.control.call(calls.claim, *asked)
                ended.append(Attempt(claimed, noop, Lease(token, claimed, now()), threaded=False))
                expire(db, job)
            for attempt in ended:
                runner.settler.add(attempt, Ending(verb, permanent=True))
            await until(lambda: not runner.settler.waiting)

    asyncio.run(scenario())
    assert " attempt=1 lease lost (" in caplog.text
    assert f" attempt=2 {verb}" in caplog.text


@pytest.mark.parametrize("verb, ends_as", [("complete", "completed"), ("fail", "failed")])
def test_one_locked_row_does_not_hold_up_what_ends_beside_it(
    dsn: str, db: Connection, connect: Callable[..., Connection], verb: str, ends_as: str
) -> None:
    locker = connect("locker", autocommit=False)

    async def handler(ctx: Context) -> None:
        if ctx.job.payload:
            locker.execute("select from taskboard.jobs where id = %s for update", [ctx.job.id])
        if verb == "fail":
            raise Permanent("no")

    async def scenario() -> None:
        async with running(dsn, {"k": handler}):
            await until(lambda: db.execute("select 1 from taskboard.jobs").rowcount == 1, within=9)
            assert state(db, stuck)["state"] == "running"
            locker.rollback()
            await until(lambda: state(db, stuck)["state"] == ends_as, within=9)

    for function in (verb, f"{verb}_many"):
        db.execute(f"alter function taskboard.{function} set lock_timeout = '200ms'")
    stuck, _ = enqueue(db, "k", {"lock": True}), [enqueue(db, "k") for _ in range(3)]
    asyncio.run(scenario())


@pytest.mark.parametrize("what", ["row", "serial key"])
def test_a_lock_on_one_job_stalls_neither_claims_nor_what_else_ends(
    dsn: str, db: Connection, connect: Callable[..., Connection], what: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    locker, ended = connect("locker", autocommit=False), list[Any]()

    async def handler(ctx: Context) -> None:
        if ctx.job.payload:
            lock = {
                "row": "select from taskboard.jobs where id = %s for update",
                "serial key": "select taskboard.enqueue('k', serial_key => %s::text)",
            }
            locker.execute(lock[what], [ctx.job.id if what == "row" else "one"])
        ended.append(ctx.job.id)

    async def scenario() -> None:
        async with running(dsn, {"k": handler}, pool=4):
            stuck = enqueue(db, "k", {"lock": True}, serial_key="one")
            await until(lambda: ended)
            # In far less time than a call waits for a lock.
            for _ in range(40):
                enqueue(db, "k")
            await until(lambda: len(ended) == 41, within=3)
            done = "select from taskboard.history"
            await until(lambda: db.execute(done).rowcount == 40, within=1)
            await until(lambda: "in the way" in caplog.text)
            locker.rollback()
            await until(lambda: state(db, stuck)["state"] == "completed")

    asyncio.run(scenario())
    assert caplog.text.count("settling: in the way, trying again: ") == 1


@pytest.mark.parametrize("lease", ["60s", "0.6s"])
def test_a_completion_is_recorded_though_handlers_hold_all_pooled_connections(
    dsn: str, db: Connection, lease: str
) -> None:
    async def handler(ctx: Context) -> None:
        if ctx.job.payload:
            async with ctx.connection(), ctx.connection(), ctx.connection():
                held.set()
                await release.wait()

    async def scenario() -> None:
        async with running(dsn, {"k": handler}, pool=5):
            jobs = [enqueue(db, "k", {"hold": True}, lease=lease)]
            await held.wait()
            jobs.append(enqueue(db, "k", lease=lease))
            await until(lambda: state(db, jobs[1])["state"] == "completed")
            release.set()
            await until(lambda: state(db, jobs[0])["state"] == "completed")
            assert {state(db, job)["attempt"] for job in jobs} == {1}

    held, release = asyncio.Event(), asyncio.Event()
    asyncio.run(scenario())


def test_what_cannot_be_settled_stops_claims_at_twice_the_slots(
    dsn: str, db: Connection, connect: Callable[..., Connection]
) -> None:
    locker, most = connect("locker", autocommit=False), 0

    async def handler(ctx: Context) -> None:
        nonlocal most
        locker.execute("select from taskboard.jobs where id = %s for update", [ctx.job.id])
        started.append(ctx.job.id)
        held = "select count(*) from taskboard.jobs where lease_token is not null"
        most = max(most, int((db.execute(held).fetchone() or [0])[0]))

    async def scenario() -> None:
        async with running(dsn, {"k": handler}, pool=6):
            await until(lambda: len(started) == 8)
            locker.commit()
            await until(lambda: len(started) == len(jobs))
            locker.commit()
            await until(lambda: {state(db, job)["state"] for job in jobs} == {"completed"})

    for function in ("complete", "complete_many"):
        db.execute(f"alter function taskboard.{function} set lock_timeout = '100ms'")
    started: list[Any] = []
    jobs = [enqueue(db, "k") for _ in range(12)]
    asyncio.run(scenario())
    assert most == 8 and len({*started}) == len(started) == 12


# Fences and effects.


@pytest.mark.parametrize("fails", [False, True])
def test_writes_and_completion_in_one_transaction_are_one_atom(
    dsn: str, db: Connection, fails: bool
) -> None:
    db.execute("create table sums (n int)")
    seen: list[object] = []

    async def handler(ctx: Context) -> None:
        async with ctx.transaction(complete=True, result={"n": 1}) as conn:
            await conn.execute("insert into sums values (1)")
            if fails:
                raise Permanent("no")
        # A crash from here on repeats nothing: the job has ended with the writes.
        seen.append(state(db, ctx.job.id)["state"])

    job = enqueue(db, "k")
    assert drain(dsn, {"k": handler}) == (3 if fails else 0)
    assert db.execute("select n from sums").fetchall() == ([] if fails else [(1,)])
    assert seen == ([] if fails else ["completed"])
    assert state(db, job)["state"] == ("failed" if fails else "completed")
    row = db.execute("select result from taskboard.history").fetchone()
    assert row == (None if fails else {"n": 1},)
    assert db.execute("select what from taskboard.incidents").fetchall() == []


def test_a_handler_that_raises_after_its_own_completion_is_said_to_have_completed(
    dsn: str, db: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(ctx: Context) -> None:
        async with ctx.transaction(complete=True):
            pass
        raise RuntimeError("afterwards")

    job = enqueue(db, "k")
    assert drain(dsn, {"k": handler}) == 0
    assert state(db, job)["state"] == "completed"
    assert "lease lost" not in caplog.text
    [line] = [line for line in caplog.messages if f"job={job} " in line]
    assert " attempt=1 completed 0." in line
    assert line.endswith(": in its own transaction, then RuntimeError: afterwards")


def test_a_stale_owner_completes_nothing_with_its_own_transaction(
    dsn: str, db: Connection
) -> None:
    db.execute("create table sums (n int)")

    async def handler(ctx: Context) -> None:
        take_over(db, ctx.job.id)
        async with ctx.transaction(complete=True) as conn:
            await conn.execute("insert into sums values (2)")

    job = enqueue(db, "k")
    assert drain(dsn, {"k": handler}) == 0
    assert db.execute("select n from sums").fetchall() == []
    assert state(db, job)["worker"] == "thief"


def test_a_stale_owner_commits_nothing_of_its_own_transaction(dsn: str, db: Connection) -> None:
    db.execute("create table sums (n int)")
    seen: list[str] = []

    async def handler(ctx: Context) -> None:
        async with ctx.transaction() as conn:
            await conn.execute("insert into sums values (1)")
        take_over(db, ctx.job.id)
        try:
            async with ctx.transaction() as conn:
                await conn.execute("insert into sums values (2)")
        finally:
            with pytest.raises(LeaseLost):
                await ctx.begin_effect()
            seen.append("no effect either")

    job = enqueue(db, "k")
    assert drain(dsn, {"k": handler}) == 0
    assert db.execute("select n from sums").fetchall() == [(1,)] and seen
    assert state(db, job)["worker"] == "thief"
    refused = db.execute("select what, job_id from taskboard.incidents").fetchall()
    assert ("write_refused", job) in refused


def test_a_lease_lost_while_waiting_for_a_connection_gives_none(dsn: str, db: Connection) -> None:
    refused: list[str] = []
    gate = asyncio.Event()

    async def handler(ctx: Context) -> None:
        await gate.wait()
        try:
            async with ctx.connection():
                refused.append("given")
        except LeaseLost:
            refused.append("refused")

    async def scenario() -> None:
        async with running(dsn, {"k": handler}, pool=3, listen=False) as runner:
            job = enqueue(db, "k")
            await until(lambda: state(db, job)["state"] == "running")
            async with runner.pool.connection():
                gate.set()
                await asyncio.sleep(0.1)
                for attempt in runner.slots.running:
                    attempt.lease.told.add(News.LOST)  # and the cancel is still to come
            await until(lambda: refused)

    asyncio.run(scenario())
    assert refused == ["refused"]


def test_an_effect_is_told_what_earlier_attempts_left(dsn: str, db: Connection) -> None:
    told: list[Any] = []

    async def handler(ctx: Context) -> None:
        told.append(await ctx.begin_effect("send", key_valid_for=timedelta(hours=23)))
        if ctx.job.attempt == 1:
            raise Retry("no answer", retry_in=timedelta(0))
        await ctx.end_effect("send", result={"id": 7})
        if ctx.job.attempt == 2:
            raise Retry("later", retry_in=timedelta(0))

    job = enqueue(db, "k")
    drain(dsn, {"k": handler})
    assert [effect.state for effect in told] == ["fresh", "unknown", "done"]
    assert {effect.idempotency_key for effect in told} == {f"{job}/send"}
    assert told[2].result == {"id": 7}


def test_an_unknown_effect_under_hold_ends_the_attempt_as_held(
    dsn: str, db: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(ctx: Context) -> None:
        try:
            await ctx.begin_effect()
        except Held:
            assert ctx.job.attempt == 2
            raise
        raise Retry("no answer", retry_in=timedelta(0))

    job = enqueue(db, "k", on_unknown="hold")
    drain(dsn, {"k": handler})
    assert state(db, job)["state"] == "held" and "held" in caplog.text


def test_a_plain_function_reaches_its_effects_from_its_thread(dsn: str, db: Connection) -> None:
    def handler(ctx: ThreadContext) -> str:
        assert threading.current_thread() is not threading.main_thread()
        effect = ctx.wait(ctx.begin_effect())
        ctx.wait(ctx.end_effect(result={"n": 1}))
        return effect.idempotency_key

    async def in_the_loop(ctx: ThreadContext) -> None:
        with pytest.raises(RuntimeError, match="plain functions"):
            ctx.wait(ctx.begin_effect())

    job, other = enqueue(db, "k"), enqueue(db, "loop")
    assert drain(dsn, {"k": handler, "loop": in_the_loop}) == 0
    assert documents(db, job)[0] == f"{job}/main"
    assert state(db, other)["state"] == "completed"


def test_a_handler_cancelled_while_it_begins_an_effect_leaves_the_step_fresh(
    dsn: str, db: Connection
) -> None:
    states: list[str] = []

    async def handler(ctx: Context) -> None:
        if ctx.job.attempt == 1:
            proxy.delay = 0.15
            asyncio.get_running_loop().call_later(0.1, asyncio.current_task().cancel)  # type: ignore[union-attr]
        states.append((await ctx.begin_effect()).state)

    enqueue(db, "k")
    with TcpProxy(dsn) as proxy:

        async def scenario() -> None:
            async with running(proxy.dsn, {"k": handler}, listen=False):
                await until(lambda: db.execute("select from taskboard.effects").rowcount)
                proxy.delay = 0
                await until(
                    lambda: (
                        db.execute("select from taskboard.jobs where lease_token is null").rowcount
                    )
                )
                db.execute("update taskboard.jobs set claimable_at = clock_timestamp()")
                await until(lambda: states)

        asyncio.run(scenario())
    assert states == ["fresh"]


def test_evidence_of_an_effect_is_recorded_though_the_lease_is_lost_and_the_handler_cancelled(
    dsn: str, db: Connection
) -> None:
    async def busy(conn: Any) -> None:
        await conn.execute("select pg_sleep(0.3)")

    async def scenario() -> None:
        async def handler(ctx: Context) -> None:
            await ctx.begin_effect()
            take_over(db, ctx.job.id)
            # The evidence has to queue, and the handler is gone before it was sent.
            async with runner.pool.connection():
                runner.spawn(runner.control.call(busy))
                cancel = asyncio.current_task().cancel  # type: ignore[union-attr]
                asyncio.get_running_loop().call_later(0.1, cancel)
                await ctx.end_effect(result={"sent": float("nan")})

        async with running(dsn, {"k": handler}, pool=3, listen=False) as runner:
            await until(lambda: db.execute("select from taskboard.effects where happened").rowcount)

    enqueue(db, "k")
    asyncio.run(scenario())


def test_evidence_is_recorded_without_a_result_that_the_database_refuses(
    dsn: str, db: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(ctx: Context) -> None:
        await ctx.begin_effect()
        await ctx.end_effect(result="x" * 2_000_000)
        raise Permanent("the effect took place all the same")

    enqueue(db, "k")
    assert drain(dsn, {"k": handler}) == 3
    found = db.execute("select happened, result from taskboard.effects").fetchall()
    assert found == [(True, None)]
    assert "end_effect main: result dropped: " in caplog.text


# The job's own limits, and the operator's word.


def test_a_handler_over_its_timeout_is_cancelled_and_fails_as_owner(
    dsn: str, db: Connection
) -> None:
    async def endless(ctx: Context) -> None:
        await asyncio.sleep(60)

    async def stubborn(ctx: Context) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.3)

    def threaded(ctx: ThreadContext) -> None:
        time.sleep(1)

    handlers = {"endless": endless, "stubborn": stubborn, "threaded": threaded}
    jobs = [enqueue(db, kind, max_attempts=1, timeout="0.5s") for kind in handlers]
    assert drain(dsn, handlers, within=6) == 3
    for job in jobs:
        assert documents(db, job)[1] == "timed out after 0.5 s"
        assert (state(db, job)["attempt"], state(db, job)["lost_leases"]) == (1, 0)


def test_the_next_attempt_does_not_begin_where_the_handler_of_the_last_one_still_runs(
    dsn: str, db: Connection, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "ENDS_WITHIN", 0.2)
    told: list[str] = []

    def handler(ctx: ThreadContext) -> None:
        told.append("began")
        time.sleep(1.2 if ctx.job.attempt == 1 else 0)
        told.append("ended")

    async def scenario() -> None:
        async with running(dsn, {"k": handler}, listen=False):
            job = enqueue(db, "k", timeout="0.2s", lease="0.4s", max_lost_leases=20)
            await until(lambda: len(told) == 4)
            assert state(db, job)["attempt"] > 2  # it was claimed meanwhile, and given back

    asyncio.run(scenario())
    assert told == ["began", "ended"] * 2
    assert "does not end: timed out" in caplog.text and "it still runs here" not in told


def test_a_cancel_reaches_a_running_handler_at_its_next_renewal(dsn: str, db: Connection) -> None:
    cancelled: list[str] = []

    async def handler(ctx: Context) -> None:
        db.execute("select taskboard.cancel(%s, 'wrong customer')", [ctx.job.id])
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append("yes")
            raise

    job = enqueue(db, "k", lease="0.6s")
    assert drain(dsn, {"k": handler}) == 0
    assert state(db, job)["state"] == "cancelled" and cancelled
    assert "wrong customer" in str(documents(db, job)[1])


def test_a_forced_cancel_ends_the_handler_as_lease_lost(
    dsn: str, db: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(ctx: Context) -> None:
        db.execute("select taskboard.cancel(%s, force => true)", [ctx.job.id])
        await asyncio.sleep(60)

    job = enqueue(db, "k", lease="0.6s")
    assert drain(dsn, {"k": handler}) == 0
    assert state(db, job)["state"] == "cancelled" and "lease lost (cancelled)" in caplog.text


# Stopping.


def test_sigterm_gives_every_job_back_and_another_runner_starts_them_at_once(
    dsn: str, db: Connection, tmp_path: Path
) -> None:
    jobs = [enqueue(db, "nap", {"seconds": 60}) for _ in range(4)]
    with process(dsn, tmp_path, "grace=0.5") as first:
        wait_for(lambda: len(first.words()) == 4)
        began = time.monotonic()
        first.popen.terminate()
        assert first.wait() == 0
        assert time.monotonic() - began < 2.5
    assert sorted(first.words()) == ["1 began"] * 4 + ["1 cancelled"] * 4
    found = [state(db, job) for job in jobs]
    assert {(row["state"], row["failures"], row["lost_leases"]) for row in found} == {
        ("ready", 0, 0)
    }
    began = time.monotonic()
    with process(dsn, tmp_path) as second:
        wait_for(lambda: second.words().count("2 began") == 4)
    assert time.monotonic() - began < 2.5


def test_sigterm_lets_a_handler_finish_within_the_grace_period(
    dsn: str, db: Connection, tmp_path: Path
) -> None:
    job, thread = enqueue(db, "nap", {"seconds": 0.7}), enqueue(db, "thread", {"seconds": 0.7})
    with process(dsn, tmp_path, "grace=10") as runner:
        wait_for(lambda: len(runner.words()) == 2)
        late = enqueue(db, "nap", {"seconds": 0}, run_at="infinity" if False else None)
        runner.popen.terminate()
        assert runner.wait() == 0
    assert {state(db, job)["state"], state(db, thread)["state"]} == {"completed"}
    assert state(db, late)["state"] in ("ready", "completed")


def test_a_thread_that_outlasts_the_grace_period_keeps_its_lease_until_it_ends(
    dsn: str, db: Connection, tmp_path: Path
) -> None:
    job = enqueue(db, "thread", {"seconds": 1.5}, lease="0.6s")
    with process(dsn, tmp_path, "grace=0.1", "ends_within=0.1") as runner:
        wait_for(lambda: runner.words() == ["1 began"])
        runner.popen.terminate()
        assert runner.wait() == 0
    assert state(db, job)["state"] == "completed" and state(db, job)["lost_leases"] == 0
    assert "waiting for handlers in threads" in runner.log.read_text()


def test_a_second_signal_ends_the_process_at_once_even_if_the_loop_is_blocked(
    dsn: str, db: Connection, tmp_path: Path
) -> None:
    enqueue(db, "block", {"seconds": 30})
    with process(dsn, tmp_path) as runner:
        wait_for(lambda: runner.words() == ["1 began"])
        runner.popen.send_signal(signal.SIGINT)
        time.sleep(0.1)
        runner.popen.send_signal(signal.SIGINT)
        assert runner.wait(2) == 128 + signal.SIGINT


@contextmanager
def hangups(how: signal.Handlers) -> Iterator[None]:
    """What a process that is started in the block inherits: to end by them, or to ignore them."""
    before = signal.signal(signal.SIGHUP, how)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("times", [1, 2])
def test_a_hangup_stops_like_sigterm_and_may_come_twice(
    dsn: str, db: Connection, tmp_path: Path, times: int
) -> None:
    job = enqueue(db, "nap", {"seconds": 60})
    with hangups(signal.SIG_DFL), process(dsn, tmp_path, "grace=0.5") as runner:
        wait_for(lambda: runner.words() == ["1 began"])
        runner.popen.send_signal(signal.SIGHUP)
        wait_for(lambda: "stopping: " in runner.log.read_text())
        if times == 2:
            runner.popen.send_signal(signal.SIGHUP)
        assert runner.wait() == 0
    assert runner.words() == ["1 began", "1 cancelled"] and state(db, job)["state"] == "ready"


def test_a_hangup_that_is_ignored_stops_nobody(
    dsn: str, db: Connection, tmp_path: Path
) -> None:
    job = enqueue(db, "nap", {"seconds": 0.5})
    with hangups(signal.SIG_IGN), process(dsn, tmp_path) as runner:
        wait_for(lambda: runner.words() == ["1 began"])
        runner.popen.send_signal(signal.SIGHUP)
        wait_for(lambda: state(db, job)["state"] == "completed")
        assert "stopping" not in runner.log.read_text()
        runner.popen.terminate()
        assert runner.wait() == 0


def test_a_handler_that_does_not_end_cannot_hold_up_the_stop(
    dsn: str, db: Connection, tmp_path: Path
) -> None:
    job, good = enqueue(db, "deaf"), enqueue(db, "nap", {"seconds": 60})
    with process(dsn, tmp_path, "grace=0.1", "ends_within=0.5") as runner:
        wait_for(lambda: len(runner.words()) == 2)
        runner.popen.terminate()
        assert runner.wait(5) == 4
    assert "1 handlers do not end" in runner.log.read_text()
    assert state(db, job)["state"] == "running" and state(db, good)["state"] == "ready"


@pytest.mark.parametrize("thread", [False, True])
def test_what_a_handler_left_behind_holds_up_the_exit_for_some_seconds_at_most(
    dsn: str, db: Connection, tmp_path: Path, thread: bool
) -> None:
    job = enqueue(db, "litter", {"thread": thread})
    with process(dsn, tmp_path) as runner:
        wait_for(lambda: state(db, job)["state"] == "completed")
        runner.popen.terminate()
        assert runner.wait(LEAVES_WITHIN + 5) == 0
    assert "what handlers left behind does not end" in runner.log.read_text()


def test_the_process_exits_when_all_slots_hold_handlers_that_do_not_end(
    dsn: str, db: Connection, tmp_path: Path
) -> None:
    for _ in range(2):
        enqueue(db, "deaf", timeout="0.3s", lease="0.5s")
    with process(dsn, tmp_path, "pool=4", "ends_within=0.5") as runner:
        assert runner.wait(10) == 4
    assert runner.words().count("1 ignored") >= 2
    assert "all 2 slots" in runner.log.read_text()


def test_until_empty_does_not_wait_for_a_handler_that_does_not_end(
    dsn: str, db: Connection, tmp_path: Path
) -> None:
    enqueue(db, "deaf", timeout="0.3s", lease="0.5s", max_lost_leases=100)
    job = enqueue(db, "nap", {"seconds": 0})
    with process(dsn, tmp_path, "until_empty=1", "ends_within=0.5") as runner:
        assert runner.wait(10) == 4
    assert state(db, job)["state"] == "completed"
    assert "1 handlers do not end" in runner.log.read_text()


def test_what_a_claim_under_way_returns_after_the_stop_is_given_back(
    dsn: str, db: Connection
) -> None:
    calls: list[int] = []

    async def handler(ctx: Context) -> None:
        calls.append(1)

    async def scenario() -> None:
        with TcpProxy(dsn) as proxy:
            async with running(proxy.dsn, {"k": handler}, listen=False):
                await asyncio.sleep(0.3)
                proxy.delay = 0.5
                job = enqueue(db, "k")
                await until(lambda: state(db, job)["attempt"] == 1)
            assert (state(db, job)["state"], state(db, job)["failures"]) == ("ready", 0)

    asyncio.run(scenario())
    assert not calls


def test_cancelling_the_coroutine_gives_the_jobs_back_too(dsn: str, db: Connection) -> None:
    async def handler(ctx: Context) -> None:
        await asyncio.sleep(60)

    async def scenario() -> None:
        task = asyncio.create_task(run(settings(dsn), {"k": handler}))
        await until(lambda: state(db, job)["state"] == "running")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    job = enqueue(db, "k")
    asyncio.run(scenario())
    assert (state(db, job)["state"], state(db, job)["failures"]) == ("ready", 0)


# Waking up.


async def pick_up(db: Connection, began: dict[Any, float], kind: str = "k") -> float:
    """Enqueue, and answer after how many seconds the handler began."""
    sent = time.monotonic()
    job = enqueue(db, kind)
    await until(lambda: job in began)
    return began[job] - sent


def clock() -> tuple[dict[Any, float], Callable[[Context], Any]]:
    began: dict[Any, float] = {}

    async def handler(ctx: Context) -> None:
        began[ctx.job.id] = time.monotonic()

    return began, handler


def listeners(db: Connection) -> list[int]:
    """The sessions that hold a sleeper's mark."""
    rows = db.execute(
        "select distinct pid from pg_locks where locktype = 'advisory' and mode = 'ShareLock'"
        " and classid = 1952539506"
        " and database = (select oid from pg_database where datname = current_database())"
    )
    return [row[0] for row in rows]


def test_a_sleeping_runner_is_woken_and_again_after_its_channel_was_lost(
    dsn: str, db: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        began, handler = clock()
        async with running(dsn, {"k": handler}, poll=60):
            await until(lambda: listeners(db))
            assert max([await pick_up(db, began) for _ in range(5)]) < 0.5
            db.execute("select pg_terminate_backend(%s)", listeners(db))
            await until(lambda: not listeners(db))
            await until(lambda: listeners(db))
            assert max([await pick_up(db, began) for _ in range(5)]) < 0.5

    asyncio.run(scenario())
    lines = [line for line in caplog.messages if line.startswith("wake:")]
    assert [line.split()[1] for line in lines] == ["listening", "the", "the", "listening"]
    assert "the database does not answer" in lines[1] and "is back" in lines[2]


def test_a_silent_dead_channel_is_noticed_and_polling_covers_the_gap(
    dsn: str, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wake, "PROBE_EVERY", 0.5)
    monkeypatch.setattr(wake, "ANSWER_WITHIN", 0.3)

    async def scenario() -> None:
        began, handler = clock()
        with TcpProxy(dsn) as proxy:
            async with running(dsn, {"k": handler}, listen_url=proxy.dsn, poll=1):
                await until(lambda: listeners(db))
                proxy.freeze()
                assert await pick_up(db, began) < 1.5
                await until(lambda: len(proxy.accepted) > 1)
                await until(lambda: listeners(db))

    asyncio.run(scenario())


def test_behind_a_pooler_no_channel_is_taken_and_that_is_said(
    dsn: str, db: Connection, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def pooled(conn: Any) -> bool:
        assert conn.info.backend_pid  # a pooler would announce another one than the server's
        return True

    monkeypatch.setattr(calls, "is_pooled", pooled)
    job = enqueue(db, "k")
    assert drain(dsn, {"k": noop}, listen=True) == 0
    assert "polling only" in caplog.text and "TASKBOARD_LISTEN_URL" in caplog.text
    assert state(db, job)["state"] == "completed" and not listeners(db)


def test_a_runner_holds_no_transaction_and_no_snapshot_while_a_handler_runs_and_while_it_sleeps(
    dsn: str, db: Connection
) -> None:
    def sessions() -> set[tuple[str, bool]]:
        """What the runner's sessions are in, and whether they keep vacuum from cleaning."""
        return set(
            db.execute(
                "select state, xact_start is not null or backend_xmin is not null"
                " from pg_stat_activity where datname = current_database()"
                " and application_name like '%resting%'"
            ).fetchall()
        )

    async def scenario() -> None:
        begun, end = asyncio.Event(), asyncio.Event()

        async def long(ctx: Context) -> None:
            async with ctx.transaction() as conn:
                await conn.execute("select 1")
            begun.set()
            await end.wait()

        job = enqueue(db, "long")
        async with running(dsn, {"long": long}, worker="resting", poll=60.0, listen=True):
            await begun.wait()
            # A session that kept a transaction would never be seen like this.
            await until(lambda: sessions() == {("idle", False)})
            end.set()
            await until(lambda: state(db, job)["state"] == "completed")
            await until(lambda: sessions() == {("idle", False)})

    asyncio.run(scenario())


def test_a_busy_runner_leaves_no_mark_that_makes_producers_notify(dsn: str, db: Connection) -> None:
    async def handler(ctx: Context) -> None:
        await release.wait()

    release = asyncio.Event()

    async def scenario() -> None:
        async with running(dsn, {"k": handler}, pool=3, poll=60):
            await until(lambda: listeners(db))
            jobs = [enqueue(db, "k") for _ in range(2)]
            await until(lambda: not listeners(db))
            release.set()
            await until(lambda: state(db, jobs[1])["state"] == "completed")
            await until(lambda: listeners(db))

    asyncio.run(scenario())


def test_a_job_enqueued_between_the_empty_claim_and_the_mark_is_not_slept_over(
    dsn: str, db: Connection
) -> None:
    # The runner's channel is slow, so each job comes in while it falls asleep.
    async def scenario() -> None:
        began, handler = clock()
        with TcpProxy(dsn) as proxy:
            proxy.delay = 0.1
            async with running(dsn, {"k": handler}, listen_url=proxy.dsn, poll=60, pool=3):
                for pause in (0.05, 0.15, 0.25, 0.35):
                    assert await pick_up(db, began) < 1
                    await asyncio.sleep(pause)

    asyncio.run(scenario())


def test_a_runner_sleeps_until_the_next_job_is_due_and_no_longer(dsn: str, db: Connection) -> None:
    async def scenario() -> None:
        began, handler = clock()
        job = enqueue(db, "k", delay="0.8s")
        due = time.monotonic() + 0.8
        async with running(dsn, {"k": handler}, listen=False, poll=30):
            await until(lambda: job in began)
        assert -0.1 < began[job] - due < 0.3

    asyncio.run(scenario())


# Starting.


def test_a_pool_without_room_for_a_handler_is_refused_with_the_reason() -> None:
    for pool in (0, 1, 2):
        with pytest.raises(SettingsError, match="at most pool - 2 jobs run at once") as caught:
            Settings(pool=pool)
        assert "--pool 3" in caught.value.hint
    assert Settings(pool=3).slots == 1
    with pytest.raises(SettingsError, match="does not fit a pool of 5"):
        Settings(pool=5, concurrency=4)


def test_settings_show_no_secret_and_an_unreadable_url_is_not_repeated() -> None:
    secrets = {
        "TASKBOARD_DATABASE_URL": "postgresql://u:hush1@h/d",
        "TASKBOARD_LISTEN_URL": "postgresql://u:hush2@h/d",
        "TASKBOARD_SMTP_URL": "smtp://u:hush3@h",
        "STRIPE_API_KEY": "sk_test_hush4",
    }
    loaded = Settings.load(secrets, pool=4)
    assert loaded.database_url.endswith("hush1@h/d") and loaded.stripe_api_key == "sk_test_hush4"
    assert "hush" not in repr(loaded) and loaded.pool == 4
    with pytest.raises(SettingsError) as caught:
        Settings.load({"TASKBOARD_DATABASE_URL": "postgresql+psycopg://u:hush@h/d"})
    assert "hush" not in f"{caught.value} {caught.value.hint}" and caught.value.__cause__ is None


def test_what_the_url_or_the_environment_says_about_a_connection_goes_before_our_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("PGCONNECT_TIMEOUT", "PGAPPNAME", "PGTARGETSESSIONATTRS"):
        monkeypatch.delenv(name, raising=False)
    ours = connect_arguments("postgresql://h/d?connect_timeout=3", "taskboard me")
    assert "connect_timeout" not in ours and ours["target_session_attrs"] == "read-write"
    assert ours["application_name"] == "taskboard me" and ours["prepare_threshold"] is None
    monkeypatch.setenv("PGAPPNAME", "mine")
    assert "application_name" not in connect_arguments("", "taskboard me")


@pytest.mark.parametrize(
    ("broken", "hint"),
    [
        ({"dbname": "nowhere"}, "TASKBOARD_DATABASE_URL"),
        ({"user": "nobody_here"}, "TASKBOARD_DATABASE_URL"),
        ({"dbname": "postgres"}, "taskboard migrate"),
    ],
    ids=["database", "user", "schema"],
)
def test_a_database_that_waiting_will_not_mend_is_refused_with_a_hint(
    dsn: str, broken: dict[str, str], hint: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        drain(make_conninfo(dsn, **broken), {"k": noop})
    assert hint in caught.value.hint


def test_another_minor_version_is_refused_and_another_patch_is_not(
    dsn: str, db: Connection
) -> None:
    body = "language sql immutable as $$ select '0.{}'::text $$"
    db.execute(f"create or replace function taskboard.version() returns text {body.format('2.0')}")
    with pytest.raises(SettingsError, match=r"the database has taskboard 0\.2\.0"):
        drain(dsn, {"k": noop})
    own = f"create or replace function taskboard.version() returns text {body.format('1.99')}"
    db.execute(own)
    assert drain(dsn, {"k": noop}) == 0


def test_a_role_that_defaults_to_another_isolation_level_drains_all_the_same(
    dsn: str, db: Connection
) -> None:
    name = db.info.dbname
    db.execute(f"alter database {name} set default_transaction_isolation = 'repeatable read'")
    for _ in range(20):
        enqueue(db, "k")

    async def handler(ctx: Context) -> None:
        async with ctx.transaction() as conn:
            cursor = await conn.execute("show transaction_isolation")
            assert await cursor.fetchone() == ("read committed",)

    assert drain(dsn, {"k": handler}) == 0
    assert db.execute("select distinct attempt, state from taskboard.history").fetchall() == [
        (1, "completed")
    ]


def test_a_worker_role_without_other_rights_is_enough(dsn: str, db: Connection) -> None:
    # Roles belong to the whole server, so this one is used by no other test.
    db.execute("create role mere_worker login in role taskboard_worker")
    try:
        job = enqueue(db, "k")
        assert drain(make_conninfo(dsn, user="mere_worker"), {"k": noop}, listen=True) == 0
        assert state(db, job)["state"] == "completed"
    finally:
        db.execute("drop role mere_worker")


def test_only_the_named_queues_are_served(dsn: str, db: Connection) -> None:
    here, there = enqueue(db, "k", queue="here"), enqueue(db, "k", queue="there")
    assert drain(dsn, {"k": noop}, queues=("here",), listen=True) == 0
    assert (state(db, here)["state"], state(db, there)["state"]) == ("completed", "ready")


# Never alive but deaf.


def test_an_unexpected_error_in_the_claim_ends_the_runner_after_its_jobs(
    dsn: str, db: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(ctx: Context) -> None:
        db.execute("drop function taskboard.claim")
        await asyncio.sleep(0.3)

    job = enqueue(db, "k")
    assert drain(dsn, {"k": handler}) == 1
    assert state(db, job)["state"] == "completed" and "unexpected end" in caplog.text


def test_housekeeping_and_listening_that_fail_are_warnings(
    dsn: str, db: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    db.execute("drop function taskboard.maintain, taskboard.listen")

    async def scenario() -> None:
        async with running(dsn, {"k": noop}):
            await until(lambda: "maintain: " in caplog.text)
            job = enqueue(db, "k")
            await until(lambda: state(db, job)["state"] == "completed")

    asyncio.run(scenario())
    assert "wake: polling only: function taskboard.listen" in caplog.text


def test_the_log_has_one_line_a_transition_and_no_token_payload_or_address(
    dsn: str, db: Connection, tmp_path: Path
) -> None:
    job = enqueue(db, "nap", {"seconds": 0, "card": "4242hush"})
    address = make_conninfo(dsn, password="hush")
    with process(address, tmp_path, "until_empty=1") as runner:
        assert runner.wait() == 0
    text = runner.log.read_text()
    assert sum(f"job={job} kind=nap attempt=1 completed " in t for t in text.splitlines()) == 1
    row = db.execute("select lease_token::text from taskboard.history").fetchone()
    assert row is not None and row[0] not in text
    assert "hush" not in text and "postgresql:" not in text
