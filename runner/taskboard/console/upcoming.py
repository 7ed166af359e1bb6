"""`taskboard upcoming`: when schedules run next, by the rules that runners go by."""

from __future__ import annotations

import argparse
import sys
from datetime import datetime
from itertools import chain, islice
from typing import Any
from zoneinfo import ZoneInfo

from taskboard.cli import FAILED, OK
from taskboard.console.output import print_json, print_table
from taskboard.console.verb import connection, fetch, statement
from taskboard.console.verbs import Verb
from taskboard.schedules import RuleError, occurrences

# What is due already is shown as well: a runner takes it when it next looks.
SCHEDULES = """\
select name, cron, time_zone, queue, kind, next_at, clock_timestamp() as now
from taskboard.schedule_list
where paused_at is null{and_name}
order by name"""


def run(verb: Verb, arguments: argparse.Namespace) -> int:
    """Show the next runs, soonest first; return the exit code. Raises Refused and psycopg.Error."""
    given = {} if arguments.name is None else {"name": arguments.name}
    text = statement(SCHEDULES.replace("{and_name}", " and name = {name}" * bool(given)), given)
    if arguments.show_sql:
        print(f"{text};")
        return OK
    with connection("taskboard upcoming", f'grant {verb.role} to "{{user}}"') as conn:
        rows = fetch(conn, text)
    runs: list[dict[str, Any]] = []
    code = OK
    for row in rows:
        try:
            runs += [_show(row, at) for at in islice(_dates(row), arguments.limit)]
        except RuleError as exc:
            print(f"taskboard: {row['name']}: {exc}", file=sys.stderr)
            code = FAILED
    runs.sort(key=lambda each: each["runs_at"])
    del runs[arguments.limit :]
    print_json(runs) if arguments.json else print_table(runs, "" if code else verb.none)
    return code


def _dates(row: dict[str, Any]) -> chain[datetime]:
    first = [] if row["next_at"] is None else [row["next_at"]]
    start = max([row["now"], *first])
    return chain(first, occurrences(row["cron"], row["time_zone"], start))


def _show(row: dict[str, Any], at: datetime) -> dict[str, Any]:
    there = at.astimezone(ZoneInfo(row["time_zone"]))
    return {
        "name": row["name"], "runs_at": at, "there": f"{there:%a %Y-%m-%d %H:%M %Z}",
        "time_zone": row["time_zone"], "queue": row["queue"], "kind": row["kind"],
    }  # fmt: skip
