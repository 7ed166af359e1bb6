"""Let a queue work for an hour with all that goes on in life, and chart whether it stays as it was.

    python tests/bench/sustained.py [--minutes 60] [--backlog N] [--out FOLDER] [--postgres BIN]

Four clients enqueue, claim and complete without a pause; one job in ten is scheduled for later, one
in twenty renewed, one in twenty fails once and is retried, one in twenty has a serial key. Beside
them: in the second and third quarter somebody holds an old snapshot; days of history come and are
dropped by `maintain()`; a report reads all of history every now and then. A further session
measures its own claims. `--autovacuum default` takes away the settings that the tables come with,
for a comparison. It ends by itself; Ctrl-C ends it early, with what there is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from charts import curves
from machine import PROGRESS, Db, Rig, describe
from rows_claim import add, percentile
from sides import PAYLOAD, our_drain, taskboard

CLAIM = "select * from taskboard.claim('{default}', '{email}', 1) \\gset\n"


def enqueue(options: str = "") -> str:
    return f"select 1 as one from taskboard.enqueue('email', '{PAYLOAD}'{options}) \\gset\n"


def job(verb: str) -> str:
    return f"select count(*) from taskboard.{verb};\n"


# What a client does in a turn, and how often of a hundred. Failing leaves a job, taking ends one.
TURNS = {
    "plain": (70, enqueue() + our_drain(1)),
    "scheduled": (10, enqueue(", delay => '5 seconds'") + our_drain(1)),
    "renewed": (
        5,
        enqueue()
        + CLAIM
        + job("renew(':job_id', ':lease_token')")
        + job("complete(':job_id', ':lease_token')"),
    ),
    "failing": (
        5,
        enqueue()
        + CLAIM
        + job("fail(':job_id', ':lease_token', 'not today', retry_in => '3 seconds')"),
    ),
    "taking": (5, our_drain(1)),
    "serial": (
        5,
        "\\set key random(1, :keys)\n" + enqueue(", serial_key => 'k:key'") + our_drain(1),
    ),
}
REPORT = (
    "select h.queue, h.kind, h.state, count(*), avg(h.finished_at - h.created_at)"
    " from taskboard.history as h group by 1, 2, 3"
)
TABLES = ("jobs", "unique_keys", "serial_keys", "effects")
LOOK = """
select
  (select n_dead_tup from pg_stat_user_tables where relid = 'taskboard.jobs'::regclass),
  pg_table_size('taskboard.jobs') / 1048576.0,
  pg_indexes_size('taskboard.jobs') / 1048576.0,
  (select sum(pg_total_relation_size(relid)) / 1048576.0
    from pg_partition_tree('taskboard.history')),
  (select autovacuum_count from pg_stat_user_tables where relid = 'taskboard.jobs'::regclass)
"""


class Run:
    """One run: threads that do their part until told to stop, and what was seen meanwhile."""

    def __init__(self, rig: Rig, dsn: str, seconds: float, each: float) -> None:
        self.rig, self.dsn, self.seconds, self.each = rig, dsn, seconds, each
        self.began = monotonic()
        self.stop = threading.Event()
        self.claims: list[tuple[float, float]] = []  # when, milliseconds
        self.seen: dict[str, list[float]] = {
            name: [] for name in ("dead rows", "table, MB", "indexes, MB", "history, MB", "vacuums")
        }
        self.days = self.reports = 0
        self.failures: list[str] = []

    def age(self) -> float:
        return monotonic() - self.began

    def part(self, work: Callable[[Db], None]) -> threading.Thread:
        def run() -> None:
            try:
                with self.rig.connect(self.dsn) as db:
                    work(db)
            except Exception as exc:
                self.failures.append(f"{work.__name__}: {exc}")

        thread = threading.Thread(target=run, name=work.__name__)
        thread.start()
        return thread

    def probe(self, db: Db) -> None:
        """Claims of our own, timed."""
        while not self.stop.wait(0.05):
            began = perf_counter()
            job = db.execute("select job_id, lease_token from taskboard.claim()").fetchone()
            self.claims.append((self.age(), (perf_counter() - began) * 1000))
            if job:  # and one for it, or there would be none left after half an hour
                db.execute("select taskboard.complete(%s, %s)", job)
                db.execute("select taskboard.enqueue('email')")

    def hold(self, db: Db) -> None:
        """An old snapshot, from a quarter of the time to three quarters."""
        if self.stop.wait(self.seconds / 4):
            return
        db.execute("begin isolation level repeatable read")
        db.execute("select count(*) from pg_class")
        self.stop.wait(self.seconds / 2)
        db.execute("rollback")

    def report(self, db: Db) -> None:
        while not self.stop.wait(max(self.each, 5)):
            db.execute(REPORT)
            self.reports += 1

    def roll(self, db: Db) -> None:
        """Let a day of nine days ago come, with copies of what has finished, and be dropped."""
        while not self.stop.wait(self.seconds / 12):
            (day,) = db.execute(
                "select (clock_timestamp() at time zone 'UTC')::date - 9"
            ).fetchone() or (None,)
            name = f"taskboard.history_{day:%Y%m%d}"
            db.execute(
                f"create table {name} (like taskboard.history including constraints)".encode()
            )
            db.execute(
                f"insert into {name} select h.* from taskboard.history as h limit 50000".encode()
            )
            db.execute(f"update {name} set finished_at = timestamptz '{day} 12:00 UTC'".encode())
            db.execute(
                f"alter table taskboard.history attach partition {name} for values from"
                f" ('{day} 00:00 UTC')"
                f" to (timestamptz '{day} 00:00 UTC' + interval '24 hours')".encode()
            )
            db.execute(f"alter table {name} owner to taskboard_owner".encode())
            for _ in range(20):
                db.execute("select taskboard.maintain()")
                (gone,) = db.execute("select to_regclass(%s) is null", [name]).fetchone() or (0,)
                if gone or self.stop.wait(1):
                    break
            self.days += 1

    def look(self, db: Db) -> None:
        while True:
            found: Any = db.execute(LOOK).fetchone()
            for name, value in zip(self.seen, found, strict=True):
                self.seen[name].append(float(value or 0))
            if self.stop.wait(self.each):
                return

    def tails(self, count: int) -> list[float]:
        """The 99th of a hundred claims, for each stretch between two looks."""
        parts: list[list[float]] = [[] for _ in range(max(count, 1))]
        for at, took in self.claims:
            parts[min(int(at / self.each), count - 1)].append(took)
        return [percentile(part, 99) if part else 0.0 for part in parts]


def load(rig: Rig, dsn: str, seconds: float, clients: int, keys: int) -> subprocess.Popen[str]:
    words = [
        str(rig.pgbench),
        "-n",
        "-M",
        "simple",
        "-c",
        str(clients),
        "-T",
        str(int(seconds)),
        "-P",
        "1",
        "-D",
        f"keys={keys}",
    ]
    for name, (weight, script) in TURNS.items():
        path = rig.folder / f"{name}.sql"
        path.write_text(script)
        words += ["-f", f"{path}@{weight}"]
    return subprocess.Popen(
        [*words, dsn], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def quarters(values: list[float]) -> list[float]:
    """The median of each quarter of the time."""
    size = max(len(values) // 4, 1)
    return [statistics.median(values[n * size : (n + 1) * size] or [0.0]) for n in range(4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--backlog", type=int, default=5_000, help="jobs that wait all the time")
    parser.add_argument("--autovacuum", choices=["shipped", "default"], default="shipped")
    parser.add_argument("--postgres", default="auto")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for charts and figures")
    given = parser.parse_args()
    seconds = given.minutes * 60
    each = max(1.0, min(10.0, seconds / 60))
    with tempfile.TemporaryDirectory() as folder:
        rig = Rig(given.postgres, Path(folder))
        process = None
        try:
            machine = describe(rig, Path(folder))
            side = taskboard()
            side.set_up(rig)
            with rig.connect(side.dsn) as db:
                if given.autovacuum == "default":
                    take_settings_away(db)
                add(db, given.backlog)
                db.execute("vacuum analyze taskboard.jobs")
            run = Run(rig, side.dsn, seconds, each)
            # With fewer keys more jobs come than get their turn, which is once in a backlog.
            keys = max(given.backlog // 5, 50)
            process = load(rig, side.dsn, seconds, given.clients, keys)
            parts = [
                run.part(work) for work in (run.probe, run.hold, run.report, run.roll, run.look)
            ]
            err = ""
            try:
                _, err = process.communicate(timeout=seconds + 120)
            except KeyboardInterrupt:
                process.terminate()
                _, err = process.communicate()
            run.stop.set()
            for part in parts:
                part.join()
            if process.returncode or run.failures:
                print("\n".join(run.failures), err[-500:], file=sys.stderr)
        finally:
            if process and process.poll() is None:
                process.kill()
            with suppress(Exception):
                rig.close()
    rates = [float(rate) for _, rate in PROGRESS.findall(err)]
    tell(machine, run, rates, given)
    if process.returncode or run.failures:
        sys.exit(1)


def take_settings_away(db: Db) -> None:
    for table in TABLES:
        (options,) = db.execute(
            "select coalesce(array_agg(split_part(o, '=', 1)), '{}') from pg_class,"
            " unnest(reloptions) as o where oid = to_regclass(%s)",
            [f"taskboard.{table}"],
        ).fetchone() or ([],)
        if options:
            db.execute(f"alter table taskboard.{table} reset ({', '.join(options)})".encode())


def tell(machine: dict[str, str], run: Run, rates: list[float], given: argparse.Namespace) -> None:
    tails = run.tails(len(run.seen["dead rows"]))
    figures = {"jobs/s": rates, "claim, p99 ms": tails, **run.seen}
    vacuums = figures.pop("vacuums")
    print("\n".join(f"* {name}: {value}" for name, value in machine.items()))
    print(
        f"* this run: {given.minutes:g} minutes, {given.clients} clients, {given.backlog:,} jobs"
        f" wait always, autovacuum {given.autovacuum}; {run.days} days of history dropped,"
        f" {run.reports} reports, {vacuums[-1] if vacuums else 0:.0f} vacuums of the live jobs\n"
    )
    print("| median of each quarter | first | second, snapshot | third, snapshot | last | most |")
    print("|---|---|---|---|---|---|")
    for name, values in figures.items():
        cells = " | ".join(f"{value:,.1f}" for value in [*quarters(values), max(values or [0])])
        print(f"| {name} | {cells} |")
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "sustained.json").write_text(
            json.dumps(
                {
                    "machine": machine,
                    "each second": rates,
                    "seconds between looks": run.each,
                    "looks": run.seen,
                    "claim p99": tails,
                },
                indent=1,
            )
            + "\n"
        )
        charts = {
            "throughput": curves("jobs ended", {"jobs/s": rates}, "a second"),
            "claim-p99": curves("the 99th of a hundred claims", {"claim": tails}, "ms", run.each),
            "dead-rows": curves(
                "dead rows of the live jobs", {"dead": run.seen["dead rows"]}, "rows", run.each
            ),
            "size": curves(
                "size",
                {name: run.seen[name] for name in ("table, MB", "indexes, MB", "history, MB")},
                "MB",
                run.each,
            ),
        }
        for name, drawing in charts.items():
            (given.out / f"sustained-{name}.svg").write_text(drawing)


if __name__ == "__main__":
    main()
