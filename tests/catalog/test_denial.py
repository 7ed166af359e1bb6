"""What one login can do to the others: each way has a bound."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import psycopg
import pytest

from catalog.calls import functions
from catalog.matrix import ROOT
from support import Connection, rows

Connect = Callable[..., Connection]
SECURITY = ROOT / "sql" / "SECURITY.md"


def hurry(db: Connection) -> None:
    """Let functions wait for locks a hundred times less long than in an installation."""
    for (name,) in rows(
        db,
        "select oid::regprocedure::text from pg_proc where pronamespace = 'taskboard'::regnamespace"
        " and 'lock_timeout=5s' = any (proconfig)",
    ):
        db.execute(f"alter function {name} set lock_timeout = '50ms'")
    ((source,),) = rows(db, "select pg_get_functiondef('taskboard.take_job_lock'::regproc)")
    assert "secs => 5)" in source
    db.execute(source.replace("secs => 5)", "secs => 0.05)"))


def test_every_function_ends_in_time_while_a_session_keeps_every_row_locked(
    db: Connection, connect: Connect
) -> None:
    hurry(db)
    blocker, victim = connect("blocker"), connect("victim", options="-c statement_timeout=3s")
    db.execute("select taskboard.enqueue('k', serial_key => 's', unique_key => 'u')")
    db.execute("select taskboard.schedule('nightly', '0 3 * * *', 'k')")
    db.execute("select taskboard.limit_queue('default', max_running => 5)")
    ((job_id, token),) = rows(db, "select job_id, lease_token from taskboard.claim(worker => 'w')")
    db.execute("select taskboard.begin_effect(%s, %s)", (job_id, token))
    # More than any role can: whoever calls functions locks the rows of its own jobs and keys.
    blocker.execute("begin")
    for (table,) in rows(
        db,
        "select relname from pg_class where relnamespace = 'taskboard'::regnamespace"
        " and relkind in ('r', 'p') and not relispartition",
    ):
        blocker.execute(f"select from taskboard.{table} for update")
    blocker.execute("select taskboard.enqueue('k', unique_key => 'new', serial_key => 'new')")
    waited, wrong = set(), []
    keys = {"unique_key": "'new'", "serial_key": "'new'"}
    many = {f"{name}s": f"array[{value}]" for name, value in keys.items()}
    for function in functions(db):
        usual = function.usual(job_id, token)
        keyed = usual | {name: value for name, value in (keys | many).items() if name in usual}
        for arguments in [usual] if keyed == usual else [usual, keyed]:
            given = ", ".join(f"{name} => {value}" for name, value in arguments.items())
            try:
                with victim.transaction(force_rollback=True):
                    victim.execute(f"select taskboard.{function.name}({given})")
            except psycopg.Error as error:
                if error.sqlstate == "55P03":
                    waited.add(function.name)
                elif error.sqlstate not in ("TB002", "TB003"):
                    wrong.append((function.name, error.sqlstate, str(error)[:200]))
    assert wrong == []
    assert waited >= {
        "enqueue", "enqueue_many", "renew", "complete", "complete_many", "fail", "release",
        "release_many",
        "require_lease", "begin_effect", "end_effect", "cancel", "pause", "resume",
        "limit_queue", "configure", "schedule", "unschedule",
    }  # fmt: skip


def test_a_login_without_rights_that_keeps_our_advisory_locks_stops_no_work(
    db: Connection, connect: Connect
) -> None:
    stranger, sleeper = connect("stranger"), connect("sleeper")
    for key in range(1952539500, 1952539520):
        stranger.execute("select pg_advisory_lock(%s, 0)", (key,))
    db.execute("select taskboard.enqueue('k')")
    # Nobody falls asleep who might not be woken: workers poll.
    assert rows(sleeper, "select taskboard.listen()") == [(False,)]
    ((job_id, token),) = rows(db, "select job_id, lease_token from taskboard.claim()")
    assert len(rows(db, "select taskboard.complete(%s, %s)", (job_id, token))) == 1
    steps = {step for (step,) in rows(db, "select step from taskboard.maintain()")}
    assert {"exhausted jobs ended", "incidents deleted", "partitions made"} <= steps
    steps = {step for (step,) in rows(db, "select step from taskboard.prune()")}
    assert "incidents deleted" in steps


def test_of_two_at_the_housekeeping_the_second_leaves_it_to_the_first(
    db: Connection, connect: Connect
) -> None:
    first = connect("first")
    with first.transaction():
        assert rows(first, "select step from taskboard.maintain()")
        assert rows(db, "select step from taskboard.maintain()") == []
        pruned = rows(db, "select step from taskboard.prune()")
        assert pruned == [("somebody else is pruning",)]
    assert rows(db, "select step from taskboard.maintain()")


def test_a_sleeper_on_very_many_queues_takes_one_lock_and_is_woken(
    db: Connection, connect: Connect
) -> None:
    # 100,000 locks would fill the server's table of locks: nobody could even connect.
    db.execute("set role taskboard_worker")
    for names in (100, 101, 100_000):
        rows(
            db,
            "select taskboard.listen(array(select 'q' || n from generate_series(1, %s) as n))",
            (names,),
        )
        ((locks,),) = rows(
            db,
            "select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()",
        )
        assert locks == (100 if names == 100 else 1)
    connect("producer").execute("select taskboard.enqueue('k', queue => 'q7')")
    assert next(db.notifies(timeout=5)).channel == "taskboard"


CLEAR_LANES = re.compile(r"```sql\n(begin;\nlock table taskboard\.lanes.*?)```", re.DOTALL)


def test_a_flood_of_queues_and_kinds_is_refused_and_can_be_cleared_away(db: Connection) -> None:
    db.execute("select taskboard.configure('lanes_most', '40')")
    db.execute("select taskboard.enqueue('honest', queue => 'honest')")
    db.execute("set role taskboard_producer")
    for flood in (
        "taskboard.enqueue('flood' || n)",
        "taskboard.enqueue('k', queue => 'flood' || n)",
        "taskboard.enqueue_many('flood' || n, array['1']::jsonb[])",
    ):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="too many queues") as error:
            db.execute(f"select {flood} from generate_series(1, 40) as n")
        assert "lanes_most" in (error.value.diag.message_hint or "")
    for n in range(19):
        db.execute("select taskboard.enqueue(%s)", (f"flood{n}",))
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        db.execute("select taskboard.enqueue('one more')")
    db.execute("select taskboard.enqueue('honest', queue => 'honest')")
    db.execute("reset role")
    ((lanes,),) = rows(db, "select count(*) from taskboard.lanes")
    assert lanes == 40
    db.execute("delete from taskboard.jobs as j using taskboard.lanes as l"
               " where l.id = j.lane_id and l.kind <> 'honest'")  # fmt: skip
    recipe = CLEAR_LANES.search(SECURITY.read_text("utf-8"))
    assert recipe is not None
    db.execute(recipe[1].encode())
    assert rows(db, "select distinct kind from taskboard.lanes") == [("honest",)]
    db.execute("select taskboard.enqueue('new')")
    assert len(rows(db, "select * from taskboard.claim(max_jobs => 5)")) == 3


def test_a_worker_that_renews_for_ever_is_stopped_by_the_timeout(db: Connection) -> None:
    db.execute("select taskboard.enqueue('k')")
    db.execute("set role taskboard_worker")
    ((job_id, token),) = rows(
        db, "select job_id, lease_token from taskboard.claim(lease => '24 hours')"
    )
    hold = ("renew(%s, %s, '24 hours')", "begin_effect(%s, %s)")
    many = "renew_many(array[%s]::uuid[], array[%s]::uuid[], '24 hours')"
    for verb in (*hold, many):
        assert len(rows(db, f"select * from taskboard.{verb}", (job_id, token))) == 1
    for verb in ("claim(lease => '24:00:01')", f"renew('{job_id}', '{token}', '24:00:01')"):
        with pytest.raises(psycopg.errors.InvalidParameterValue):
            db.execute(f"select * from taskboard.{verb}")
    db.execute("reset role")
    db.execute("update taskboard.jobs set claimed_at = claimed_at - interval '1 hour'")
    for verb in (*hold, many):
        assert rows(db, f"select * from taskboard.{verb}", (job_id, token)) == []
    # What is left of the lease ends by itself, or now by a person.
    db.execute("set role taskboard_operator")
    db.execute("select taskboard.evict(%s)", (db.info.parameter_status("application_name"),))
    db.execute("set role taskboard_worker")
    assert len(rows(db, "select * from taskboard.claim()")) == 1


def test_a_flood_of_incidents_is_bounded_in_number_and_in_size(db: Connection) -> None:
    db.execute("select taskboard.configure('incidents_per_minute', '50')")
    huge = "repeat('x', 1000000)"
    db.execute("select taskboard.enqueue('k') from generate_series(1, 30)")
    ids = [job_id for (job_id,) in rows(db, "select job_id from taskboard.job_list")]
    db.execute("set role taskboard_producer")
    for job_id in ids:
        db.execute(f"select taskboard.cancel(%s, {huge})", (job_id,))
    db.execute("set role taskboard_worker")
    for verb in ("complete", "fail", "release", "renew"):
        for job_id in ids:
            db.execute(f"select * from taskboard.{verb}(%s, gen_random_uuid())", (job_id,))
    db.execute("reset role")
    ((count, longest),) = rows(
        db, "select count(*), max(octet_length(i::text)) from taskboard.incidents as i"
    )
    assert count == 50
    assert longest < 2000
    ((longest,),) = rows(db, "select max(octet_length(h::text)) from taskboard.history as h")
    assert longest < 2000


def test_the_longest_names_of_the_widest_characters_fit_every_index(db: Connection) -> None:
    name = "\U0001f512" * 200
    options = "queue => %(n)s, unique_key => %(n)s, serial_key => %(n)s"
    db.execute("set role taskboard_producer")
    db.execute(f"select taskboard.enqueue(%(n)s, {options})", {"n": name})
    for argument in ("kind", "queue", "unique_key", "serial_key"):
        with pytest.raises(psycopg.errors.InvalidParameterValue):
            kind = "" if argument == "kind" else "kind => 'k', "
            db.execute(f"select taskboard.enqueue({kind}{argument} => %s)", (name + "x",))
    db.execute("reset role")
    ((job_id, token),) = rows(
        db, "select job_id, lease_token from taskboard.claim(worker => %s)", (name,)
    )
    db.execute("select taskboard.pause(%s)", (name,))
    db.execute("select taskboard.schedule(%s, '* * * * *', %s, queue => %s)", (name,) * 3)
    assert len(rows(db, "select taskboard.complete(%s, %s)", (job_id, token))) == 1


def test_a_storm_of_waits_for_results_holds_up_nobody(db: Connection, connect: Connect) -> None:
    db.execute("select taskboard.enqueue('k')")
    ((waited_for,),) = rows(db, "select job_id from taskboard.job_list")
    waiters = [connect(f"waiter {n}") for n in range(20)]
    for conn in waiters:
        conn.execute("set role taskboard_producer")
        conn.pgconn.send_query(f"select taskboard.wait_for('{waited_for}', '5 minutes')".encode())
    began = time.monotonic()
    for _ in range(50):
        db.execute("select taskboard.enqueue('k')")
        ((job_id, token),) = rows(db, "select job_id, lease_token from taskboard.claim()")
        assert len(rows(db, "select taskboard.complete(%s, %s)", (job_id, token))) == 1
    assert time.monotonic() - began < 10
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        db.execute("select taskboard.wait_for(%s, '5 minutes 1 second')", (waited_for,))
    for conn in waiters:
        conn.cancel_safe()
        conn.close()
