"""Workers as they come, with handlers that do nothing: jobs a second, and how soon one starts.

The handler itself counts, in the worker's process, so starting up is no part of it. A job is picked
up when its handler begins; its time runs from when the producer's commit has been answered.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep, time

from lines import Line
from machine import Rig
from rows_claim import percentile
from rows_sql import Options, in_turns, say
from sides import HERE, PAYLOAD, Side

GOALS = {10: "ahead of every Python peer", 50: "≥ 15,000, ahead of every Python peer"}


@contextmanager
def working(
    rig: Rig, side: Side, slots: int, what: str, seconds: float, jobs: int
) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """A worker of this side, until the end of the block; and the file where its handler writes."""
    assert side.worker is not None
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "out"), Path(folder, "log")
        out.touch()
        env = os.environ | {
            "TASKBOARD_DATABASE_URL": rig.tcp(side.dsn),
            "BENCH_DSN": rig.tcp(side.dsn),
            "BENCH_OUT": str(out),
            "BENCH_MODE": what,
            "BENCH_SECONDS": str(seconds),
            "BENCH_JOBS": str(jobs),
            "BENCH_SLOTS": str(slots),
            "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}",
        }
        with log.open("wb") as file:
            process = subprocess.Popen(
                side.worker(side.dsn, slots, what),
                env=env,
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                cwd=folder,
                start_new_session=True,
            )
        try:
            yield out, process
        except TimeoutError as exc:
            raise RuntimeError(f"{exc}: {log.read_text(errors='replace')[-500:]}") from exc
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a worker of ours and what it started; in order, if it can."""
    for how, patience in ((signal.SIGTERM, 8), (signal.SIGKILL, 8)):
        if process.poll() is None:
            os.killpg(process.pid, how)
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                continue


def wait_for(out: Path, process: subprocess.Popen[bytes], begin: str, seconds: float) -> str:
    """The line that the handler wrote, once there is one that begins so. Raises TimeoutError."""
    deadline = monotonic() + seconds
    while True:
        for line in out.read_text().splitlines():
            if line.startswith(begin):
                return line
        if process.poll() is not None:
            raise TimeoutError(f"the worker ended with {process.returncode}")
        if monotonic() > deadline:
            raise TimeoutError("the worker did not get that far")
        sleep(0.02)


def runner(rig: Rig, sides: Sequence[Side], options: Options) -> list[Line]:
    able = [side for side in sides if side.worker]
    seconds = max(options.seconds * 1.5, 0.3)
    guess = {side.name: 3000.0 if side.name == "Taskboard" else 1000.0 for side in able}

    def measure(side: Side, slots: int, seconds: float = seconds) -> float:
        # Twice as many as the last time's rate would need, in the time and while it gets warm.
        jobs = int(guess[side.name] * seconds * 2) + 500
        side.start_anew(rig)
        with rig.connect(side.dsn) as db:
            side.fill(db, jobs)
        with working(rig, side, slots, "rate", seconds, jobs) as (out, process):
            line = wait_for(out, process, "rate ", seconds * 6 + 30)
        guess[side.name] = rate = float(line.split()[1])
        return rate

    lines = []
    for slots in (10, 50):
        line = Line(
            "runner",
            f"runner, no-op handlers, concurrency {slots}",
            "jobs/s",
            GOALS[slots],
            base="",
        )
        if options.rounds > 1:  # once, for a guess of how many jobs it takes
            for side in able:
                try:
                    measure(side, slots, seconds / 4)
                except RuntimeError as exc:
                    say(f"{side.name}: {exc}")
        lines.append(
            in_turns(able, options.fewer(3), line, lambda side, slots=slots: measure(side, slots))
        )
    return lines


def pickup(rig: Rig, sides: Sequence[Side], options: Options) -> list[Line]:
    """How long a job waits for an idle worker."""
    able = [side for side in sides if side.worker]
    line = Line("pickup", "pick-up on an idle runner, p50", "ms", "≤ 1.5", base="")
    late = Line("pickup", "pick-up on an idle runner, p99", "ms", "≤ 4", base="")
    samples = max(options.turns // (1 if len(able) == 1 else 2), 5)
    for side in able:
        try:
            waits = pick_up(rig, side, samples)
        except Exception as exc:
            if side.name == "Taskboard":
                raise
            line.notes[side.name] = late.notes[side.name] = (
                "failed: " + str(exc).splitlines()[0][:80]
            )
            say(f"{side.name}: {exc}")
            continue
        line.add(side.name, statistics.median(waits))
        late.add(side.name, percentile(waits, 99))
        say(f"  pick-up, {side.name}: {line.cell(side.name)}, p99 {late.cell(side.name)}")
    return [line, late]


def pick_up(rig: Rig, side: Side, samples: int) -> list[float]:
    warm, waits = max(samples // 10, 2), []
    side.start_anew(rig)
    with rig.connect(side.dsn) as db, working(rig, side, 10, "pickup", 0, 0) as (out, process):
        for n in range(1_000_000, 1_000_000 + samples + warm):
            payload = PAYLOAD.replace("{", f'{{"n": {n}, ', 1)
            db.execute(side.enqueue.replace(PAYLOAD, payload).encode())
            sent = time()
            line = wait_for(out, process, f"{n} ", 30)
            waits.append((float(line.split()[1]) - sent) * 1000)
            sleep(random.uniform(0.04, 0.08))
    return waits[warm:]
