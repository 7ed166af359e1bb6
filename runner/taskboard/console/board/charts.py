"""Charts as SVG, drawn here: no script, no style attribute, and a text for who cannot see them.

Series differ by colour and by the way they are drawn; both come from classes in board.css.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from markupsafe import Markup

WIDE, HIGH = 640, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 24
TICKS = 4


@dataclass(frozen=True, slots=True)
class Series:
    """One line, or one part of the bars; `values` may have gaps. `look` is a class in board.css."""

    name: str
    look: str
    values: Sequence[float | None]


def lines(
    title: str, times: Sequence[datetime], series: Sequence[Series], unit: str = "",
    since: datetime | None = None, until: datetime | None = None,
) -> Markup:  # fmt: skip
    """Draw lines over time."""
    scale = Scale.of(times, [v for one in series for v in one.values], unit, since, until)
    parts = [scale.grid()]
    for one in series:
        parts.append(
            Markup('<path class="line {}" d="{}"/>').format(
                one.look, path([scale.x(at) for at in times], scale, one.values)
            )
        )
        points = [(at, v) for at, v in zip(times, one.values, strict=True) if v is not None]
        if points:
            at, value = points[-1]
            parts.append(
                Markup('<circle class="dot {}" cx="{}" cy="{}" r="3"/>').format(
                    one.look, scale.x(at), scale.y(value)
                )
            )
    return drawing(title, summary(series, unit), parts)


def bars(title: str, times: Sequence[datetime], series: Sequence[Series], step: float) -> Markup:
    """Draw bars over time, one part upon the other; `step`: seconds that a bar stands for."""
    sums = [sum(v or 0 for v in column) for column in zip(*(o.values for o in series), strict=True)]
    scale = Scale.of(times, sums, "", None, None, more=step)
    wide = max((WIDE - LEFT - RIGHT) / max(len(times), 1) - 1, 1)
    parts = [scale.grid()]
    heights = [0.0] * len(times)
    for one in series:
        for number, (at, value) in enumerate(zip(times, one.values, strict=True)):
            if not value:
                continue
            top, foot = scale.y(heights[number] + value), scale.y(heights[number])
            heights[number] += value
            parts.append(
                Markup('<rect class="bar {}" x="{}" y="{}" width="{}" height="{}"/>').format(
                    one.look, scale.x(at), top, round(wide, 1), round(max(foot - top, 1), 1)
                )
            )
    return drawing(title, summary(series, ""), parts)


@dataclass(frozen=True, slots=True)
class Scale:
    """Where times and values lie in the drawing."""

    first: float
    seconds: float
    top: float
    unit: str

    @classmethod
    def of(
        cls, times: Sequence[datetime], values: Sequence[float | None], unit: str,
        since: datetime | None, until: datetime | None, more: float = 0,
    ) -> Scale:  # fmt: skip
        first = (since or times[0]).timestamp()
        last = (until or times[-1]).timestamp() + more
        highest = max((v for v in values if v is not None), default=0)
        # Of a job there is no part.
        top = round_up(highest) if unit else max(round_up(highest), TICKS)
        return cls(first, max(last - first, 1), top, unit)

    def x(self, at: datetime) -> float:
        return self._x(at.timestamp())

    def _x(self, seconds: float) -> float:
        return round(LEFT + (seconds - self.first) / self.seconds * (WIDE - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        return round(HIGH - BOTTOM - value / self.top * (HIGH - TOP - BOTTOM), 1)

    def grid(self) -> Markup:
        """Draw the lines behind, with their figures."""
        parts = []
        for number in range(TICKS + 1):
            value = self.top * number / TICKS
            parts.append(
                Markup(
                    '<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>'
                    '<text class="tick" x="{}" y="{}" text-anchor="end">{}</text>'
                ).format(
                    LEFT, WIDE - RIGHT, self.y(value), self.y(value),
                    LEFT - 6, self.y(value) + 3.5, short(value) + self.unit,
                )
            )  # fmt: skip
        step = 900 if self.seconds > 1800 else 300
        mark = math.ceil(self.first / step) * step
        while mark <= self.first + self.seconds:
            at = datetime.fromtimestamp(mark, tz=UTC).strftime("%H:%M")
            parts.append(
                Markup('<text class="tick" x="{}" y="{}" text-anchor="middle">{}</text>').format(
                    min(self._x(mark), WIDE - RIGHT - 12), HIGH - 6, at
                )
            )
            mark += step
        return Markup("").join(parts)


def path(xs: Sequence[float], scale: Scale, values: Sequence[float | None]) -> str:
    """Describe a line; a gap lifts the pen."""
    words, pen = [], "M"
    for x, value in zip(xs, values, strict=True):
        if value is None:
            pen = "M"
            continue
        words.append(f"{pen}{x} {scale.y(value)}")
        pen = "L"
    return " ".join(words)


def drawing(title: str, text: str, parts: Sequence[Markup]) -> Markup:
    return Markup(
        '<svg class="chart" role="img" viewBox="0 0 {} {}" aria-label="{}. {}">{}</svg>'
    ).format(WIDE, HIGH, title, text, Markup("").join(parts))


def summary(series: Sequence[Series], unit: str) -> str:
    """Say in words what the lines show: the last and the highest of each."""
    said = []
    for one in series:
        known = [v for v in one.values if v is not None]
        if known:
            said.append(
                f"{one.name}: now {short(known[-1])}{unit}, at most {short(max(known))}{unit}"
            )
    return "; ".join(said) or "no figures yet"


def round_up(value: float) -> float:
    """Answer a round number that is not below: 1, 2, 4, 5 or 8 times a power of ten."""
    if value <= 0:
        return 4
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 5, 8, 10) if step * power >= value * 0.9999)


def short(value: float) -> str:
    """Write a figure in few characters."""
    for bound, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= bound:
            return f"{value / (1e3 if letter == 'k' else bound):.3g}{letter}"
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.2g}"
