"""What `taskboard run` says at the start, and what it refuses, before any job is touched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import enqueue, state

from support import Connection
from taskboard.cli import main
from taskboard.settings import Settings, SettingsError

PYTHON = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
PATIENCE = 40.0  # seconds, on a machine that has much else to do


def taskboard(
    *arguments: str, folder: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "taskboard", *arguments], cwd=folder,
        env=os.environ | PYTHON | environment, capture_output=True, text=True, timeout=PATIENCE,
        check=False,
    )  # fmt: skip


# Addresses of databases.


@pytest.mark.parametrize("command", [["run"], ["migrate"], ["jobs"], ["psql"], ["doctor"]])
def test_an_at_in_a_password_is_refused_and_not_shown(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TASKBOARD_DATABASE_URL", "postgresql://ann:hush@hush@127.0.0.1/shop")
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "taskboard: TASKBOARD_DATABASE_URL has an @ in its password: write %40\n" in said
    assert "hush" not in said


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://ann:hu/sh@127.0.0.1/shop", "postgresql://ann:12/hush@127.0.0.1/shop",
        "postgresql://ann:hu?s@hu@127.0.0.1/shop", "postgresql://ann:hush@hush/hush@127.0.0.1/shop",
        "postgresql://127.0.0.1:hush/shop", "postgresql://127.0.0.1:70000/shop",
        "postgresql://127.0.0.1:0/shop", "host=127.0.0.1 port=hush",
    ],
)  # fmt: skip
def test_an_address_that_cannot_work_is_refused_and_not_shown(url: str) -> None:
    for name in ("TASKBOARD_DATABASE_URL", "TASKBOARD_LISTEN_URL"):
        with pytest.raises(SettingsError, match=name) as caught:
            Settings.load({name: url})
        assert "hu" not in f"{caught.value}{caught.value.hint}"


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://ann:p%40ss@127.0.0.1:5432/shop", "postgresql:///shop?host=/tmp&port=5433",
        "postgresql://a:1,b:2/shop?user=ann@example.com", "postgresql://[::1]:5432/shop", "",
        "host=a,b port=1,2 password=p@ss@word", "postgresql://ann:p?ss@/shop",
    ],
)  # fmt: skip
def test_an_address_that_can_work_is_left_to_libpq(url: str) -> None:
    assert Settings.load({"TASKBOARD_DATABASE_URL": url}).database_url == url


# --dev.


@pytest.mark.parametrize("name", ["TASKBOARD_SMTP_URL", "STRIPE_API_KEY"])
def test_dev_beside_a_real_server_or_key_is_refused_and_no_job_is_touched(
    name: str, dsn: str, db: Connection
) -> None:
    job = enqueue(db, "email", {"to": "ann@example.com"})
    given = {"TASKBOARD_DATABASE_URL": dsn, name: "smtp://mail.example.com"}
    run = taskboard("run", "--dev", "--until-empty", **given)
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr == (
        f"taskboard: --dev sends nothing, and {name} is set\nhint: unset it, or leave out --dev\n"
    )
    assert state(db, job)["state"] == "ready"


def test_dev_says_in_the_log_whose_jobs_end_without_being_sent(dsn: str, db: Connection) -> None:
    run = taskboard("run", "--dev", "--until-empty", TASKBOARD_DATABASE_URL=dsn)
    assert run.returncode == 0, run.stderr
    said = (
        f"WARNING --dev: mails and charges of database {db.info.dbname} at {db.info.host} are"
        " printed, not sent, and their jobs end as completed\n"
    )
    assert said in run.stderr
    assert f", database {db.info.dbname} at {db.info.host}, queues all, " in run.stderr
