"""The unit for systemd stops a runner cleanly; the container is made of what is there."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from support import Connection, rows, wait_for
from taskboard import attempts, stopping, worker
from taskboard.cli import duration, make_parser

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "runner/deploy"
UNIT, CONTAINER = DEPLOY / "taskboard.service", DEPLOY / "Containerfile"

HANDLERS = """
import asyncio
from taskboard.handlers import handler

@handler("short")
async def short(ctx):
    print("began", flush=True)
    await asyncio.sleep(1)

@handler("long")
async def long(ctx):
    print("began", flush=True)
    await asyncio.sleep(3600)
"""


def settings() -> dict[str, str]:
    """The unit's settings, by name; of those that are repeated the last one."""
    lines = UNIT.read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if re.match(r"[A-Z]\w+=", line))


def command(module: str, grace: str) -> list[str]:
    """The unit's command, for a module and a grace of the test's own."""
    program, *arguments = shlex.split(settings()["ExecStart"])
    assert Path(program).name == "taskboard"
    for name, value in (("shop.jobs", module), ("25s", grace), ("9090", "0")):
        arguments[arguments.index(name)] = value
    return [sys.executable, "-m", "taskboard", *arguments]


@pytest.mark.parametrize(
    ("kind", "grace", "then"), [("short", "25s", "completed"), ("long", "1s", "ready")]
)
def test_a_runner_that_is_stopped_as_the_unit_says_ends_its_job_or_gives_it_back(
    kind: str, grace: str, then: str, dsn: str, db: Connection, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(HANDLERS)
    [(job_id,)] = rows(db, "select job_id from taskboard.enqueue(%s)", [kind])
    environment = os.environ | {"TASKBOARD_DATABASE_URL": dsn}
    with subprocess.Popen(
        command("own", grace), cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as started:  # fmt: skip
        try:
            assert started.stdout is not None and started.stdout.readline() == "began\n"
            before = time.monotonic()
            # KillMode=mixed: the signal goes to the main process alone.
            assert settings()["KillMode"] == "mixed"
            os.kill(started.pid, getattr(signal, settings()["KillSignal"]))
            assert started.wait(int(settings()["TimeoutStopSec"])) == 0
            assert time.monotonic() - before < 25, "long before it would be killed"
        finally:
            started.kill()
    found = "select state, failures, lost_leases from taskboard.job(%s)"
    wait_for(lambda: rows(db, found, [job_id]) == [(then, 0, 0)], what=f"the job to be {then}")


def test_the_time_to_stop_covers_the_grace_and_all_that_comes_after_it() -> None:
    arguments = make_parser().parse_args(shlex.split(settings()["ExecStart"])[1:])
    after = 2 * attempts.ENDS_WITHIN + 2 * worker.ANSWERS_WITHIN + stopping.SETTLES_WITHIN
    assert arguments.grace == duration("25s") and arguments.pool == 10
    assert int(settings()["TimeoutStopSec"]) >= arguments.grace.total_seconds() + after + 5
    assert settings()["Restart"] == "always" and settings()["RestartPreventExitStatus"] == "2"


def test_the_container_is_made_of_files_that_are_there_and_runs_a_command_that_is() -> None:
    text = CONTAINER.read_text().replace("\\\n", " ")
    copied = {
        source
        for line in re.findall(r"^COPY (?!--from)(.*)", text, re.M)
        for source in line.split()[:-1]
    }
    assert all((ROOT / source).exists() for source in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    needed = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    assert copied == needed | set(wheel), "all that the wheel is made of, and nothing else"
    extras = re.findall(r"'\.\[([\w,]+)\]'", text)[0].split(",")
    assert set(extras) <= set(project["project"]["optional-dependencies"])
    shown = re.findall(r"^CMD (\[.*\])", text, re.M)[0]
    arguments = make_parser().parse_args(re.findall(r'"([^"]+)"', shown))
    assert arguments.metrics == "0.0.0.0:9090"
    assert re.findall(r"^USER (\d+)", text, re.M) != ["0"]


@pytest.mark.wide
def test_systemd_takes_the_unit_and_calls_it_well_sheltered(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    assert analyze, "apt-get install systemd"
    # What it names is on the host that it is for.
    unit = tmp_path / UNIT.name
    program = tmp_path / "taskboard"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    text = UNIT.read_text().replace("/srv/shop/.venv/bin/taskboard", str(program))
    unit.write_text(text.replace("User=taskboard", "User=daemon"))
    done = subprocess.run(
        [analyze, "verify", "--man=no", unit], capture_output=True, text=True, check=False
    )
    said = [line for line in done.stderr.splitlines() if UNIT.name in line or str(unit) in line]
    assert done.returncode == 0 and said == [], done.stderr
    exposure = ["security", "--offline=yes", "--threshold=25", "--no-pager", unit]
    done = subprocess.run([analyze, *exposure], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr
    # A line that it does not know is noticed.
    unit.write_text(text + "\n[Service]\nKillSignals=SIGTERM\n")
    done = subprocess.run(
        [analyze, "verify", "--man=no", unit], capture_output=True, text=True, check=False
    )
    assert "KillSignals" in done.stderr
