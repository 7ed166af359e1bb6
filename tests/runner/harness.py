"""Runners for tests: in this process, with handlers at hand, or as a process of their own.

As a process it has the handlers below, which write to the file $EVIDENCE what they do: a line each,
attempt and word.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
from psycopg.types.json import Jsonb

from taskboard import attempts, several
from taskboard.handlers import Context, Handler, ThreadContext, handler
from taskboard.process import main, run
from taskboard.settings import Settings
from taskboard.worker import Worker

HERE = Path(__file__).parent
left: list[Any] = []  # by handlers


def settings(dsn: str, **options: Any) -> Settings:
    return Settings(database_url=dsn, **{"pool": 6, "poll": 0.2, "grace": 1.0} | options)


def drain(dsn: str, handlers: Mapping[str, Handler], *, within: float = 10, **options: Any) -> int:
    """Run until nothing is left; return the exit code."""
    options.setdefault("listen", False)

    async def bounded() -> int:
        async with asyncio.timeout(within):
            return await run(settings(dsn, until_empty=True, **options), handlers)

    return asyncio.run(bounded())


@asynccontextmanager
async def running(
    dsn: str, handlers: Mapping[str, Handler], **options: Any
) -> AsyncIterator[Worker]:
    """Run beside the block, and stop after it; the exit code is then `worker.code`."""
    worker = Worker(settings(dsn, **options), handlers)
    task = asyncio.create_task(worker.run({}))
    try:
        yield worker
    finally:
        worker.stop()
        async with asyncio.timeout(15):
            await task


async def until(condition: Callable[[], Any], *, within: float = 10, what: str = "") -> None:
    """Wait until a condition holds; the loop goes on meanwhile."""
    ends_at = time.monotonic() + within
    while not condition():
        assert time.monotonic() < ends_at, f"not within {within:g} s: {what or condition}"
        await asyncio.sleep(0.01)


def enqueue(db: psycopg.Connection[Any], kind: str, payload: Any = None, **options: Any) -> UUID:
    """Enqueue a job; options are those of the function."""
    options = {"kind": kind, "payload": Jsonb(payload or {})} | options
    named = ", ".join(f"{name} => %({name})s" for name in options)
    row = db.execute(f"select job_id from taskboard.enqueue({named})", options).fetchone()
    assert row is not None
    job_id: UUID = row[0]
    return job_id


def state(db: psycopg.Connection[Any], job_id: UUID) -> Any:
    """What became of a job: the row of the function job, by column name."""
    cursor = db.execute("select * from taskboard.job(%s)", [job_id])
    row = cursor.fetchone()
    assert row is not None and cursor.description is not None
    return dict(zip([column.name for column in cursor.description], row, strict=True))


class Process:
    """A runner as an operating system process, with the handlers of this file."""

    def __init__(self, dsn: str, folder: Path, *arguments: str, **environment: str) -> None:
        self.evidence, self.log = folder / "evidence", folder / f"log{time.monotonic_ns()}"
        self.evidence.touch()
        with self.log.open("w") as out:
            self.popen = subprocess.Popen(
                [sys.executable, HERE / "harness.py", *arguments], stderr=out,
                env=os.environ | environment | {
                    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                    "TASKBOARD_DATABASE_URL": dsn, "EVIDENCE": str(self.evidence),
                },
            )  # fmt: skip

    def words(self) -> list[str]:
        """What the handlers of all processes in this folder wrote, in order."""
        return self.evidence.read_text().splitlines()

    def wait(self, within: float = 10) -> int:
        return self.popen.wait(within)


@contextmanager
def process(dsn: str, folder: Path, *arguments: str, **environment: str) -> Iterator[Process]:
    """Start a process; kill it at the end, whatever state it is in."""
    started = Process(dsn, folder, *arguments, **environment)
    try:
        yield started
    finally:
        started.popen.kill()
        started.popen.wait()


def evidence(ctx: Context, word: str) -> None:
    with open(os.environ["EVIDENCE"], "a") as file:
        file.write(f"{ctx.job.attempt} {word}\n")


@handler("nap")
async def nap(ctx: Context) -> str:
    """Sleep for payload.seconds (later attempts: payload.again), and say if that is cut short."""
    evidence(ctx, "began")
    seconds = ctx.job.payload["seconds"]
    try:
        await asyncio.sleep(
            seconds if ctx.job.attempt == 1 else ctx.job.payload.get("again", seconds)
        )
    except asyncio.CancelledError:
        evidence(ctx, "cancelled")
        raise
    evidence(ctx, "ended")
    return "rested"


@handler("block")
async def block(ctx: Context) -> None:
    """Hold up the event loop for payload.seconds."""
    evidence(ctx, "began")
    time.sleep(ctx.job.payload["seconds"])  # noqa: ASYNC251
    evidence(ctx, "ended")


@handler("thread")
def thread(ctx: ThreadContext) -> None:
    """Work for payload.seconds in a thread."""
    evidence(ctx, "began")
    time.sleep(ctx.job.payload["seconds"])
    evidence(ctx, "ended")


@handler("deaf")
async def deaf(ctx: Context) -> None:
    """End only when it wants to."""
    evidence(ctx, "began")
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            evidence(ctx, "ignored")


@handler("litter")
async def litter(ctx: Context) -> None:
    """Leave something behind that does not end: a thread, else a task."""
    thread = ctx.job.payload["thread"]
    rest = asyncio.to_thread(time.sleep, 60) if thread else deaf(ctx)
    left.append(asyncio.ensure_future(rest))
    await asyncio.sleep(0.1)


@handler("die")
async def die(ctx: Context) -> None:
    evidence(ctx, "died")
    os.kill(os.getpid(), signal.SIGKILL)


@handler("leave")
async def leave(ctx: Context) -> None:
    evidence(ctx, "leaves")
    os._exit(7)


@handler("steps")
async def steps(ctx: Context) -> None:
    """Have payload.first effects, one after the other; later attempts payload.again."""
    for n in range(ctx.job.payload["first" if ctx.job.attempt == 1 else "again"]):
        await ctx.begin_effect(f"step/{n}")
        evidence(ctx, "effect")
        await ctx.end_effect(f"step/{n}")
        await asyncio.sleep(0.05)


@handler("hoard")
async def hoard(ctx: Context) -> None:
    """Take all the memory that there is, which is 300 MB more than now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])  # noqa: ASYNC240
    most = pages * resource.getpagesize() + 300 * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
    hoard = []
    while True:
        hoard.append(bytes(2**20))


if __name__ == "__main__":
    numbers = {name: float(value) for name, _, value in (a.partition("=") for a in sys.argv[1:])}
    attempts.ENDS_WITHIN = numbers.pop("ends_within", attempts.ENDS_WITHIN)
    pool, until_empty = int(numbers.pop("pool", 6)), bool(numbers.pop("until_empty", 0))
    first, *others = several.load(pool=pool, until_empty=until_empty, **{"poll": 0.2, **numbers})
    raise SystemExit(main(first, ["harness"], others))
