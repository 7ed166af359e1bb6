"""`taskboard doctor`: connect as a runner would, and say what is wrong or risky, and what helps.

A row of CHECKS is a topic, what is said when nothing is found, and the function that looks. No
check needs another but the first; what this login may not look at is said as well.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import psycopg

from taskboard.cli import FAILED, OK, database, one_database
from taskboard.connections import connect, one_line
from taskboard.console import checks, poolers, services
from taskboard.console.checks import ANSWERS_WITHIN, SQL, WRONG, Check, Finding, Look
from taskboard.console.output import COLOURS, cell, paint, print_json
from taskboard.console.verbs import Verb
from taskboard.settings import Settings

CHECKS: list[tuple[str, str, Check]] = [
    ("database", "", checks.database),
    ("clock", "this host's and the database's agree", checks.clock),
    ("version", "the functions are those of this release", checks.version),
    ("rights", "this login may call all that a worker calls", checks.rights),
    ("listen", "notifications arrive", checks.listen),
    ("pooler", "none, or one that lends a session for a transaction only", poolers.pooler),
    ("connections", "there are enough", checks.connections),
    ("transactions", "nobody holds an old snapshot or a long transaction", checks.transactions),
    ("standbys", "no standby has an old snapshot kept", checks.standbys),
    ("slots", "no replication slot is left behind", checks.slots),
    ("autovacuum", "it is on", checks.autovacuum),
    ("notifications", "their queue is empty", checks.notifications),
    ("durability", "what is acknowledged survives a crash", checks.durability),
    ("logs", "no setting shows lease tokens", checks.logs),
    ("isolation", "read committed", checks.isolation),
    ("email", "", services.email),
    ("stripe", "", services.stripe),
    ("jobs", "none is held, and none waits for long", checks.jobs),
]


def run(verb: Verb, arguments: argparse.Namespace) -> int:
    """Examine the database and what the environment names; return the exit code."""
    if arguments.show_sql:
        print("\n\n".join(f"-- {name}\n{text.strip()};" for name, text in SQL.items()))
        return OK
    from taskboard.preflight import find_handlers

    settings = one_database(pool=arguments.pool)
    # The built-in ones are looked at by checks of their own, which bear wrong settings.
    own = find_handlers(replace(settings, smtp_url=None, stripe_api_key=None), arguments.modules)
    with database(settings) as settings:
        found = asyncio.run(examine(settings, arguments.older_than, set(own[0]), arguments.modules))
    healthy = not any(finding.level == WRONG for _, finding in found)
    if arguments.json:
        lines = [
            {"topic": topic, "level": one.level.lower(), "text": one.text, "fix": one.fix}
            for topic, one in found
        ]
        print_json({"ok": healthy, "findings": lines})
        return OK if healthy else FAILED
    for topic, one in found:
        level = paint(f"{one.level:5}", COLOURS[one.level], sys.stdout)
        print(f"{level}  {topic:13}  {cell(one.text)}")
        if one.fix:
            print(f"{'fix:':>20}  {cell(one.fix)}")
    return OK if healthy else FAILED


async def examine(
    settings: Settings, older_than: timedelta, kinds: set[str], modules: Sequence[str]
) -> list[tuple[str, Finding]]:
    """Run all checks; answer topics and findings, what is wrong first within a topic."""
    try:
        async with asyncio.timeout(ANSWERS_WITHIN):
            conn = await connect(settings.database_url, "taskboard doctor")
    except (psycopg.Error, OSError) as exc:
        why = one_line(exc) or f"no answer within {ANSWERS_WITHIN:g} s"
        fix = "check TASKBOARD_DATABASE_URL, or the PG* variables, and whether the server runs"
        return [("database", Finding(WRONG, why, fix))]
    report: list[tuple[str, Finding]] = []
    async with conn:
        look = Look(conn, settings, older_than.total_seconds(), kinds, modules)
        for topic, fine, check in CHECKS:
            try:
                found = await check(look)
            except psycopg.errors.InsufficientPrivilege as exc:
                why = f"could not be looked at: {exc.diag.message_primary}"
                found = [checks.note(why, "look as a role that may see it")]
            except (psycopg.Error, OSError) as exc:
                why = f"could not be looked at: {one_line(exc) or 'no answer'}"
                found = [checks.wrong(why, "run it again; if it stays, see the server's log")]
            found.sort(key=lambda finding: finding.level != WRONG)
            report += [(topic, finding) for finding in found or [checks.fine(fine)]]
            if not look.facts.get("installed"):
                break
    return report
