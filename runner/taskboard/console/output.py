"""How rows are shown: a table for people, JSON for programs."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, TextIO

COLOURS = {
    "ready": "36", "running": "36", "completed": "32", "ok": "32", "done": "32",
    "note": "33", "expired": "33", "blocked": "33", "held": "35", "unknown": "35", "open": "35",
    "failed": "31", "cancelled": "31", "WRONG": "31;1",
}  # fmt: skip
UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def colourful(stream: TextIO) -> bool:
    """Tell whether to use colours: on a terminal, unless NO_COLOR is set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, colour: str, stream: TextIO) -> str:
    return f"\033[{colour}m{text}\033[0m" if colour and colourful(stream) else text


def cell(value: Any) -> str:
    """Write a value on one line; nothing in it can steer the terminal."""
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case datetime():
            return value.astimezone().isoformat(" ", "seconds")
        case Decimal() | float():
            return f"{value:.2f}"
        case timedelta():
            return span(value)
        case dict() | list():
            value = json.dumps(value, ensure_ascii=False)
    return UNSAFE.sub(lambda found: ascii(found[0])[1:-1], str(value))


def span(value: timedelta) -> str:
    """Write a duration in the largest unit of which it is a multiple."""
    for name, unit in (("d", 86400), ("h", 3600), ("min", 60)):
        if value and not value % timedelta(seconds=unit):
            return f"{value.total_seconds() / unit:g} {name}"
    return f"{value.total_seconds():g} s"


def plain(value: Any) -> Any:
    """Turn what JSON does not know into what it knows."""
    match value:
        case datetime():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case Decimal():
            return float(value)
    return str(value)


def print_json(value: Any) -> None:
    print(json.dumps(value, default=plain, ensure_ascii=sys.stdout.encoding != "utf-8"))


def print_table(rows: Sequence[dict[str, Any]], note: str = "") -> None:
    """Print rows under their columns; without rows, a note on stderr."""
    if not rows:
        return print(note, file=sys.stderr) if note else None
    numeric = {name for name, value in rows[0].items() if isinstance(value, int | float | Decimal)}
    lines = [list(rows[0]), *([cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for number, line in enumerate(lines):
        padded = [
            text.rjust(width) if name in numeric else text.ljust(width)
            for name, text, width in zip(rows[0], line, widths, strict=True)
        ]
        text = "  ".join(padded).rstrip()[:room]
        if number and "state" in rows[0]:
            state = line[list(rows[0]).index("state")]
            text = text.replace(state, paint(state, COLOURS.get(state, ""), sys.stdout), 1)
        print(text if number else paint(text, "1", sys.stdout))


def print_record(row: dict[str, Any]) -> None:
    """Print one row, a column a line, without those that are null."""
    shown = {name: cell(value) for name, value in row.items() if value is not None}
    width = max(map(len, shown), default=0)
    for name, text in shown.items():
        text = paint(text, COLOURS.get(text, "") if name == "state" else "", sys.stdout)
        print(f"{paint(name.ljust(width), '1', sys.stdout)}  {text}")
