"""Runners, the command and doctor behind PgBouncer, and set-ups that cannot work."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from console.conftest import Console
from console.test_doctor import lines, sees
from runner.harness import enqueue, running, state, until
from support import Connection, rows
from taskboard.console import poolers
from taskboard.handlers import Context
from taskboard.migrate import LOCK, MigrateError, migrate
from taskboard.settings import Settings, SettingsError
from taskboard.worker import Worker

pytestmark = pytest.mark.wide

Bouncer = Callable[..., str]
Client = Callable[..., Connection]

SESSIONS = (
    "select count(*) from pg_stat_activity where datname = current_database()"
    " and application_name ~ '^taskboard '"
)
LISTENING = (
    "select count(*) from pg_stat_activity where datname = current_database()"
    " and query ~ 'taskboard.listen' and state = 'idle'"
)


async def noop(ctx: Context) -> None:
    pass


def drain_with(dsn: str, runners: int, handler: Any = noop, **options: Any) -> int:
    """Let runners work until nothing is left; answer how many connections they had, at most."""

    async def scenario() -> int:
        async with asyncio.timeout(40):
            workers = [
                Worker(
                    Settings(database_url=dsn, poll=0.2, until_empty=True, **options),
                    {"k": handler},
                )
                for _ in range(runners)
            ]
            codes = await asyncio.gather(*(worker.run({}) for worker in workers))
        return max(codes)

    return asyncio.run(scenario())


def test_four_runners_on_two_sessions_complete_each_job_once_at_any_default_isolation(
    bouncer: Bouncer, db: Connection
) -> None:
    db.execute(
        f"alter database {db.info.dbname} set default_transaction_isolation = 'repeatable read'"
    )
    db.execute("select taskboard.enqueue_many('k', array(select to_jsonb(n) from"
               " generate_series(1, 1000) as n))")  # fmt: skip
    ran, sessions = Counter[Any](), [0]

    async def handler(ctx: Context) -> None:
        ran[ctx.job.payload] += 1
        if ctx.job.payload % 100 == 0:
            sessions.append(rows(db, SESSIONS)[0][0])
            async with ctx.transaction(complete=True) as conn:
                await conn.execute("select 1")

    assert drain_with(bouncer(), 4, handler, pool=8) == 0
    assert len(ran) == 1000 and set(ran.values()) == {1}
    assert rows(db, "select state, count(*), max(attempt) from taskboard.history group by 1") == [
        ("completed", 1000, 1)
    ]
    assert 0 < max(sessions) <= 2


def test_runner_with_a_direct_way_to_listen_is_woken_and_its_leases_are_renewed(
    bouncer: Bouncer, dsn: str, db: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    async def scenario() -> None:
        async def handler(ctx: Context) -> None:
            await asyncio.sleep(1.0)

        options: dict[str, Any] = {"pool": 8, "listen_url": dsn, "poll": 60}
        async with running(bouncer(), {"k": handler}, **options):
            await until(lambda: rows(db, LISTENING) == [(1,)])
            job = enqueue(db, "k", lease="0.6 s")
            await until(lambda: state(db, job)["state"] == "completed")
            assert state(db, job)["attempt"] == 1

    asyncio.run(scenario())
    said = next(line for line in caplog.messages if line.startswith("taskboard 0."))
    assert said.endswith("at most 9 connections through a pooler, listening")
    assert "wake: listening" in caplog.messages


def test_runner_without_one_says_at_its_start_that_it_polls_and_does_its_work(
    bouncer: Bouncer, db: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    job = enqueue(db, "k")
    assert drain_with(bouncer(), 1, pool=8) == 0
    assert state(db, job)["state"] == "completed" and rows(db, LISTENING) == [(0,)]
    said = next(line for line in caplog.messages if line.startswith("taskboard 0."))
    assert said.endswith("through a pooler, polling only")
    assert "wake: polling only" in caplog.text and "TASKBOARD_LISTEN_URL" in caplog.text


def test_a_pooler_at_the_direct_way_is_noticed(
    bouncer: Bouncer, db: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    pooled = bouncer()
    enqueue(db, "k")
    assert drain_with(pooled, 1, listen_url=pooled) == 0
    assert "wake: polling only: behind a pooler notifications do not arrive" in caplog.text


def test_runner_bears_styles_that_another_client_has_set_in_a_shared_session(
    bouncer: Bouncer, client: Client, db: Connection
) -> None:
    pooled = bouncer(size=1)
    careless = client(pooled, "careless")
    careless.execute("set intervalstyle = 'iso_8601'; set extra_float_digits = 0")
    jobs = [enqueue(db, "k", lease="90 s", timeout="1 h") for _ in range(3)]
    assert rows(client(pooled, "next"), "show intervalstyle") == [("iso_8601",)]
    assert drain_with(pooled, 1) == 0
    assert {(state(db, job)["state"], state(db, job)["attempt"]) for job in jobs} == {
        ("completed", 1)
    }


def test_runners_go_on_while_the_functions_are_loaded_anew_beneath_them(
    bouncer: Bouncer, dsn: str, db: Connection
) -> None:
    pooled = bouncer()

    async def scenario() -> None:
        async with running(pooled, {"k": noop}, pool=8, listen=False):
            for round_ in range(3):
                jobs = [enqueue(db, "k") for _ in range(20)]
                db.execute("update taskboard.migrations set checksum = '' where name = 'functions'")
                # An answer of another shape is what breaks a statement that was kept.
                report = await asyncio.to_thread(migrate, dsn)
                assert report.applied == ["functions"], round_
                for job in jobs:
                    await until(lambda job=job: state(db, job)["state"] == "completed")

    asyncio.run(scenario())
    assert rows(db, "select distinct attempt, state from taskboard.history") == [(1, "completed")]


def test_migrate_refuses_a_pooler_with_a_hint_and_leaves_no_lock_and_takes_the_direct_way(
    bouncer: Bouncer, dsn: str, db: Connection, console: Console
) -> None:
    pooled = bouncer()
    with pytest.raises(MigrateError, match=r"a pooler stands in between.*TASKBOARD_LISTEN_URL"):
        migrate(pooled)
    held = "select count(*) from pg_locks where locktype = 'advisory' and classid = %s"
    assert rows(db, held, [LOCK[0]]) == [(0,)]
    said = console("migrate", TASKBOARD_DATABASE_URL=pooled)
    assert said.code == 1 and "TASKBOARD_LISTEN_URL" in said.err
    said = console("migrate", TASKBOARD_DATABASE_URL=pooled, TASKBOARD_LISTEN_URL=dsn)
    assert said.code == 0 and "up to date" in said.out


def test_every_command_works_through_the_pooler(
    bouncer: Bouncer, db: Connection, console: Console
) -> None:
    pooled = bouncer(size=1)

    def run(*words: str, code: int = 0) -> str:
        said = console(*words, TASKBOARD_DATABASE_URL=pooled)
        assert said.code == code, said
        return said.out

    job = run("enqueue", "email", '{"to": "ann@example.com"}', "--delay", "1h").strip()
    assert job in run("jobs") and "scheduled" in run("job", job)
    assert "email" in run("queues") and run("pause", "mails") and run("resume", "mails")
    assert run("limit", "mails", "--running", "3") and run("configure", "lease", "30 s")
    assert "cancelled" in run("cancel", job) and "scheduled" not in run("retry", job)
    assert run("schedule", "nightly", "0 2 * * *", "email") and "nightly" in run("schedules")
    assert run("unschedule", "nightly") and run("evict", "nobody") is not None
    assert run("prune") and "job_retried" in run("incidents") and run("workers") == ""


def test_doctor_finds_nothing_wrong_with_a_pooler_that_pools_transactions(
    bouncer: Bouncer, dsn: str, console: Console
) -> None:
    said = console("doctor", "--json", TASKBOARD_DATABASE_URL=bouncer(), TASKBOARD_LISTEN_URL=dsn)
    assert [level for level, _, _ in lines(said, "pooler")] == ["ok"]
    assert sees(said, "listen", "ok", "notifications arrive")
    assert sees(said, "connections", "ok", "there are enough")


def test_doctor_names_what_other_clients_left_in_a_shared_session(
    bouncer: Bouncer, client: Client, db: Connection, console: Console
) -> None:
    pooled = bouncer(size=1)
    db.execute("create role pooled_stranger in role taskboard_worker, taskboard_observer")
    careless = client(pooled, "careless", prepare_threshold=0)
    try:
        rows(careless, "select %s::int", [1])
        careless.execute("set statement_timeout = '9 min'", prepare=False)
        rows(careless, "select taskboard.listen(%s)", [["q"]])
        careless.execute("set role pooled_stranger", prepare=False)
        said = console("doctor", "--json", TASKBOARD_DATABASE_URL=pooled)
    finally:
        careless.execute("reset role", prepare=False)
        db.execute("drop role pooled_stranger")
    for level, text, fix in (
        ("wrong", "set role stays: calls are made as pooled_stranger", "set local"),
        ("wrong", "[12] statements are prepared", "max_prepared_statements"),
        ("note", "settings .* shared session: statement_timeout$", "alter role"),
        ("note", r"called listen\(\) here", "unlisten"),
    ):
        assert sees(said, "pooler", level, text, fix), (text, lines(said, "pooler"))


def test_doctor_names_a_pooler_that_lends_whole_sessions_and_has_too_few(
    bouncer: Bouncer, db: Connection, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poolers, "LENDS_WITHIN", 0.5)
    pooled = bouncer(pool_mode="session", size=3)
    said = console("doctor", "--json", TASKBOARD_DATABASE_URL=pooled)
    assert sees(said, "pooler", "wrong", "serves 2 at once", "pool_mode = transaction")
    said = console("doctor", "--json", TASKBOARD_DATABASE_URL=bouncer(max_client_conn=5))
    assert sees(said, "pooler", "wrong", "serves [34] at once .*no more connections allowed")


def test_a_pool_of_one_whole_session_starves_renewals_and_the_log_says_of_whom(
    bouncer: Bouncer, db: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async def handler(ctx: Context) -> None:
            await asyncio.sleep(30)

        async with running(bouncer(pool_mode="session", size=1), {"k": handler}, grace=0):
            enqueue(db, "k", lease="0.5 s")
            await until(lambda: "lease lost" in caplog.text)

    asyncio.run(scenario())
    assert "renewer: the database does not answer" in caplog.text


@pytest.mark.parametrize(
    ("wrong", "said", "hint"),
    [
        ({"options": "-c statement_timeout=9s"}, "unsupported startup parameter", "alter role"),
        ({"dbname": "nowhere"}, "does not exist|no such database", "check user"),
        ({"user": "nobody_known"}, "no such user|authentication failed", "check user"),
    ],
)
def test_runner_that_the_pooler_will_never_let_in_says_why_and_ends(
    wrong: dict[str, str], said: str, hint: str, bouncer: Bouncer
) -> None:
    with pytest.raises(SettingsError) as caught:
        drain_with(make_conninfo(bouncer(), **wrong), 1)
    assert re.search(said, str(caught.value)) and hint in caught.value.hint
