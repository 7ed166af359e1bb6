"""What a user or the weather does wrong is told in a line, with an exit code, whatever it is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import taskboard
from console.conftest import Console
from support import Connection, rows
from taskboard.localpg import binaries

BAD = os.fsdecode(b"\xff")  # as an argument that is not UTF-8 arrives
BIG = "99999999999"


@pytest.mark.parametrize(
    "command",
    [
        ("enqueue", BAD), ("enqueue", "k", "{}", "--unique-key", BAD), ("jobs", "--queue", BAD),
        ("configure", "history", BAD), ("upcoming", BAD), ("evict", BAD), ("prune", "--keep", BAD),
        ("enqueue", "k", "{}", "--priority", BIG), ("enqueue", "k", "{}", "--max-attempts", BIG),
        ("limit", "q", "--running", BIG), ("limit", "q", "--starts", "x"), ("run", ".."),
        ("schedule", "x", "0 0 * * *", "k", "{}", "--priority", BIG), ("run", "--pool", BIG),
        ("schedule", "x", "0 0 * * *", "k", "{}", "--time-zone", BAD), ("psql", "--nothing"),
    ],
    ids=lambda words: ascii(" ".join(words)),
)  # fmt: skip
def test_what_cannot_be_read_is_a_usage_error(
    command: tuple[str, ...], dsn: str, console: Console
) -> None:
    said = console(*command)
    assert said.code == (1 if command[0] == "psql" else 2) and said.out == ""


def test_input_and_environment_that_are_not_utf8_are_usage_errors(
    dsn: str, console: Console
) -> None:
    said = console("enqueue", "k", "-", stdin=b'{"a": "\xff"}')
    assert said.code == 2 and "taskboard: not UTF-8: " in said.err and "hint: " in said.err
    said = console("jobs", TASKBOARD_DATABASE_URL=f"postgresql://{BAD}@127.0.0.1/x")
    assert said.code == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = = 1", "line 1: SyntaxError: invalid syntax"),
        ("\nraise RuntimeError('no key')", "line 2: RuntimeError: no key"),
        ("import not_there_at_all", "needs a module not_there_at_all\nhint: install it"),
    ],
)
def test_a_module_that_cannot_be_imported_is_told_with_its_line(
    text: str, told: str, dsn: str, console: Console, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "broken_jobs.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    for command in ("run", "doctor"):
        said = console(command, "broken_jobs")
        assert (said.code, said.out) == (2, "") and told in said.err
        assert "broken_jobs" in said.err


def test_streams_that_are_closed_or_full_end_no_command_in_a_traceback(db: Connection) -> None:
    environment = os.environ | {"TASKBOARD_DATABASE_URL": db.info.dsn}

    def shell(command: str) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", "-c", command.replace("taskboard", f"{sys.executable} -m taskboard", 1)],
            env=environment, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert "Traceback" not in done.stderr
        return done.returncode, done.stderr

    assert shell("taskboard enqueue k >/dev/full") == (
        1, "taskboard: [Errno 28] No space left on device\n")  # fmt: skip
    assert shell("taskboard enqueue k - <&-")[0] == 2
    assert shell("taskboard jobs >&-")[0] == 0
    assert rows(db, "select count(*) from taskboard.jobs") == [(1,)]


def test_a_command_for_one_database_takes_no_list_of_them(dsn: str, console: Console) -> None:
    both = "postgresql://ann@127.0.0.1:1/a postgresql://ann@127.0.0.1:1/b"
    for command in ("jobs", "doctor", "psql", "enqueue k - --lines", "upcoming", "board"):
        said = console(*command.split(), TASKBOARD_DATABASE_URL=both)
        assert (said.code, said.out) == (2, "")
        assert "names 2 databases\nhint: only run and migrate take several: name one" in said.err


def test_migrate_shows_what_psql_does_as_well_and_answers_in_json(
    empty_dsn: str, console: Console
) -> None:
    shown = console("migrate", "--show-sql", TASKBOARD_DATABASE_URL=empty_dsn)
    subprocess.run(
        [str(binaries() / "psql"), "-Xq", "-v", "ON_ERROR_STOP=1", empty_dsn], input=shown.out,
        text=True, check=True, capture_output=True,
    )  # fmt: skip
    # What psql has installed leaves no checksum.
    for applied in (["functions"], []):
        said = console("migrate", "--json", TASKBOARD_DATABASE_URL=empty_dsn)
        assert said.json == {"version": taskboard.version(), "applied": applied}


def test_run_shows_its_calls_which_a_server_understands(db: Connection, console: Console) -> None:
    calls = console("run", "--show-sql").out.splitlines()
    for number, call in enumerate(calls):
        db.execute(f"prepare call_{number} as {call}")
    names = [re.findall(r"taskboard\.(\w+)\(", call)[0] for call in calls]
    assert {"claim", "renew_many", "complete_many", "fail", "advance_schedule"} <= {*names}
