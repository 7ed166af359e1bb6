"""Which statements inside the functions took the time: pg_stat_statements, nested ones too."""

from __future__ import annotations

from machine import Rig

SETTINGS = {
    "shared_preload_libraries": "pg_stat_statements",
    "pg_stat_statements.track": "all",
    "pg_stat_statements.track_planning": "on",
    "compute_query_id": "on",
}
# What a function executes is in its own time, too: read a call and then what is below it.
SLOWEST = """
select s.toplevel, s.calls, (s.total_exec_time + s.total_plan_time) * 1000 / s.calls as us,
  s.total_plan_time * 1000 / s.calls as planning, s.wal_bytes / s.calls as wal,
  (s.shared_blks_hit + s.shared_blks_read) / s.calls as pages,
  left(regexp_replace(s.query, '\\s+', ' ', 'g'), 90) as query
from pg_stat_statements as s
join pg_database as d on d.oid = s.dbid and d.datname = current_database()
where s.calls > 10 and s.query ~ 'taskboard'
order by s.total_exec_time + s.total_plan_time desc
limit 25
"""


def told(rig: Rig, dsn: str) -> str:
    """The statements of a database that took longest, as a table."""
    with rig.connect(dsn) as db:
        db.execute("create extension if not exists pg_stat_statements")
        found = db.execute(SLOWEST).fetchall()
    lines = ["| called by | calls | us a call | of it planning | WAL, bytes | pages | statement |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for top, calls, each, planning, wal, pages, query in found:
        text = str(query).replace("|", "\\|")
        lines.append(f"| {'a client' if top else 'a function'} | {calls:,} | {each:,.1f}"
                     f" | {planning:,.1f} | {wal:,.0f} | {pages:,} | {text} |")  # fmt: skip
    return "\n".join(lines)
