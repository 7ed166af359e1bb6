"""An upgrade under full load: runners of the version before go on, and nothing is left of it."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from itertools import count, pairwise
from pathlib import Path
from threading import Event

import psycopg
import pytest

import taskboard
from support import Connection, rows, session, wait_for
from taskboard.localpg import binaries
from taskboard.migrate import migrate
from test_install import catalog
from upgrade.conftest import EARLIER
from upgrade.versions import Program, Version, ended, from_git, later, this

Upgrade = tuple[Version, Version]

KINDS = ("quick", "quick", "quick", "flaky", "early", "fenced", "effect", "thread")
HELD = 3  # jobs that begin before the upgrade and end after it
# A change waits 1 s for a lock, and claims behind it; the rest is this machine's.
STALL = timedelta(seconds=1 + 2)
# What a runner may say: its own lines, what these handlers do, that a lock was in the way, that a
# renewal took a quarter of its lease, and what psycopg says when a stop meets a call.
EXPECTED = re.compile(
    r" INFO |again in \d+ s,|query cancellation interrupted"
    r"|in the way, trying again: canceling statement due to lock timeout"
    r"|renewer: the database does not answer.*closed the connection"
)


@pytest.fixture
def upgrade(request: pytest.FixtureRequest, tmp_path: Path) -> Upgrade:
    """The version before, and the one after."""
    if request.param == "from the commit before":
        return from_git(EARLIER[0], tmp_path / "before"), this(tmp_path / "after")
    return this(tmp_path / "before"), later(tmp_path / "after")


def test_each_earlier_commit_becomes_what_a_fresh_installation_is(
    commit: str, empty_dsn: str, dsn: str, tmp_path: Path
) -> None:
    folder = tmp_path / "before"
    before = from_git(commit, folder) if commit else this(folder)
    said = before.run(empty_dsn, "migrate", log=tmp_path / "log")
    assert said.code == 0, said.said
    # Where this fails, or something is left over, sql/00_dropped.sql lacks a line.
    assert migrate(empty_dsn).applied == (["functions"] if commit else [])
    found, expected = catalog(empty_dsn), catalog(dsn)
    names, fresh = ({each[0] for each in them["functions"]} for them in (found, expected))
    assert names - fresh == set(), "left over"
    assert found == expected


def test_psql_and_migrate_upgrade_to_the_same(
    new_database: Callable[..., str], template: str, tmp_path: Path
) -> None:
    to_come = later(tmp_path / "after")
    by_psql, by_migrate, fresh = new_database(template), new_database(template), new_database()
    done = subprocess.run(
        [binaries() / "psql", "-Xqd", by_psql, "-f", to_come.folder / "sql/install.sql"],
        text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for dsn in (by_migrate, fresh):
        said = to_come.run(dsn, "migrate", log=tmp_path / "log")
        assert said.code == 0, said.said
    assert catalog(by_psql) == catalog(by_migrate) == catalog(fresh)


def test_runner_of_another_version_refuses_in_a_line_and_changes_nothing(
    dsn: str, db: Connection, empty_dsn: str, tmp_path: Path
) -> None:
    now, to_come = this(tmp_path / "now"), later(tmp_path / "later")
    assert to_come.run(empty_dsn, "migrate", log=tmp_path / "log").code == 0
    for runner, where, installed in ((now, empty_dsn, to_come), (to_come, dsn, now)):
        with session(where) as conn:
            job_id = rows(conn, "select job_id from taskboard.enqueue('quick')")[0][0]
            conn.execute("select taskboard.schedule('s', '* * * * *', 'quick')")
            conn.execute("update taskboard.schedules set next_at = now() - interval '1 s'")
            said = runner.run(where, "run", "load_handlers", "--until-empty", log=tmp_path / "log")
            assert said.code == 2, said.said
            first, hint = said.said.splitlines()
            assert first == (
                f"taskboard: the database has taskboard {installed.number},"
                f" this runner is {runner.number}"
            )
            assert "taskboard migrate" in hint
            assert rows(conn, "select job_id, attempt from taskboard.job_list") == [(job_id, 0)]
    # Nor does the earlier one undo the later one's functions.
    said = now.run(empty_dsn, "migrate", log=tmp_path / "log")
    assert said.code == 0 and "newer than this package" in said.said
    with session(empty_dsn) as conn:
        assert rows(conn, "select taskboard.version()") == [(to_come.number,)]


def test_runner_whose_calls_are_gone_claims_no_more_and_finishes_what_it_holds(
    dsn: str, db: Connection, tmp_path: Path
) -> None:
    """As after an upgrade by hand, to something that it cannot work with."""
    evidence, go = tmp_path / "evidence", tmp_path / "go"
    evidence.touch()
    held = rows(db, "select job_id from taskboard.enqueue('held')")[0][0]
    with ended(this(tmp_path / "now").start(
        dsn, "run", "load_handlers", "--poll", "100ms", "--no-listen", log=tmp_path / "log",
        EVIDENCE=str(evidence), GO=str(go),
    )) as runner:  # fmt: skip
        wait_for(lambda: "held" in evidence.read_text(), what="the handler to begin")
        db.execute(
            "alter function taskboard.claim(text[], text[], integer, interval, text)"
            " rename to claim_otherwise"
        )
        wait_for(lambda: "taskboard.claim(" in runner.said, what="it to be told")
        later = rows(db, "select job_id from taskboard.enqueue('quick')")[0][0]
        go.touch()
        assert runner.popen.wait(20) != 0
    assert rows(db, "select state, result from taskboard.wait_for(%s)", [held]) == [
        ("completed", "held on")
    ]
    assert rows(db, "select state, attempt from taskboard.job(%s)", [later]) == [("ready", 0)]


# What producers and workers call, with the owner of a job; none of it reads a view.
CALLS = (
    "enqueue('k', serial_key => 's', unique_key => 'u')", "enqueue_many('k', '{1,2}')",
    "renew(%(job)s, %(token)s)", "renew_many(array[%(job)s::uuid], array[%(token)s::uuid])",
    "require_lease(%(job)s, %(token)s)", "lease_status(%(job)s, %(token)s)",
    "begin_effect(%(job)s, %(token)s)", "end_effect(%(job)s, %(token)s)",
    "next_claimable_at()", "due_schedules()", "listen()", "unlisten()", "maintain()", "version()",
    "complete(%(job)s, %(token)s)", "wait_for(%(job)s, '0 s')", "claim()",
)  # fmt: skip


def test_while_the_functions_are_being_loaded_no_call_of_a_worker_or_producer_waits(
    db: Connection, connect: Callable[..., Connection]
) -> None:
    rows(db, "select taskboard.enqueue('k')")
    job, token = rows(db, "select job_id, lease_token from taskboard.claim()")[0]
    loading = connect("loading")
    loading.execute("begin")
    for path in sorted(taskboard.SQL.glob("[0-9]*.sql")):
        loading.execute(path.read_bytes())
    warm = connect("warm", options="-c lock_timeout=1ms -c statement_timeout=5s")
    for call in CALLS:
        rows(warm, f"select * from taskboard.{call}".encode(), {"job": job, "token": token})
    with pytest.raises(psycopg.errors.LockNotAvailable):
        rows(warm, "select * from taskboard.queue_stats")
    loading.execute("commit")
    assert rows(db, "select state from taskboard.job(%s)", [job]) == [("completed",)]


@dataclass(slots=True)
class Load:
    """Producers that keep some hundred jobs waiting, until they are told to end."""

    dsn: str
    over: Event

    def produce(self, number: int) -> int:
        with session(self.dsn, f"producer {number}") as conn:
            for n in count():
                if self.over.is_set():
                    return n
                kind, queue = KINDS[n % len(KINDS)], ("default", "narrow")[n % 5 == 4]
                rows(
                    conn,
                    "select taskboard.enqueue(kind => %s, payload => %s, queue => %s,"
                    " serial_key => %s, unique_key => %s)",
                    [kind, f'{{"n": {n}}}', queue, f"s{n % 30}" if n % 7 == 0 else None,
                     f"{number}-{n}" if n % 3 == 0 else None],
                )  # fmt: skip
                if n % 50 == 0:
                    while not self.over.is_set() and waiting(conn) > 400:
                        time.sleep(0.02)
        raise AssertionError


def waiting(conn: Connection) -> int:
    found: int = rows(conn, "select count(*) from taskboard.jobs")[0][0]
    return found


def finished(conn: Connection) -> int:
    found: int = rows(conn, "select count(*) from taskboard.history")[0][0]
    return found


def waits_for_a_lock(conn: Connection) -> bool:
    """Tell whether a migration waits for a lock on something of ours."""
    return bool(rows(
        conn,
        "select 1 from pg_locks as l join pg_stat_activity as a using (pid) where not l.granted"
        " and l.locktype = 'relation' and a.application_name = 'taskboard migrate'"
        " and a.datname = current_database()",
    ))  # fmt: skip


def check_lives(db: Connection, evidence: Path, said: str) -> None:
    """Hold what the handlers did against what the database has recorded: nothing lost, or twice."""
    ran = Counter(tuple(line.split()) for line in evidence.read_text().splitlines())
    assert max(ran.values()) == 1, "an attempt ran twice"
    recorded = rows(db, "select id::text, attempt, kind, state, lost_leases from taskboard.history")
    assert {state for _, _, _, state, _ in recorded} == {"completed"}
    assert {lost for *_, lost in recorded} == {0}
    attempts = {
        (job_id, str(n), kind)
        for job_id, attempt, kind, _, _ in recorded for n in range(1, attempt + 1)
    }  # fmt: skip
    assert ran.keys() <= attempts
    # What a claim brought after the signal to stop is given back: of no other may nothing be seen.
    given_back = re.findall(r"job=(\S+) kind=(\S+) attempt=(\d+) released", said)
    assert attempts - ran.keys() <= {(job_id, n, kind) for job_id, kind, n in given_back}
    assert {(job_id, str(attempt), kind) for job_id, attempt, kind, _, _ in recorded} <= ran.keys()
    assert rows(db, "select count(*), count(distinct job_id) from public.ledger") == rows(
        db, "select count(*), count(*) from taskboard.history where kind = 'fenced'"
    )
    wrong = "select what, detail from taskboard.incident_list where what !~ '^queue_'"
    assert rows(db, wrong) == []


def longest_stall(db: Connection) -> timedelta:
    """The longest time in which nothing was claimed; there was always something to claim."""
    claims = [at for (at,) in rows(db, "select claimed_at from taskboard.history order by 1")]
    return max(after - before for before, after in pairwise(claims))


@pytest.mark.wide
def test_under_full_load_nothing_is_lost_or_run_twice_and_runners_of_the_version_before_go_on(
    upgrade: Upgrade, new_database: Callable[[], str], tmp_path: Path,
    connect: Callable[..., Connection],
) -> None:  # fmt: skip
    before, after = upgrade
    empty_dsn, fresh_dsn = new_database(), new_database()
    evidence, go, over = tmp_path / "evidence", tmp_path / "go", Event()
    evidence.touch()
    environment = {"EVIDENCE": str(evidence), "GO": str(go)}
    numbers = count()

    def start(version: Version, *arguments: str, **variables: str) -> Program:
        log = tmp_path / f"log {next(numbers)}"
        program = version.start(empty_dsn, *arguments, log=log, **variables)
        return stack.enter_context(ended(program))

    def start_runner(version: Version) -> Program:
        return start(version, "run", "load_handlers", "--pool", "6", "--lease", "4s", **environment)

    with ExitStack() as stack:
        assert before.run(empty_dsn, "migrate", log=tmp_path / "installed").code == 0
        db, reader = connect("db", empty_dsn), connect("reader", empty_dsn)
        assert rows(db, "select taskboard.version()") == [(before.number,)]
        db.execute("create table public.ledger (job_id uuid)")
        db.execute("select taskboard.limit_queue('narrow', max_running => 2)")
        for _ in range(HELD):
            db.execute("select taskboard.enqueue('held', priority => 0)")
        threads = stack.enter_context(ThreadPoolExecutor(2))
        stack.callback(over.set)
        produced: list[Future[int]] = [
            threads.submit(Load(empty_dsn, over).produce, n) for n in range(2)
        ]
        old = [start_runner(before) for _ in range(2)]
        wait_for(lambda: finished(db) > 200, seconds=30, what="the load")

        # Somebody's open transaction is in the way of the change: it waits, and not for long.
        reader.execute("begin; select count(*) from taskboard.job_list")
        killed = start(after, "migrate")
        wait_for(lambda: waits_for_a_lock(db), seconds=20, what="the change to wait")
        killed.popen.kill()
        migrators = [start(after, "migrate") for _ in range(3)]
        wait_for(lambda: waits_for_a_lock(db), seconds=20, what="the next one to wait")
        done = finished(db)
        wait_for(lambda: finished(db) > done + 50, what="the work to go on beside it")
        reader.execute("rollback")
        for migrator in migrators:
            assert migrator.popen.wait(60) == 0, migrator.said
        assert rows(db, "select taskboard.version()") == [(after.number,)]
        assert sum("functions" in migrator.said for migrator in migrators) == 1

        # The runners of the version before work on with the new functions, then make room.
        done = finished(db)
        wait_for(lambda: finished(db) > done + 300, seconds=30, what="the old runners")
        new = [start_runner(after) for _ in range(2)]
        wait_for(lambda: all(": on" in each.said for each in new), what="the new runners")
        assert [each.code for each in old] == [None, None]
        go.touch()
        kept = "select count(*) from taskboard.history where kind = 'held'"
        wait_for(lambda: rows(db, kept) == [(HELD,)], what="the end of what the old runners held")
        for each in old:
            each.popen.send_signal(signal.SIGTERM)
        for each in old:
            assert each.popen.wait(30) == 0, each.said
        over.set()
        total = sum(future.result(60) for future in produced)
        wait_for(lambda: waiting(db) == 0, seconds=60, what="the end of the backlog")
        for each in new:
            each.popen.send_signal(signal.SIGTERM)
            assert each.popen.wait(30) == 0, each.said

        assert finished(db) == total + HELD
        # Nothing is left over of the version before.
        db.execute("select taskboard.limit_queue('narrow')")
        assert after.run(fresh_dsn, "migrate", log=tmp_path / "fresh").code == 0
        assert catalog(empty_dsn) == catalog(fresh_dsn)
        said = "".join(each.said for each in [*old, *new])
        check_lives(db, evidence, said)
        assert longest_stall(db) < STALL
        assert [line for line in said.splitlines() if not EXPECTED.search(line)] == []
