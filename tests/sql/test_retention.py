"""What stays of finished jobs, and that keeping house never holds anybody up."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import date, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql
from verbs import (
    Db,
    Row,
    call,
    claim,
    claim_one,
    ended,
    enqueue,
    lease_status,
    leased,
    live,
    own,
    pairs,
    query,
    raises,
    refuses,
    row_of,
    set_default,
    state,
)

from support import expire, wait_for, wait_until_blocked

rows_only = pytest.mark.rows_only

Connect = Callable[..., Db]

HOUR = timedelta(hours=1)


def finished(db: Db, verb: str = "complete", **options: Any) -> Row:
    """A job with an effect that has ended; the row that claim returned."""
    outcomes: dict[str, Row] = {
        "complete": {"result": {"n": 1}}, "fail": {"permanent": True, "error": "no"}
    }  # fmt: skip
    usual: Row = {"payload": {"n": 1}, "headers": {"trace": "x"}}
    job = leased(db, **usual | options)
    call(db, "begin_effect", **own(job))
    call(db, verb, **own(job), **outcomes[verb])
    return job


def ago(db: Db, job: Row, span: timedelta) -> None:
    """Let a job have ended a while ago; it moves to the partition of that day, if there is one."""
    query(
        db,
        "update taskboard.history set finished_at = finished_at - %(span)s where id = %(id)s",
        span=span,
        id=job["job_id"],
    )


def known(db: Db, job: Row) -> tuple[int, int]:
    """How many rows of history and of effects a job has."""
    return (
        len(query(db, "select 1 from taskboard.history where id = %(id)s", id=job["job_id"])),
        len(query(db, "select 1 from taskboard.effects where job_id = %(id)s", id=job["job_id"])),
    )


def make_day(db: Db, days_ago: int) -> str:
    """Make the partition of a day that has gone, as maintenance did then; its name."""
    (row,) = query(
        db, "select (clock_timestamp() at time zone 'UTC')::date - %(n)s as day", n=days_ago
    )
    day: date = row["day"]
    name = f"history_{day:%Y%m%d}"
    following = day + timedelta(days=1)
    (owner,) = query(
        db,
        "select relowner::regrole::text as name from pg_class"
        " where oid = 'taskboard.history'::regclass",
    )
    table = sql.Identifier("taskboard", name)
    query(
        db,
        sql.SQL("create table {} partition of taskboard.history for values from ({}) to ({})")
        .format(table, f"{day} 00:00Z", f"{following} 00:00Z"),
    )  # fmt: skip
    query(db, sql.SQL("alter table {} owner to {}").format(table, sql.Identifier(owner["name"])))
    return name


def days(db: Db) -> list[str]:
    return [
        row["name"]
        for row in query(
            db,
            "select relname::text as name from pg_inherits join pg_class on oid = inhrelid"
            " where inhparent = 'taskboard.history'::regclass order by relname",
        )
    ]


# Keeping nothing.


@rows_only
def test_of_a_completed_job_only_id_and_token_stay_for_an_hour(db: Db) -> None:
    call(db, "keep_history", queue="default", completed=False)
    job = finished(db)
    row = ended(db, job["job_id"])
    assert (row["payload"], row["headers"], row["result"]) == (None, None, None)
    assert (row["lease_token"], row["state"]) == (job["lease_token"], "completed")
    answer = {"job_id": job["job_id"], "finished_at": row["finished_at"]}
    for minutes, stays in ((0, True), (59, True), (2, False)):
        ago(db, job, timedelta(minutes=minutes))
        call(db, "maintain")
        if stays:
            answer["finished_at"] -= timedelta(minutes=minutes)
            assert call(db, "complete", **own(job)) == [answer]
            assert call(db, "complete_many", **pairs(job)) == [answer]
            assert lease_status(db, job) == "completed_by_you"
            assert state(db, job["job_id"]) == "completed"
    assert known(db, job) == (0, 0)
    assert call(db, "complete", **own(job)) == []
    assert lease_status(db, job) == "unknown_job"


@rows_only
def test_jobs_completed_in_one_call_leave_as_little(db: Db) -> None:
    call(db, "keep_history", queue="default", completed=False)
    jobs = [leased(db, payload={"n": 1}), leased(db, payload={"n": 2}, queue="kept")]
    call(db, "complete_many", **pairs(*jobs))
    assert [ended(db, job["job_id"])["payload"] for job in jobs] == [None, {"n": 2}]


@rows_only
def test_failed_and_cancelled_jobs_are_kept_whole_and_can_be_brought_back(db: Db) -> None:
    call(db, "keep_history", queue="default", completed=False)
    failed, cancelled = finished(db, "fail"), enqueue(db, payload={"n": 2})
    call(db, "cancel", job_id=cancelled)
    assert ended(db, failed["job_id"])["payload"] == {"n": 1}
    for job_id in (failed["job_id"], cancelled):
        assert call(db, "retry", job_id=job_id)[0]["state"] == "ready"
        assert row_of(db, job_id)["payload"] is not None


@rows_only
def test_a_job_of_which_nothing_was_kept_cannot_be_brought_back(db: Db) -> None:
    call(db, "keep_history", queue="default", completed=False)
    job = finished(db)
    raises(db, "TB003", "retry", job_id=job["job_id"])
    assert call(db, "retry_failed") == []


@rows_only
def test_a_job_whose_lane_is_forgotten_can_be_brought_back(db: Db) -> None:
    job = finished(db)
    query(db, "delete from taskboard.lanes")
    call(db, "retry", job_id=job["job_id"])
    again = claim_one(db)
    assert (again["job_id"], again["attempt"]) == (job["job_id"], 2)


@rows_only
def test_it_counts_for_jobs_that_wait_and_run_when_it_is_said_and_can_be_taken_back(
    db: Db,
) -> None:
    running, waiting = leased(db, payload={"n": 1}), enqueue(db, payload={"n": 2})
    call(db, "keep_history", queue="default", completed=False)
    call(db, "complete", **own(running))
    assert ended(db, running["job_id"])["payload"] is None
    call(db, "keep_history", queue="default")
    call(db, "complete", **own(claim_one(db)))
    assert ended(db, waiting)["payload"] == {"n": 2}


@rows_only
def test_it_counts_for_lanes_that_come_later(db: Db) -> None:
    call(db, "keep_history", queue="default", completed=False)
    for options in ({"kind": "new"}, {"priority": 9}, {"unique_key": "u"}):
        assert ended(db, finished(db, **options)["job_id"])["payload"] is None
    assert ended(db, finished(db, queue="other")["job_id"])["payload"] is not None


@rows_only
def test_it_counts_for_a_lane_whose_first_job_was_not_yet_committed(
    db: Db, connect: Connect
) -> None:
    producer = connect("producer")
    query(producer, "begin")
    job_id = enqueue(producer, payload={"n": 1})
    call(db, "keep_history", queue="default", completed=False)
    query(producer, "commit")
    # Maintenance may be what mends it.
    call(db, "maintain")
    call(db, "complete", **own(claim_one(db)))
    assert ended(db, job_id)["payload"] is None


# Keeping failures longer.


def test_failures_outlive_their_day_for_as_long_as_their_queue_keeps_them(db: Db) -> None:
    call(db, "keep_history", queue="bills", failed_for="30 days")
    name = make_day(db, 9)
    jobs = {
        which: finished(db, verb, queue=queue)
        for which, verb, queue in (
            ("kept", "fail", "bills"), ("completed", "complete", "bills"),
            ("elsewhere", "fail", "default"), ("brought back", "fail", "bills"),
        )
    }  # fmt: skip
    for job in jobs.values():
        ago(db, job, timedelta(days=9))
    call(db, "maintain")
    assert name not in days(db)
    found = {which: known(db, job) for which, job in jobs.items()}
    assert found == {
        "kept": (1, 1), "completed": (0, 0), "elsewhere": (0, 0), "brought back": (1, 1)
    }  # fmt: skip
    row = ended(db, jobs["kept"]["job_id"])
    assert (row["payload"], row["error"], row["state"]) == ({"n": 1}, "no", "failed")
    call(db, "retry", job_id=jobs["brought back"]["job_id"])
    assert call(db, "retry_failed", queue="default") == []
    call(db, "maintain")
    assert known(db, jobs["kept"]) == (1, 1)
    assert known(db, jobs["brought back"]) == (0, 1)
    ago(db, jobs["kept"], timedelta(days=21))
    call(db, "maintain")
    assert known(db, jobs["kept"]) == (0, 0)


@rows_only
def test_failures_without_a_day_of_their_own_are_kept_as_long(db: Db) -> None:
    call(db, "keep_history", queue="bills", failed_for="30 days")
    kept, gone, other = (
        finished(db, verb, queue=queue)
        for verb, queue in (("fail", "bills"), ("complete", "bills"), ("fail", "default"))
    )
    for job in (kept, gone, other):
        ago(db, job, timedelta(days=9))
    call(db, "maintain")
    assert [known(db, job) for job in (kept, gone, other)] == [(1, 1), (0, 0), (0, 0)]
    call(db, "keep_history", queue="bills")
    call(db, "maintain")
    assert known(db, kept) == (0, 0)


@rows_only
def test_keeping_failures_shorter_than_the_rest_changes_nothing(db: Db) -> None:
    call(db, "keep_history", queue="default", failed_for="1 hour")
    job = finished(db, "fail")
    ago(db, job, timedelta(days=2))
    call(db, "maintain")
    assert known(db, job) == (1, 1)


def test_days_are_dropped_one_and_all_oldest_first_and_the_rest_stays(db: Db) -> None:
    names = [make_day(db, n) for n in (30, 12, 9, 8, 7, 1)]
    jobs = [finished(db) for _ in names]
    for job, n in zip(jobs, (30, 12, 9, 8, 7, 1), strict=True):
        ago(db, job, timedelta(days=n))
    rows = call(db, "prune")
    dropped = [row["step"] for row in rows if row["step"].startswith("dropped ")]
    assert dropped == [f"dropped {name}" for name in names[:4]]
    assert [row["touched"] for row in rows if row["step"] in dropped] == [1] * 4
    assert set(names) & set(days(db)) == set(names[4:])
    assert [known(db, job) for job in jobs] == [(0, 0)] * 4 + [(1, 1)] * 2
    call(db, "prune", keep="36 hours")
    assert names[4] not in days(db) and names[5] in days(db)


def test_a_partition_that_somebody_else_made_is_left_alone(db: Db) -> None:
    query(
        db,
        "create table taskboard.history_archive partition of taskboard.history"
        " for values from ('2000-01-01Z') to ('2010-01-01Z')",
    )
    call(db, "prune", keep="1 hour")
    assert "history_archive" in days(db)


# Nobody waits.


@pytest.mark.parametrize("held", ["history", "history_default", "today"])
def test_a_long_read_of_history_makes_no_completion_wait_for_maintenance(
    db: Db, connect: Connect, held: str
) -> None:
    make_day(db, 9)
    query(db, "drop table taskboard." + [name for name in days(db) if name[-1].isdigit()][-1])
    today = make_day_name(db)
    reader, keeper, worker = connect("reader"), connect("keeper"), connect("worker")
    query(reader, "begin")
    query(reader, f"select count(*) from taskboard.{today if held == 'today' else held}")
    # Whatever maintenance could get, it holds until it commits. Beside a read of one other day it
    # gets all, and commits at once, as it does in real life.
    if held != "today":
        query(keeper, "begin")
    call(keeper, "maintain")
    query(worker, "set statement_timeout = '2 s'")
    jobs = [finished(worker), finished(worker, "fail"), leased(worker)]
    assert len(call(worker, "complete_many", **pairs(jobs[2]))) == 1
    query(keeper, "commit")
    assert len(call(worker, "complete", **own(jobs[0]))) == 1
    query(reader, "commit")
    call(db, "maintain")
    assert len([name for name in days(db) if name[-1].isdigit()]) == 4


def make_day_name(db: Db) -> str:
    (row,) = query(
        db, "select to_char(clock_timestamp() at time zone 'UTC', 'YYYYMMDD') as day"
    )
    return f"history_{row['day']}"


def test_completions_beside_a_long_read_and_much_maintenance_are_quick(
    db: Db, connect: Connect
) -> None:
    for n in (9, 10, 11):
        make_day(db, n)
    reader, keeper = connect("reader"), connect("keeper")
    query(reader, "begin")
    query(reader, "select count(*) from taskboard.history")
    busy = True

    def keep() -> None:
        while busy:
            call(keeper, "maintain")

    longest = 0.0
    with ThreadPoolExecutor(1) as thread:
        keeping = thread.submit(keep)
        try:
            for _ in range(60):
                job = leased(db)
                began = time.monotonic()
                assert len(call(db, "complete", **own(job))) == 1
                longest = max(longest, time.monotonic() - began)
        finally:
            busy = False
        keeping.result()
    assert longest < 0.5


@pytest.mark.parametrize(
    ("job", "rights"), [("waiting", False), ("waiting", True), ("unknown", False)]
)
def test_a_day_is_dropped_while_a_producer_waits_for_a_job(
    db: Db, connect: Connect, job: str, rights: bool
) -> None:
    day, producer = make_day(db, 30), connect("producer")
    set_default(db, "queue_rights", rights)
    job_id = enqueue(db) if job == "waiting" else uuid4()
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(call, producer, "wait_for", job_id=job_id, at_most="30 s")
        wait_for(lambda: sleeps(db, producer), what="a look that found nothing")
        assert f"dropped {day}" in {row["step"] for row in call(db, "maintain")}
        assert not answer.done()
        if job == "unknown":
            producer.cancel_safe()
        else:
            call(db, "complete", **own(claim_one(db)))
            assert answer.result()[0]["state"] == "completed"
    assert day not in days(db)


def sleeps(db: Db, other: Db) -> bool:
    """Whether another session sleeps in the middle of a call."""
    pid = other.info.backend_pid
    return query(
        db, "select 1 from pg_stat_activity where pid = %(pid)s and wait_event = 'PgSleep'", pid=pid
    ) != []  # fmt: skip


def test_maintenance_from_eight_sessions_beside_work_drops_each_day_once_and_fails_nowhere(
    db: Db, connect: Connect
) -> None:
    names = [make_day(db, n) for n in range(9, 15)]
    for n in range(9, 15):
        ago(db, finished(db), timedelta(days=n))
    dropped: list[str] = []

    def keep(session: Db) -> None:
        for verb in ("maintain", "prune") * 5:
            steps = [row["step"] for row in call(session, verb)]
            dropped.extend(step.split()[1] for step in steps if step.startswith("dropped "))

    with ThreadPoolExecutor(10) as threads:
        keeping = [threads.submit(keep, connect(f"keeper {n}")) for n in range(8)]
        working = threads.submit(work_alone, connect("worker"), 40)
        for each in keeping:
            each.result()
        assert working.result() == 40
    call(db, "prune")
    assert not set(names) & set(days(db))
    assert len(dropped) == len(set(dropped))


def work_alone(session: Db, count: int) -> int:
    """Enqueue, claim and complete one job after the other; how many were completed."""
    done = 0
    for _ in range(count):
        done += len(call(session, "complete", **own(leased(session))))
    return done


def test_who_drops_a_day_that_another_session_is_dropping_is_not_in_the_way(
    db: Db, connect: Connect
) -> None:
    names = [make_day(db, n) for n in (9, 10)]
    first, second = connect("first"), connect("second")
    query(first, "begin")
    call(first, "prune")
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(call, second, "prune")
        time.sleep(0.05)
        query(first, "commit")
        assert answer.result()
    assert not set(names) & set(days(db))


def test_two_that_make_the_same_partition_do_not_fail(db: Db, connect: Connect) -> None:
    query(db, "drop table taskboard." + [name for name in days(db) if name[-1].isdigit()][-1])
    first, second = connect("first"), connect("second")
    query(first, "begin")
    assert call(first, "make_partitions") == [{"make_partitions": 1}]
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(call, second, "make_partitions")
        time.sleep(0.03)
        query(first, "commit")
        assert answer.result()[0]["make_partitions"] in (0, 1)
    assert len([name for name in days(db) if name[-1].isdigit()]) == 4


def test_pruning_many_jobs_with_effects_takes_moments(db: Db) -> None:
    name = make_day(db, 9)
    job = finished(db)
    query(
        db,
        "insert into taskboard.history (id, finished_at, attempt, priority, failures, lost_leases,"
        " run_at, created_at, state, queue, kind, on_unknown, payload)"
        " select gen_random_uuid(), h.finished_at - interval '9 days', 1, 5, 0, 0, h.run_at,"
        " h.created_at, 'completed', 'default', 'mail', 'retry', '{}'"
        " from taskboard.history as h, generate_series(1, 100000) where h.id = %(id)s",
        id=job["job_id"],
    )
    query(
        db,
        sql.SQL(
            "insert into taskboard.effects (job_id, step, lease_token, attempt, idempotency_key,"
            " begun_at) select id, 'main', id, 1, id::text, finished_at from taskboard.{}"
            " limit 5000"
        ).format(sql.Identifier(name)),
    )
    # So many effects in one call, which must end in time; the next one goes on.
    for left in (3000, 1000):
        rows = call(db, "drop_days", names=[name], most_effects=2000)
        assert rows == [{"step": "days left, jobs with effects deleted", "touched": 2000}]
        assert len(query(db, "select 1 from taskboard.effects")) == left + 1
        # None of them can be retried without what it has done.
        stay = "select 1 from taskboard.history as h join taskboard.effects as e on job_id = id"
        assert len(query(db, stay)) == left + 1
        assert len(query(db, "select 1 from taskboard.history")) == 95_000 + left + 1
    began = time.monotonic()
    rows = call(db, "prune")
    assert time.monotonic() - began < 5
    assert {"step": f"dropped {name}", "touched": 96_000} in rows
    assert len(query(db, "select 1 from taskboard.effects")) == 1


# Settings.

SETTINGS = {
    "lease": "30 s", "timeout": "2 h", "max_attempts": "3", "max_lost_leases": "2",
    "backoff": "1 s", "backoff_max": "1 min", "payload_bytes": "100", "error_bytes": "80",
    "claim_jobs": "5", "bulk_jobs": "7", "lanes_most": "9", "lease_least": "1 s",
    "lease_most": "2 h",
    "delay_most": "1 day", "history": "30 days", "incidents_per_minute": "0", "notify": "off",
    "shard": "7",
}  # fmt: skip


def settings(db: Db) -> Row:
    (row,) = query(db, "select to_jsonb(s) as all from taskboard.settings as s")
    found: Row = row["all"]
    return found


@rows_only
def test_every_setting_can_be_changed_and_is_written_exactly(db: Db) -> None:
    before = settings(db)
    ours = {"one_row", "queue_rights", "queue_limits", "paused_at", "shard_id"}
    assert set(before) - set(SETTINGS) == ours
    query(db, "set timezone = 'America/New_York'")
    for name, value in SETTINGS.items():
        call(db, "configure", setting=name, value=value)
    after = settings(db)
    assert [name for name in SETTINGS if after[name] == before[name]] == []
    # A day is 24 hours, whatever the zone and the season.
    (row,) = query(
        db, "select delay_most = '24 hours' and extract(day from delay_most) = 0 as exact"
        " from taskboard.settings",
    )  # fmt: skip
    assert row["exact"]


@rows_only
def test_settings_count_at_once(db: Db, connect: Connect) -> None:
    worker = connect("worker")
    enqueue(worker)
    claim(worker)
    for name, value in SETTINGS.items():
        call(db, "configure", setting=name, value=value)
    job = leased(worker)
    assert (job["lease"], job["timeout"]) == (timedelta(seconds=30), timedelta(hours=2))
    assert job["max_attempts"] == 3 and job["job_id"].bytes[-2:] == bytes([0, 7])
    raises(worker, "22023", "claim", max_jobs=6)
    raises(worker, "22023", "enqueue_many", kind="mail", payloads=[{}] * 8)
    raises(worker, "22023", "enqueue", kind="mail", payload={"text": "x" * 200})
    raises(worker, "22023", "enqueue", kind="mail", delay="25 h")
    raises(worker, "22023", "claim", lease="0.5 s")
    call(worker, "fail", **own(job), error="x" * 500)
    assert len(row_of(db, job["job_id"])["last_error"].encode()) < 120
    assert call(worker, "complete", **own(job)) == []
    assert query(db, "select 1 from taskboard.incidents") == []


@rows_only
def test_absurd_settings_are_refused(db: Db) -> None:
    counts = ("max_attempts", "max_lost_leases", "payload_bytes", "error_bytes", "claim_jobs",
              "bulk_jobs")  # fmt: skip
    spans = ("lease", "timeout", "backoff", "lease_least", "lease_most", "delay_most")
    wrong: list[Row] = [
        *({"setting": name, "value": value} for name in counts
          for value in ("0", "-1", "1.5", "x", "", "NaN", "99999999999", "1e9", "null", "[]")),
        *({"setting": name, "value": value} for name in spans
          for value in ("0", "-1 s", "x", "", "999999999999 years", "1e400 s", "NaN")),
        {"setting": "history", "value": "-1 s"},
        {"setting": "incidents_per_minute", "value": "-1"},
        {"setting": "notify", "value": "perhaps"},
        {"setting": "notify", "value": ""},
        {"setting": "shard", "value": "-1"},
        {"setting": "shard", "value": "65536"},
        {"setting": "backoff_max", "value": "1 s"},
        {"setting": "backoff", "value": "2 h"},
        {"setting": "lease_least", "value": "25 h"},
        {"setting": "lease_most", "value": "0.01 s"},
        *({"setting": name, "value": "true"}
          for name in ("one_row", "queue_rights", "paused_at", "", "LEASE", "nothing", "lease ")),
    ]  # fmt: skip
    refuses(
        db,
        "configure",
        {"setting": "lease", "value": "60 s"},
        [
            *((arguments, "22023") for arguments in wrong),
            ({"setting": None}, "22004"),
            ({"value": None}, "22004"),
        ],
    )


@rows_only
@pytest.mark.parametrize("value", ["infinity", "100000 years", "178000000 years"])
@pytest.mark.parametrize(
    "name", ["lease", "timeout", "backoff_max", "lease_most", "delay_most", "history"]
)
def test_a_setting_without_bounds_is_refused_or_stops_no_verb(
    db: Db, name: str, value: str
) -> None:
    try:
        call(db, "configure", setting=name, value=value)
    except psycopg.Error as error:
        assert error.sqlstate == "22023"
        return
    change_all(db)
    assert call(db, "maintain") != []


def change_all(db: Db) -> None:
    """Do with jobs what needs the settings; none of it may raise."""
    job = leased(db)
    assert len(call(db, "renew", **own(job))) == 1
    assert len(call(db, "renew_many", **pairs(job))) == 1
    assert call(db, "begin_effect", **own(job))[0]["state"] == "fresh"
    query(
        db, "update taskboard.jobs set failures = 100, max_attempts = 1000 where id = %(id)s",
        id=job["job_id"],
    )  # fmt: skip
    assert call(db, "fail", **own(job))[0]["state"] == "scheduled"
    expire(db, job["job_id"])
    assert len(call(db, "release", **own(claim_one(db)))) == 1
    assert len(call(db, "complete", **own(claim_one(db)))) == 1
    assert live(db, job["job_id"]) is None


@rows_only
def test_what_a_queue_keeps_is_checked(db: Db) -> None:
    refuses(
        db,
        "keep_history",
        {"queue": "default"},
        [
            ({"queue": None}, "22004"),
            ({"queue": ""}, "22023"),
            ({"queue": "q" * 201}, "22023"),
            ({"completed": None}, "22004"),
            ({"failed_for": "-1 s"}, "22023"),
            ({"failed_for": "1000000 years"}, "22023"),
        ],
    )


@rows_only
def test_what_a_queue_keeps_leaves_its_limits_and_its_pause_alone(db: Db) -> None:
    call(db, "limit_queue", queue="q", max_running=1, lease="9 s")
    call(db, "pause", queue="q")
    call(db, "keep_history", queue="q", completed=False, failed_for="9 days")
    call(db, "limit_queue", queue="q", max_running=2)
    (row,) = query(db, "select * from taskboard.queues")
    assert row["paused_at"] is not None and row["max_running"] == 2
    assert (row["keep_completed"], row["keep_failed"]) == (False, timedelta(days=9))


def test_two_at_once_change_different_settings(db: Db, connect: Connect) -> None:
    first, second = connect("first"), connect("second")
    query(first, "begin")
    call(first, "configure", setting="max_attempts", value="7")
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(call, second, "configure", setting="max_lost_leases", value="8")
        wait_until_blocked(db, second.info.backend_pid)
        query(first, "commit")
        answer.result()
    found = settings(db)
    assert (found["max_attempts"], found["max_lost_leases"]) == (7, 8)


def test_work_goes_on_while_a_setting_is_being_changed(db: Db, connect: Connect) -> None:
    operator = connect("operator")
    query(operator, "begin")
    call(operator, "configure", setting="lease", value="9 s")
    query(db, "set statement_timeout = '2 s'")
    assert leased(db)["lease"] == timedelta(seconds=60)
    query(operator, "commit")
    assert leased(db)["lease"] == timedelta(seconds=9)
    set_default(db, "lease", HOUR)
    assert isinstance(leased(db)["job_id"], UUID)
