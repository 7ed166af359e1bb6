"""A runner among hostile neighbours, and what it keeps to itself."""

from __future__ import annotations

import argparse
import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from harness import Context, drain, enqueue, process, until

from support import rows, session, wait_for
from taskboard import connections as calls
from taskboard import wake
from taskboard.cli import make_parser
from taskboard.migrate import migrate

Connection = psycopg.Connection[Any]


def test_a_storm_of_notifications_wakes_a_runner_a_bounded_number_of_times(
    dsn: str, db: Connection
) -> None:
    woken = 0

    def count() -> None:
        nonlocal woken
        woken += 1

    def storm() -> None:
        with session(dsn, "stranger") as stranger:
            for _ in range(3000):
                stranger.execute("notify taskboard")

    async def scenario() -> float:
        nonlocal woken
        channel = wake.Wake(lambda: calls.connect(dsn, "sleeper"), None, count)
        channel.sleeping(True)
        task = asyncio.create_task(channel.run())
        await until(lambda: channel.works)
        woken, began = 0, asyncio.get_running_loop().time()
        await asyncio.to_thread(storm)
        took = asyncio.get_running_loop().time() - began
        await until(lambda: woken)
        task.cancel()
        return took

    took = asyncio.run(scenario())
    assert 1 <= woken <= took / wake.AT_MOST_EVERY + 3


def test_a_runner_reads_every_character_whatever_encoding_the_environment_names(
    dsn: str, db: Connection, tmp_path: Path
) -> None:
    for payload in ({"seconds": 0, "to": "10 €"}, {"seconds": 0}):
        enqueue(db, "nap", payload)
    with process(dsn, tmp_path, "until_empty=1", PGCLIENTENCODING="LATIN1") as runner:
        assert runner.wait() == 0
    assert rows(db, "select state, count(*) from taskboard.job_list group by state") == [
        ("completed", 2)
    ]


def test_a_superuser_who_looks_at_the_sessions_of_a_runner_sees_no_token_and_no_payload(
    dsn: str, db: Connection, tmp_path: Path
) -> None:
    for seconds in (0, 0, 30):
        enqueue(db, "nap", {"seconds": seconds, "card": "4242hush"})
    name = "watched"
    with process(dsn, tmp_path, PGAPPNAME=name) as runner:
        wait_for(lambda: len(runner.words()) == 5)
        seen = set()
        for _ in range(30):
            query = "select query from pg_stat_activity where application_name = %s"
            seen |= set(rows(db, query, (name,)))
        text = str(seen)
        tokens = rows(
            db,
            "select lease_token::text from taskboard.history union all"
            " select lease_token::text from taskboard.jobs",
        )
        command = Path(f"/proc/{runner.popen.pid}/cmdline")
        argv = command.read_text() if command.exists() else ""
    assert len(tokens) == 3 and "taskboard." in text
    for hidden in ("hush", *(token for (token,) in tokens)):
        assert hidden not in text
        assert hidden not in argv
    assert "postgresql:" not in argv and "host=" not in argv


def test_another_login_sees_nothing_of_what_a_session_runs(
    dsn: str, db: Connection, connect: Callable[..., Connection]
) -> None:
    enqueue(db, "k")
    ((job_id, token),) = rows(db, "select job_id, lease_token from taskboard.claim()")
    # By hand, with the token in the text of the statement.
    db.execute(f"select taskboard.renew('{job_id}', '{token}')")
    for role in ("producer", "worker", "operator", "observer"):
        other = connect("other")
        other.execute(f"set role taskboard_{role}")
        ((query,),) = rows(
            other, "select query from pg_stat_activity where pid = %s", (db.info.backend_pid,)
        )
        assert query == "<insufficient privilege>"


def options_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings or [action.dest]
        if isinstance(action.choices, dict):
            for sub in action.choices.values():
                yield from options_of(sub)


def test_no_argument_of_any_command_takes_an_address_or_a_key() -> None:
    found = set(options_of(make_parser()))
    assert {"--queue", "--unique-key", "--pool"} <= found
    secret = re.compile(r"url|dsn|password|passwd|secret|token|api|(?<!unique-)(?<!serial-)key")
    assert sorted(name for name in found if secret.search(name)) == []


def test_the_servers_log_shows_tokens_and_payloads_until_it_is_told_not_to(
    server_factory: Callable[..., Any], tmp_path: Path
) -> None:
    server = server_factory(log_min_duration_statement="0", logging_collector="on")
    migrate(server.dsn())
    with session(server.dsn()) as db:

        def log() -> bytes:
            ((text,),) = rows(db, "select pg_read_binary_file(pg_current_logfile())")
            return bytes(text)

        def work() -> tuple[list[str], str]:
            """Run a job; answer its token, and what the server has logged meanwhile."""
            before = len(log())
            job_id = enqueue(db, "nap", {"seconds": 0, "card": "4242hush"})
            with process(server.dsn(), tmp_path, "until_empty=1") as runner:
                assert runner.wait() == 0
            with pytest.raises(psycopg.Error):
                db.execute("select taskboard.fail(%s, %s, retry_in => '-1 s')", [job_id] * 2)
            query = "select lease_token::text from taskboard.history where id = %s"
            tokens = [token for (token,) in rows(db, query, (job_id,))]
            return tokens, log()[before:].decode(errors="replace")

        (token,), text = work()
        assert token in text and "hush" in text
        for name in ("log_parameter_max_length", "log_parameter_max_length_on_error"):
            db.execute(f"alter system set {name} = 0")
        db.execute("select pg_reload_conf()")
        db.execute("select pg_sleep(0.1)")
        (token,), text = work()
        assert "taskboard.claim" in text and "retry_in is out of bounds" in text
        assert token not in text and "hush" not in text


def test_time_limits_of_the_server_cost_attempts_and_never_a_write_without_its_completion(
    dsn: str, db: Connection
) -> None:
    db.execute("create table sums (n int)")
    limits = {
        "statement_timeout": "150ms", "lock_timeout": "20ms",
        "idle_in_transaction_session_timeout": "150ms",
    }  # fmt: skip
    if db.info.server_version >= 170000:
        limits["transaction_timeout"] = "300ms"
    for name, value in limits.items():
        db.execute(f"alter database {db.info.dbname} set {name} = '{value}'")

    async def handler(ctx: Context) -> None:
        async with ctx.transaction(complete=True) as conn:
            await conn.execute("insert into sums values (%s)", (ctx.job.payload["n"],))
            match ctx.job.payload["limit"] if ctx.job.attempt == 1 else None:
                case "idle":
                    await asyncio.sleep(0.6)
                case "statement":
                    await conn.execute("select pg_sleep(5)")
                case "lock":
                    await conn.execute("select from barred")

    db.execute("create table barred (n int)")
    for n, limit in enumerate((None, "idle", "statement", "lock")):
        enqueue(db, "k", {"n": n, "limit": limit})
    db.execute("update taskboard.settings set backoff = '0.05 s'")
    unlimited = " ".join(f"-c {name}=0" for name in limits)
    with session(dsn, "holder", options=unlimited) as holder:
        holder.execute("begin; lock table barred")
        while rows(db, "select 1 from taskboard.jobs"):  # also what comes back a moment later
            drain(dsn, {"k": handler}, within=30)
    assert rows(db, "select n from sums order by 1") == [(0,), (1,), (2,), (3,)]
    ended = rows(
        db,
        "select payload->>'limit', state, attempt, failures, lost_leases from taskboard.history"
        " order by payload->>'n'",
    )
    assert ended == [
        (None, "completed", 1, 0, 0), ("idle", "completed", 2, 1, 0),
        ("statement", "completed", 2, 1, 0), ("lock", "completed", 2, 1, 0),
    ]  # fmt: skip


def test_a_claim_that_the_server_cuts_short_has_leased_nothing(db: Connection) -> None:
    db.execute(
        "select count(*) from taskboard.enqueue_many("
        "'k', array(select '1'::jsonb from generate_series(1, 1000)))"
    )
    db.execute("set statement_timeout = '1ms'")
    with pytest.raises(psycopg.errors.QueryCanceled):
        db.execute("select * from taskboard.claim(max_jobs => 1000)")
    db.execute("reset statement_timeout")
    assert rows(db, "select state, count(*) from taskboard.job_list group by 1") == [
        ("ready", 1000)
    ]
    assert len(rows(db, "select * from taskboard.claim(max_jobs => 1000)")) == 1000
