"""A file of JSON lines becomes jobs, in their order, and a bad line is named."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from console.conftest import Console
from support import Connection, rows
from taskboard.console import lines


def payloads(db: Connection) -> list[object]:
    return [row[0] for row in rows(db, "select payload from taskboard.jobs order by payload")]


def test_each_line_becomes_a_job_in_order(
    db: Connection, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "BATCH", 3)
    documents = [{"n": n, "text": "ü"} for n in range(8)]
    text = "\n\n".join(json.dumps(document, ensure_ascii=n % 2 == 0)
                       for n, document in enumerate(documents)).encode()  # fmt: skip
    said = console("enqueue", "mail", "-", "--lines", "--queue", "bulk", "--serial-key", "k",
                   "--delay", "5m", stdin=text)  # fmt: skip
    assert (said.code, said.out, said.err) == (0, "8 jobs enqueued\n", "")
    # The order of a serial key is the order in which jobs came.
    found = rows(
        db,
        "select j.payload, l.kind, j.serial_key from taskboard.jobs as j join taskboard.lanes as l"
        " on l.id = j.lane_id where l.queue = 'bulk' order by j.serial_no",
    )
    assert found == [(document, "mail", "k") for document in documents]
    said = console("enqueue", "mail", "-", "--lines", "--json", stdin=b"1\r\n2\n")
    answers = [json.loads(line) for line in said.out.splitlines()]
    first, second = (rows(db, "select payload from taskboard.jobs where id = %s", [a["job_id"]])
                     for a in answers)  # fmt: skip
    assert (first, second) == ([(1,)], [(2,)]) and all(a["created"] for a in answers)
    said = console("enqueue", "mail", "-", "--lines")
    assert (said.code, said.out) == (0, "0 jobs enqueued\n")


def test_a_bad_line_is_named_and_those_before_it_are_in(db: Connection, console: Console) -> None:
    for bad in (b"{", b"NaN", b"\xff", b"9" * 5000, b"[" * 100_000):
        db.execute("delete from taskboard.jobs")
        said = console("enqueue", "mail", "-", "--lines", stdin=b"1\n\n2\n" + bad + b"\n3\n")
        assert (said.code, said.out) == (2, "")
        assert "taskboard: line 4 is not JSON: " in said.err and "tail -n +4" in said.err
        assert payloads(db) == [1, 2]


def test_what_the_database_refuses_is_named_by_its_lines(
    db: Connection, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "BATCH", 2)
    said = console("enqueue", "mail", "-", "--lines", stdin=b'1\n2\n3\n"\\u0000"\n5\n')
    assert said.code == 2 and "hint: of lines 3 to 4 none is enqueued; those before" in said.err
    assert payloads(db) == [1, 2]
    said = console("enqueue", "mail", "-", "--lines", "--priority", "12", stdin=b"1\n")
    assert said.code == 2 and "hint: of lines 1 to 1 none" in said.err


def test_what_does_not_go_with_lines_is_refused(db: Connection, console: Console) -> None:
    for more in ((), ("--show-sql",)):
        said = console("enqueue", "mail", "-", "--lines", "--unique-key", "k", *more, stdin=b"1\n")
        assert said.code == 2 and "--unique-key names one job" in said.err
    said = console("enqueue", "mail", "{}", "--lines")
    assert said.code == 2 and "write - for the payload" in said.err
    assert payloads(db) == []


def test_the_calls_that_lines_make_are_shown_and_run(
    db: Connection, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "BATCH", 2)
    text = b'{"it\'s": "a, \\"b\\""}\n2\n3\n'
    shown = console("enqueue", "mail", "-", "--lines", "--serial-key", "k", "--show-sql",
                    stdin=text)  # fmt: skip
    assert shown.code == 0 and payloads(db) == []
    for call in shown.out.splitlines():
        rows(db, call)
    assert shown.out.count(";\n") == 2 and payloads(db) == [2, 3, {"it's": 'a, "b"'}]


def test_enqueue_shows_its_sql(db: Connection, console: Console) -> None:
    shown = console("enqueue", "mail", '{"it\'s": "\\\\n"}', "--delay", "1d", "--unique-key", "k",
                    "--show-sql")  # fmt: skip
    assert shown.code == 0 and payloads(db) == []
    rows(db, shown.out)
    assert payloads(db) == [{"it's": "\\n"}]


def test_progress_is_shown_on_a_terminal(db: Connection, dsn: str, tmp_path: Path) -> None:
    (tmp_path / "jobs").write_text("".join(f"{n}\n" for n in range(2500)))
    ours, theirs = pty.openpty()
    with (tmp_path / "jobs").open() as source:
        done = subprocess.run(
            [sys.executable, "-m", "taskboard", "enqueue", "k", "-", "--lines"], stdin=source,
            stdout=subprocess.PIPE, stderr=theirs, text=True, timeout=60,
            env=os.environ | {"TASKBOARD_DATABASE_URL": dsn},
        )  # fmt: skip
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    os.close(theirs)
    assert (done.returncode, done.stdout) == (0, "2500 jobs enqueued\n")
    assert "100%  2,500 jobs, " in shown and shown.rstrip("\r\n\x1b[K").endswith("/s")
    assert rows(db, "select count(*) from taskboard.jobs") == [(2500,)]


@pytest.mark.parametrize("when", ["2026-03-08 02:30", "2026-03-08T02:30:00", "2026-03-08", "soon"])
def test_a_wall_clock_without_an_offset_is_refused(
    when: str, db: Connection, console: Console
) -> None:
    said = console("enqueue", "k", "--run-at", when)
    assert said.code == 2 and "is no instant: write 2026-07-01T08:00:00+02:00" in said.err
    assert rows(db, "select 1 from taskboard.jobs") == []


@pytest.mark.parametrize("zone", ["America/New_York", "UTC", "Australia/Lord_Howe"])
def test_dates_and_delays_are_the_same_instants_in_every_zone(
    zone: str, db: Connection, console: Console
) -> None:
    wanted = datetime.now(UTC).replace(microsecond=0) + timedelta(days=100)
    there = wanted.astimezone(timezone(timedelta(hours=-5)))
    for when in (f"{wanted:%Y-%m-%dT%H:%M:%SZ}", there.isoformat()):
        assert console("enqueue", "k", "--run-at", when, PGTZ=zone, TZ=zone).code == 0
    assert rows(db, "select distinct run_at from taskboard.jobs") == [(wanted,)]
    # A week is 168 hours, whether clocks change in it or not.
    assert console("enqueue", "later", "--delay", "7d", PGTZ=zone, TZ=zone).code == 0
    late = "select run_at - created_at from taskboard.job_list where kind = 'later'"
    assert abs(rows(db, late)[0][0] - timedelta(days=7)) < timedelta(seconds=1)
