"""Schedules over years: each occurrence once, by a calendar of this file's own, however many run.

The calendar takes nothing from the library that the runner reads rules with: it looks at every
minute of every day, and asks zoneinfo what the clock on the wall says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from functools import partial
from itertools import takewhile
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from support import Connection, rows
from taskboard import connections, schedules
from taskboard.schedules import occurrences

MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)
BERLIN, NEW_YORK, LORD_HOWE = "Europe/Berlin", "America/New_York", "Australia/Lord_Howe"


@dataclass(frozen=True, slots=True)
class Rule:
    """A cron rule, and what it means, said again: which minutes, hours and days."""

    cron: str
    minutes: frozenset[int]
    hours: frozenset[int]
    days: Callable[[date], bool] = lambda day: True

    @property
    def by_real_time(self) -> bool:
        return any(field.startswith("*") for field in self.cron.split()[:2])


EVERY_HOUR = frozenset(range(24))
NIGHTLY = Rule("30 2 * * *", frozenset({30}), frozenset({2}))
EARLY = Rule("15,45 1,2 * * *", frozenset({15, 45}), frozenset({1, 2}))
HALF_HOURS = Rule("*/30 1-3 * * 0", frozenset({0, 30}), frozenset({1, 2, 3}),
                  lambda day: day.isoweekday() == 7)  # fmt: skip
HOURLY = Rule("5 * 25-28 3,10 *", frozenset({5}), EVERY_HOUR,
              lambda day: 25 <= day.day <= 28 and day.month in (3, 10))  # fmt: skip
MONTHLY = Rule("0 9 1 * *", frozenset({0}), frozenset({9}), lambda day: day.day == 1)
RULES = [NIGHTLY, EARLY, HALF_HOURS, HOURLY, MONTHLY]
ZONES = [
    BERLIN, NEW_YORK, LORD_HOWE, "Africa/Cairo", "America/St_Johns", "Asia/Kolkata", "UTC",
]  # fmt: skip


def calendar(rule: Rule, zone: str, start: datetime, end: datetime) -> list[datetime]:
    """The occurrences after start, to end, in UTC."""
    found: set[datetime] = set()
    day = (start - 2 * DAY).date()
    while day <= (end + 2 * DAY).date():
        if rule.days(day):
            for hour in rule.hours:
                for minute in rule.minutes:
                    wall = datetime.combine(day, time(hour, minute))
                    found.update(instants(wall, ZoneInfo(zone), rule.by_real_time))
        day += DAY
    return sorted(at for at in found if start < at <= end)


def instants(wall: datetime, zone: ZoneInfo, by_real_time: bool) -> Iterator[datetime]:
    """When a clock on the wall shows this: once; in the fold twice; in the gap right after it."""
    first, second = (wall.replace(tzinfo=zone, fold=fold).astimezone(UTC) for fold in (0, 1))
    if first.astimezone(zone).replace(tzinfo=None) == wall:
        yield first
        if by_real_time:
            yield second
    elif not by_real_time:
        # In the gap, by the offset from before it, it is as long after the change as it lies in it.
        at = first
        while (at - MINUTE).astimezone(zone).utcoffset() == first.astimezone(zone).utcoffset():
            at -= MINUTE
        yield at


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def between(rule: Rule, zone: str, start: datetime, end: datetime) -> list[datetime]:
    return list(takewhile(lambda found: found <= end, occurrences(rule.cron, zone, start)))


def test_the_calendar_knows_the_gap_and_the_fold() -> None:
    def of_day(rule: Rule, zone: str, start: datetime) -> list[str]:
        return [f"{found:%H:%M}" for found in calendar(rule, zone, start, start + DAY)]

    assert of_day(NIGHTLY, BERLIN, at("2026-03-29")) == ["01:00"]
    assert of_day(NIGHTLY, BERLIN, at("2026-10-25")) == ["00:30"]
    assert of_day(NIGHTLY, NEW_YORK, at("2026-03-08")) == ["07:00"]
    assert of_day(HALF_HOURS, BERLIN, at("2026-10-24 23:59")) == [
        "00:00", "00:30", "01:00", "01:30", "02:00", "02:30",
    ]  # fmt: skip
    # Half an hour: from 02:00 to 02:30, and from 02:00 back to 01:30.
    assert of_day(EARLY, LORD_HOWE, at("2026-10-03 12:00")) == ["14:45", "15:15", "15:30", "15:45"]
    assert of_day(EARLY, LORD_HOWE, at("2026-04-04 12:00")) == ["14:15", "14:45", "15:45", "16:15"]


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.cron)
def test_years_are_as_the_calendar_says(rule: Rule, zone: str) -> None:
    start, end = at("2025-01-01 00:00:30"), at("2027-01-01")
    assert between(rule, zone, start, end) == calendar(rule, zone, start, end)


# With the database: its schedules go by a clock that is a row, so that years pass at once.

START = at("2023-01-01 00:00:30")


@pytest.fixture
def clock(db: Connection) -> Callable[[datetime], object]:
    db.execute("create table public.clock as select %s::timestamptz as now", [START])
    source = "select prosrc from pg_proc where oid = 'taskboard.due_schedules'::regproc"
    body = rows(db, source)[0][0]
    assert body.count("clock_timestamp()") == 2
    body = body.replace("clock_timestamp()", "(select c.now from public.clock as c)")
    db.execute(
        "create or replace function taskboard.due_schedules() returns setof taskboard.due_schedule"
        f" language plpgsql stable set search_path = pg_catalog, pg_temp as $${body}$$".encode()
    )
    return lambda now: db.execute("update public.clock set now = %s", [now])


def link(dsn: str) -> connections.Link:
    return connections.Link("t", partial(connections.connect, dsn, "t"), within=10, cap=1)


class Stalled:
    """A runner that has read what is due, and stalls before its first step until it may go on."""

    def __init__(self, dsn: str) -> None:
        self.link, self.read, self.go_on = link(dsn), asyncio.Event(), asyncio.Event()
        self.answers: list[Any] = []

    async def call(self, function: Any, *arguments: Any, **named: Any) -> Any:
        if function is not schedules.due_schedules:
            self.read.set()
            await self.go_on.wait()
        answer = await self.link.call(function, *arguments, **named)
        if function is not schedules.due_schedules:
            self.answers.append(answer)
        return answer

    async def advance(self) -> int:
        self.read.clear()
        self.go_on.clear()
        return await schedules.advance(self)  # type: ignore[arg-type]


def enqueued(db: Connection, name: str) -> list[datetime]:
    """The occurrences that became jobs, by the jobs."""
    found = rows(
        db, "select (headers->>'occurrence')::timestamptz from taskboard.jobs"
        " where headers->>'schedule' = %s order by 1", [name],
    )  # fmt: skip
    return [row[0].astimezone(UTC) for row in found]


def schedule(db: Connection, name: str, rule: Rule, zone: str, misfire: str = "all") -> None:
    db.execute(
        "select taskboard.schedule(%s, %s, 'k', time_zone => %s, misfire => %s)",
        [name, rule.cron, zone, misfire],
    )


def test_three_runners_one_of_them_always_late_go_through_two_years_with_an_edit_and_a_pause(
    db: Connection, dsn: str, clock: Callable[[datetime], object]
) -> None:
    kept = {
        "berlin": (NIGHTLY, BERLIN), "new york": (NIGHTLY, NEW_YORK), "howe": (NIGHTLY, LORD_HOWE),
        "half hours": (HALF_HOURS, LORD_HOWE), "hourly": (HOURLY, BERLIN),
    }  # fmt: skip
    for name, pair in kept.items():
        schedule(db, name, *pair)
    schedule(db, "edited", NIGHTLY, NEW_YORK)
    schedule(db, "paused", NIGHTLY, BERLIN)
    looks = [START + n * 17 * DAY for n in range(44)]
    edited, paused, resumed = 20, 25, 31

    async def live() -> None:
        prompt, late = [link(dsn) for _ in range(2)], Stalled(dsn)
        for n, now in enumerate(looks):
            clock(now)
            async with asyncio.timeout(30), asyncio.TaskGroup() as group:
                behind = group.create_task(late.advance())
                await late.read.wait()
                if n == edited:
                    schedule(db, "edited", NIGHTLY, BERLIN)
                if n in (paused, resumed):
                    db.execute("select taskboard.pause_schedule('paused', %s)", [n == paused])
                # The two at once, until they leave nothing to do.
                while sum(await asyncio.gather(*map(schedules.advance, prompt))):
                    pass
                late.go_on.set()
            assert behind.result() == 0, "all that it knew of has been done"
        assert len(late.answers) > len(looks) and set(late.answers) == {None}
        for each in (*prompt, late.link):
            each.close()

    asyncio.run(live())
    for name, (rule, zone) in kept.items():
        assert enqueued(db, name) == calendar(rule, zone, START, looks[-1]), name
    # A new rule holds from when it was given; what falls into a pause is not made up for.
    assert enqueued(db, "edited") == [
        *calendar(NIGHTLY, NEW_YORK, START, looks[edited - 1]),
        *calendar(NIGHTLY, BERLIN, looks[edited], looks[-1]),
    ]
    assert enqueued(db, "paused") == [
        *calendar(NIGHTLY, BERLIN, START, looks[paused - 1]),
        *calendar(NIGHTLY, BERLIN, looks[resumed], looks[-1]),
    ]


@pytest.mark.parametrize(
    ("misfire", "days"), [("skip", []), ("one", [-1]), ("all", range(-100, 0))]
)
def test_after_a_year_without_runners_as_many_are_made_up_for_as_the_schedule_says(
    misfire: str, days: Any, db: Connection, dsn: str, clock: Callable[[datetime], object]
) -> None:
    schedule(db, "s", NIGHTLY, BERLIN, misfire)
    year = calendar(NIGHTLY, BERLIN, START, START + 365 * DAY)

    async def live() -> None:
        first, second = link(dsn), link(dsn)
        assert await schedules.advance(first) == 0
        clock(START + 365 * DAY)
        while sum(await asyncio.gather(schedules.advance(first), schedules.advance(second))):
            pass
        for each in (first, second):
            each.close()

    asyncio.run(live())
    assert enqueued(db, "s") == [year[n] for n in days]
    (following,) = rows(db, "select next_at from taskboard.schedule_list")[0]
    assert following == calendar(NIGHTLY, BERLIN, year[-1], year[-1] + 2 * DAY)[0]


def test_a_first_date_that_was_worked_out_for_another_zone_is_not_taken(
    db: Connection, dsn: str
) -> None:
    schedule(db, "s", NIGHTLY, BERLIN)

    async def live() -> None:
        late = Stalled(dsn)
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            group.create_task(late.advance())
            await late.read.wait()
            schedule(db, "s", NIGHTLY, LORD_HOWE)
            late.go_on.set()
        assert rows(db, "select next_at from taskboard.schedules") == [(None,)]
        await schedules.advance(late.link)
        late.link.close()

    asyncio.run(live())
    now, following = rows(db, "select clock_timestamp(), next_at from taskboard.schedules")[0]
    assert following.astimezone(UTC) == calendar(NIGHTLY, LORD_HOWE, now, now + 2 * DAY)[0]
