"""Measure what pruning a long history takes, and how long a completion waits beside it.

    python tests/bench/retention.py [--rows N] [--singles N] [--postgres BIN]

N finished jobs of nine days ago are put straight into a partition of their day, with effects for
one in ten, and pruned by `maintain()`: first while somebody reads history for long (nothing may
wait, the day stays), then without, again until the day is gone. After that many single rows: stubs
of a queue that keeps nothing, unique keys past their time and incidents past theirs. All the while
another session enqueues, claims and completes: the longest completion is shown beside the longest
without any maintenance. One durable server of this program's own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from time import perf_counter, sleep
from typing import Any

import psycopg

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import make_server
from taskboard.migrate import migrate

FINISHED = """
insert into {table} (id, finished_at, attempt, priority, failures, lost_leases, lease_token, run_at,
  created_at, claimed_at, state, queue, kind, on_unknown, finished_by, payload)
select gen_random_uuid(), d.at, 1, 5, 0, 0, gen_random_uuid(), {at}, {at}, {at},
  'completed', 'default', 'mail', 'retry', 'worker', {payload}
from generate_series(1, {rows}) as n
cross join lateral (select {at} + n * interval '1 ms' as at) as d
"""
EFFECTS = """
insert into taskboard.effects (job_id, step, lease_token, attempt, idempotency_key, begun_at)
select h.id, 'main', h.lease_token, 1, h.id || '/main', h.finished_at
from {table} as h tablesample bernoulli (10)
"""
PAYLOAD = """'{"to": "ada@example.com", "subject": "Hello", "text": "some hundred bytes"}'::jsonb"""


class Bench:
    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.db = self.connect()

    def connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(
            self.dsn, autocommit=True, prepare_threshold=None,
            options="-c statement_timeout=600s",
        )  # fmt: skip

    def run(self, statement: str) -> None:
        self.db.execute(statement.encode())

    def make_day(self, rows: int) -> None:
        """A day of nine days ago with so many finished jobs; its indexes are built at the end."""
        (day,) = self.db.execute(
            "select (clock_timestamp() at time zone 'UTC')::date - 9"
        ).fetchone() or [None]  # fmt: skip
        table = f"taskboard.history_{day:%Y%m%d}"
        self.run(f"create table {table} (like taskboard.history including constraints)")
        midnight = f"timestamptz '{day} 00:00 UTC'"
        self.run(FINISHED.format(table=table, at=midnight, rows=rows, payload=PAYLOAD))
        self.run(
            f"alter table taskboard.history attach partition {table} for values"
            f" from ({midnight}) to ({midnight} + interval '24 hours')"
        )
        self.run(f"alter table {table} owner to taskboard_owner")
        # A real day has been vacuumed long before it is dropped.
        self.run(f"alter table {table} set (autovacuum_enabled = off)")
        self.run(EFFECTS.format(table=table))
        self.run(f"analyze {table}, taskboard.effects")

    @contextmanager
    def work(self) -> Iterator[list[float]]:
        """Jobs that live and end meanwhile; how many milliseconds each completion took."""
        took: list[float] = []
        stop = Event()

        def live() -> None:
            with self.connect() as conn:
                while not stop.is_set():
                    conn.execute("select taskboard.enqueue('mail')")
                    job = conn.execute(
                        "select job_id, lease_token from taskboard.claim()"
                    ).fetchone()  # fmt: skip
                    began = perf_counter()
                    conn.execute("select taskboard.complete(%s, %s)", job)
                    took.append((perf_counter() - began) * 1000)

        with ThreadPoolExecutor(1) as thread:
            living = thread.submit(live)
            try:
                yield took
            finally:
                stop.set()
                living.result()

    def measure(self, name: str, statement: str, least: float = 0) -> bool:
        """Run a statement beside work; say how long both took and what was done.

        Tells whether a day has been dropped.
        """
        with self.work() as completions:
            sleep(0.3)
            completions.clear()
            began = perf_counter()
            rows = self.db.execute(statement.encode()).fetchall()
            took = perf_counter() - began
            sleep(max(0.3, least - took))
        done = "; ".join(f"{step} {touched:,}" for step, touched in rows if touched)
        middle = sorted(completions)[len(completions) // 2]
        print(f"| {name} | {took:.2f} | {middle:.2f} | {max(completions):.1f} | {done} |",
              flush=True)  # fmt: skip

        return "dropped" in done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--singles", type=int, default=1_000_000)
    parser.add_argument("--postgres", default="auto")
    options = parser.parse_args()
    server = make_server(options.postgres, {"shared_buffers": "512MB", "max_wal_size": "4GB"})
    try:
        migrate(server.dsn("postgres"))
        bench = Bench(server.dsn("postgres"))
        bench.make_day(options.rows)
        bench.run("checkpoint")
        print(
            f"{options.rows:,} finished jobs in one day, {options.singles:,} of each single kind\n"
        )
        print("| what | s | completion, median ms | longest ms | done |\n|---|---|---|---|---|")
        bench.measure("nothing", "select 'nothing', 0", least=5)
        maintain = "select step, touched from taskboard.maintain()"
        with bench.connect() as reader, reader.transaction():
            reader.execute("select from taskboard.history limit 1")
            bench.measure("maintain() beside a long read", maintain)
        for _ in range(options.rows // 2_000_000 + 3):
            if bench.measure("maintain()", maintain):
                break
        bench.run(FINISHED.format(
            table="taskboard.history", at="clock_timestamp() - interval '3 hours'",
            rows=options.singles, payload="null"))  # fmt: skip
        bench.measure("maintain(), stubs", maintain)
        bench.run(
            "insert into taskboard.unique_keys (kind, key, job_id, live, held_until)"
            " select 'mail', n::text, gen_random_uuid(), false, clock_timestamp()"
            f" from generate_series(1, {options.singles}) as n"
        )
        bench.measure("maintain(), unique keys", maintain)
        bench.run(
            "insert into taskboard.incidents (happened_at, what, by_role)"
            " select clock_timestamp() - interval '8 days', 'lease_lapsed', 'me'"
            f" from generate_series(1, {options.singles}) as n"
        )
        bench.measure("maintain(), incidents", maintain)
        bench.measure("maintain(), nothing left", maintain)
        bench.db.close()
    finally:
        server.close()


if __name__ == "__main__":
    main()
