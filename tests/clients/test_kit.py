"""The kit catches clients that are wrong, and names the step; each is a good one, spoilt in a line.

A client in Python stands for all: the kit sees lines of JSON, whatever wrote them.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from clients.kit import play_script, play_worker

HERE = Path(__file__).parent
README = HERE / "README.md"


@dataclass(frozen=True, slots=True)
class Spoilt:
    """A line of a good program, what stands there in a bad one, and where the kit must notice."""

    good: str
    bad: str
    caught_in: str
    fault: str

    def written(self, name: str, folder: Path) -> str:
        """Write the bad program; answer the command that runs it."""
        text = (HERE / "python" / name).read_text()
        assert text.count(self.good) == 1
        (folder / name).write_text(text.replace(self.good, self.bad))
        return f"{sys.executable} {folder / name}"


ASKED = '    return {"rows": conn.execute(call, list(request["args"].values())).fetchall()}\n'

CLIENTS = {
    "takes zero rows for success": Spoilt(
        ASKED,
        '    rows = conn.execute(call, list(request["args"].values())).fetchall()\n'
        '    if request["call"] == "complete" and not rows:\n'
        '        rows = [{"job_id": request["args"]["job_id"], "finished_at": "2001-01-01"}]\n'
        '    return {"rows": rows}\n',
        "a completion with a superseded token is zero rows",
        "step 5, A: complete: expected zero rows, got",
    ),
    "renews in its mind only": Spoilt(
        ASKED,
        '    if request["call"] == "renew":\n'
        '        return {"rows": [{"job_id": request["args"]["job_id"], "cancel_requested": False,'
        ' "lease_expires_at": "2001-01-01 00:00"}]}\n' + ASKED,
        "a lapsed lease is not renewed, and may complete until it is overtaken",
        "step 4, A: renew: expected zero rows, got",
    ),
    "makes up a token to complete again": Spoilt(
        '    call = f"select * from',
        '    if request["call"] == "complete" and (done := globals().setdefault("done", [])):\n'
        '        request["args"]["lease_token"] = request["args"]["job_id"]\n'
        '    request["call"] == "complete" and globals().setdefault("done", []).append(1)\n'
        '    call = f"select * from',
        "the same completion again gives the same row again",
        "step 4, A: complete: expected [{",
    ),
    "rounds numbers": Spoilt(
        'conn.adapters.register_loader("jsonb", TextLoader)',
        "from psycopg.types.json import set_json_loads\n"
        "set_json_loads(lambda text: json.loads(text, parse_int=float))",
        "big integers keep every digit",
        "step 2, A: claim: expected",
    ),
    "swallows errors": Spoilt(
        'found = {"error": {"sqlstate": exc.sqlstate, "message": str(exc)}}',
        'found = {"rows": []}',
        "require_lease raises TB001 and the transaction rolls back",
        "step 8, A: require_lease: expected error TB001, got",
    ),
    "prepares its statements": Spoilt(
        "prepare_threshold=None",
        "prepare_threshold=0",
        "no prepared statement is left in the session, so that a pooler may share it",
        "step 2, A: do $$ begin assert not exists",
    ),
}

WORKERS = {
    "takes zero rows for success": Spoilt(
        'return word if rows else "lost"',
        "return word",
        "a completion with zero rows is not reported as one",
        "it said ['completed ",
    ),
    "does not renew": Spoilt(
        "while not done.wait(third)",
        "while not done.wait(3600)",
        "a job longer than its lease is renewed",
        "its lease ran out while it was at work",
    ),
    "works on when its renewal was refused": Spoilt(
        'return halt.say("lost")',
        "continue",
        "a job that was taken over is given up at the next renewal",
        "it noticed only at the end of its work",
    ),
    "does not hear of a cancel": Spoilt(
        'halt.say("cancelled")',
        "pass",
        "a cancelled job is stopped",
        "it said ['completed ",
    ),
    "dies of a stop": Spoilt(
        "signal.signal(signal.SIGTERM, stop)",
        "",
        "a stop gives back or finishes what runs and claims no more",
        "exit code -15 after SIGTERM",
    ),
    "does not connect again": Spoilt(
        "if time.monotonic() > give_up",
        "if True",
        "a worker whose sessions are cut finishes its job",
        "it said ['lost ",
    ),
}

ZERO_ROWS = "takes zero rows for success"


def test_a_client_that_takes_zero_rows_for_success_fails_in_the_step_that_is_named(
    url: str, tmp_path: Path
) -> None:
    bad = CLIENTS[ZERO_ROWS]
    code, said = kit(url, "--client", bad.written("client.py", tmp_path), "--only", bad.caught_in)
    assert code == 1 and said.endswith("0 of 1 passed\n")
    assert "FAILED" in said and bad.caught_in in said and bad.fault in said


def test_a_worker_that_takes_zero_rows_for_success_fails_in_the_situation_that_is_named(
    url: str, tmp_path: Path
) -> None:
    bad = WORKERS[ZERO_ROWS]
    (found,) = play_worker(bad.written("worker.py", tmp_path), url, only=bad.caught_in)
    assert bad.fault in found.fault


@pytest.mark.wide
@pytest.mark.parametrize("program", ["client.py", "worker.py"])
def test_whoever_breaks_another_rule_is_caught_where_it_is_named(
    program: str, url: str, tmp_path: Path
) -> None:
    spoilt = CLIENTS if program == "client.py" else WORKERS
    play = play_script if program == "client.py" else play_worker

    def caught(name: str) -> str:
        (folder := tmp_path / name.replace(" ", "-")).mkdir()
        bad = spoilt[name]
        (found,) = play(bad.written(program, folder), url, bad.caught_in)
        return "" if bad.fault in found.fault else f"{name}: {found.fault or 'passed'}"

    with ThreadPoolExecutor(len(spoilt)) as pool:
        assert [fault for fault in pool.map(caught, spoilt) if fault] == []


@pytest.mark.wide
def test_the_command_of_the_page_runs_and_ends_with_0(url: str) -> None:
    (line,) = re.findall(r"^python (tests/clients/kit\.py .+)$", README.read_text(), re.M)
    done = subprocess.run(
        [sys.executable, *shlex.split(line), "--only", "completion with"], text=True, timeout=120,
        stdout=subprocess.PIPE, cwd=HERE.parents[1],
        env=os.environ | {"TASKBOARD_DATABASE_URL": url},
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.endswith("2 of 2 passed\n"), done.stdout


@pytest.mark.wide
def test_the_command_does_not_end_with_0_when_nothing_was_played(
    url: str,
) -> None:
    good = f"{sys.executable} {HERE}/python/client.py"
    assert kit(url, "--client", good, "--only", "no case has this in its name")[0] == 1
    assert kit(url)[0] == 2


def kit(url: str, *arguments: str) -> tuple[int, str]:
    """Run the command as strangers do; answer its exit code and what it said."""
    done = subprocess.run(
        [sys.executable, HERE / "kit.py", "--dsn", url, *arguments], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120,
    )  # fmt: skip
    return done.returncode, done.stdout
