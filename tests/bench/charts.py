"""Charts as SVG, made of text: bars of ratios, and lines over the seconds of a run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from html import escape

from lines import FLOOR, OURS, Line, number

COLOURS = [
    "#1b6ca8",
    "#d1495b",
    "#66a182",
    "#edae49",
    "#8d6b94",
    "#5c5c5c",
    "#2e4057",
    "#00798c",
    "#b56576",
    "#9a8c98",
]
STYLE = "<style>text{font:12px sans-serif;fill:#222}.t{font-weight:bold}</style>"


def drawing(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}"'
        f' viewBox="0 0 {width:.0f} {height:.0f}">{STYLE}'
        f'<rect width="100%" height="100%" fill="white"/>'
        f'<text class="t" x="10" y="20">{escape(title)}</text>' + "".join(parts) + "</svg>\n"
    )


def bars(title: str, rows: Sequence[tuple[str, float, str]], mark: float | None = None) -> str:
    """A bar for each (name, length, words beside it); a line where the mark is."""
    left, width, step = 470.0, 380.0, 18.0
    longest = max([length for _, length, _ in rows] + [mark or 0, 1e-9])
    parts = []
    for n, (name, length, words) in enumerate(rows):
        y = 34 + n * step
        colour = COLOURS[0] if OURS in name else "#a9b4bd"
        parts.append(
            f'<text x="{left - 6}" y="{y + 11}" text-anchor="end">{escape(name)}</text>'
            f'<rect x="{left}" y="{y}" width="{length / longest * width:.1f}" height="13"'
            f' fill="{colour}"/>'
            f'<text x="{left + length / longest * width + 5:.1f}" y="{y + 11}">'
            f"{escape(words)}</text>"
        )
    if mark is not None:
        x = left + mark / longest * width
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="28" y2="{34 + len(rows) * step:.1f}"'
            ' stroke="#222" stroke-dasharray="3 3"/>'
        )
    return drawing(left + width + 190, 44 + len(rows) * step, title, parts)


def curves(
    title: str,
    series: Mapping[str, Sequence[float]],
    unit: str = "",
    each: float = 1,
    height: float = 220,
) -> str:
    """A line for each series, from nought; `each` is the seconds between two figures."""
    left, width, top = 70.0, 620.0, 36.0
    series = {name: values for name, values in series.items() if values}
    most = max((max(values) for values in series.values()), default=1) or 1
    longest = max((len(values) for values in series.values()), default=2)
    parts = [f'<path d="M{left} {top}V{top + height}H{left + width}" fill="none" stroke="#888"/>']
    for share in (0, 0.5, 1):
        y = top + height * (1 - share)
        parts.append(
            f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">'
            f"{number(most * share) if share else 0}</text>"
        )
    parts.append(
        f'<text x="{left + width}" y="{top + height + 16}" text-anchor="end">'
        f"{(longest - 1) * each:,.0f} s</text>"
    )
    for n, (name, values) in enumerate(series.items()):
        colour = COLOURS[n % len(COLOURS)]
        points = " ".join(
            f"{left + i / max(longest - 1, 1) * width:.1f},{top + height * (1 - v / most):.1f}"
            for i, v in enumerate(values)
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        )
        y = top + height + 34 + n * 16
        parts.append(
            f'<rect x="{left}" y="{y - 9:.0f}" width="10" height="10" fill="{colour}"/>'
            f'<text x="{left + 16}" y="{y:.0f}">{escape(name)}</text>'
        )
    return drawing(
        left + width + 30,
        top + height + 44 + len(series) * 16,
        f"{title} ({unit})" if unit else title,
        parts,
    )


def of(lines: Sequence[Line]) -> dict[str, str]:
    """The charts of a run of the benchmark, by file name."""
    found = {}
    for row in dict.fromkeys(line.row for line in lines):
        mine = [line for line in lines if line.row == row]
        rows = []
        for line in mine:
            for side in line.samples:
                middle, ratios = line.middle(side) or 0, line.ratios(side)
                if line.base != FLOOR or row in ("runner", "pickup"):
                    if side == line.base:
                        continue
                    value = statistics.median(ratios) if ratios else middle
                    words = (
                        f"{value:.2f} · {number(middle)} {line.unit}"
                        if ratios
                        else (f"{number(middle)} {line.unit}")
                    )
                elif side == FLOOR or not ratios:
                    continue
                else:
                    value = statistics.median(ratios)
                    words = f"{value:.2f} · {number(middle)} {line.unit}"
                rows.append((f"{line.what.removeprefix(row).lstrip(', ')}: {side}", value, words))
        if rows:
            title = f"{row}: ratio to the floor" if mine[0].base == FLOOR else row
            found[f"{row}.svg"] = bars(title, rows, 1.0 if mine[0].base else None)
    for line in lines:
        if line.series:
            found["sustained-seconds.svg"] = curves(
                "enqueue, claim and complete, beside an old snapshot", line.series, "jobs/s"
            )
    return found
