"""Install or upgrade Taskboard in a database: tables by yoyo, then the functions, under one lock.

What is installed is written in `taskboard.migrations`, by whichever way it came there: a row for
each migration, and the row `functions` with the checksum of the files in sql/.
"""

from __future__ import annotations

import getpass
import glob
import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import psycopg
from psycopg.conninfo import conninfo_to_dict

import taskboard
from taskboard.connections import connect_arguments

LOCK = (1952539508, 0)  # sql/install.sql takes the same
# Running workers never queue longer than this behind a change that waits for a lock, and have as
# long for themselves before the next try: a renewal gets through, also that of a short lease.
LOCK_TIMEOUT = "1s"
PAUSE = 1.0  # seconds
BUSY = (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected)

# Transactions that have been open for a while and hold a lock on something of ours, or have
# changed anything (a function, say; no lock shows that).
HOLDERS = """
with held as (
  select l.pid
  from pg_locks as l
  join pg_class as c on c.oid = l.relation and c.relnamespace = to_regnamespace('taskboard')
  where l.granted and l.database = (
    select d.oid from pg_database as d where d.datname = current_database()))
select concat('process ', a.pid, ' (', a.application_name, ', user ', a.usename, ', ', a.state,
  ', begun at ', a.xact_start, ')')
from pg_stat_activity as a
where a.datname = current_database() and a.pid <> pg_backend_pid()
  and (a.backend_xid is not null or a.pid in (select h.pid from held as h))
  and a.xact_start < clock_timestamp() - %(patience)s::interval
union all
select concat('the prepared transaction ', quote_literal(p.gid), ' of ', p.prepared)
from pg_prepared_xacts as p
where p.database = current_database() and exists (select from held as h where h.pid is null)
limit 5"""

Connection = psycopg.Connection[tuple[Any, ...]]


class MigrateError(Exception):
    """The database is not up to date; the text says why, and what to do."""


@dataclass(slots=True)
class Report:
    """The version that is installed now, what was applied for it, what else is worth saying."""

    version: str = ""
    applied: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def migrate(url: str, *, wait: float = 60.0) -> Report:
    """Bring a database up to date; safe at any time, from many places at once, and after a crash.

    `url` leads to the server itself, not to a pooler. Others are waited for, up to `wait` seconds.
    Raises MigrateError.
    """
    report, deadline = Report(), time.monotonic() + wait
    migrations = {path.stem: path for path in sorted(taskboard.MIGRATIONS.glob("[0-9]*.sql"))}
    functions = sorted(taskboard.SQL.glob("[0-9]*.sql"))
    try:
        with psycopg.connect(url, **connect_arguments(url, "taskboard migrate")) as conn:
            conn.add_notice_handler(lambda notice: report.notices.append(_text(notice)))
            _lock(conn, wait)
            _check_encoding(conn)
            _check_schema(conn)
            applied, report.version = _installed(conn)
            if _parts(report.version) > _parts(taskboard.version()) or (
                applied.keys() - migrations.keys() - {"functions"}
            ):
                report.notices.append(
                    f"left as it is: newer than this package ({taskboard.version()})"
                )
                return report
            if pending := [name for name in migrations if name not in applied]:
                _patiently(conn, lambda: _make_tables(url, applied), deadline)
                report.applied += pending
            report.notices += _compare(conn, migrations)
            if pending or applied.get("functions") != checksum(functions) or not _is_granted(conn):
                _patiently(conn, lambda: _load(conn, functions, migrations), deadline)
                report.applied.append("functions")
            report.version = _installed(conn)[1]
    except psycopg.Error as exc:
        raise MigrateError(" ".join([*getattr(exc, "__notes__", []), str(exc).strip()])) from exc
    return report


def _lock(conn: Connection, wait: float) -> None:
    if conn.execute("select pg_backend_pid()").fetchone() != (conn.info.backend_pid,):
        raise MigrateError(
            "a pooler stands in between; name the server itself in TASKBOARD_LISTEN_URL"
        )
    conn.execute("set statement_timeout = 0")  # the role's own is meant for short statements
    conn.execute("select set_config('lock_timeout', %s, false)", [LOCK_TIMEOUT])
    deadline = time.monotonic() + wait
    # Asked for again and again: whoever waits in a statement holds a snapshot, and no index could
    # be built concurrently by the one that is waited for.
    while conn.execute("select pg_try_advisory_lock(%s, %s)", LOCK).fetchone() != (True,):
        if time.monotonic() > deadline:
            raise MigrateError(
                f"another migration of this database has been running for {wait:g} s; try again"
                " when it has ended (see pg_stat_activity: application_name 'taskboard migrate')"
            )
        time.sleep(0.1)


def _check_encoding(conn: Connection) -> None:
    """Refuse to begin in a database that takes any bytes for text: runners could not read them."""
    begun = conn.execute("select to_regclass('taskboard.migrations')").fetchone() != (None,)
    if conn.info.parameter_status("server_encoding") == "SQL_ASCII" and not begun:
        raise MigrateError(
            f'the database "{conn.info.dbname}" has the encoding SQL_ASCII, in which jobs may hold'
            " what is no text: create one with encoding 'UTF8' and template template0"
        )


def _check_schema(conn: Connection) -> None:
    """Make the schema, or refuse one that is not Taskboard's, or not this role's to change."""
    row = conn.execute(
        "select pg_get_userbyid(n.nspowner), current_user, pg_has_role(n.nspowner, 'usage'),"
        " exists (select from pg_class as c where c.relnamespace = n.oid"
        " and c.relname !~ '^_?yoyo') and to_regclass('taskboard.migrations') is null"
        " from pg_namespace as n where n.nspname = 'taskboard'"
    ).fetchone()
    if row is None:
        try:
            conn.execute("create schema taskboard")
        except psycopg.errors.InsufficientPrivilege as exc:
            raise MigrateError(
                f"{exc.diag.message_primary}: migrate as the database's owner, or let an"
                f' administrator run: grant create on database "{conn.info.dbname}"'
                f' to "{conn.info.user}"'
            ) from None
        return
    owner, user, may, foreign = row
    if owner not in (user, "taskboard_owner") or not may:
        raise MigrateError(
            f"the schema taskboard belongs to the role {owner}, and this is {user}: migrate as"
            f" {owner}, or move the schema out of the way if it is not Taskboard's"
        )
    if foreign:
        raise MigrateError(
            "the schema taskboard holds something that is not Taskboard: move it out of the way"
            " (alter schema taskboard rename to …)"
        )


def _installed(conn: Connection) -> tuple[dict[str, str | None], str]:
    """Answer name and checksum of what is installed, and the version of the functions."""
    applied: dict[str, str | None] = {}
    version = ""
    if conn.execute("select to_regclass('taskboard.migrations')").fetchone() != (None,):
        applied = dict(conn.execute("select name, checksum from taskboard.migrations").fetchall())
    if conn.execute("select to_regprocedure('taskboard.version()')").fetchone() != (None,):
        version = conn.execute("select taskboard.version()").fetchall()[0][0]
    return applied, version


def _make_tables(url: str, applied: dict[str, str | None]) -> None:
    import yoyo  # slow to import, and seldom needed

    try:
        getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name, and yoyo insists on one
        os.environ["LOGNAME"] = "taskboard"
    parameters = connect_arguments(url, "taskboard migrate") | conninfo_to_dict(url)
    given = parameters.get("options", os.environ.get("PGOPTIONS", ""))
    options = f"{given} -c lock_timeout={LOCK_TIMEOUT} -c statement_timeout=0"
    parameters |= {"schema": "taskboard", "options": options.strip()}
    del parameters["prepare_threshold"]  # which no URL can carry; these statements run once
    with yoyo.get_backend(f"postgresql+psycopg://?{urlencode(parameters)}") as backend:
        backend.break_lock()  # the lock is ours; a row is left from a run that was killed
        every = yoyo.read_migrations(glob.escape(str(taskboard.MIGRATIONS)))
        known = backend.to_apply(every.filter(lambda migration: migration.id in applied))
        backend.mark_migrations(known)
        backend.apply_migrations(backend.to_apply(every))


def _compare(conn: Connection, migrations: dict[str, Path]) -> list[str]:
    """Answer a notice for each file that is not what was applied."""
    noted = _installed(conn)[0]
    if missing := migrations.keys() - noted.keys():
        raise MigrateError(f"{min(missing)} was applied but did not record itself")
    return [
        f"{path.name} is not what was applied here: changes to an applied migration have no effect"
        for name, path in migrations.items()
        if noted[name] not in (None, checksum([path]))
    ]


def _is_granted(conn: Connection) -> bool:
    """Tell whether all four roles exist and may use the schema; else the load says so again."""
    row = conn.execute(
        "select count(*) filter (where has_schema_privilege(oid, 'taskboard', 'usage'))"
        " from pg_roles where rolname ~ '^taskboard_(producer|worker|operator|observer)$'"
    ).fetchone()
    return row == (4,)


def _load(conn: Connection, functions: list[Path], migrations: dict[str, Path]) -> None:
    """Load the functions and write down the checksums, in one transaction."""
    with conn.transaction():
        for path in functions:
            try:
                conn.execute(path.read_bytes())
            except psycopg.Error as exc:
                exc.add_note(f"sql/{path.name}:")
                raise
        sources = {name: [path] for name, path in migrations.items()} | {"functions": functions}
        for name, files in sources.items():
            conn.execute(
                "update taskboard.migrations set checksum = %s"
                " where name = %s and checksum is null",
                [checksum(files), name],
            )


def _patiently(conn: Connection, step: Callable[[], None], deadline: float) -> None:
    """Repeat a step, which is one transaction, while others hold a lock that it needs."""
    while True:
        try:
            return step()
        except psycopg.Error as exc:
            # The second: somebody has just changed the same function by hand.
            if not isinstance(exc, BUSY) and "tuple concurrently" not in str(exc):
                raise
            if time.monotonic() > deadline:
                exc.add_note(_blame(conn))
                raise
            time.sleep(PAUSE)


def _blame(conn: Connection) -> str:
    rows = conn.execute(HOLDERS, {"patience": LOCK_TIMEOUT}).fetchall()
    who = f" (look at {', '.join(row[0] for row in rows)})" if rows else ""
    return f"A transaction is in the way{who}; end it or try again, for the step was undone:"


def checksum(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(b"%s\0%s\0" % (path.name.encode(), path.read_bytes()))
    return digest.hexdigest()


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _text(notice: psycopg.errors.Diagnostic) -> str:
    return ". ".join(filter(None, (notice.message_primary, notice.message_hint)))
