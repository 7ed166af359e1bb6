"""The command line, run in this process against a database of the test's own."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support import Connection, Databases, expire, rows, session
from taskboard.cli import main


@dataclass(frozen=True, slots=True)
class Said:
    """What a command answered."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Console = Callable[..., Said]
Standing = tuple[str, dict[str, str]]


def enqueue(db: Connection, kind: str = "mail", **options: Any) -> str:
    named = ", ".join(["kind => %(kind)s", *(f"{name} => %({name})s" for name in options)])
    sql = f"select job_id::text from taskboard.enqueue({named})"
    found: str = rows(db, sql, options | {"kind": kind})[0][0]
    return found


def claim(db: Connection, kind: str, worker: str = "w1") -> tuple[Any, Any]:
    sql = "select job_id, lease_token from taskboard.claim(kinds => array[%s], worker => %s)"
    return rows(db, sql, [kind, worker])[0]


def make_jobs(db: Connection) -> dict[str, str]:
    """Make a job in each interesting state; answer ids by state. `stale` has left an incident."""
    made = {
        state: enqueue(db, state) for state in ("failed", "completed", "running", "held", "stale")
    }
    owner = claim(db, "failed")
    rows(db, "select taskboard.fail(%s, %s, 'no such address', permanent => true)", owner)
    owner = claim(db, "completed")
    rows(db, "select taskboard.begin_effect(%s, %s)", owner)
    rows(db, "select taskboard.end_effect(%s, %s, result => '{\"id\": 7}')", owner)
    rows(db, "select taskboard.complete(%s, %s, '{\"sent\": true}')", owner)
    rows(db, "update taskboard.jobs set on_unknown = 'hold' where id = %s", [made["held"]])
    owner = claim(db, "held", "gone")
    rows(db, "select taskboard.begin_effect(%s, %s)", owner)
    expire(db, owner[0])
    rows(db, "select taskboard.begin_effect(%s, %s)", claim(db, "held"))
    expire(db, claim(db, "stale", "gone")[0])
    claim(db, "stale", "w2")
    claim(db, "running")
    made["ready"] = enqueue(db, "ready", payload='{"to": "ann\\u001b[31m"}', queue="mails")
    made["scheduled"] = enqueue(db, "scheduled", delay="1 hour")
    rows(db, "select taskboard.schedule('report', '30 2 * * *', 'mail')")
    return made


@pytest.fixture(scope="module")
def standing(databases: Databases, template: str) -> Standing:
    """A database for tests that change nothing in it, and its jobs by state."""
    dsn = databases.server.dsn(databases.create(template))
    with session(dsn) as conn:
        return dsn, make_jobs(conn)


@pytest.fixture
def jobs(db: Connection) -> dict[str, str]:
    """The ids of a job in each interesting state, in a database of the test's own."""
    return make_jobs(db)


@pytest.fixture
def console(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], tmp_path: Path,
) -> Console:  # fmt: skip
    """Run `console("jobs", "--json")`; keywords are environment variables, and `stdin`."""
    names = request.fixturenames
    if "standing" in names:
        monkeypatch.setenv("TASKBOARD_DATABASE_URL", request.getfixturevalue("standing")[0])
    elif "dsn" in names or "db" in names:
        monkeypatch.setenv("TASKBOARD_DATABASE_URL", request.getfixturevalue("dsn"))

    def run(*arguments: object, stdin: bytes = b"", **environment: str) -> Said:
        source = tmp_path / "stdin"
        source.write_bytes(stdin)
        with monkeypatch.context() as patch, source.open("rb") as file:
            patch.setattr("sys.stdin", io.TextIOWrapper(file))
            for name, value in environment.items():
                patch.setenv(name, value)
            capsys.readouterr()
            try:
                code = main([str(argument) for argument in arguments])
            except SystemExit as exc:  # argparse
                code = exc.code if isinstance(exc.code, int) else 1
            said = capsys.readouterr()
        assert "Traceback" not in said.err
        return Said(code, said.out, said.err)

    return run
