"""Measure what the board's pages take in front of a long history.

    python tests/bench/board.py [--rows N] [--days N] [--stay] [--postgres BIN]

N finished jobs (ten millions) of so many days (7) are put straight into partitions of their days,
one in 500 failed, one in 100,000 of a rare kind, each with a unique key of its own; vacuumed and
analyzed, as autovacuum does. Then a board is served, and each page is loaded over HTTP six times;
shown are the first time, the median and the longest, how many jobs the page shows, and what the
database read for it, with what the board counts meanwhile. With `--stay` both go on until Ctrl-C,
for a look with a browser. One server of this program's own, in a temporary folder.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Event
from time import perf_counter, sleep
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from board.conftest import serving
from support import Connection, make_server, rows, session
from taskboard.console.board.access import Access
from taskboard.console.board.serve import OWN_NAMES
from taskboard.migrate import migrate

ATTACH = """
alter table taskboard.history attach partition {table} for values from ('{day}') to ('{next}')
"""
FINISHED = """
insert into {table} (id, finished_at, attempt, priority, failures, lost_leases,
  lease_token, run_at, created_at, claimed_at, state, queue, kind, on_unknown, finished_by,
  unique_key, payload)
select taskboard.new_job_id(taskboard.job_id_head(d.at), gen_random_uuid(), 0, '0000'),
  d.at + interval '90 ms', 1, 5, 0, 0, gen_random_uuid(), d.at, d.at, d.at + interval '50 ms',
  case when n % 500 = 0 then 'failed' else 'completed' end,
  case when n % 3 = 0 then 'orders' else 'mails' end,
  case when n % 100000 = 77 then 'rare' when n % 3 = 0 then 'stripe' else 'email' end, 'retry',
  'web-' || n % 7, 'order-' || n,
  jsonb_build_object('to', 'ada@example.com', 'subject', 'Hello', 'text', repeat('some words ', 9))
from generate_series({first}, {last}) as n
cross join lateral (
  select timestamptz '{begins}' + (n - {first} + 1) * interval '{step} us' as at) as d
"""


def fill(db: Connection, count: int, days: int) -> None:
    """Make a history, a day in a transaction: its table, its jobs, then its indexes."""
    db.execute("set timezone = 'UTC'")
    [(today, passed)] = rows(
        db, "select date_trunc('day', now()), extract(epoch from now() - date_trunc('day', now()))"
    )
    each = round(count / (days + float(passed) / 86400))
    for ago in range(days, -1, -1):
        day, first = today - timedelta(days=ago), (days - ago) * each + 1
        last = first + each - 1 if ago else count
        table, step = f"taskboard.history_{day:%Y%m%d}", 86_399_000_000 // each
        text = FINISHED.format(table=table, first=first, last=last, begins=day, step=step)
        with db.transaction():
            if ago:
                db.execute(
                    f"create table {table} (like taskboard.history including constraints)".encode()
                )
            db.execute(text.encode())
            if ago:
                after = day + timedelta(days=1)
                db.execute(ATTACH.format(table=table, day=day, next=after).encode())
        print(f"{last:,} jobs", flush=True)
    db.execute("vacuum analyze taskboard.history")


def some_live(db: Connection) -> None:
    for kind in ("email", "stripe"):
        db.execute(
            "select count(*) from taskboard.enqueue_many("
            f"'{kind}', array_fill('{{}}'::jsonb, array[5000]), on_unknown => 'hold')"
        )
    rows(db, "select taskboard.begin_effect(c.job_id, c.lease_token)"
         " from taskboard.claim(max_jobs => 20, lease => '1 second') as c")  # fmt: skip
    sleep(1.2)
    rows(db, "select taskboard.begin_effect(c.job_id, c.lease_token)"
         " from taskboard.claim(max_jobs => 20) as c")  # fmt: skip


def read(db: Connection) -> int:
    """How many blocks all sessions of the database have asked for."""
    db.execute("select pg_stat_clear_snapshot()")
    [(found,)] = rows(
        db, "select blks_hit + blks_read from pg_stat_database where datname = current_database()"
    )
    return int(found)


def measure(client: httpx.Client, name: str, path: str) -> None:
    """Load a page six times, and say how that went."""
    times = []
    for _ in range(6):
        before = perf_counter()
        answer = client.get(path)
        times.append((perf_counter() - before) * 1000)
    shown = len(re.findall(r'class="id" href', answer.text))
    looked = re.search(r'role="status">([\d\u202f]+) jobs were looked at', answer.text)
    print(
        f"{name:34} {answer.status_code} {times[0]:7.0f} {statistics.median(times):7.0f}"
        f" {max(times):7.0f} ms {shown:4} shown"
        + (f", {looked[1]} looked at" if looked else ""), flush=True,
    )  # fmt: skip


def pages(db: Connection, count: int) -> dict[str, str]:
    def when(part: float) -> str:
        [(at,)] = rows(
            db, "select to_char(min(h.created_at) + (max(h.created_at) - min(h.created_at)) * %s,"
            " 'YYYY-MM-DD\"T\"HH24:MI:SS') from taskboard.history as h"
            " where h.unique_key in (%s, %s)", [part, "order-1", f"order-{count}"],
        )  # fmt: skip
        return str(at)

    [(one,)] = rows(
        db, "select id from taskboard.history as h where h.unique_key = %s", [f"order-{count // 2}"]
    )
    return {
        "overview": "/", "held": "/held", "incidents": "/incidents", "workers": "/workers",
        "a job": f"/jobs/{one}", "jobs": "/jobs", "jobs, far back": f"/jobs?before={one}",
        "failed": "/jobs?state=failed", "failed of a kind": "/jobs?state=failed&kind=stripe",
        "cancelled (none)": "/jobs?state=cancelled", "held ones": "/jobs?state=held",
        "of a queue": "/jobs?queue=orders&state=completed",
        "of a worker": "/jobs?worker=web-3", "of a rare kind": "/jobs?kind=rare",
        "of a kind that is not there": "/jobs?kind=none",
        "of a key": f"/jobs?key=order-{count // 3}",
        "of a key that nobody had": "/jobs?key=none",
        "of a time": f"/jobs?since={when(0.4)}&until={when(0.41)}",
        "of a time and a worker": f"/jobs?until={when(0.4)}&worker=web-3",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--days", type=int, default=7)
    parser.add_argument("--stay", action="store_true")
    parser.add_argument("--postgres", default="auto")
    options = parser.parse_args()
    settings: dict[str, Any] = {
        "synchronous_commit": "off", "max_wal_size": "4GB", "shared_buffers": "512MB",
        "maintenance_work_mem": "256MB", "wal_level": "minimal", "max_wal_senders": "0",
    }  # fmt: skip
    server = make_server(options.postgres, settings)
    try:
        migrate(server.dsn())
        with session(server.dsn(), options="-c statement_timeout=900s") as db:
            before = perf_counter()
            fill(db, options.rows, options.days)
            some_live(db)
            print(f"filled in {perf_counter() - before:.0f} s")
            chosen = pages(db, options.rows)
            access = Access(hosts=OWN_NAMES, name="bench")
            with (
                serving(server.dsn(), access, operator=True) as address,
                httpx.Client(base_url=address, timeout=60) as client,
            ):
                sleep(15)  # the board counts the minutes of the last hour
                for name, path in chosen.items():
                    blocks = read(db)
                    measure(client, name, path)
                    sleep(1.2)  # so late are statistics at most
                    print(f"{'':34} {(read(db) - blocks) / 6:10.0f} blocks a time")
                if options.stay:
                    print(f"the board is at {address}, its database {server.dsn()}", flush=True)
                    with suppress(KeyboardInterrupt):
                        Event().wait()
    finally:
        server.close()


if __name__ == "__main__":
    main()
