"""Runners advance schedules: each occurrence once, whatever the clocks do and whoever is late."""

from __future__ import annotations

import asyncio
import logging
import random
from bisect import bisect_right
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import takewhile
from typing import Any

import psycopg
import pytest

from support import Connection, rows, wait_for
from taskboard import connections, schedules
from taskboard.schedules import Due, RuleError, first_after, occurrences, passed, plan

MINUTE = timedelta(minutes=1)
BERLIN, NEW_YORK = "Europe/Berlin", "America/New_York"


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def between(cron: str, zone: str, start: datetime, end: datetime) -> list[datetime]:
    """The occurrences after start, to end."""
    return list(takewhile(lambda found: found <= end, occurrences(cron, zone, start)))


# Zone, rule, first day, and the occurrences from then on, in UTC.
CHANGES = [
    # The gap: 02:30 is left out and happens right after it, at 03:00.
    (BERLIN, "30 2 * * *", "03-28", ["03-28 01:30", "03-29 01:00", "03-30 00:30"]),
    (NEW_YORK, "30 2 * * *", "03-07", ["03-07 07:30", "03-08 07:00", "03-09 06:30"]),
    (BERLIN, "0,30 2 * * *", "03-29", ["03-29 01:00", "03-30 00:00", "03-30 00:30"]),
    # The fold: an hour comes twice, its rules once, in the first.
    (BERLIN, "30 2 * * *", "10-24", ["10-24 00:30", "10-25 00:30", "10-26 01:30"]),
    (NEW_YORK, "30 1 * * *", "10-31", ["10-31 05:30", "11-01 05:30", "11-02 06:30"]),
    # By real time: every hour, every half of an hour.
    (BERLIN, "15 * * * *", "03-29", [f"03-29 {n:02}:15" for n in range(6)]),
    (BERLIN, "15 * * * *", "10-25", [f"10-25 {n:02}:15" for n in range(6)]),
    (NEW_YORK, "*/30 1 * * *", "11-01", [f"11-01 0{n}" for n in ("5:00", "5:30", "6:00", "6:30")]),
    (NEW_YORK, "*/30 2 * * *", "03-08", ["03-09 06:00", "03-09 06:30"]),
]  # fmt: skip


@pytest.mark.parametrize(("zone", "cron", "day", "expected"), CHANGES)
def test_when_the_clocks_change_nothing_is_left_out_and_nothing_comes_twice(
    zone: str, cron: str, day: str, expected: list[str]
) -> None:
    found = occurrences(cron, zone, at(f"2026-{day}"))
    assert [next(found) for _ in expected] == [at(f"2026-{text}") for text in expected]


@pytest.mark.parametrize("zone", [BERLIN, NEW_YORK, "Africa/Cairo", "Australia/Sydney", "UTC"])
@pytest.mark.parametrize(
    "cron",
    ["30 2 * * *", "0,30 1-3 * * *", "*/30 0-3 * * 0", "5 0 * * *", "15 */2 1-15 * 0"],
)
def test_wherever_one_starts_the_occurrences_are_the_same(cron: str, zone: str) -> None:
    start, end = at("2026-01-01"), at("2027-01-01")
    year = between(cron, zone, start, end)
    assert year == sorted(set(year))
    draw = random.Random(f"{cron} {zone}")
    # At random, and close to the hours at which clocks change.
    starts = [start + draw.random() * (end - start) for _ in range(5)]
    starts += [
        at(f"2026-{day}") + draw.uniform(-3, 6) * timedelta(hours=1)
        for day in ("03-29", "10-25", "03-08", "11-01", "04-24", "10-29", "04-05", "10-04") * 2
    ]
    for now in starts:
        number = bisect_right(year, now)
        if number == len(year):
            continue
        assert first_after(cron, zone, now) == year[number]
        if number > 3:
            due = Due("s", cron, zone, "all", year[max(number - 5, 0)], now)
            assert passed(due) == year[max(number - 5, 0) : number]


MINUTES = [at("2026-05-01 10:00") + n * MINUTE for n in range(200)]
# Misfire, how many minutes after the first the database says it is, which are enqueued, next.
POLICIES = [
    ("skip", 0.5, [0], 1), ("one", 0.5, [0], 1), ("all", 0.5, [0], 1),
    ("skip", 1.5, [1], 2), ("one", 1.5, [1], 2), ("all", 1.5, [0, 1], 2),
    ("one", 30.9, [30], 31), ("all", 30.9, range(31), 31), ("all", 150.2, range(51, 151), 151),
]  # fmt: skip


@pytest.mark.parametrize(("misfire", "late", "enqueued", "following"), POLICIES)
def test_what_is_made_up_for_is_a_choice(
    misfire: str, late: float, enqueued: Any, following: int
) -> None:
    due = Due("s", "* * * * *", "UTC", misfire, MINUTES[0], MINUTES[0] + late * MINUTE)
    steps = plan(due)
    assert [step.due_at for step in steps if step.enqueue] == [MINUTES[n] for n in enqueued]
    # Each step begins where the one before it ended.
    assert [step.due_at for step in steps] == [MINUTES[0], *(step.next_at for step in steps[:-1])]
    assert steps[-1].next_at == MINUTES[following]


def test_a_daily_occurrence_that_was_missed_is_skipped_or_made_up_for() -> None:
    noon = at("2026-05-01 12:00")
    for misfire, kept in (("skip", []), ("one", [noon]), ("all", [noon])):
        steps = plan(Due("s", "0 12 * * *", "UTC", misfire, noon, noon + timedelta(hours=5)))
        assert [step.due_at for step in steps if step.enqueue] == kept
        assert steps[-1].next_at == noon + timedelta(days=1)


def test_a_new_schedule_starts_with_what_comes_next() -> None:
    fold = at("2026-10-25 01:10")  # 02:10 in Berlin, for the second time
    (step,) = plan(Due("s", "30 2 * * *", BERLIN, "one", None, fold))
    assert (step.due_at, step.next_at, step.enqueue) == (None, at("2026-10-26 01:30"), False)


@pytest.mark.parametrize(
    ("cron", "zone", "why"),
    [
        ("* * * *", "UTC", "five fields"), ("* * * * * *", "UTC", "five fields"),
        ("@daily", "UTC", "five fields"), ("60 * * * *", "UTC", "bad minute"),
        ("0 0 30 2 *", "UTC", "day-of-month"), ("0 0 * 2 MON#6", "UTC", "bad day-of-week"),
        ("0 0 ² * *", "UTC", "bad"), ("", "UTC", "five fields"), ("*/0 * * * *", "UTC", "bad"),
        ("0 0 * * *", "Mars/Olympus", "time zone"), ("0 0 * * *", "", "time zone"),
        ("0 0 * * *", "../etc", "time zone"), ("0 0 * * *", "Europe", "time zone"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_with_the_reason(cron: str, zone: str, why: str) -> None:
    with pytest.raises(RuleError, match=why):
        first_after(cron, zone, at("2026-01-01"))


# With the database.


@pytest.fixture
def link(dsn: str) -> Callable[[], connections.Link]:
    return lambda: connections.Link("t", partial(connections.connect, dsn, "t"), within=10, cap=1)


def occurrences_of(db: Connection, name: str) -> list[datetime]:
    """The occurrences that became jobs, by the jobs."""
    sql = (
        "select (headers->>'occurrence')::timestamptz from taskboard.jobs"
        " where headers->>'schedule' = %s order by 1"
    )
    return [row[0].astimezone(UTC) for row in rows(db, sql, [name])]


@pytest.mark.parametrize(("misfire", "jobs"), [("skip", 0), ("one", 1), ("all", 25)])
def test_after_a_day_without_runners_they_do_as_the_schedule_says(
    misfire: str, jobs: int, db: Connection, link: Callable[[], connections.Link]
) -> None:
    db.execute("select taskboard.schedule('s', '0 * * * *', 'k', misfire => %s)", [misfire])
    past = "date_trunc('hour', clock_timestamp(), 'UTC') - interval '24 hours'"

    async def two_runners() -> int:
        first, second = link(), link()
        assert await schedules.advance(first) == 0
        db.execute(f"update taskboard.schedules set next_at = {past}")
        # Where this hour is younger than a minute, it has not been missed.
        fresh = rows(db, "select extract(minute from clock_timestamp()) = 0")[0][0]
        enqueued = sum(await asyncio.gather(*map(schedules.advance, (first, second, first))))
        assert await schedules.advance(second) == 0
        for each in (first, second):
            each.close()
        return enqueued - (fresh and misfire == "skip")

    assert asyncio.run(two_runners()) == jobs
    found = occurrences_of(db, "s")
    assert len(set(found)) == len(found)
    if misfire == "one":
        assert rows(db, "select clock_timestamp() - %s < interval '1 hour 1 minute'", found) == [
            (True,)
        ]


def test_a_schedule_that_cannot_be_read_is_logged_once_and_holds_up_no_other(
    db: Connection, link: Callable[[], connections.Link], caplog: pytest.LogCaptureFixture
) -> None:
    for name, cron in (("a bad", "at noon"), ("b good", "* * * * *"), ("c refused", "* * * * *")):
        db.execute("select taskboard.schedule(%s, %s, 'k')", [name, cron])
    complaints: schedules.Complaints = {}

    async def look() -> int:
        runner = link()
        enqueued = await schedules.advance(runner, complaints)
        runner.close()
        return enqueued

    asyncio.run(look())
    past = "date_trunc('minute', clock_timestamp())"
    db.execute(f"update taskboard.schedules set next_at = {past} where next_at > now()")
    db.execute(
        "update taskboard.schedules set payload = to_jsonb(repeat('x', 999)) where name ~ '^c'"
    )
    db.execute("select taskboard.configure('payload_bytes', '500')")
    assert asyncio.run(look()) == 1
    asyncio.run(look())
    assert [record.getMessage() for record in caplog.records] == [
        "schedule=a bad is left out: cron rule 'at noon': it has five fields",
        "schedule=c refused is left out: payload is larger than 500 bytes",
    ]
    assert rows(db, "select next_at from taskboard.schedules where name = 'a bad'") == [(None,)]
    # Once corrected they go on: at the next look, and when the database may be asked again.
    db.execute("select taskboard.schedule('a bad', '0 12 * * *', 'k')")
    db.execute("update taskboard.schedules set payload = '1' where name = 'c refused'")
    assert asyncio.run(look()) == 0 and complaints.keys() == {"c refused"}
    complaints["c refused"] = (complaints["c refused"][0], 0.0)
    assert asyncio.run(look()) == 1 and not complaints


def test_a_runner_looks_every_second_and_bears_a_refusal(
    db: Connection, link: Callable[[], connections.Link], login: Callable[..., str], dsn: str,
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(schedules, "EVERY", 0.05)
    caplog.set_level(logging.INFO)
    db.execute("select taskboard.schedule('s', '* * * * *', 'k')")
    stranger = partial(connections.connect, login(), "t")

    def make_due() -> None:
        db.execute("update taskboard.schedules set next_at = now() - interval '1 second'")

    async def until(condition: Callable[[], bool]) -> None:
        await asyncio.to_thread(wait_for, condition, seconds=20)

    async def runners() -> None:
        allowed, other = link(), connections.Link("o", stranger, within=10, cap=1)
        tasks = [asyncio.create_task(schedules.run(each)) for each in (allowed, other)]
        await until(lambda: rows(db, "select next_at from taskboard.schedules") != [(None,)])
        make_due()
        await until(lambda: len(occurrences_of(db, "s")) == 1)
        db.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name = 't' and datname = current_database()"
        )
        await asyncio.sleep(0.2)
        make_due()
        await until(lambda: len(occurrences_of(db, "s")) == 2)
        await until(lambda: bool(refusals()))
        assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        allowed.close()
        other.close()

    def refusals() -> list[str]:
        said = [record.getMessage() for record in caplog.records]
        return [text for text in said if "no schedules from this runner" in text]

    asyncio.run(runners())
    assert len(refusals()) == 1 and "permission denied" in refusals()[0]


def test_who_may_not_look_is_told_so(login: Callable[..., str]) -> None:
    async def look() -> None:
        dial = partial(connections.connect, login(), "t")
        stranger = connections.Link("o", dial, within=10, cap=1)
        try:
            await schedules.advance(stranger)
        finally:
            stranger.close()

    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        asyncio.run(look())
