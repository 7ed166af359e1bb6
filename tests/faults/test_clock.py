"""Clocks that are wrong. Needs Debian's faketime."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from faults.clock import LIBRARY, Clock
from faults.clock import programs as stand_ins
from faults.run import AS_RELEASED, bench
from runner.harness import enqueue, process, state
from support import Connection, wait_for
from taskboard.localpg import binaries, temporary_folder

pytestmark = pytest.mark.wide


def test_clock_of_the_server_steps_and_no_promise_breaks_and_no_job_hides(programs: str) -> None:
    folder = temporary_folder()
    try:
        clock = Clock(folder / "now")
        clock.set(0.0)
        real = binaries() if programs in ("auto", "wheel") else Path(programs)
        place = bench(str(stand_ins(real, folder / "bin", clock.file)))
        place.clock = clock
        try:
            verdict = place.run(AS_RELEASED, 1, 6, restarts=False, quiet=70)
        finally:
            place.server.close()
    finally:
        shutil.rmtree(folder)
    print(verdict)
    assert (verdict.violations, verdict.undecided) == ([], 0)
    assert verdict.faults["set the clock"] > 3


@pytest.mark.parametrize("off", ["+600", "-600"])
def test_runner_whose_clock_is_ten_minutes_off_starts_and_keeps_jobs_by_the_databases(
    off: str, dsn: str, db: Connection, tmp_path: Path
) -> None:
    now = enqueue(db, "nap", {"seconds": 6}, lease="2 s")  # three leases long
    soon = enqueue(db, "nap", {"seconds": 0}, delay="2 s")
    late = enqueue(db, "nap", {"seconds": 0}, delay="5 min")
    with process(
        dsn, tmp_path, LD_PRELOAD=LIBRARY, FAKETIME=off, FAKETIME_DONT_FAKE_MONOTONIC="1"
    ):
        wait_for(
            lambda: all(state(db, job)["state"] == "completed" for job in (now, soon)), seconds=20,
            what="two jobs to be completed",
        )  # fmt: skip
    assert [state(db, job)["attempt"] for job in (now, soon, late)] == [1, 1, 0]
    assert state(db, late)["state"] == "scheduled"
    claimed, due = db.execute(
        "select claimed_at, run_at from taskboard.history where id = %s", [soon]
    ).fetchone() or (None, None)
    assert claimed >= due
