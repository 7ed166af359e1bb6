from __future__ import annotations

from collections.abc import Callable
from datetime import date, timedelta
from typing import Any
from uuid import UUID

import pytest
from psycopg import sql
from verbs import (
    Db,
    Row,
    call,
    claim_one,
    clock,
    ended,
    enqueue,
    everything,
    lease_status,
    leased,
    own,
    query,
    raises,
    refuses,
    set_default,
    state,
    states,
)

from support import expire


def partitions(db: Db) -> set[str]:
    return {
        row["name"]
        for row in query(
            db,
            "select inhrelid::regclass::text as name from pg_inherits"
            " where inhparent = 'taskboard.history'::regclass",
        )
    }


def today(db: Db) -> date:
    (row,) = query(db, "select (clock_timestamp() at time zone 'UTC')::date as day")
    found: date = row["day"]
    return found


def name_of(day: date) -> str:
    return f"taskboard.history_{day:%Y%m%d}"


def drop(db: Db, day: date) -> None:
    query(db, f"drop table {name_of(day)}")


def make_partition(db: Db, day: date) -> None:
    """What maintain made on that day."""
    following = day + timedelta(days=1)
    name = sql.Identifier("taskboard", f"history_{day:%Y%m%d}")
    (owner,) = query(
        db,
        "select proowner::regrole::text as name from pg_proc"
        " where oid = 'taskboard.maintain()'::regprocedure",
    )
    query(
        db,
        sql.SQL(
            "create table {} partition of taskboard.history for values from ({}) to ({})"
        ).format(name, sql.Literal(f"{day} 00:00Z"), sql.Literal(f"{following} 00:00Z")),
    )
    query(db, sql.SQL("alter table {} owner to {}").format(name, sql.Identifier(owner["name"])))


def finished(db: Db, ago: timedelta, **options: Any) -> UUID:
    """A job with an effect that was completed a while ago."""
    job = leased(db, **options)
    call(db, "begin_effect", **own(job))
    call(db, "complete", **own(job))
    query(
        db,
        "update taskboard.history set finished_at = finished_at - %(ago)s where id = %(id)s",
        ago=ago,
        id=job["job_id"],
    )
    return UUID(str(job["job_id"]))


def known(db: Db, job_id: UUID) -> tuple[int, int]:
    """How many rows of history and of effects a job has."""
    return (
        len(query(db, "select 1 from taskboard.history where id = %(id)s", id=job_id)),
        len(query(db, "select 1 from taskboard.effects where job_id = %(id)s", id=job_id)),
    )


def touched(rows: list[Row], step: str) -> int:
    return sum(row["touched"] for row in rows if row["step"] == step)


def test_history_has_partitions_for_today_and_the_days_ahead(db: Db) -> None:
    days = {name_of(today(db) + timedelta(days=n)) for n in range(4)}
    assert days <= partitions(db)
    drop(db, today(db) + timedelta(days=2))
    assert touched(call(db, "maintain"), "partitions made") == 1
    assert days <= partitions(db)
    assert touched(call(db, "maintain"), "partitions made") == 0


def test_a_finished_job_is_stored_in_the_partition_of_its_day(db: Db) -> None:
    call(db, "complete", **own(leased(db)))
    (row,) = query(db, "select tableoid::regclass::text as name from taskboard.history")
    assert row["name"] == name_of(today(db))


def test_without_a_partition_jobs_finish_all_the_same_and_maintenance_goes_on(db: Db) -> None:
    drop(db, today(db))
    job = leased(db)
    call(db, "complete", **own(job))
    (row,) = query(db, "select tableoid::regclass::text as name from taskboard.history")
    assert row["name"] == "taskboard.history_default"
    # The default partition has rows of today, so today gets none of its own.
    call(db, "maintain")
    assert name_of(today(db)) not in partitions(db)
    assert state(db, job["job_id"]) == "completed"
    assert lease_status(db, job) == "completed_by_you"
    call(db, "retry", job_id=job["job_id"])
    assert touched(call(db, "maintain"), "partitions made") == 1


def test_whole_days_past_their_retention_are_dropped_with_their_effects(db: Db) -> None:
    old_day, kept_day = (today(db) - timedelta(days=n) for n in (9, 7))
    for day in (old_day, kept_day):
        make_partition(db, day)
    old, kept = finished(db, timedelta(days=9)), finished(db, timedelta(days=7))
    new = finished(db, timedelta(0))
    rows = call(db, "maintain")
    assert touched(rows, f"dropped history_{old_day:%Y%m%d}") == 1
    assert name_of(old_day) not in partitions(db)
    assert [known(db, job_id) for job_id in (old, kept, new)] == [(0, 0), (1, 1), (1, 1)]


def test_jobs_in_the_default_partition_past_their_retention_are_forgotten(db: Db) -> None:
    old, kept = finished(db, timedelta(days=8)), finished(db, timedelta(days=6))
    call(db, "prune")
    assert (known(db, old), known(db, kept)) == ((0, 0), (1, 1))
    call(db, "prune", keep="5 days")
    assert known(db, kept) == (0, 0)


def test_retention_is_a_setting(db: Db) -> None:
    job_id = finished(db, timedelta(hours=3))
    set_default(db, "history", timedelta(hours=2))
    query(db, "select set_config('timezone', 'America/New_York', false)")
    call(db, "maintain")
    # Today's partition stays whole until the day is over; what is of yesterday may have gone.
    assert known(db, job_id) in ((0, 0), (1, 1))
    job_id = finished(db, timedelta(days=4))
    call(db, "maintain")
    assert known(db, job_id) == (0, 0)


def test_the_effects_of_live_jobs_stay_however_old(db: Db) -> None:
    retried, waiting = finished(db, timedelta(days=30)), leased(db)
    call(db, "retry", job_id=retried)
    call(db, "begin_effect", **own(waiting))
    query(db, "update taskboard.effects set begun_at = begun_at - interval '30 days'")
    call(db, "maintain")
    assert known(db, retried) == (0, 1)
    assert known(db, waiting["job_id"]) == (0, 1)


def test_live_jobs_are_never_pruned(db: Db) -> None:
    jobs = [enqueue(db, delay="1 h"), leased(db)["job_id"]]
    query(db, "update taskboard.jobs set created_at = created_at - interval '1 year'")
    call(db, "prune", keep="0")
    assert states(db, *jobs) == ["scheduled", "running"]


def test_a_day_that_somebody_reads_is_left_to_the_next_call(
    db: Db, connect: Callable[..., Db]
) -> None:
    day = today(db) - timedelta(days=9)
    make_partition(db, day)
    job_id = finished(db, timedelta(days=9))
    reader = connect()
    reader.execute("begin")
    query(reader, "select * from taskboard.history")
    call(db, "maintain")
    assert known(db, job_id) == (1, 1)
    reader.execute("rollback")
    call(db, "maintain")
    assert known(db, job_id) == (0, 0)


def test_unique_keys_past_their_time_are_forgotten(db: Db) -> None:
    call(db, "complete", **own(leased(db, unique_key="old", unique_for="1 hour")))
    call(db, "complete", **own(leased(db, unique_key="new", unique_for="1 hour")))
    held = enqueue(db, unique_key="live", unique_for="1 hour", delay="1 day")
    query(
        db,
        "update taskboard.unique_keys set held_until = held_until - interval '1 hour'"
        " where key <> 'new'",
    )
    assert touched(call(db, "prune"), "unique keys freed") == 1
    keys = query(db, "select key from taskboard.unique_keys order by key")
    assert [row["key"] for row in keys] == ["live", "new"]
    assert state(db, held) == "scheduled"


def test_old_incidents_are_forgotten(db: Db) -> None:
    job = leased(db)
    call(db, "release", **own(job), delay="1 h")
    call(db, "release", **own(job))
    query(db, "update taskboard.incidents set happened_at = happened_at - interval '8 days'")
    call(db, "release", **own(job))
    assert touched(call(db, "prune"), "incidents deleted") == 1
    assert len(query(db, "select 1 from taskboard.incidents")) == 1


def test_exhausted_jobs_of_lanes_that_nobody_claims_are_ended(db: Db) -> None:
    doomed = [leased(db, kind, max_lost_leases=1) for kind in ("mail", "bill")]
    alive, lapsed = leased(db), leased(db)
    for job in (*doomed, lapsed):
        expire(db, job["job_id"])
    assert touched(call(db, "maintain"), "exhausted jobs ended") == 2
    assert states(db, *(job["job_id"] for job in doomed)) == ["failed", "failed"]
    assert states(db, alive["job_id"], lapsed["job_id"]) == ["running", "expired"]
    assert ended(db, doomed[0]["job_id"])["lost_leases"] == 1


@pytest.mark.parametrize("outcome", ["complete", "claim"])
def test_maintenance_never_overwrites_what_happens_meanwhile(
    db: Db, connect: Callable[..., Db], outcome: str
) -> None:
    job = leased(db, max_lost_leases=1)
    expire(db, job["job_id"])
    other = connect()
    other.execute("begin")
    if outcome == "complete":
        call(other, "complete", **own(job))
    else:
        query(other, "update taskboard.jobs set max_lost_leases = 5")
        again = claim_one(other, worker="b")
    assert touched(call(db, "maintain"), "exhausted jobs ended") == 0
    other.execute("commit")
    assert touched(call(db, "maintain"), "exhausted jobs ended") == 0
    if outcome == "complete":
        assert state(db, job["job_id"]) == "completed"
    else:
        assert len(call(db, "complete", **own(again))) == 1


def test_two_at_once_do_not_wait_for_each_other(db: Db, connect: Callable[..., Db]) -> None:
    other = connect()
    other.execute("begin")
    assert call(other, "maintain") != []
    assert call(db, "maintain") == []
    call(db, "complete", **own(leased(db)))
    other.execute("rollback")


def test_it_may_run_again_and_again(db: Db) -> None:
    finished(db, timedelta(days=8))
    call(db, "maintain")
    before = everything(db)
    rows = call(db, "maintain")
    assert all(row["touched"] == 0 for row in rows)
    assert everything(db) == before


def test_keys_that_are_just_taken_again_hold_up_no_maintenance(
    db: Db, connect: Callable[..., Db]
) -> None:
    call(db, "complete", **own(leased(db, unique_key="u", unique_for="1 hour")))
    query(db, "update taskboard.unique_keys set held_until = held_until - interval '1 hour'")
    old = finished(db, timedelta(days=8))
    producer = connect()
    producer.execute("begin")
    taken = enqueue(producer, unique_key="u")
    assert call(db, "maintain") != []
    assert known(db, old) == (0, 0)
    producer.execute("commit")
    assert state(db, taken) == "ready"
    (row,) = call(db, "enqueue", kind="mail", unique_key="u")
    assert row == {"job_id": taken, "created": False}


def test_old_jobs_that_are_just_retried_hold_up_no_maintenance(
    db: Db, connect: Callable[..., Db]
) -> None:
    retried, old = finished(db, timedelta(days=8)), finished(db, timedelta(days=8))
    operator = connect()
    operator.execute("begin")
    call(operator, "retry", job_id=retried)
    assert call(db, "maintain") != []
    operator.execute("commit")
    assert state(db, retried) == "ready" and known(db, retried) == (0, 1)
    call(db, "maintain")
    assert known(db, old) == (0, 0)


def test_a_finished_job_that_is_pruned_is_unknown(db: Db) -> None:
    job = leased(db)
    call(db, "complete", **own(job))
    query(db, "update taskboard.history set finished_at = finished_at - interval '8 days'")
    call(db, "prune")
    assert call(db, "job", job_id=job["job_id"]) == []
    assert lease_status(db, job) == "unknown_job"
    assert call(db, "complete", **own(job)) == []


def test_s5_a_queue_that_keeps_nothing_still_knows_id_and_token_for_an_hour(db: Db) -> None:
    """S5: the same completion repeated is answered, also by a queue that keeps no history."""
    call(db, "keep_history", queue="default", completed=False)
    job = leased(db, payload={"secret": 1}, headers={"secret": 1})
    first = call(db, "complete", **own(job), result={"secret": 1})
    kept = ended(db, job["job_id"])
    assert (kept["payload"], kept["headers"], kept["result"]) == (None, None, None)
    call(db, "maintain")
    assert call(db, "complete", **own(job)) == first
    assert lease_status(db, job) == "completed_by_you"
    raises(db, "TB003", "retry", job_id=job["job_id"])
    query(db, "update taskboard.history set finished_at = finished_at - interval '61 minutes'")
    call(db, "maintain")
    assert call(db, "complete", **own(job)) == []
    assert lease_status(db, job) == "unknown_job"


def test_s5_with_no_retention_at_all_a_job_is_still_known_for_an_hour(db: Db) -> None:
    """S5, across the end of a day: the partition of yesterday may hold what ended just now."""
    set_default(db, "history", timedelta(0))
    yesterday = today(db) - timedelta(days=1)
    make_partition(db, yesterday)
    job = leased(db)
    call(db, "complete", **own(job))
    # As if it were half an hour past midnight, and the job had ended half an hour before.
    (row,) = query(db, "select clock_timestamp()::time < '01:00' as early")
    query(
        db,
        "update taskboard.history set finished_at = %(at)s",
        at=f"{today(db)} 00:00Z" if row["early"] else clock(db) - timedelta(minutes=50),
    )
    call(db, "prune", keep="0")
    assert len(call(db, "complete", **own(job))) == 1


def test_a_queue_may_keep_failed_jobs_when_the_rest_has_gone(db: Db) -> None:
    call(db, "keep_history", queue="slow", failed_for="30 days")
    make_partition(db, today(db) - timedelta(days=9))
    jobs = []
    for queue, days in (("slow", 9), ("slow", 20), ("default", 9)):
        job = leased(db, queue=queue)
        call(db, "fail", **own(job), permanent=True)
        query(
            db,
            "update taskboard.history set finished_at = finished_at - %(ago)s where id = %(id)s",
            ago=timedelta(days=days),
            id=job["job_id"],
        )
        jobs.append(job["job_id"])
    for _ in range(2):
        call(db, "maintain")
        assert [known(db, job_id)[0] for job_id in jobs] == [1, 1, 0]
    query(db, "update taskboard.history set finished_at = finished_at - interval '22 days'")
    call(db, "maintain")
    assert [known(db, job_id)[0] for job_id in jobs] == [0, 0, 0]


def test_absurd_rules_of_keeping_are_refused(db: Db) -> None:
    refuses(
        db,
        "keep_history",
        {"queue": "slow"},
        [
            ({"queue": None}, "22004"),
            ({"queue": ""}, "22023"),
            ({"completed": None}, "22004"),
            ({"failed_for": "-1 s"}, "22023"),
            ({"failed_for": "1000 years"}, "22023"),
        ],
    )


def test_absurd_arguments_are_refused_and_prune_nothing(db: Db) -> None:
    finished(db, timedelta(days=30))
    refuses(
        db,
        "prune",
        {},
        [({"keep": "-1 s"}, "22023"), ({"keep": "1000 years"}, "22023")],
    )
    if db.info.server_version >= 170000:
        refuses(db, "prune", {}, [({"keep": "infinity"}, "22023")])
    assert clock(db)


def test_a_call_that_drops_a_day_leaves_keys_and_exhausted_jobs_to_the_next(db: Db) -> None:
    """Their locks last until it commits, and dropping a long day may take seconds."""
    make_partition(db, today(db) - timedelta(days=9))
    old = finished(db, timedelta(days=9))
    call(db, "complete", **own(leased(db, unique_key="u", unique_for="1 hour")))
    query(db, "update taskboard.unique_keys set held_until = held_until - interval '1 hour'")
    doomed = leased(db, max_lost_leases=1)
    expire(db, doomed["job_id"])
    call(db, "maintain")
    assert known(db, old) == (0, 0)
    assert state(db, doomed["job_id"]) == "expired"
    assert len(query(db, "select 1 from taskboard.unique_keys")) == 1
    rows = call(db, "maintain")
    assert (touched(rows, "exhausted jobs ended"), touched(rows, "unique keys freed")) == (1, 1)
    assert state(db, doomed["job_id"]) == "failed"


def test_under_a_long_read_a_day_that_is_left_is_not_even_prepared_to_go(
    db: Db, connect: Callable[..., Db]
) -> None:
    make_partition(db, today(db) - timedelta(days=9))
    old = finished(db, timedelta(days=9))
    reader = connect()
    reader.execute("begin")
    query(reader, "select * from taskboard.history")
    query(db, "begin")
    assert touched(call(db, "maintain"), "days left, history is being read") == 1
    (effects,) = query(
        db,
        "select n_tup_del from pg_stat_xact_user_tables"
        " where relid = 'taskboard.effects'::regclass",
    )
    query(db, "commit")
    assert effects["n_tup_del"] == 0 and known(db, old) == (1, 1)


def test_a_vacuum_of_another_day_keeps_no_day_from_being_dropped(
    db: Db, connect: Callable[..., Db]
) -> None:
    make_partition(db, today(db) - timedelta(days=9))
    old = finished(db, timedelta(days=9))
    vacuum = connect()
    vacuum.execute("begin")
    # The lock that a vacuum holds as long as it takes.
    query(vacuum, f"lock table {name_of(today(db))} in share update exclusive mode")
    call(db, "maintain")
    assert known(db, old) == (0, 0)
    vacuum.execute("rollback")
