"""Schedules: which occurrences of a cron rule are due, and what becomes of those that were missed.

Any number of runners work this out at the same time, from the database's clock. The database takes
each step from one of them (compare and set), so that each occurrence is enqueued once: there is no
leader, and nobody holds a lock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from uuid import UUID
from zoneinfo import ZoneInfo

import psycopg
from cronsim import CronSim, CronSimError

from taskboard.connections import REFUSED_PAUSE, Call, Link, as_it_is, every, keep_on, one, one_line

log = logging.getLogger(__name__)

EVERY = 1.0  # seconds from one look to the next
MISSED_AFTER = timedelta(seconds=60)  # an occurrence found later than that was missed
MADE_UP_FOR = 100  # most occurrences that the policy `all` makes up for


# By schedule: why it was left out, and from when on to ask the database again.
Complaints = dict[str, tuple[str, float]]


class RuleError(ValueError):
    """A cron rule or a time zone that cannot be read; the text says which, and why."""


@dataclass(frozen=True, slots=True)
class Due:
    """One row of due_schedules; `due_at` is None until a first date has been worked out."""

    name: str
    cron: str
    time_zone: str
    misfire: str
    due_at: datetime | None
    now: datetime


@dataclass(frozen=True, slots=True)
class Step:
    """A call of advance_schedule: from one date to another, and whether the first becomes a job."""

    due_at: datetime | None
    next_at: datetime
    enqueue: bool


def occurrences(
    cron: str, time_zone: str, start: datetime, *, back: bool = False
) -> Iterator[datetime]:
    """Yield the occurrences after an instant (before it, going `back`), as instants in UTC.

    As in Debian's cron: what falls into the hour that is left out when clocks go forward happens
    right after it; what falls into the hour that comes twice happens in the first; rules with `*`
    (or `*/n`) for the minute or the hour go by real time. Raises RuleError.
    """
    if len(cron.split()) != 5:  # the library would take a field for seconds
        raise RuleError(f"cron rule {cron!r}: it has five fields")
    try:
        zone = ZoneInfo(time_zone)
    except (LookupError, ValueError, OSError):
        raise RuleError(f"time zone {time_zone!r} is not known here") from None
    try:
        rule = CronSim(cron, start.astimezone(zone), reverse=back)
    except CronSimError as exc:
        raise RuleError(f"cron rule {cron!r}: {str(exc).lower()}") from None
    for local in rule:
        at = local.astimezone(UTC)
        # In the second pass of an hour the library counts from the first.
        if at < start if back else at > start:
            yield at


def first_after(cron: str, time_zone: str, start: datetime) -> datetime:
    """Return the next occurrence. Raises RuleError, also when there is none in fifty years."""
    for at in occurrences(cron, time_zone, start):
        return at
    raise RuleError(f"cron rule {cron!r}: it names a day that never comes")


def passed(due: Due) -> list[datetime]:
    """List the occurrences from `due_at` to now, oldest first: the newest MADE_UP_FOR of them."""
    assert due.due_at is not None
    found: list[datetime] = []
    # From a while ahead, so that no hour that comes twice lies between the start and now.
    for at in occurrences(due.cron, due.time_zone, due.now + timedelta(hours=3), back=True):
        if at <= due.due_at or len(found) == MADE_UP_FOR:
            break
        if at <= due.now:
            found.append(at)
    return [due.due_at, *reversed(found)][-MADE_UP_FOR:]


def plan(due: Due) -> list[Step]:
    """Work out the steps that bring a schedule up to date. Raises RuleError."""
    following = first_after(due.cron, due.time_zone, max(due.now, due.due_at or due.now))
    if due.due_at is None:
        return [Step(None, following, enqueue=False)]
    chosen = passed(due)
    if due.misfire != "all":
        chosen = chosen[-1:]
    if due.misfire == "skip" and due.now - chosen[-1] > MISSED_AFTER:
        chosen = []
    dates = [*chosen, following]
    steps = [Step(at, then, enqueue=True) for at, then in pairwise(dates)]
    if dates[0] != due.due_at:
        steps.insert(0, Step(due.due_at, dates[0], enqueue=False))
    return steps


due_schedules = every(
    "select name, cron, time_zone, misfire, due_at, now from taskboard.due_schedules()", Due
)
# Answers the job that was enqueued; None when there is none, or somebody was quicker.
advance_schedule: Call[UUID | None] = one(
    "select taskboard.advance_schedule(%s, %s, %s, %s, %s, %s)", as_it_is
)


async def advance(link: Link, complaints: Complaints | None = None) -> int:
    """Enqueue what is due by now; return how many jobs this runner enqueued.

    A schedule that cannot be read, or whose job is refused, holds up no other: it is left as it is
    and logged, once as long as the caller keeps `complaints`. Raises Weather, and psycopg.Error
    when this login may not look.
    """
    complaints = {} if complaints is None else complaints
    enqueued = 0
    for due in await link.call(due_schedules):
        known, again_at = complaints.get(due.name, ("", 0.0))
        if again_at > time.monotonic():
            continue
        try:
            for step in plan(due):
                dates = due.name, step.due_at, step.next_at
                job_id = await link.call(
                    advance_schedule, *dates, step.enqueue, due.cron, due.time_zone
                )
                if step.enqueue and job_id is None:
                    break  # another runner was here; it goes on from there
                enqueued += step.enqueue
        except (RuleError, psycopg.Error) as exc:
            text, refused = one_line(exc), isinstance(exc, psycopg.Error)
            # A rule is read again each time, for it may have been corrected; that asks nobody.
            complaints[due.name] = text, time.monotonic() + REFUSED_PAUSE if refused else 0.0
            if text != known:
                log.warning("schedule=%s is left out: %s", due.name, text)
        else:
            complaints.pop(due.name, None)
    return enqueued


async def run(link: Link) -> None:
    """Advance the schedules for ever, about once a second."""
    complaints: Complaints = {}
    await keep_on("no schedules from this runner", link, lambda: advance(link, complaints), EVERY)
