"""Measure Taskboard against a floor of plain SQL, in one run, and print ratios.

    python tests/bench/bench.py [--quick] [--seconds S] [--rounds N] [--postgres BIN] [case …]

The floor is what a person would write by hand: one table, `skip locked` pick and update, delete by
id; no token, no history, no functions. Both run on one server of this program's own, durable, by
pgbench, in turns; the figure is the median over the rounds of (Taskboard / floor), with its spread.
Machines differ and are noisy: quote ratios, not rates.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psycopg

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import make_server
from taskboard.migrate import migrate

PAYLOAD = '{"to": "ada@example.com", "subject": "Hello", "text": "about a hundred bytes of text"}'

FLOOR = """
create table floor (
  id bigserial primary key, kind text not null, payload jsonb not null,
  run_at timestamptz not null default now(), locked_until timestamptz);
create index on floor (run_at, id) where locked_until is null;
"""

FLOOR_PICK = """update floor set locked_until = now() + interval '60 s'
  where id = any (array(
    select id from floor where locked_until is null and run_at <= now()
    order by run_at, id limit {n} for update skip locked))
  returning id, payload"""


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison: a pgbench script for each side, and how many jobs a transaction moves."""

    name: str
    floor: str
    ours: str
    jobs: int = 1
    drains: bool = False
    goal: float = 0.80


def batch(n: int) -> tuple[str, str]:
    return (
        f"with picked as ({FLOOR_PICK.format(n=n)})"
        " select array_agg(id) as ids, count(payload) from picked \\gset\n"
        "delete from floor where id = any (':ids');\n",
        "select array_agg(job_id) as ids, array_agg(lease_token) as tokens, count(payload)"
        f" from taskboard.claim('{{default}}', '{{email}}', {n}) \\gset\n"
        "select count(*) from taskboard.complete_many(':ids', ':tokens');\n",
    )


CASES = [
    Case(
        "enqueue, one per transaction",
        f"insert into floor (kind, payload) values ('email', '{PAYLOAD}') returning id;\n",
        f"select * from taskboard.enqueue('email', '{PAYLOAD}');\n",
        goal=0.85,
    ),
    *(
        Case(
            f"enqueue, {n:,} a statement",
            f"insert into floor (kind, payload) select 'email', p"
            f" from unnest(array_fill('{PAYLOAD}'::jsonb, array[{n}])) as p;\n",
            f"select count(*) from taskboard.enqueue_many('email',"
            f" array_fill('{PAYLOAD}'::jsonb, array[{n}]));\n",
            jobs=n,
            goal=0.85,
        )
        for n in (1000, 100_000)
    ),
    Case(
        "drain, claim 1 + complete 1",
        FLOOR_PICK.format(n=1) + " \\gset\ndelete from floor where id = :id;\n",
        "select * from taskboard.claim('{default}', '{email}', 1) \\gset\n"
        "select * from taskboard.complete(':job_id', ':lease_token');\n",
        drains=True,
    ),
    Case("drain, batches of 10", *batch(10), jobs=10, drains=True),
    Case("drain, batches of 100", *batch(100), jobs=100, drains=True),
]


class Bench:
    """A server with both sides installed, and pgbench."""

    def __init__(self, choice: str, folder: Path) -> None:
        self.server = make_server(choice, {"shared_buffers": "512MB", "max_wal_size": "4GB"})
        self.dsn = self.server.dsn("postgres")
        self.pgbench = Path(self.server.name) / "pgbench"
        self.folder = folder
        migrate(self.dsn)
        self.db = psycopg.connect(self.dsn, autocommit=True)
        self.db.execute(FLOOR)

    def fill(self, jobs: int) -> None:
        """Give both sides so many ready jobs, and nothing else."""
        self.db.execute("truncate floor, taskboard.jobs, taskboard.history")
        self.db.execute(
            "insert into floor (kind, payload) select 'email', %s::jsonb"
            " from generate_series(1, %s)", [PAYLOAD, jobs],
        )  # fmt: skip
        for start in range(0, jobs, 100_000):
            self.db.execute(
                "select count(*) from taskboard.enqueue_many('email',"
                " array_fill(%s::jsonb, array[%s::integer]))",
                [PAYLOAD, min(100_000, jobs - start)],
            )
        self.db.execute("vacuum analyze floor")
        self.db.execute("vacuum analyze taskboard.jobs")
        self.db.execute("checkpoint")

    def rate(self, script: str, clients: int, seconds: float, jobs: int) -> float:
        """Run a script and tell how many jobs a second it moved."""
        path = self.folder / "script.sql"
        path.write_text(script)
        done = subprocess.run(
            [self.pgbench, "-n", "-M", "simple", "-c", str(clients), "-j", "1",
             "-T", str(max(1, round(seconds))), "-f", path, self.dsn],
            capture_output=True, text=True, timeout=seconds * 10 + 60,
        )  # fmt: skip
        for line in done.stdout.splitlines():
            if line.startswith("tps = "):
                return float(line.split()[2]) * jobs
        raise RuntimeError(done.stderr[-800:])


def compare(
    bench: Bench, case: Case, clients: int, rounds: int, seconds: float, say: Callable[[str], None]
) -> None:
    """Run both sides in turns; print the median ratio, its spread and the median rates."""
    ratios, ours, floors = [], [], []
    for turn in range(rounds):
        bench.fill(int(case.jobs * seconds * (9_000 if case.jobs == 1 else 2_500)) if case.drains
                   else 0)  # fmt: skip
        both = [("floor", case.floor), ("ours", case.ours)]
        rates = {
            side: bench.rate(script, clients, seconds, case.jobs)
            for side, script in (both if turn % 2 else both[::-1])
        }
        ratios.append(rates["ours"] / rates["floor"])
        ours.append(rates["ours"])
        floors.append(rates["floor"])
    middle = statistics.median(ratios)
    say(
        f"| {case.name} | {clients} | {middle:.2f} ({min(ratios):.2f}-{max(ratios):.2f}) "
        f"| {case.goal:.2f} | {statistics.median(floors):,.0f} | {statistics.median(ours):,.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help="parts of case names; all by default")
    parser.add_argument("--quick", action="store_true", help="a smoke test of some seconds")
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 4, 8])
    parser.add_argument("--postgres", default="auto")
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.rounds, options.clients = 1, 1, [2]
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options.postgres, Path(folder))
        try:
            (version,) = bench.db.execute("show server_version").fetchone() or ("?",)
            print(f"PostgreSQL {version}, {os.cpu_count()} cores, {platform.machine()}, durable\n")
            print("| what | clients | ratio (spread) | goal | floor, jobs/s | Taskboard, jobs/s |")
            print("|---|---|---|---|---|---|")
            for case in CASES:
                if options.cases and not any(part in case.name for part in options.cases):
                    continue
                if options.quick and case.jobs > 1000:
                    continue
                for clients in options.clients if case.jobs == 1 else options.clients[1:2] or [2]:
                    compare(bench, case, clients, options.rounds, options.seconds,
                            lambda line: print(line, flush=True))  # fmt: skip
        finally:
            bench.db.close()
            bench.server.close()


if __name__ == "__main__":
    main()
