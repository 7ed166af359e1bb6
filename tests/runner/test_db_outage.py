"""Bad weather: the runner outlives what happens to the database, and loses no known outcome."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from harness import Context, enqueue, process, running, state, until
from tcp_proxy import TcpProxy

from support import Server, session, wait_for
from taskboard import worker
from taskboard.migrate import migrate

Connection = psycopg.Connection[Any]


async def nap(ctx: Context) -> str:
    await asyncio.sleep(ctx.job.payload["seconds"])
    return "rested"


def weather(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [m for m in caplog.messages if "database does not" in m or "database is back" in m]


def test_a_restart_of_the_server_ends_neither_the_runner_nor_its_handlers(
    server_factory: Callable[..., Server], tmp_path: Path
) -> None:
    server = server_factory(fsync="off")
    migrate(server.dsn())
    with session(server.dsn()) as db:
        jobs = [enqueue(db, "nap", {"seconds": 1.2}) for _ in range(3)]
    with process(server.dsn(), tmp_path) as runner:
        wait_for(lambda: runner.words() == ["1 began"] * 3)
        server.crash()
        time.sleep(0.5)
        server.start()
        with session(server.dsn()) as db:
            wait_for(lambda: all(state(db, job)["state"] == "completed" for job in jobs))
            jobs.append(enqueue(db, "nap", {"seconds": 0}))
            wait_for(lambda: state(db, jobs[-1])["state"] == "completed", seconds=6)
            assert {state(db, job)["attempt"] for job in jobs} == {1}
        runner.popen.terminate()
        assert runner.wait() == 0
    assert runner.words() == ["1 began"] * 3 + ["1 ended"] * 3 + ["1 began", "1 ended"]
    assert len(runner.log.read_text().splitlines()) < 25


def test_a_runner_that_starts_before_its_server_waits_for_it(
    server_factory: Callable[..., Server], tmp_path: Path
) -> None:
    server = server_factory(fsync="off")
    migrate(server.dsn())
    dsn = server.dsn()
    with session(dsn) as db:
        job = enqueue(db, "nap", {"seconds": 0})
    server.stop()
    with process(dsn, tmp_path) as runner:
        wait_for(lambda: "does not answer" in runner.log.read_text())
        server.start()
        with session(dsn) as db:
            wait_for(lambda: state(db, job)["state"] == "completed")
        runner.popen.terminate()
        assert runner.wait() == 0
    assert "is back" in runner.log.read_text()


def test_a_runner_that_waits_for_its_server_can_be_stopped(tmp_path: Path) -> None:
    with process("postgresql://x@127.0.0.1:1/x", tmp_path) as runner:
        wait_for(lambda: "does not answer" in runner.log.read_text())
        runner.popen.terminate()
        assert runner.wait(2) == 0


def test_an_outcome_that_was_known_during_an_outage_is_recorded_after_it(
    dsn: str, db: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        with TcpProxy(dsn) as proxy:
            async with running(proxy.dsn, {"k": nap}):
                job = enqueue(db, "k", {"seconds": 0.5}, lease="5s")
                await until(lambda: state(db, job)["state"] == "running")
                proxy.refusing = True
                proxy.cut()
                opened = len(proxy.accepted)
                await asyncio.sleep(2)
                # Renewer, control, channel and pool tried, more and more rarely.
                assert len(proxy.accepted) - opened < 30
                proxy.refusing = False
                await until(lambda: state(db, job)["state"] == "completed", within=6)
                assert state(db, job)["attempt"] == 1
                later = enqueue(db, "k", {"seconds": 0})
                await until(lambda: state(db, later)["state"] == "completed")

    asyncio.run(scenario())
    lines = [line.split(":")[0] for line in weather(caplog)]
    assert lines.count("control") == 2 and lines.count("renewer") <= 2


def test_an_outage_longer_than_the_lease_cancels_the_handlers_and_claims_go_on_after_it(
    dsn: str, db: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    cancelled: list[int] = []

    async def handler(ctx: Context) -> None:
        try:
            await asyncio.sleep(60 if ctx.job.attempt == 1 else 0)
        except asyncio.CancelledError:
            cancelled.append(ctx.job.attempt)
            raise

    async def scenario() -> None:
        with TcpProxy(dsn) as proxy:
            async with running(proxy.dsn, {"k": handler}, pool=5):
                jobs = [enqueue(db, "k", lease="0.8s") for _ in range(3)]
                await until(lambda: all(state(db, job)["state"] == "running" for job in jobs))
                proxy.refusing = True
                proxy.cut()
                await until(lambda: cancelled == [1, 1, 1], within=2)
                await asyncio.sleep(0.3)
                proxy.refusing = False
                await until(lambda: all(state(db, job)["state"] == "completed" for job in jobs))
                assert {(state(db, j)["failures"], state(db, j)["lost_leases"]) for j in jobs} == {
                    (0, 1)
                }

    asyncio.run(scenario())
    assert caplog.text.count("lease lost") == 3


def test_a_database_that_turns_read_only_is_waited_for(
    dsn: str, db: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    name = db.info.dbname

    def others(db: Connection) -> None:
        db.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )

    async def scenario() -> None:
        async with running(dsn, {"k": nap}):
            job = enqueue(db, "k", {"seconds": 0.5})
            await until(lambda: state(db, job)["state"] == "running")
            db.execute(f"alter database {name} set default_transaction_read_only = on")
            others(db)
            await asyncio.sleep(1.5)
            assert state(db, job)["state"] == "running"
            db.execute("set default_transaction_read_only = off")
            db.execute(f"alter database {name} reset default_transaction_read_only")
            await until(lambda: state(db, job)["state"] == "completed", within=6)

    asyncio.run(scenario())
    assert len(caplog.messages) < 20


def test_a_session_that_turns_read_only_is_left_for_another_one(dsn: str, db: Connection) -> None:
    # As after a failover behind an address that stays: the socket lives, writes are refused.
    async def scenario() -> None:
        async with running(dsn, {"k": nap}) as runner:
            job = enqueue(db, "k", {"seconds": 0.3})
            await until(lambda: state(db, job)["state"] == "running")
            await runner.control.call(read_only)
            await until(lambda: state(db, job)["state"] == "completed")

    async def read_only(conn: Any) -> None:
        await conn.execute("set default_transaction_read_only = on")

    asyncio.run(scenario())


def test_a_server_without_free_connections_is_waited_for(dsn: str, db: Connection) -> None:
    async def scenario() -> None:
        job = enqueue(db, "k", {"seconds": 0})
        db.execute("create role crowded login in role taskboard_worker connection limit 1")
        crowded = psycopg.conninfo.make_conninfo(dsn, user="crowded")
        with session(crowded, options=""):
            async with running(crowded, {"k": nap}, listen=False):
                await asyncio.sleep(1)
                assert state(db, job)["attempt"] == 0
                db.execute("alter role crowded connection limit 20")
                await until(lambda: state(db, job)["state"] == "completed")

    try:
        asyncio.run(scenario())
    finally:
        db.execute("drop role if exists crowded")


def test_a_channel_that_cannot_be_opened_is_tried_once_a_second_and_told_of_once(
    dsn: str, db: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        with TcpProxy(dsn) as proxy:
            proxy.refusing = True
            async with running(dsn, {"k": nap}, listen_url=proxy.dsn):
                job = enqueue(db, "k", {"seconds": 0})
                await until(lambda: state(db, job)["state"] == "completed")
                await asyncio.sleep(2.5)
                assert 1 <= len(proxy.accepted) <= 3

    asyncio.run(scenario())
    assert caplog.text.count("wake: the database does not answer") == 1


def test_a_half_open_connection_holds_up_claim_and_settling_only_for_a_bounded_time(
    dsn: str, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "ANSWERS_WITHIN", 0.8)

    async def scenario() -> None:
        with TcpProxy(dsn) as proxy:
            async with running(proxy.dsn, {"k": nap}, listen=False) as runner:
                job = enqueue(db, "k", {"seconds": 0.5})
                await until(lambda: runner.slots.running)  # the claim's answer has come, too
                proxy.freeze()
                began = time.monotonic()
                await until(lambda: state(db, job)["state"] == "completed")
                later = enqueue(db, "k", {"seconds": 0})
                await until(lambda: state(db, later)["state"] == "completed")
                assert time.monotonic() - began < 6

    asyncio.run(scenario())


def test_a_handlers_dead_pooled_connections_are_replaced_before_it_gets_one(
    dsn: str, db: Connection
) -> None:
    async def handler(ctx: Context) -> None:
        async with ctx.connection() as conn:
            await conn.execute("select 1")

    async def scenario() -> None:
        with TcpProxy(dsn) as proxy:
            async with running(proxy.dsn, {"k": handler}, listen=False):
                for _ in range(3):
                    jobs = [enqueue(db, "k", max_attempts=1) for _ in range(4)]
                    await until(
                        lambda jobs=jobs: all(  # type: ignore[misc]
                            state(db, job)["state"] == "completed" for job in jobs
                        )
                    )
                    proxy.cut()
                    await asyncio.sleep(0.1)

    asyncio.run(scenario())
