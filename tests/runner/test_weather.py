"""The runner in bad weather, as a process: it keeps what it knows, stays calm, and recovers.

Each kind of weather comes while a handler runs and another job waits. Measured are the process's
own time on a processor, its lines in the log, and how soon after it all goes on without a restart.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest
from harness import Context, Process, drain, enqueue, process, running, state, until
from psycopg.conninfo import make_conninfo
from tcp_proxy import TcpProxy

import support
from support import Connection, OwnServer, expire, rows, session, wait_for
from taskboard import leases, schedules, settle, stopping, wake, worker
from taskboard.handlers import LeaseLost
from taskboard.migrate import migrate

LASTS = 2.0  # seconds of bad weather
# Bounds for them. Tries are 0.1 to 5 s apart, and one may hang for 10 s.
MOST_SECONDS_OF_CPU, MOST_LINES = 0.7, 20
RECOVERS_WITHIN = 17.0
PATIENCE = 40.0  # on a machine that has much else to do

wide = pytest.mark.wide


def cpu(pid: int) -> float:
    """Seconds on a processor, of all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Sky:
    """A server, the way to it, and what can come over both."""

    server: OwnServer
    proxy: TcpProxy
    disk: Path | None = None
    held: ExitStack = field(default_factory=ExitStack)

    def administer(self) -> Any:
        writable = "-c default_transaction_read_only=off"
        return session(self.server.dsn(), "administrator", options=writable)

    def end_sessions(self, db: Connection) -> int:
        return len(
            rows(
                db,
                "select pg_terminate_backend(pid, 2000) from pg_stat_activity"
                " where usename = 'runner' and application_name <> 'crowd'",
            )
        )

    def come(self, what: str) -> None:
        match what:
            case "server stopped":
                self.server.stop()
            case "no answers":
                self.proxy.delay = 3600.0
            case "read only":
                with self.administer() as db:
                    db.execute("alter system set default_transaction_read_only = on")
                    db.execute("select pg_reload_conf()")
                    self.end_sessions(db)
            case "no connections left":
                with self.administer() as db:
                    while self.end_sessions(db):
                        self.crowd()
            case "disk full":
                assert self.disk is not None
                with suppress(OSError), (self.disk / "filler").open("wb", 0) as filler:
                    while True:
                        filler.write(bytes(65536))
                with suppress(OSError), (self.disk / "filler").open("ab", 0) as filler:
                    while True:
                        filler.write(bytes(512))
                with pytest.raises((psycopg.errors.DiskFull, psycopg.OperationalError)):  # noqa: SIM117
                    with self.administer() as db:
                        while True:
                            db.execute("select taskboard.enqueue('other')")

    def crowd(self) -> None:
        """Take all connections that are left."""
        dsn = make_conninfo(self.server.dsn(), user="runner")
        with suppress(psycopg.OperationalError):
            while True:
                self.held.enter_context(session(dsn, "crowd", options=""))

    def go(self, what: str) -> None:
        self.proxy.delay = 0.0
        self.held.close()
        if self.disk is not None:
            (self.disk / "filler").unlink(missing_ok=True)
        self.server.start()  # if it does not run
        if what == "read only":
            with self.administer() as db:
                db.execute("alter system reset default_transaction_read_only")
                db.execute("select pg_reload_conf()")


@pytest.fixture
def sky(
    programs: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Sky]:
    """With the weather "disk full", the server has a small disk of its own."""
    disk = None
    with ExitStack() as stack:
        if request.node.callspec.params["what"] == "disk full":
            disk = Path(f"/tmp/taskboard-disk-{os.getpid()}")
            disk.mkdir()
            stack.callback(disk.rmdir)
            mount = ["mount", "-t", "tmpfs", "-o", "size=300m,mode=755", "tmpfs", str(disk)]
            subprocess.run(mount, check=True)
            stack.callback(subprocess.run, ["umount", "-l", str(disk)], check=True)
            monkeypatch.setattr(support, "memory", lambda: disk)
        few = {"fsync": "off", "max_connections": "16", "max_wal_size": "64MB"}
        server = support.make_server(programs, few)
        stack.callback(server.close)
        assert isinstance(server, OwnServer)
        migrate(server.dsn())
        with session(server.dsn()) as db:
            db.execute("create role runner login in role taskboard_worker")
        proxy = stack.enter_context(TcpProxy(make_conninfo(server.dsn(), user="runner")))
        sky = Sky(server, proxy, disk)
        stack.callback(sky.held.close)
        yield sky


@pytest.mark.parametrize(
    "what",
    [
        "server stopped",
        *(
            pytest.param(what, marks=wide)
            for what in (
                "no answers", "read only", "no connections left", "disk full",
            )
        ),
    ],
)  # fmt: skip
def test_what_is_known_stays_and_nothing_spins_and_all_goes_on_without_a_restart(
    what: str, sky: Sky, tmp_path: Path
) -> None:
    with sky.administer() as db:
        job = enqueue(db, "nap", {"seconds": 1}, lease="60s")
    with process(sky.proxy.dsn, tmp_path, "poll=1") as runner:
        wait_for(lambda: runner.words() == ["1 began"], seconds=PATIENCE)
        sky.come(what)
        before, lines = cpu(runner.popen.pid), len(log(runner))
        time.sleep(LASTS)
        assert cpu(runner.popen.pid) - before < MOST_SECONDS_OF_CPU
        assert len(log(runner)) - lines < MOST_LINES
        # Its handler has ended; the outcome is kept until somebody takes it.
        wait_for(lambda: runner.words() == ["1 began", "1 ended"])
        sky.go(what)
        began = time.monotonic()
        with sky.administer() as db:
            later = enqueue(db, "nap", {"seconds": 0})
            for each in (job, later):
                wait_for(lambda each=each: state(db, each)["state"] == "completed", seconds=30)
            assert time.monotonic() - began < RECOVERS_WITHIN
            assert {state(db, each)["attempt"] for each in (job, later)} == {1}
        runner.popen.terminate()
        assert runner.wait() == 0
    assert runner.words() == ["1 began", "1 ended"] * 2


def test_what_is_known_is_settled_before_anything_is_claimed_after_an_outage(
    dsn: str, db: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    began, end = list[int](), asyncio.Event()

    async def handler(ctx: Context) -> None:
        began.append(ctx.job.attempt)
        await end.wait()

    async def scenario() -> None:
        with TcpProxy(dsn) as proxy:
            async with running(proxy.dsn, {"k": handler}, listen=False) as runner:
                jobs = [enqueue(db, "k", lease="2s") for _ in range(4)]
                await until(lambda: len(began) == 4)
                proxy.refusing = True
                proxy.cut()
                end.set()
                await until(lambda: {state(db, job)["state"] for job in jobs} == {"expired"})
                proxy.refusing = False

                def ended() -> bool:
                    runner.stirred.set()  # whoever claims has no patience
                    return {state(db, job)["state"] for job in jobs} == {"completed"}

                await until(ended)

    asyncio.run(scenario())
    assert began == [1] * 4 and caplog.text.count("completed") == 4


def test_a_stop_during_an_outage_waits_the_grace_period_for_what_is_known_to_be_settled(
    dsn: str, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "SETTLES_WITHIN", 0.1)
    end = asyncio.Event()

    async def handler(ctx: Context) -> None:
        await end.wait()

    async def scenario() -> None:
        with TcpProxy(dsn) as proxy:
            async with running(proxy.dsn, {"k": handler}, listen=False, grace=10.0) as runner:
                job = enqueue(db, "k")
                await until(lambda: state(db, job)["state"] == "running")
                proxy.refusing = True
                proxy.cut()
                end.set()
                await until(lambda: runner.settler.behind)
                runner.stop()
                lost_for = runner.control.lost_for
                await until(lambda: runner.control.lost_for > lost_for + 0.5)
                proxy.refusing = False
            assert state(db, job)["state"] == "completed"

    asyncio.run(scenario())


def log(runner: Process) -> list[str]:
    return runner.log.read_text().splitlines()


@wide
@pytest.mark.parametrize("what", ["no answers"])
def test_a_signal_during_an_outage_is_obeyed_within_a_bound(
    what: str, sky: Sky, tmp_path: Path
) -> None:
    with sky.administer() as db:
        jobs = [enqueue(db, "nap", {"seconds": seconds}, lease="2s") for seconds in (0.5, 60)]
    with process(sky.proxy.dsn, tmp_path, "grace=0.5") as runner:
        wait_for(lambda: runner.words() == ["1 began"] * 2, seconds=PATIENCE)
        sky.come(what)
        wait_for(lambda: "1 ended" in runner.words())
        began = time.monotonic()
        runner.popen.terminate()
        # The grace, a cancelled handler, a call that hangs, and what is left to settle.
        assert runner.wait(25) == 0
        assert time.monotonic() - began < 20
        sky.go(what)
    with sky.administer() as db:
        # Nobody was told of an end that is not on record.
        for job in jobs:
            expire(db, job)
        assert drain(sky.server.dsn(), {"nap": noop}) == 0
        assert {state(db, job)["state"] for job in jobs} == {"completed"}


async def noop(ctx: Context) -> None:
    pass


# What a handler can do to its process.


def test_after_a_stop_past_the_lease_no_further_effect_starts(
    dsn: str, db: Connection, tmp_path: Path
) -> None:
    job = enqueue(db, "steps", {"first": 200, "again": 1}, lease="0.6s")
    with process(dsn, tmp_path) as first:
        wait_for(lambda: first.words().count("1 effect") >= 3, seconds=PATIENCE)
        first.popen.send_signal(signal.SIGSTOP)
        with process(dsn, tmp_path) as second:
            wait_for(lambda: state(db, job)["state"] == "completed", seconds=PATIENCE)
            before = first.words().count("1 effect")
            first.popen.send_signal(signal.SIGCONT)
            wait_for(lambda: "lease lost" in first.log.read_text(), seconds=5)
            # One may have passed the gate just before it was stopped.
            assert first.words().count("1 effect") <= before + 1
            second.popen.terminate()
            assert second.wait() == 0
        first.popen.terminate()
        assert first.wait() == 0
    assert (state(db, job)["attempt"], state(db, job)["lost_leases"]) == (2, 1)
    assert f"job={job} kind=steps attempt=1 completed" not in first.log.read_text()


def test_a_machine_that_slept_past_the_lease_wakes_up_to_find_it_lost(
    dsn: str, db: Connection, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # While a machine sleeps, CLOCK_BOOTTIME runs on and CLOCK_MONOTONIC, the loop's, does not.
    assert leases.CLOCK == time.CLOCK_BOOTTIME
    slept, real, begun, ended = 0.0, time.clock_gettime, asyncio.Event(), list[str]()
    monkeypatch.setattr(time, "clock_gettime", lambda clock: real(clock) + slept)

    async def handler(ctx: Context) -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            with pytest.raises(LeaseLost):
                await ctx.begin_effect()
            ended.append("cancelled")

    async def scenario() -> None:
        nonlocal slept
        async with running(dsn, {"k": handler}, listen=False):
            job = enqueue(db, "k", lease="60s")
            await begun.wait()
            deadline = state(db, job)["claimable_at"]
            slept = 61.0
            await until(lambda: ended, within=3)
            assert state(db, job)["claimable_at"] == deadline  # not renewed

    asyncio.run(scenario())
    assert "lease lost" in caplog.text


def test_a_handler_that_takes_all_memory_fails_and_its_neighbours_do_not(
    dsn: str, db: Connection, tmp_path: Path
) -> None:
    job = enqueue(db, "hoard", max_attempts=1)
    others = [enqueue(db, "nap", {"seconds": 1}) for _ in range(2)]
    with process(dsn, tmp_path, "until_empty=1") as runner:
        assert runner.wait(PATIENCE) == 3
    assert state(db, job)["state"] == "failed" and "MemoryError" in runner.log.read_text()
    assert {state(db, other)["state"] for other in others} == {"completed"}


@wide
def test_a_handler_that_leaves_the_process_costs_a_lost_lease_and_no_failure(
    dsn: str, db: Connection, tmp_path: Path
) -> None:
    job = enqueue(db, "leave", lease="0.5s", max_lost_leases=1)
    with process(dsn, tmp_path) as runner:
        assert runner.wait() == 7
    wait_for(lambda: state(db, job)["state"] == "expired")
    assert drain(dsn, {"leave": noop}) == 0
    assert state(db, job)["state"] == "failed" and runner.words() == ["1 leaves"]
    assert (state(db, job)["failures"], state(db, job)["lost_leases"]) == (0, 1)


# Parts of the runner.


@wide
def test_handlers_cancelled_while_they_get_a_connection_leave_the_pool_whole(
    dsn: str, db: Connection
) -> None:
    used = 0

    async def borrow(ctx: Context, seconds: float) -> None:
        nonlocal used
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds), ctx.connection() as conn:
                await conn.execute("select 1")
                used += 1

    async def handler(ctx: Context) -> None:
        for n in range(60):
            await asyncio.gather(*(borrow(ctx, (n + k) % 9 / 2000) for k in range(8)))
        await borrow(ctx, 20)

    async def scenario() -> None:
        async with running(dsn, {"k": handler}, pool=4, listen=False) as runner:
            jobs = [enqueue(db, "k") for _ in range(2)]
            await until(
                lambda: {state(db, job)["state"] for job in jobs} == {"completed"}, within=40
            )
            # All can be had at once, again.
            async with asyncio.timeout(10):
                async with runner.pool.connection(), runner.pool.connection():
                    pass
            stats = runner.pool.get_stats()
            assert stats["pool_size"] <= 2 and stats.get("requests_waiting", 0) == 0

    asyncio.run(scenario())
    assert used >= 2


@wide
def test_a_pool_that_has_given_up_is_there_again_with_its_server(
    dsn: str, db: Connection
) -> None:
    async def handler(ctx: Context) -> None:
        async with ctx.connection() as conn:
            await conn.execute("select 1")

    async def scenario() -> None:
        with TcpProxy(dsn) as proxy:
            async with running(proxy.dsn, {"k": handler}, listen=False) as runner:
                runner.pool.reconnect_timeout = 0.3
                jobs = [enqueue(db, "k", max_attempts=1)]
                await until(lambda: state(db, jobs[0])["state"] == "completed")
                proxy.refusing = True
                proxy.cut()
                with pytest.raises(psycopg.OperationalError):
                    async with runner.pool.connection(timeout=1):
                        pass
                await asyncio.sleep(0.5)
                proxy.refusing = False
                jobs.append(enqueue(db, "k", max_attempts=1))
                await until(lambda: state(db, jobs[1])["state"] == "completed", within=15)

    asyncio.run(scenario())


@wide
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (wake.Wake, "_serve"), (settle.Settler, "_settle"), (schedules, "advance"),
        (worker, "borrow"), (worker.Worker, "_start"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)  # fmt: skip
def test_an_unexpected_error_in_any_part_ends_the_runner_and_says_so(
    dsn: str, db: Connection, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
    owner: Any, name: str,
) -> None:  # fmt: skip
    def broken(*_: Any, **__: Any) -> Any:
        raise TypeError("a bug")

    async def scenario() -> int:
        async with running(dsn, {"k": noop}) as runner:
            enqueue(db, "k")
            await until(runner.stopping.is_set)
        return runner.code

    monkeypatch.setattr(owner, name, broken)
    assert asyncio.run(scenario()) == worker.BROKEN
    assert "unexpected end" in caplog.text and "a bug" in caplog.text


def test_no_part_of_the_runner_that_decides_reads_the_hosts_wall_clock() -> None:
    folder = Path(worker.__file__).parent
    wall = re.compile(r"time\.time\(|localtime|datetime\.now|utcnow|date\.today|CLOCK_REALTIME")
    # The others: the date in a mail's header, and the lines of the log.
    for name in (
        "worker", "leases", "wake", "db", "settle", "attempts", "context", "connections",
        "schedules", "handlers/email", "handlers/stripe", "stripe_calls", "smtp",
    ):  # fmt: skip
        assert not wall.search((folder / f"{name}.py").read_text()), name
