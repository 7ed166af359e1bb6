"""A runner with several databases works them all, and none of them holds up another."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict

from runner.harness import enqueue, process, settings, state
from runner.tcp_proxy import TcpProxy
from support import rows, session, wait_for
from taskboard import several
from taskboard.handlers import Context
from taskboard.process import run
from taskboard.settings import SettingsError

Databases = Callable[..., str]


@pytest.fixture
def two(new_database: Databases, template: str) -> list[str]:
    return [new_database(template), new_database(template)]


async def noop(ctx: Context) -> None:
    pass


def test_jobs_of_all_are_run_and_each_has_a_pool_of_its_own(two: list[str]) -> None:
    at_once: list[int] = [0]
    running = 0

    async def handler(ctx: Context) -> None:
        nonlocal running
        running += 1
        at_once.append(running)
        await asyncio.sleep(0.1)
        running -= 1

    for dsn in two:
        with session(dsn) as conn:
            rows(conn, "select taskboard.enqueue_many('k', '{1,2}')")
    first, second = (settings(dsn, pool=4, until_empty=True, listen=False) for dsn in two)
    assert asyncio.run(run(first, {"k": handler}, others=[second])) == 0
    assert max(at_once) == 4, "two slots for each database"
    for dsn in two:
        with session(dsn) as conn:
            assert rows(conn, "select count(*) from taskboard.history") == [(2,)]


def test_database_that_is_away_does_not_stop_the_others_and_sigterm_stops_all(
    two: list[str], tmp_path: Path
) -> None:
    with TcpProxy(two[1]) as away, session(two[0]) as here, session(two[1]) as there:
        away.refusing = True
        with process(f"{two[0]} {url(away.dsn)}", tmp_path, "poll=0.1") as runner:
            job = enqueue(here, "nap", {"seconds": 0})
            wait_for(lambda: state(here, job)["state"] == "completed")
            late = enqueue(there, "nap", {"seconds": 0})
            away.refusing = False
            wait_for(lambda: state(there, late)["state"] == "completed")
            away.cut()
            away.refusing = True
            job = enqueue(here, "nap", {"seconds": 0.2})
            wait_for(lambda: state(here, job)["state"] == "running")
            runner.popen.send_signal(signal.SIGTERM)
            assert runner.wait() == 0
            assert state(here, job)["state"] == "completed"
            name = conninfo_to_dict(two[1])["dbname"]
            assert f" 2/{name}: control: the database does not answer" in runner.log.read_text()


def test_what_is_said_about_renewals_names_the_database(two: list[str], tmp_path: Path) -> None:
    with TcpProxy(two[1]) as way, session(two[1]) as there:
        enqueue(there, "nap", {"seconds": 60}, lease="1s")
        with process(f"{two[0]} {url(way.dsn)}", tmp_path, "grace=0.1") as runner:
            wait_for(lambda: runner.words() == ["1 began"])
            way.refusing = True
            way.cut()
            wait_for(lambda: "renewer: " in runner.log.read_text())
            way.refusing = False
            runner.popen.send_signal(signal.SIGTERM)
            assert runner.wait() == 0
            lines = runner.log.read_text().splitlines()
    name = conninfo_to_dict(two[1])["dbname"]
    said = [line for line in lines if "renewer:" in line]
    assert said and all(f" 2/{name}: renewer: " in line for line in said)


def test_one_that_no_waiting_helps_ends_all_with_the_reason(
    two: list[str], empty_dsn: str
) -> None:
    first, second = (settings(dsn, listen=False) for dsn in (two[0], empty_dsn))
    with pytest.raises(SettingsError, match="cannot use the database"):
        asyncio.run(asyncio.wait_for(run(first, {"k": noop}, others=[second]), 10))


def test_several_are_urls_with_spaces_between() -> None:
    two = "postgresql://a/one\n  postgresql://b/two"
    names: dict[str, Any] = {"TASKBOARD_DATABASE_URL": two}
    assert [one.database_url for one in several.load(names)] == two.split()
    names["TASKBOARD_LISTEN_URL"] = "postgresql://c/one postgresql://d/two"
    assert [one.listen_url for one in several.load(names, pool=5)] == [
        "postgresql://c/one", "postgresql://d/two",
    ]  # fmt: skip
    with pytest.raises(SettingsError, match="names 1 databases, TASKBOARD_DATABASE_URL 2"):
        several.load(names | {"TASKBOARD_LISTEN_URL": "postgresql://c/one"})
    plain = {"TASKBOARD_DATABASE_URL": "host=a dbname=one"}
    assert [one.database_url for one in several.load(plain)] == ["host=a dbname=one"]


def url(dsn: str) -> str:
    """Write a DSN as a URL."""
    parts = conninfo_to_dict(dsn)
    secret = f":{parts['password']}" if "password" in parts else ""
    return (
        f"postgresql://{parts['user']}{secret}@{parts['host']}:{parts['port']}/{parts['dbname']}"
    )


def test_migrate_brings_all_up_to_date(
    two: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from taskboard.cli import main

    monkeypatch.setenv("TASKBOARD_DATABASE_URL", " ".join(two))
    assert main(["migrate"]) == 0
    assert capsys.readouterr().out.count("already up to date") == 2
    assert main(["jobs"]) == 2, "which one?"
    assert "name one" in capsys.readouterr().err
