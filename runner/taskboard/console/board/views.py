"""How values are written on a page, and what the charts of the overview show."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from taskboard.console.board import charts
from taskboard.console.board.charts import Series
from taskboard.console.board.samples import MINUTE_LONG, MINUTES, Samples

PAGES = Path(__file__).parent / "pages"
NONE = "\N{EN DASH}"  # where there is nothing to show


def when(at: datetime | None) -> Markup | str:
    """Write an instant, in UTC."""
    if at is None:
        return NONE
    at = at.astimezone(UTC)
    return Markup('<time datetime="{}">{}</time>').format(
        at.isoformat(timespec="milliseconds"), at.strftime("%Y-%m-%d %H:%M:%S")
    )


def exactly(at: datetime) -> Markup:
    """Write an instant with its milliseconds."""
    text = at.astimezone(UTC).isoformat(" ", "milliseconds").removesuffix("+00:00")
    return Markup('<time datetime="{}Z">{}</time>').format(text.replace(" ", "T"), text)


def span(length: timedelta | float | None) -> str:
    """Write a duration with its two largest parts."""
    if length is None:
        return NONE
    seconds = length.total_seconds() if isinstance(length, timedelta) else float(length)
    sign, seconds = ("-", -seconds) if seconds < 0 else ("", seconds)
    if seconds < 1:
        return f"{sign}{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{sign}{seconds:.1f} s"
    for size, unit, part_size, part in (
        (86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"),
    ):  # fmt: skip
        if seconds >= size:
            rest = int(seconds % size // part_size)
            return f"{sign}{int(seconds // size)} {unit}" + (f" {rest} {part}" if rest else "")
    return f"{sign}{seconds:.0f} s"


def ago(at: datetime | None, now: datetime) -> str:
    """Say how long ago, or in how long."""
    if at is None:
        return NONE
    length = now - at
    return f"{span(length)} ago" if length >= timedelta(0) else f"in {span(-length)}"


def count(value: int) -> str:
    """Write a count; those of queue_stats end at 10,000 a lane."""
    return f"{value:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def document(value: Any) -> str:
    """Write JSON to be read, or a text as it is."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, indent=2)


def short_id(job_id: object) -> str:
    """The part of an id that tells jobs apart at a glance: not the beginning, which is a date."""
    text = str(job_id)
    return f"{text[:8]}…{text[-10:]}"


def ended_chart(samples: Samples) -> Markup:
    """Draw what ended, a minute a bar."""
    last = samples.now.replace(second=0, microsecond=0)
    times = [last - (MINUTES - number) * MINUTE_LONG for number in range(MINUTES)]
    found = [samples.minutes.get(at) for at in times]
    series = [
        Series(name, name, [getattr(one, name) if one else None for one in found])
        for name in ("completed", "failed", "cancelled")
    ]
    return charts.bars("Jobs that ended, per minute", times, series, 60)


def depth_chart(samples: Samples) -> Markup:
    """Draw how many jobs waited and ran."""
    times = [one.at for one in samples.depths]
    series = [
        Series(name, name, [getattr(one, name) for one in samples.depths])
        for name in ("ready", "running", "scheduled", "held")
    ]
    since = samples.now - MINUTES * MINUTE_LONG
    return charts.lines("Jobs by state", times, series, since=since, until=samples.now)


def seconds_chart(samples: Samples) -> Markup:
    """Draw how long last attempts took."""
    last = samples.now.replace(second=0, microsecond=0)
    times = [last - (MINUTES - number) * MINUTE_LONG for number in range(MINUTES)]
    found = [samples.minutes.get(at) for at in times]
    series = [
        Series("half of them", "half", [one.half if one else None for one in found]),
        Series("95 of 100", "most", [one.most if one else None for one in found]),
    ]
    return charts.lines("Seconds of the last attempt, no more than", times, series, " s")


def make_environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(PAGES), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {
        "when": when, "exactly": exactly, "span": span, "ago": ago, "count": count,
        "document": document, "short_id": short_id,
    }  # fmt: skip
    environment.globals |= {
        "ended_chart": ended_chart,
        "depth_chart": depth_chart,
        "seconds_chart": seconds_chart,
    }
    return environment


ENVIRONMENT = make_environment()


def render(name: str, values: dict[str, Any]) -> str:
    """Render a template."""
    return ENVIRONMENT.get_template(name).render(values)
