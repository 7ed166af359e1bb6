"""`taskboard uninstall`: the schema goes, and the roles, unless somebody else needs them."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import psycopg
from psycopg import sql

from taskboard import migrate
from taskboard.cli import FAILED, OK
from taskboard.console.output import print_json
from taskboard.console.verb import Connection, connection
from taskboard.console.verbs import Mistake, Verb

PATIENCE = 15.0  # seconds, for a moment in which no worker holds a lock
ROLES = [f"taskboard_{part}" for part in ("owner", "producer", "worker", "operator", "observer")]

# In one transaction, which nobody who migrates comes between.
STATEMENTS = (
    f"set local lock_timeout = '{migrate.LOCK_TIMEOUT}'",
    "select pg_advisory_xact_lock({}, {})".format(*migrate.LOCK),
    "drop schema if exists taskboard cascade",
)

LIVE = """
select coalesce(sum(ready + scheduled + running + expired + blocked + held), 0)::bigint as live
from taskboard.queue_stats"""

# What is not in the schema and would go with it: a view on one of ours, a trigger that enqueues.
ON_TOP = """
select distinct o.type || ' ' || o.identity as name
from pg_depend as d
cross join lateral pg_identify_object(d.refclassid, d.refobjid, 0) as ours
cross join lateral pg_identify_object(d.classid, d.objid, d.objsubid) as o
where d.deptype in ('n', 'a') and ours.schema = 'taskboard'
  and d.refclassid in ('pg_class'::regclass, 'pg_proc'::regclass, 'pg_type'::regclass)
  and o.schema is distinct from 'taskboard' and o.identity !~ '\\ytaskboard\\.[^ ]*$'
order by name"""

# Rows of pg_shdepend, here or in any other database of the cluster.
USES = """
select coalesce(d.datname, 'the cluster') as place, count(*) as objects
from pg_shdepend as s
join pg_roles as r on r.oid = s.refobjid and s.refclassid = 'pg_authid'::regclass
left join pg_database as d on d.oid = s.dbid
where r.rolname = {role}
group by d.datname
order by d.datname"""


def run(verb: Verb, arguments: argparse.Namespace) -> int:
    """Uninstall; return the exit code. Raises Mistake and psycopg.Error."""
    if arguments.show_sql:
        print("\n".join(["begin;", *(f"{text};" for text in STATEMENTS), "commit;"]))
        print("-- Each role where no other database needs it, by whoever may drop roles:")
        print("\n".join(f"-- drop role if exists {role};" for role in ROLES))
        return OK
    rights = "only the owner of the schema taskboard may drop it, or a superuser; {user} is neither"
    with connection("taskboard uninstall", rights, direct=True) as conn:
        place = conn.info.dbname
        if not conn.execute("select from pg_namespace where nspname = 'taskboard'").rowcount:
            print(f"Taskboard is not installed in {place}", file=sys.stderr)
            return OK
        live, on_top = _look(conn)
        if (live or on_top) and not arguments.force:
            what = [_live_jobs(live)] * bool(live) + on_top
            print(f"taskboard: what would go as well: {', '.join(what)}", file=sys.stderr)
            hint = "let workers finish it, taskboard cancel it, or say --force"
            print(f"hint: {hint}", file=sys.stderr)
            return FAILED
        if not arguments.yes and not _agreed(conn, live):
            print("nothing was changed", file=sys.stderr)
            return FAILED
        dropped, kept = _drop(conn)
    if arguments.json:
        print_json({"schema": "dropped", "roles_dropped": dropped, "roles_kept": kept})
        return OK
    print(f"dropped the schema taskboard of {place}, and {len(dropped)} roles")
    for role, why in kept.items():
        print(f"note: the role {role} stays: {why}", file=sys.stderr)
    return OK


def _look(conn: Connection) -> tuple[int, list[str]]:
    try:
        live = conn.execute(LIVE).fetchall()[0]["live"]
    except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn):
        live = 0  # half an installation
    return live, [row["name"] for row in conn.execute(ON_TOP)]


def _live_jobs(live: int) -> str:
    return f"{live} live job{'s' * (live != 1)}"


def _agreed(conn: Connection, live: int) -> bool:
    if not sys.stdin.isatty():
        raise Mistake("uninstall asks before it drops anything, and nobody is there", "say --yes")
    print(
        f"This drops the schema taskboard of the database {conn.info.dbname}"
        f" on {conn.info.host or 'this host'}, with {_live_jobs(live)} and the whole history."
        "\nType the name of the database to go on: ",
        end="", file=sys.stderr, flush=True,
    )  # fmt: skip
    return sys.stdin.readline().strip() == conn.info.dbname


def _drop(conn: Connection) -> tuple[list[str], dict[str, str]]:
    """Drop the schema and what roles may go, in one transaction; answer them, and why others stay.

    Never queues long for a lock: workers would queue behind it.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            with conn.transaction():
                for text in STATEMENTS:
                    conn.execute(text.encode())
                return _drop_roles(conn)
        except migrate.BUSY:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def _drop_roles(conn: Connection) -> tuple[list[str], dict[str, str]]:
    dropped: list[str] = []
    kept: dict[str, str] = {}
    for role in ROLES:
        if not conn.execute("select from pg_roles where rolname = %s", [role]).rowcount:
            continue
        uses: list[dict[str, Any]] = conn.execute(
            sql.SQL(USES).format(role=sql.Literal(role))
        ).fetchall()
        if uses:
            places = ", ".join(f"{use['place']} ({use['objects']} objects)" for use in uses)
            kept[role] = f"used in {places}"
            continue
        try:
            with conn.transaction():
                conn.execute(sql.SQL("drop role {}").format(sql.Identifier(role)))
            dropped.append(role)
        except psycopg.errors.InsufficientPrivilege:
            kept[role] = f"{conn.info.user} may not drop it"
    return dropped, kept
