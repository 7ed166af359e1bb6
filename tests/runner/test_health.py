"""Health turns red when a part of a runner is dead though the process lives, and green again."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness import enqueue, settings, until

from support import Connection, rows, wait_for
from taskboard import health, wake, worker
from taskboard.handlers import Context, Handler, Retry
from taskboard.health import Health, serving
from taskboard.settings import SettingsError
from taskboard.worker import Worker


def ask(address: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(address + path, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        return exc.code, exc.read().decode()


class Seen:
    """A running worker, and what is seen of it over HTTP."""

    def __init__(self, worker: Worker, address: str) -> None:
        self.worker, self.address = worker, address

    async def get(self, path: str) -> tuple[int, str]:
        return await asyncio.to_thread(ask, self.address, path)

    async def until(self, path: str, code: int, text: str = "", within: float = 15) -> str:
        """Wait until a path answers so."""
        ends_at = time.monotonic() + within
        while True:
            found, said = await self.get(path)
            if found == code and text in said:
                return said
            assert time.monotonic() < ends_at, f"{path}: {found} {said}, not {code} {text}"
            await asyncio.sleep(0.02)


@asynccontextmanager
async def seen(
    dsn: str, handlers: Mapping[str, Handler], **options: Any
) -> AsyncIterator[Seen]:
    """Run a worker that is watched."""
    with serving("0") as watcher:
        running = Worker(settings(dsn, **options), handlers)
        watcher.watch(running)
        task = asyncio.create_task(running.run({}))
        port = port_of(watcher)
        try:
            yield Seen(running, f"http://127.0.0.1:{port}")
        finally:
            running.stop()
            async with asyncio.timeout(15):
                await task


def port_of(watcher: Health) -> int:
    """Where it is served: its own log line told the port."""
    return PORTS[-1]


PORTS: list[int] = []


@pytest.fixture(autouse=True)
def ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Note the ports, and be quick to call a part late."""

    class Noted(health.Server):
        def server_activate(self) -> None:
            PORTS.append(self.server_address[1])
            super().server_activate()

    monkeypatch.setattr(health, "Server", Noted)
    monkeypatch.setattr(health, "LATE", 1.5)  # the renewer looks once a second
    monkeypatch.setattr(health, "STUCK_AFTER", 2.0)
    monkeypatch.setattr(health, "BEAT_EVERY", 0.02)


def in_loop(test: Callable[..., Any]) -> Callable[..., None]:
    """Run a test that is a coroutine."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


async def idle(ctx: Context) -> None:
    pass


def pid_of(db: Connection, query: str) -> int:
    """The process of a worker's session that last ran such a query, once there is one."""
    found: list[tuple[int]] = []

    def look() -> bool:
        found[:] = rows(
            db, "select pid from pg_stat_activity where datname = current_database()"
            " and application_name like 'taskboard %%' and query like %s", [query],
        )  # fmt: skip
        return bool(found)

    wait_for(look, what=f"a session with {query}")
    return found[0][0]


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A server process that does not move: a half-open connection, as its client sees it."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@in_loop
async def test_a_runner_that_works_is_green_and_red_before_it_has_begun_and_while_it_stops(
    dsn: str, db: Connection
) -> None:
    with serving("127.0.0.1:0"):
        assert ask(f"http://127.0.0.1:{PORTS[-1]}", "/readyz") == (503, "not started\n")
        assert ask(f"http://127.0.0.1:{PORTS[-1]}", "/healthz") == (200, "ok\n")
    held = asyncio.Event()

    async def wait(ctx: Context) -> None:
        await held.wait()

    async with seen(dsn, {"wait": wait}, grace=5.0) as it:
        await it.until("/readyz", 200, "ok")
        assert await it.get("/healthz") == (200, "ok\n")
        assert (await it.get("/elsewhere"))[0] == 404
        enqueue(db, "wait")
        await until(lambda: it.worker.slots.running)
        it.worker.stop()
        assert "claims: stopping" in await it.until("/readyz", 503)
        held.set()


@in_loop
async def test_a_loop_that_is_held_up_turns_ready_red_then_healthy_and_green_again(
    dsn: str, db: Connection
) -> None:
    said: list[tuple[int, str]] = []

    async def block(ctx: Context) -> None:
        """Hold up the loop until both are red, which only another thread can see."""
        ends_at = time.monotonic() + 15
        while time.monotonic() < ends_at and len(said) < 2:
            for path in ("/readyz", "/healthz")[len(said) :]:
                answer = ask(f"http://127.0.0.1:{PORTS[-1]}", path)
                if answer[0] == 503:
                    said.append(answer)

    async with seen(dsn, {"block": block}) as it:
        await it.until("/readyz", 200)
        enqueue(db, "block")
        await until(lambda: len(said) == 2, within=20)
        assert all("claims: the loop has been held up" in text for _, text in said)
        await it.until("/readyz", 200)
        await it.until("/healthz", 200)


@pytest.mark.wide
@in_loop
async def test_a_claim_session_that_hangs_turns_ready_red_and_not_healthy(
    dsn: str, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "ANSWERS_WITHIN", 2.0)
    async with seen(dsn, {"idle": idle}, listen=False) as it:
        await it.until("/readyz", 200)
        with stopped(await asyncio.to_thread(pid_of, db, "%taskboard.next_claimable_at(%")):
            await it.until("/readyz", 503, "claims: none was answered")
            assert (await it.get("/healthz"))[0] == 200
            await it.until("/readyz", 200)  # by another session: this one was given up


@pytest.mark.wide
@in_loop
async def test_claims_that_are_refused_turn_ready_red_as_long_as_they_are(
    dsn: str, db: Connection, connect: Callable[..., Connection]
) -> None:
    async with seen(dsn, {"idle": idle}, listen=False) as it:
        await it.until("/readyz", 200)
        owner = connect("owner", autocommit=False)
        owner.execute("lock table taskboard.lanes in access exclusive mode")
        await it.until("/readyz", 503, "claims: none was answered")
        owner.rollback()
        await it.until("/readyz", 200)


@in_loop
async def test_a_renewer_that_is_dead_turns_ready_and_healthy_red(
    dsn: str, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread ends as by an error that nothing catches; the claims go on at first."""

    class Killed(BaseException):
        pass

    async with seen(dsn, {"idle": idle}) as it:
        await it.until("/readyz", 200)
        renewer = it.worker.renewer
        monkeypatch.setattr("threading.excepthook", lambda arguments: None)

        def end() -> None:
            raise Killed

        monkeypatch.setattr(renewer, "_watch", end)
        await asyncio.to_thread(renewer.join, 10)
        await it.until("/readyz", 503, "renewer: its thread is gone")
        await until(it.worker.stopping.is_set)
    assert it.worker.code == worker.BROKEN, "a worker without a renewer ends"


@pytest.mark.wide
@in_loop
async def test_a_renewer_that_stands_still_turns_ready_and_healthy_red(
    dsn: str, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    async with seen(dsn, {"idle": idle}) as it:
        await it.until("/readyz", 200)
        watch = it.worker.renewer._watch
        monkeypatch.setattr(
            it.worker.renewer, "_watch", lambda: watch() if go_on.wait(20) else []
        )
        await it.until("/readyz", 503, "renewer: it has stood still")
        await it.until("/healthz", 503, "renewer: it has stood still")
        go_on.set()
        monkeypatch.undo()
        await it.until("/healthz", 200)


@pytest.mark.wide
@in_loop
async def test_renewals_that_are_refused_turn_ready_red_before_the_leases_lapse(
    dsn: str, db: Connection
) -> None:
    done = asyncio.Event()

    async def wait(ctx: Context) -> None:
        await done.wait()

    async with seen(dsn, {"wait": wait}) as it:
        await it.until("/readyz", 200)
        db.execute("alter function taskboard.renew_many rename to gone")
        enqueue(db, "wait", lease="3 seconds")
        await it.until("/readyz", 503, "renewer: 1 leases are not renewed")
        db.execute("alter function taskboard.gone rename to renew_many")
        await it.until("/readyz", 200)
        done.set()


@pytest.mark.wide
@in_loop
async def test_a_listener_that_is_deaf_turns_ready_red_and_comes_back(
    dsn: str, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wake, "PROBE_EVERY", 0.1)
    monkeypatch.setattr(wake, "ANSWER_WITHIN", 0.4)
    async with seen(dsn, {"idle": idle}) as it:
        await it.until("/readyz", 200)
        with stopped(await asyncio.to_thread(pid_of, db, "%taskboard.listen(%")):
            await it.until("/readyz", 503, "listener: ")
        await it.until("/readyz", 200)


@in_loop
async def test_claim_loop_dead_heartbeat_alive(
    dsn: str, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever part ends, the process never goes on alive but deaf.

    An unexpected error in the claims, listener, renewer and housekeeping in turn: either the part
    goes on, or the worker ends with a code that has it started anew; and health is red by then.
    """
    monkeypatch.setattr(worker, "MAINTAIN_EVERY", 1.0)
    for part in ("claims", "listener", "housekeeping", "renewer"):
        async with seen(dsn, {"idle": idle}) as it:
            await it.until("/readyz", 200)

            calls: list[Any] = []

            def broken(*arguments: Any, calls: list[Any] = calls, **options: Any) -> Any:
                calls.append(arguments)
                raise TypeError("unexpected")

            if part == "claims":
                it.worker.control.call = broken  # type: ignore[method-assign]
            elif part == "listener":
                it.worker.wake.link.call = broken  # type: ignore[method-assign]
                it.worker.wake.sleeping(False)
            elif part == "housekeeping":
                it.worker.pool.getconn = broken  # type: ignore[method-assign]
            else:
                it.worker.renewer._watch = broken  # type: ignore[method-assign]
            if part == "renewer":
                await until(lambda calls=calls: len(calls) > 1, what="it to begin again")
                del it.worker.renewer._watch
                await it.until("/readyz", 200)
                job_id = enqueue(db, "idle")
                await until(
                    lambda job=job_id: rows(
                        db, "select state from taskboard.job(%s)", [job]
                    ) == [("completed",)]
                )  # fmt: skip
            else:
                await it.until("/readyz", 503, "claims: stopping")
        assert it.worker.code == (worker.FINE if part == "renewer" else worker.BROKEN), part


def figures(text: str) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in (line.rsplit(" ", 1) for line in text.splitlines() if line[:1] != "#")
    }


@in_loop
async def test_figures_count_attempts_by_outcome_and_show_nothing_that_jobs_carry(
    dsn: str, db: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async def mail(ctx: Context) -> None:
        if ctx.job.payload["n"] == 1:
            raise Retry("secret-error")

    async with seen(dsn, {"mail": mail}) as it:
        for n in range(3):
            enqueue(db, "mail", {"n": n, "card": "secret"}, unique_key=f"secret-{n}")
        name = 'taskboard_jobs_total{kind="mail",outcome="%s"}'

        async def counted() -> bool:
            found = figures((await it.get("/metrics"))[1])
            return found.get(name % "completed") == 2 and found.get(name % "retried", 0) >= 1

        for _ in range(500):
            if await counted():
                break
            await asyncio.sleep(0.02)
        text = (await it.get("/metrics"))[1]
        found = figures(text)
        assert found['taskboard_job_seconds_count{kind="mail"}'] >= 3
        assert found["taskboard_slots"] == 4 and found["taskboard_slots_used"] == 0
        assert found['taskboard_part_up{part="claims"}'] == 1
        assert found['taskboard_database_lost_total{part="claims"}'] == 0
        assert "secret" not in text and not re.search(r"[0-9a-f]{8}-[0-9a-f]{4}", text)


@pytest.mark.parametrize(
    ("said", "word"),
    [
        ("completed", "completed"), ("released", "released"), ("failed", "failed"),
        ("failed, again in 5 s,", "retried"), ("lease lost (not_current)", "lease_lost"),
        ("held", "held"), ("cancelled", "cancelled"), ("given_back", "other"),
    ],
)  # fmt: skip
def test_outcomes_are_few_words(said: str, word: str) -> None:
    assert health.outcome_of(said) == word


@pytest.mark.parametrize("where", ["", "x", "127.0.0.1:", "70000", "localhost:x"])
def test_a_place_that_is_none_is_refused(where: str) -> None:
    with pytest.raises(SettingsError, match="is no port"):
        health.address(where)


def test_a_port_that_is_taken_is_refused() -> None:
    with serving("0"), pytest.raises(SettingsError, match="--metrics"), serving(str(PORTS[-1])):
        pass


def test_the_command_serves_figures(dsn: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from taskboard.handlers import handler\n\n@handler('own')\nasync def own(ctx): pass\n"
    )
    command = [sys.executable, "-m", "taskboard", "run", "own", "--metrics", "0"]
    environment = os.environ | {"TASKBOARD_DATABASE_URL": dsn}
    with subprocess.Popen(
        command, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True
    ) as started:
        try:
            assert started.stderr is not None
            line = next(line for line in started.stderr if "metrics: at" in line)
            found = re.search(r"http://\S+:\d+", line)
            assert found
            wait_for(lambda: ask(found[0], "/readyz")[0] == 200, what="the runner to be ready")
            assert "taskboard_part_up" in ask(found[0], "/metrics")[1]
            started.send_signal(signal.SIGTERM)
            assert started.wait(10) == 0
        finally:
            started.kill()
