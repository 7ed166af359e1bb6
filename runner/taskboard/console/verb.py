"""Run a row of the table of verbs: make its statement, run it, show the answer."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from taskboard import connections
from taskboard.cli import FAILED, OK, Refused, database, explain, one_database
from taskboard.console.output import print_json, print_record, print_table
from taskboard.console.verbs import Verb

Connection = psycopg.Connection[dict[str, Any]]


def run(verb: Verb, arguments: argparse.Namespace) -> int:
    """Run a verb; return the exit code. Raises UsageError and psycopg.Error."""
    values = {name: getattr(arguments, name) for name in verb.names}
    given = {name: value for name, value in values.items() if value is not None}
    template = verb.sql if isinstance(verb.sql, str) else verb.sql(given)
    items = given.pop(verb.each, None) or [None]
    each = [given if item is None else {verb.each: item} | given for item in items]
    statements = [statement(template, one) for one in each]
    if arguments.show_sql:
        more = [statement(template, given) for template in (verb.more or {}).values()]
        print("\n".join(f"{text};" for text in statements + more))
        return OK
    with connection(f"taskboard {verb.name}", f'grant {verb.role} to "{{user}}"') as conn:
        code, rows = _run_each(conn, verb, statements, items)
        if verb.more and rows:
            return _show_whole(conn, verb, rows[0], given, arguments.json)
        notes = list(_notes(conn, verb, each))
        if verb.now and not arguments.json:
            template, tell = verb.now
            print(tell(fetch(conn, statement(template, given))[0]))
        else:
            code = _show(verb, rows, code, arguments.json)
    for text in notes:
        print(f"note: {text}", file=sys.stderr)
    return code


def statement(template: str, given: dict[str, Any]) -> str:
    """Fill a template with what was given, as literals: psql takes the statement as it is."""
    literals = {
        name: sql.Literal(str(value) if isinstance(value, UUID) else value).as_string().strip()
        for name, value in given.items()
    }
    call = ", ".join(f"{name} => {text}" for name, text in literals.items())
    where = " and ".join(f"{name} = {text}" for name, text in literals.items() if name != "limit")
    return template.format(call=call, where=where and f"\nwhere {where}", **literals)


@contextmanager
def connection(name: str, rights: str, *, direct: bool = False) -> Iterator[Connection]:
    """Connect to the database that is named, else to the embedded one. Raises Refused.

    `rights`: what helps where {user} lacks some. `direct`: to the server itself, where a pooler
    stands between.
    """
    with database(one_database(), migrated=not direct) as settings:
        url = (direct and settings.listen_url) or settings.database_url
        kwargs = connections.connect_arguments(url, name)
        with psycopg.connect(url, row_factory=dict_row, **kwargs) as conn:
            try:
                yield conn
            except psycopg.errors.InsufficientPrivilege as exc:
                raise Refused(exc, rights, conn.info.user) from exc


def fetch(conn: Connection, text: str) -> list[dict[str, Any]]:
    """Run a statement as it is shown, without parameters."""
    return conn.execute(text.encode()).fetchall()


def _run_each(
    conn: Connection, verb: Verb, statements: list[str], items: list[Any]
) -> tuple[int, list[dict[str, Any]]]:
    code, rows = OK, []
    for item, text in zip(items, statements, strict=True):
        try:
            rows += fetch(conn, text)
        except psycopg.errors.InsufficientPrivilege:
            raise
        except psycopg.Error as exc:
            if conn.closed or len(items) == 1:
                raise
            print(f"{item}: ", end="", file=sys.stderr)
            code = max(code, explain(exc))
    return code, rows


def _notes(conn: Connection, verb: Verb, each: list[dict[str, Any]]) -> Iterator[str]:
    """Ask what should be known about each thing that the verb was told of."""
    about, template = verb.notes
    for given in each:
        if about in given:
            for row in fetch(conn, statement(template, {about: given[about]})):
                yield from filter(None, row.values())


def _show(verb: Verb, rows: list[dict[str, Any]], code: int, as_json: bool) -> int:
    """Show the answer; what is void or a boolean is said in words."""
    first = next(iter(rows[0].values())) if rows and len(rows[0]) == 1 else None
    if first is False or (verb.more and not rows and code == OK):
        print(f"taskboard: {verb.none}", file=sys.stderr)
        return FAILED
    if first is True or first == "":
        print_json({"done": True}) if as_json else print(verb.done)
    elif as_json and (rows or code == OK):
        print_json(rows[0] if verb.one else rows)
    elif verb.done and rows and "queue" in rows[0]:
        print(verb.done, *filter(None, [rows[0]["queue"]]))
    else:
        print_table(rows, verb.none if code == OK else "")
    return code


def _show_whole(
    conn: Connection, verb: Verb, row: dict[str, Any], given: dict[str, Any], as_json: bool
) -> int:
    """Show one row with what belongs to it, as far as this login may see it."""
    parts: dict[str, list[dict[str, Any]] | None] = {}
    for name, template in (verb.more or {}).items():
        try:
            parts[name] = fetch(conn, statement(template, given))
        except psycopg.errors.InsufficientPrivilege:
            parts[name] = None
    if as_json:
        print_json(row | parts)
        return OK
    print_record(row)
    for name, rows in parts.items():
        if rows is None:
            print(f"\n{name}: not for {conn.info.user} to see")
        elif rows:
            print(f"\n{name}")
            print_record(rows[0]) if name == "documents" else print_table(rows)
    return OK
