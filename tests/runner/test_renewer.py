"""Leases are kept while the work is alive, and noticed when lost, whatever gets in the way."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
from harness import Context, drain, enqueue, process, running, state, until
from tcp_proxy import TcpProxy

from support import expire, wait_for
from taskboard import db as calls
from taskboard import worker
from taskboard.handlers import LeaseLost, ThreadContext
from taskboard.leases import now

Connection = psycopg.Connection[Any]


async def nap(ctx: Context) -> None:
    await asyncio.sleep(ctx.job.payload["seconds"])


def test_a_handler_that_blocks_the_loop_keeps_the_leases_of_the_whole_process(
    dsn: str, db: Connection, tmp_path: Path
) -> None:
    jobs = [enqueue(db, "block", {"seconds": 1.5}, lease="0.5s")]
    jobs += [enqueue(db, "nap", {"seconds": 1}, lease="0.5s") for _ in range(3)]
    with process(dsn, tmp_path, "until_empty=1") as first:
        wait_for(lambda: "1 began" in first.words())
        with process(dsn, tmp_path) as second:
            assert first.wait() == 0
            second.popen.terminate()
            assert second.wait() == 0
    assert sorted(first.words()) == ["1 began"] * 4 + ["1 ended"] * 4
    assert {(state(db, job)["state"], state(db, job)["lost_leases"]) for job in jobs} == {
        ("completed", 0)
    }


def test_a_thread_keeps_its_lease_until_it_ends(dsn: str, db: Connection) -> None:
    def handler(ctx: ThreadContext) -> None:
        time.sleep(1.2)

    job = enqueue(db, "k", lease="0.4s")
    assert drain(dsn, {"k": handler}) == 0
    assert (state(db, job)["attempt"], state(db, job)["state"]) == (1, "completed")


def test_a_stopped_process_loses_its_job_and_settles_nothing_when_it_goes_on(
    dsn: str, db: Connection, tmp_path: Path
) -> None:
    job = enqueue(db, "nap", {"seconds": 30, "again": 0.5}, lease="0.6s")
    with process(dsn, tmp_path) as first:
        wait_for(lambda: first.words() == ["1 began"])
        first.popen.send_signal(signal.SIGSTOP)
        with process(dsn, tmp_path) as second:
            wait_for(lambda: "2 began" in second.words())
            first.popen.send_signal(signal.SIGCONT)
            wait_for(lambda: "1 cancelled" in first.words(), seconds=2)
            wait_for(lambda: state(db, job)["state"] == "completed")
            second.popen.terminate()
            assert second.wait() == 0
        first.popen.terminate()
        assert first.wait() == 0
    assert sorted(first.words()) == ["1 began", "1 cancelled", "2 began", "2 ended"]
    assert (state(db, job)["attempt"], state(db, job)["lost_leases"]) == (2, 1)
    assert "lease lost (" in first.log.read_text() and "failed" not in first.log.read_text()


def test_a_process_that_resumes_just_as_its_handler_ends_does_not_complete(
    dsn: str, db: Connection, tmp_path: Path
) -> None:
    job = enqueue(db, "nap", {"seconds": 0.5}, lease="0.6s")
    with process(dsn, tmp_path) as runner:
        wait_for(lambda: runner.words() == ["1 began"])
        runner.popen.send_signal(signal.SIGSTOP)
        time.sleep(1)
        with db.transaction():
            db.execute("select from taskboard.jobs for key share")  # nobody may take it over
            runner.popen.send_signal(signal.SIGCONT)
            wait_for(lambda: "lease lost" in runner.log.read_text())
            assert state(db, job)["state"] == "expired"
    assert "completed" not in runner.log.read_text()


def test_a_killed_process_is_replaced_when_its_lease_lapses(
    dsn: str, db: Connection, tmp_path: Path
) -> None:
    job = enqueue(db, "nap", {"seconds": 30, "again": 0}, lease="0.6s")
    with process(dsn, tmp_path) as first:
        wait_for(lambda: first.words() == ["1 began"])
        first.popen.kill()
        first.popen.wait()
    with process(dsn, tmp_path) as second:
        wait_for(lambda: state(db, job)["state"] == "completed")
    assert second.words() == ["1 began", "2 began", "2 ended"]
    assert (state(db, job)["failures"], state(db, job)["lost_leases"]) == (0, 1)


def test_a_job_that_kills_its_process_ends_after_its_lost_leases_and_spares_the_others(
    dsn: str, db: Connection, tmp_path: Path
) -> None:
    job = enqueue(db, "die", lease="0.3s", max_lost_leases=2)
    good = [enqueue(db, "nap", {"seconds": 0}, lease="0.3s") for _ in range(3)]
    for _ in range(3):
        with process(dsn, tmp_path, "until_empty=1") as runner:
            runner.wait()
        time.sleep(0.3)
    assert runner.words().count("1 died") + runner.words().count("2 died") == 2
    assert state(db, job)["state"] == "failed"
    assert {state(db, other)["state"] for other in good} == {"completed"}


# The network.


def test_a_frozen_connection_is_given_up_and_the_lease_kept_over_another_one(
    dsn: str, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "ANSWERS_WITHIN", 1.5)

    async def scenario() -> None:
        with TcpProxy(dsn) as proxy:
            async with running(proxy.dsn, {"k": nap}, listen=False):
                job = enqueue(db, "k", {"seconds": 1.8}, lease="1.2s")
                await until(lambda: state(db, job)["state"] == "running")
                await asyncio.sleep(0.5)
                proxy.freeze()
                await until(lambda: len(proxy.accepted) >= 3, within=1.5)
                await asyncio.sleep(1)
                assert state(db, job)["state"] == "running"
                await until(lambda: state(db, job)["state"] == "completed", within=15)
            assert (state(db, job)["attempt"], state(db, job)["lost_leases"]) == (1, 0)

    asyncio.run(scenario())


def test_one_lost_answer_of_a_renewal_costs_nothing(dsn: str, db: Connection) -> None:
    with TcpProxy(dsn) as proxy:

        async def handler(ctx: Context) -> None:
            proxy.lose_reply_to = b"taskboard.renew_many"
            await asyncio.sleep(1.5)

        job = enqueue(db, "k", lease="0.9s")
        assert drain(proxy.dsn, {"k": handler}) == 0
        assert proxy.replies_lost == 1
    assert (state(db, job)["attempt"], state(db, job)["state"]) == (1, "completed")


def test_without_renewals_the_handler_is_cancelled_at_the_local_deadline(
    dsn: str, db: Connection, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "ANSWERS_WITHIN", 1.0)
    ended: list[float] = []

    async def handler(ctx: Context) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(time.monotonic())

    async def scenario() -> None:
        with TcpProxy(dsn) as proxy:
            async with running(proxy.dsn, {"k": handler}, listen=False) as runner:
                job = enqueue(db, "k", lease="1.2s")
                await until(lambda: state(db, job)["state"] == "running")
                await asyncio.sleep(0.2)
                proxy.refusing = True
                proxy.freeze()
                frozen = time.monotonic()
                [attempt] = runner.slots.running
                deadline = time.time() + attempt.lease.deadline - now()
                await until(lambda: ended)
                assert 0.5 < ended[0] - frozen < 1.2
                # The database's deadline lies after the local one.
                assert deadline < state(db, job)["claimable_at"].timestamp()
                assert state(db, job)["failures"] == 0
                proxy.refusing = False

    asyncio.run(scenario())
    assert "lease lost" in caplog.text


# What the database answers.


def test_a_refused_renewal_cancels_the_handler_and_no_further_effect_starts(
    dsn: str, db: Connection
) -> None:
    effects: list[int] = []
    refused: list[str] = []

    async def handler(ctx: Context) -> None:
        try:
            for n in range(100):
                await ctx.begin_effect(f"send/{n}")
                effects.append(n)
                await ctx.end_effect(f"send/{n}")
                await asyncio.sleep(0.05)
        finally:  # cancelled, or refused at the gate
            with pytest.raises(LeaseLost):
                async with ctx.connection():
                    pass
            refused.append("connection")

    async def scenario() -> None:
        async with running(dsn, {"k": handler}, listen=False):
            job = enqueue(db, "k", lease="0.6s")
            await until(lambda: len(effects) == 3)
            with db.transaction():
                db.execute("select from taskboard.jobs for update")
                expire(db, job)
                row = db.execute("select count(*) from taskboard.claim(worker => 'B')").fetchone()
            assert row == (1,)
            count = len(effects)
            await until(lambda: refused, within=1.5)
            assert len(effects) <= count + 1
            await asyncio.sleep(0.1)
            assert state(db, job)["worker"] == "B"

    asyncio.run(scenario())


@pytest.mark.parametrize("gate", ["begin_effect", "require_lease"])
def test_a_handler_that_goes_on_after_the_gate_was_closed_is_cancelled(
    dsn: str, db: Connection, gate: str
) -> None:
    ended: list[str] = []

    async def handler(ctx: Context) -> None:
        with db.transaction():
            expire(db, ctx.job.id)
            db.execute("select taskboard.claim(worker => 'B')")
        with pytest.raises(LeaseLost):
            if gate == "begin_effect":
                await ctx.begin_effect()
            async with ctx.transaction():
                pass
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def scenario() -> None:
        async with running(dsn, {"k": handler}, listen=False) as runner:
            job = enqueue(db, "k", lease="60s")
            await until(lambda: ended)
            await until(lambda: not runner.slots.running)
            assert state(db, job)["worker"] == "B"

    asyncio.run(scenario())


def test_a_completion_in_the_handlers_own_transaction_is_not_lost_and_blocks_no_renewal(
    dsn: str, db: Connection
) -> None:
    slept: set[UUID] = set()  # once the completion is committed, a renewal may say that it is gone

    async def handler(ctx: Context) -> None:
        if ctx.job.payload:
            row = db.execute("select id, lease_token from taskboard.jobs").fetchone()
            async with ctx.transaction() as conn:
                await conn.execute("select * from taskboard.complete(%s, %s)", row)
                await asyncio.sleep(1.3)  # more than two leases
                slept.add(ctx.job.id)
        else:
            await asyncio.sleep(1.3)
            slept.add(ctx.job.id)

    async def scenario() -> None:
        async with running(dsn, {"k": handler}, listen=False):
            jobs = [enqueue(db, "k", {"own": True}, lease="0.6s")]
            await until(lambda: state(db, jobs[0])["state"] == "running")
            jobs += [enqueue(db, "k", lease="0.6s") for _ in range(3)]
            await until(lambda: {state(db, job)["state"] for job in jobs} == {"completed"})
            assert {state(db, job)["attempt"] for job in jobs} == {1}
            assert slept == set(jobs)

    asyncio.run(scenario())


def test_a_commit_that_fails_with_the_completion_leaves_the_lease_renewed(
    dsn: str, db: Connection
) -> None:
    db.execute("create table sums (n int unique deferrable initially deferred)")

    async def handler(ctx: Context) -> str:
        for _ in range(2):
            with pytest.raises(psycopg.errors.UniqueViolation):
                async with ctx.transaction(complete=True) as conn:
                    await conn.execute("insert into sums values (1), (1)")
        await asyncio.sleep(1.3)  # more than two leases
        return "all the same"

    job = enqueue(db, "k", lease="0.6s")
    assert drain(dsn, {"k": handler}) == 0
    assert (state(db, job)["attempt"], state(db, job)["state"]) == (1, "completed")


def test_a_renewal_that_comes_after_the_completion_is_no_alarm(
    dsn: str, db: Connection, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    renew_many = calls.renew_many
    asked: list[int] = []

    async def late(*args: Any) -> Any:
        await asyncio.sleep(0.1)
        asked.append(len(args[1]))
        return await renew_many(*args)

    monkeypatch.setattr(calls, "renew_many", late)
    caplog.set_level(logging.INFO)
    jobs = [enqueue(db, "k", {"seconds": 0.3 + n / 200}, lease="1s") for n in range(60)]
    assert drain(dsn, {"k": nap}, pool=62) == 0
    assert asked and caplog.text.count("completed") == 60 and "lost" not in caplog.text
    assert {state(db, job)["attempt"] for job in jobs} == {1}


def test_an_unexpected_error_in_the_renewer_makes_it_begin_again(
    dsn: str, db: Connection, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    renew_many, broken = calls.renew_many, [MemoryError()]

    async def sometimes(*args: Any) -> Any:
        if broken:
            raise broken.pop()
        return await renew_many(*args)

    monkeypatch.setattr(calls, "renew_many", sometimes)
    job = enqueue(db, "k", {"seconds": 2.6}, lease="2.4s")
    assert drain(dsn, {"k": nap}) == 0
    assert not broken and caplog.text.count("beginning again") == 1
    assert (state(db, job)["attempt"], state(db, job)["state"]) == (1, "completed")


def test_handlers_that_take_all_pooled_connections_starve_no_renewal(
    dsn: str, db: Connection
) -> None:
    async def greedy(ctx: Context) -> None:
        async with ctx.connection(), ctx.connection():
            await ctx.begin_effect()
            await asyncio.sleep(1.2)

    jobs = [enqueue(db, "k", lease="0.5s") for _ in range(2)]
    assert drain(dsn, {"k": greedy}, pool=6, concurrency=2) == 0
    assert {(state(db, job)["state"], state(db, job)["attempt"]) for job in jobs} == {
        ("completed", 1)
    }
