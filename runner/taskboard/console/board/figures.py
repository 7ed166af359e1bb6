"""The depth of the queues, for Prometheus: `queue_stats` as text.

Labels are the names of queues and kinds, as everywhere; of very many only the first are told, and
how many are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from taskboard.console.board.queries import LIVE, Row

ROWS_MOST = 1000
KIND = "text/plain; version=0.0.4; charset=utf-8"


def text(queues: list[Row], now: datetime) -> str:
    """Write the figures of queues."""
    return "\n".join([*lines(queues, now), ""])


def lines(queues: list[Row], now: datetime) -> Iterator[str]:
    told = queues[:ROWS_MOST]
    yield "# HELP taskboard_queue_jobs Live jobs; a count ends at 10,000 a lane."
    yield "# TYPE taskboard_queue_jobs gauge"
    for row in told:
        for state in LIVE:
            yield f'taskboard_queue_jobs{{{labels(row)},state="{state}"}} {row[state]}'
    yield "# HELP taskboard_queue_oldest_ready_seconds Since when the oldest ready job waits."
    yield "# TYPE taskboard_queue_oldest_ready_seconds gauge"
    for row in told:
        since = row["oldest_ready_at"]
        seconds = max((now - since).total_seconds(), 0) if since else 0
        yield f"taskboard_queue_oldest_ready_seconds{{{labels(row)}}} {seconds:.3f}"
    yield "# HELP taskboard_queue_paused Whether the queue is paused."
    yield "# TYPE taskboard_queue_paused gauge"
    for row in told:
        yield f"taskboard_queue_paused{{{labels(row)}}} {int(row['paused'])}"
    yield "# HELP taskboard_queue_left_out How many queues, kinds and priorities are not told."
    yield "# TYPE taskboard_queue_left_out gauge"
    yield f"taskboard_queue_left_out {len(queues) - len(told)}"


def labels(row: Row) -> str:
    found = {name: str(row[name]) for name in ("queue", "kind", "priority")}
    return ",".join(f'{name}="{escaped(value)}"' for name, value in found.items())


def escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
