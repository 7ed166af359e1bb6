"""A line of the table: what was measured on which side, as ratios of one round first."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from typing import Any

OURS, FLOOR = "Taskboard", "floor"


@dataclass(slots=True)
class Line:
    """One comparison. `samples` has a figure for each side and round."""

    row: str
    what: str
    unit: str
    goal: str = ""
    base: str = FLOOR  # the side that ratios are made to
    samples: dict[str, list[float]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)  # instead of figures, or beside them
    series: dict[str, list[float]] = field(default_factory=dict)  # a figure for each second

    def add(self, side: str, figure: float) -> None:
        self.samples.setdefault(side, []).append(figure)

    def middle(self, side: str) -> float | None:
        found = self.samples.get(side)
        return statistics.median(found) if found else None

    def ratios(self, side: str) -> list[float]:
        """This side to the base, round by round."""
        pairs = zip(self.samples.get(side, []), self.samples.get(self.base, []), strict=False)
        return [mine / base for mine, base in pairs if base]

    def cell(self, side: str) -> str:
        """The ratio with its spread, then the figure."""
        middle, note = self.middle(side), self.notes.get(side, "")
        if middle is None:
            return note or "-"
        figure, ratios = f"{number(middle)} {self.unit}", self.ratios(side)
        if side == self.base or not ratios:
            text = f"{figure} {spread(self.samples[side], number)}"
        else:
            text = (
                f"**{statistics.median(ratios):.2f}** {spread(ratios, '{:.2f}'.format)} · {figure}"
            )
        return f"{text.strip()} {note}".strip()


def number(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def spread(values: list[float], say: Any) -> str:
    return f"({say(min(values))}-{say(max(values))})" if len(values) > 1 else ""


def table(lines: list[Line]) -> str:
    """All lines as a table in markdown: our column, the floor, then the others."""
    others = {side for line in lines for side in (*line.samples, *line.notes)} - {OURS}
    bases = sorted({line.base for line in lines} & others, key=lambda side: side != FLOOR)
    sides = [OURS, *bases, *sorted(others - set(bases))]
    # What is compared to the same side of ours under another condition shares one column.
    if any(side != FLOOR for side in bases):
        sides = [OURS, *([FLOOR] if FLOOR in bases else []), "", *sorted(others - set(bases))]
    text = [
        "| what | goal | " + " | ".join(side or "compared with" for side in sides) + " |",
        "|---" * (len(sides) + 2) + "|",
    ]
    for line in lines:
        cells = [
            (f"{line.base}: {line.cell(line.base)}" if line.base not in (FLOOR, OURS, "") else "-")
            if side == ""
            else line.cell(side)
            for side in sides
        ]
        text.append(f"| {line.what} | {line.goal or '-'} | " + " | ".join(cells) + " |")
    return "\n".join(text)


def as_json(machine: dict[str, str], lines: list[Line], facts: list[dict[str, str]]) -> str:
    found = [
        {
            "row": line.row,
            "what": line.what,
            "unit": line.unit,
            "goal": line.goal,
            "base": line.base,
            "samples": line.samples,
            "notes": line.notes,
            "series": line.series,
            "ratios": {side: line.ratios(side) for side in line.samples if side != line.base},
        }
        for line in lines
    ]
    return json.dumps({"machine": machine, "lines": found, "guarantees": facts}, indent=1)
