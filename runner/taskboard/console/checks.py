"""What doctor looks at in the database, by statements that any login may run.

They show as much as a login may see; where that is too little, a finding says so.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg.rows import dict_row

import taskboard
from taskboard import db, migrate
from taskboard.connections import Connection, bounded, connect, one_line
from taskboard.console.output import cell
from taskboard.settings import Settings

ANSWERS_WITHIN = 10.0  # seconds, for a check or a server
OLD_ON_A_STANDBY = 100_000  # transactions; of its queries no age in seconds is known here
FINE, NOTE, WRONG = "ok", "note", "WRONG"


@dataclass(frozen=True, slots=True)
class Finding:
    """How bad it is, what was found, what helps."""

    level: str
    text: str
    fix: str = ""


def fine(text: str) -> Finding:
    return Finding(FINE, text)


def note(text: str, fix: str = "") -> Finding:
    return Finding(NOTE, text, fix)


def wrong(text: str, fix: str = "") -> Finding:
    return Finding(WRONG, text, fix)


@dataclass(slots=True)
class Look:
    """What checks look at, and what the first ones found out for those that follow.

    `kinds` have a handler here, most of them in `modules`; of the others, `off` says why some have
    none. What is older than `least` seconds is remarked on.
    """

    conn: Connection
    settings: Settings
    least: float
    kinds: set[str]
    modules: Sequence[str] = ()
    off: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)

    async def rows(self, name: str) -> list[dict[str, Any]]:
        """Run one of the statements."""
        with bounded(self.conn, ANSWERS_WITHIN):
            cursor = self.conn.cursor(row_factory=dict_row)
            await cursor.execute(SQL[name].encode())
            return await cursor.fetchall()


Check = Callable[[Look], Awaitable[list[Finding]]]

SQL = {
    "facts": """
select quote_ident(current_user) as user, r.rolsuper as is_super, pg_backend_pid() as pid,
  current_setting('server_version') as version, clock_timestamp() as clock,
  exists (
    select from pg_proc as p join pg_namespace as n on n.oid = p.pronamespace
    where n.nspname = 'taskboard' and p.proname = 'version') as installed,
  pg_has_role('pg_read_all_stats', 'usage') as sees_all,
  array(
    select m.rolname::text from pg_roles as m
    where m.rolname ~ '^taskboard_' and pg_has_role(m.oid, 'usage')) as roles,
  (select count(*) from pg_stat_replication) as standbys,
  pg_notification_queue_usage() as notifications,
  -- Those not in use, and this one.
  1 + least(
    current_setting('max_connections')::integer
      - current_setting('superuser_reserved_connections')::integer
      - coalesce(current_setting('reserved_connections', true)::integer, 0)
      - (select sum(s.numbackends) from pg_stat_database as s),
    nullif(d.datconnlimit, -1) - (
      select count(*) from pg_stat_activity as a where a.datname = d.datname),
    nullif(r.rolconnlimit, -1) - (
      select count(*) from pg_stat_activity as a where a.usename = r.rolname)) as free
from pg_roles as r, pg_database as d
where r.rolname = current_user and d.datname = current_database()""",
    "settings": """
select name, setting from pg_settings""",
    "pooled": """
-- What other clients have left in a session that we share with them.
select nullif(current_user, session_user) as role,
  current_setting('taskboard.asleep', true) <> '' as asleep,
  (select count(*) from pg_prepared_statements as p where p.name !~ '^PGBOUNCER_') as prepared,
  (select count(*) from pg_locks as l
    where l.locktype = 'advisory' and l.pid = pg_backend_pid()) as locks,
  (select string_agg(s.name, ', ' order by s.name) from pg_settings as s
    where s.source = 'session' and s.setting is distinct from s.reset_val
      and s.name !~ '^taskboard[.]' and s.name <> all (
      '{application_name,client_encoding,DateStyle,IntervalStyle,TimeZone,
        standard_conforming_strings}')) as settings""",
    "version": """
select * from taskboard.version()""",
    "functions": """
select p.proname as name, p.prosrc as source,
  has_function_privilege(p.oid, 'execute') and has_schema_privilege('taskboard', 'usage') as may
from pg_proc as p
where p.pronamespace = 'taskboard'::regnamespace""",
    "migrations": """
select name, checksum from taskboard.migrations""",
    "limits": """
select s.queue_rights as in_use, r.role::oid::bigint as role, p.rolname is not null as known,
  string_agg(r.queue, ', ' order by r.queue) as queues
from taskboard.settings as s
left join taskboard.queue_rights as r on true
left join pg_roles as p on p.oid = r.role
group by s.queue_rights, r.role, p.rolname
order by r.role""",
    "transactions": """
select a.pid, a.usename as user, a.application_name as name, coalesce(a.state, a.backend_type)
    as state, a.backend_xid is not null as writes,
  extract(epoch from clock_timestamp() - a.xact_start)::float8 as seconds
from pg_stat_activity as a
where a.pid <> pg_backend_pid() and a.backend_type is distinct from 'autovacuum worker'
  and (a.backend_xid is not null
    or a.backend_xmin is not null and a.datname = current_database())
order by a.xact_start""",
    "prepared": """
select quote_literal(p.gid) as gid, p.owner, p.database,
  extract(epoch from clock_timestamp() - p.prepared)::float8 as seconds
from pg_prepared_xacts as p
order by p.prepared""",
    "slots": """
select s.slot_name as name, s.xmin is not null as holds,
  pg_size_pretty(pg_wal_lsn_diff(pg_current_wal_lsn(), s.restart_lsn)) as wal
from pg_replication_slots as s
where not s.active
order by s.slot_name""",
    "standbys": """
select s.slot_name as name, age(s.xmin) as transactions
from pg_replication_slots as s
where s.active and s.xmin is not null
union all
select r.application_name, age(r.backend_xmin)
from pg_stat_replication as r
where r.backend_xmin is not null
order by name""",
    "tables": """
select c.relname as name
from pg_class as c, unnest(c.reloptions) as o
where c.relnamespace = 'taskboard'::regnamespace and o ~ '^autovacuum_enabled=(false|off|no|0)'""",
    "queues": """
select s.queue, s.kind, s.paused, s.ready, s.running, s.held,
  coalesce(extract(epoch from clock_timestamp() - s.oldest_ready_at), 0)::float8 as seconds
from taskboard.queue_stats as s
order by s.queue, s.kind""",
    "pauses and limits": """
select * from taskboard.queue_list as q
order by q.queue nulls first""",
}

# By topic: a setting, values that are remarked on, how, why, and what to set it to.
FOR_ALL = "alter system set {name} = {value}; select pg_reload_conf();"
FOR_LOGIN = "alter role {user} set {name} = {value};"
RULES: dict[str, list[tuple[str, str, str, str, str, str]]] = {
    "autovacuum": [
        ("autovacuum", "off", WRONG, "dead rows stay: claims get slower by the day", FOR_ALL, "on"),
        ("track_counts", "off", WRONG, "autovacuum does not know where to go", FOR_ALL, "on"),
    ],
    "durability": [
        ("fsync", "off", WRONG, "a crash of the host can ruin the cluster", FOR_ALL, "on"),
        ("full_page_writes", "off", WRONG, "a crash of the host can ruin the cluster",
         FOR_ALL, "on"),
        ("synchronous_commit", "off", WRONG,
         "a crash forgets jobs and completions that were acknowledged", FOR_LOGIN, "on"),
    ],
    "logs": [
        ("log_parameter_max_length_on_error", "(?!0$)", WRONG,
         "a call that fails leaves its lease token and payload in the log",
         "as superuser: " + FOR_LOGIN, "0"),
    ],
    "isolation": [
        ("default_transaction_isolation", "(?!read committed)", NOTE,
         "each claim takes two more round trips, for a transaction of its own",
         FOR_LOGIN, "'read committed'"),
    ],
}  # fmt: skip
# This extension has settings of its own, which count once it is loaded.
EXPLAIN = "auto_explain.log_min_duration", "auto_explain.log_parameter_max_length"
# With any of these on, calls are logged, and by default with their parameters.
LOGGING = {
    "log_statement": "all",
    "log_min_duration_statement": "(?!-1)",
    "log_min_duration_sample": "(?!-1)",
    "log_transaction_sample_rate": "(?!0$)",
}


async def database(look: Look) -> list[Finding]:
    before = time.time()
    (look.facts,) = await look.rows("facts")
    after, facts = time.time(), look.facts
    facts["ahead"] = facts["clock"].timestamp() - (before + after) / 2
    facts["away"] = after - before
    look.values = {row["name"]: row["setting"] for row in await look.rows("settings")}
    if not facts["installed"]:
        return [wrong("Taskboard is not installed in this database", "taskboard migrate")]
    return [fine(f"PostgreSQL {facts['version']}, {facts['away'] * 1000:.0f} ms away, as"
                 f" {facts['user']}")]  # fmt: skip


async def clock(look: Look) -> list[Finding]:
    ahead = abs(look.facts["ahead"])
    if ahead <= 1 + look.facts["away"]:
        return []
    what = f"this host's and the database's differ by {ahead:.1f} s: only the database's counts,"
    return [note(f"{what} but logs do not agree", "run a time service on both (chrony)")]


async def version(look: Look) -> list[Finding]:
    """Compare the bodies of functions with our files: no right is needed, no edit goes unseen."""
    ((theirs,),) = [row.values() for row in await look.rows("version")]
    ours = taskboard.version()
    if theirs != ours:
        what, fix = f"the database has {theirs}, this is {ours}", "taskboard migrate"
        if theirs.split(".")[:2] == ours.split(".")[:2]:
            return [note(what, fix)]
        return [wrong(f"{what}: runners refuse to start", f"{fix}, or run the matching release")]
    text = "".join(path.read_text("utf-8") for path in sorted(taskboard.SQL.glob("[0-9]*.sql")))
    expected = set(re.findall(r"create or replace function taskboard\.(\w+)", text))
    bodies = {"", *text.split("$$")}  # empty where it was parsed when it was created
    present = await look.rows("functions")
    found: list[Finding] = []
    if missing := expected - {row["name"] for row in present}:
        found.append(wrong(f"functions are missing: {_listed(missing)}", "taskboard migrate"))
    if other := {row["name"] for row in present if row["source"] not in bodies}:
        fix = "taskboard migrate; if that finds nothing to do: psql -f sql/install.sql"
        found.append(wrong(f"functions are not of this release: {_listed(other)}", fix))
    with suppress(psycopg.errors.InsufficientPrivilege):  # for the owner to see
        applied = {row["name"]: row["checksum"] for row in await look.rows("migrations")}
        files = {path.stem: path for path in taskboard.MIGRATIONS.glob("[0-9]*.sql")}
        if pending := files.keys() - applied.keys():
            found.append(wrong(f"migrations are missing: {_listed(pending)}", "taskboard migrate"))
        edited = {
            name for name in files.keys() & applied.keys()
            if applied[name] not in (None, migrate.checksum([files[name]]))
        }  # fmt: skip
        if edited:
            what = f"migrations are not what was applied: {_listed(edited)}"
            found.append(note(what, "reinstall the package"))
    return found


async def rights(look: Look) -> list[Finding]:
    matrix = (taskboard.SQL / "90_grants.sql").read_text("utf-8")
    needed = set(re.findall(r"^    (\w+) [a-z ]*\bworker\b", matrix, re.M))
    user = look.facts["user"]
    lacking = {row["name"] for row in await look.rows("functions") if not row["may"]} & needed
    roles = set(look.facts["roles"])
    if lacking and "taskboard_worker" not in roles and roles & {
        "taskboard_operator", "taskboard_observer"
    }:  # fmt: skip
        what = f"{user} is an operator's or observer's login, and no runner's"
        return [note(what, "taskboard doctor, with the environment of a runner")]
    if lacking:
        fix = f"grant taskboard_worker to {user}; if it has that: taskboard migrate"
        return [wrong(f"{user} may not call {_listed(lacking)}", fix)]
    found: list[Finding] = []
    with suppress(psycopg.errors.InsufficientPrivilege):  # for the owner to see
        found += [_judge_limit(**row) for row in await look.rows("limits") if not row["known"]]
    if look.facts["is_super"]:
        fix = "create role runner login password '…'; grant taskboard_worker to runner;"
        found.append(note(f"{user} is a superuser; a runner needs far less", fix))
    return [one for one in found if one.text]


def _judge_limit(in_use: bool, role: int | None, known: bool, queues: str | None) -> Finding:
    """Judge a row of queue_rights whose role is gone; without a role: that there is no row."""
    fix = "select taskboard.allow_queue(ROLE, QUEUE), for each role that was limited"
    if role is not None:
        what = f"the role with oid {role}, limited to {queues}, is gone; made anew it has no limit"
        return wrong(what, f"{fix}; delete from taskboard.queue_rights where role = {role};")
    what = "roles were limited to queues, and no limit is left, as after a restore without roles"
    return wrong(what, fix) if in_use else fine("")


def is_pooled(look: Look) -> bool:
    """Tell whether a pooler stands between: it announces process ids of its own."""
    return bool(look.facts["pid"] != look.conn.info.backend_pid)


async def listen(look: Look) -> list[Finding]:
    """Notify ourselves, as a pooler swallows notifications and says nothing."""
    url = look.settings.listen_url
    fix = "name the server itself in TASKBOARD_LISTEN_URL"
    if not url:
        if is_pooled(look):
            what = "a pooler stands between: no notification arrives, so runners poll every second"
            return [note(f"{what}; calls go through, as nothing is prepared", fix)]
        return [] if await _hears_itself(look.conn) else [wrong("no notification arrives", fix)]
    try:
        async with asyncio.timeout(ANSWERS_WITHIN):
            conn = await connect(url, "taskboard doctor")
    except (psycopg.Error, OSError) as exc:
        return [wrong(f"TASKBOARD_LISTEN_URL: {one_line(exc) or 'no answer'}", fix)]
    async with conn:
        with bounded(conn, ANSWERS_WITHIN):
            pooled = await db.is_pooled(conn)
        if pooled or not await _hears_itself(conn):
            why = "a pooler stands there, too" if pooled else "no notification arrives"
            return [wrong(f"TASKBOARD_LISTEN_URL: {why}", fix)]
    return []


async def _hears_itself(conn: Connection) -> bool:
    channel = f"taskboard_doctor_{conn.info.backend_pid}"
    with bounded(conn, ANSWERS_WITHIN):
        for verb in ("listen", "notify"):
            await conn.execute(f"{verb} {channel}".encode())
        arrived = [True async for _ in conn.notifies(timeout=2, stop_after=1)]
        await conn.execute(f"unlisten {channel}".encode())
    return bool(arrived)


async def connections(look: Look) -> list[Finding]:
    if is_pooled(look):
        return []  # the pooler's connections are not ours
    opens, free = look.settings.pool + look.settings.listen, look.facts["free"]
    if free >= opens:
        return []
    fix = "a smaller --pool, a larger max_connections (or limit of the role), or a pooler"
    return [wrong(f"a runner opens up to {opens} connections, and {free} are free", fix)]


async def transactions(look: Look) -> list[Finding]:
    rows = await look.rows("transactions")
    found: list[Finding] = []
    for row in rows:
        if row["seconds"] is None or row["seconds"] < look.least:
            continue
        who = ", ".join(filter(None, (row["user"], row["name"], row["state"])))
        for_long, fix = _age(row["seconds"]), f"select pg_terminate_backend({row['pid']});"
        if row["writes"]:
            found.append(
                wrong(f"process {row['pid']} ({who}) writes in a transaction that is open for"
                      f" {for_long}: claims slow down, and vacuum cleans nothing", fix)
            )  # fmt: skip
        else:
            what = f"process {row['pid']} ({who}) keeps a snapshot of {for_long} ago"
            found.append(note(f"{what}: vacuum cleans nothing", fix))
    for row in await look.rows("prepared"):
        if row["seconds"] >= look.least:
            found.append(
                wrong(f"{row['owner']}'s prepared transaction {row['gid']} waits for"
                      f" {_age(row['seconds'])}: claims slow down, and vacuum cleans nothing",
                      f"in {row['database']}: commit prepared {row['gid']}; or rollback prepared")
            )  # fmt: skip
    hidden = sum(row["seconds"] is None for row in rows)
    if hidden and not look.facts["sees_all"]:
        fix = f"grant pg_read_all_stats to {look.facts['user']};"
        found.append(note(f"{hidden} transactions of others could not be looked at", fix))
    return found


async def slots(look: Look) -> list[Finding]:
    return [
        wrong(f"nobody reads the replication slot {row['name']}: it keeps {row['wal'] or 'no'} WAL"
              + (", and vacuum cleans nothing" if row["holds"] else ""),
              f"start its reader, or: select pg_drop_replication_slot('{row['name']}');")
        for row in await look.rows("slots")
    ]  # fmt: skip


async def standbys(look: Look) -> list[Finding]:
    """Look for snapshots that a standby has us keep, by hot_standby_feedback."""
    fix = "there: end long queries (pg_stat_activity), or set hot_standby_feedback = off"
    return [
        note(f"a query on the standby {row['name']} keeps a snapshot of {row['transactions']:,}"
             " transactions ago: vacuum cleans nothing since", fix)
        for row in await look.rows("standbys")
        if row["transactions"] > OLD_ON_A_STANDBY
    ]  # fmt: skip


def rules(look: Look, topic: str) -> list[Finding]:
    """Remark on settings."""
    return [
        Finding(level, f"{name} is {value}: {why}",
                fix.format(user=look.facts["user"], name=name, value=better))
        for name, bad, level, why, fix, better in RULES[topic]
        if (value := look.values.get(name)) is not None and re.match(bad, value)
    ]  # fmt: skip


async def autovacuum(look: Look) -> list[Finding]:
    return rules(look, "autovacuum") + [
        wrong(f"it is off for taskboard.{row['name']}",
              f"alter table taskboard.{row['name']} reset (autovacuum_enabled);")
        for row in await look.rows("tables")
    ]  # fmt: skip


async def notifications(look: Look) -> list[Finding]:
    used = look.facts["notifications"]
    if used < 0.1:
        return []
    level = WRONG if used >= 0.5 else NOTE
    what = f"their queue is {used:.0%} full; from 50% on, no sleeping runner is woken"
    return [Finding(level, what, "end the session that listens and stays in a transaction")]


async def durability(look: Look) -> list[Finding]:
    found, values = rules(look, "durability"), look.values
    weak = values["synchronous_commit"] in ("local", "off")
    if look.facts["standbys"] and (weak or not values["synchronous_standby_names"]):
        what = "no standby is synchronous: a failover forgets some of what was acknowledged"
        fix = FOR_ALL.format(name="synchronous_standby_names", value="'ANY 1 (*)'")
        found.append(note(what, fix))
    return found


async def logs(look: Look) -> list[Finding]:
    found, values = rules(look, "logs"), look.values
    on = [f"{name} = {values[name]}" for name in LOGGING if re.match(LOGGING[name], values[name])]
    if on and values["log_parameter_max_length"] != "0":
        fix = FOR_LOGIN.format(user=look.facts["user"], name="log_parameter_max_length", value=0)
        what = f"{', '.join(on)}: what is logged shows lease tokens and payloads"
        found.append(wrong(what, f"as superuser: {fix}"))
    explains, cut_at = (values.get(name) for name in EXPLAIN)
    if explains not in (None, "-1") and cut_at not in (None, "0"):
        what = f"{EXPLAIN[0]} = {explains}: plans are logged with lease tokens and payloads"
        found.append(wrong(what, FOR_ALL.format(name=EXPLAIN[1], value=0)))
    return found


async def isolation(look: Look) -> list[Finding]:
    return rules(look, "isolation")


async def jobs(look: Look) -> list[Finding]:
    rows = await look.rows("queues")
    stops = {row["queue"]: row for row in await look.rows("pauses and limits")}
    found = [_judge_pause(row) for row in stops.values() if row["paused_at"]]
    for queue in sorted({row["queue"] for row in rows if row["ready"] and not row["paused"]}):
        here = [row for row in rows if row["queue"] == queue]
        full = _judge_fullness(stops.get(queue, {}), here, look.least)
        found += full
        for row in here if full else ():
            row["paused"] = True  # as good as that
    own = look.kinds - {"email", "stripe"}  # known only where modules were named
    if held := sum(row["held"] for row in rows):
        fix = "taskboard jobs --state held; find out; taskboard resolve ID STEP --happened yes|no"
        found.append(wrong(f"held: {held}; somebody must find out whether effects happened", fix))
    for kind in sorted({row["kind"] for row in rows}):
        some = [row for row in rows if row["kind"] == kind and not row["paused"]]
        ready = sum(row["ready"] for row in some)
        oldest = max((row["seconds"] for row in some), default=0)
        what = f"kind {kind}: {ready} ready, the oldest for {_age(oldest)}"
        fix = look.off.get(kind, f"taskboard run MODULE, one that handles {kind}")
        if kind in look.kinds:
            fix = " ".join(["taskboard run", *look.modules])
        if not ready:
            continue
        if any(row["running"] for row in some):
            if oldest >= look.least:
                fix = "start more runners, unless the queue has a limit"
                found.append(note(f"{what}: they come faster than they are run", fix))
        elif oldest >= look.least:
            found.append(wrong(f"{what}, and none is running", fix))
        elif kind not in look.kinds and (own or kind in look.off):
            found.append(note(f"{what}, and a runner started here has no handler", fix))
    return found


def _judge_pause(row: dict[str, Any]) -> Finding:
    what = "all queues are" if row["queue"] is None else f"the queue {row['queue']} is"
    by = f" by {row['paused_by']}" if row["paused_by"] else ""
    reason = f": {row['pause_reason']}" if row["pause_reason"] else ""
    fix = " ".join(["taskboard resume", *filter(None, [row["queue"]])])
    return note(f"{what} paused, since {cell(row['paused_at'])}{by}{reason}", fix)


def _judge_fullness(
    stop: dict[str, Any], rows: list[dict[str, Any]], least: float
) -> list[Finding]:
    """Remark on a limit that lets no ready job run now; on one that lets some, after a while."""
    most, starts = stop.get("max_running"), stop.get("max_starts")
    waits = max(row["seconds"] for row in rows) >= least
    if most is not None and sum(row["running"] for row in rows) >= most and (waits or not most):
        what = f"the queue {stop['queue']} may run {most} jobs at once"
        return [note(what, f"taskboard limit {stop['queue']} --running N")]
    if starts == 0:
        what = f"the queue {stop['queue']} may start {starts} jobs per {cell(stop['starts_per'])}"
        return [note(what, f"taskboard limit {stop['queue']} --starts N --per DURATION")]
    return []


def _age(seconds: float) -> str:
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"


def _listed(names: Iterable[str]) -> str:
    some = sorted(names)
    return ", ".join(some[:6]) + (f" and {len(some) - 6} more" if len(some) > 6 else "")
