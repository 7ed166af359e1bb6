"""Measure what many jobs of one serial key, and many keys, cost against an empty queue.

    python tests/bench/keys.py [--jobs N] [--bulk N] [--rounds N] [--postgres BIN]

First the keys in bulk: `enqueue_many` of one batch, without keys, with one serial key, with as many
serial keys as jobs, and with as many unique keys; the figure is (with keys / without). Then the
life of single jobs while N jobs wait: under one key, and under N keys; the figure is the median of
each call's time over that on a queue with nothing else in it. One durable server of this program's
own; quote ratios, not times.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import psycopg

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import make_server
from taskboard.migrate import migrate

Db = psycopg.Connection[Any]

BULK = {
    "no key": "",
    "one serial key": ", serial_keys => array_fill('k'::text, array[{n}])",
    "a serial key each": ", serial_keys => (select array_agg('k' || n) from"
    " generate_series(1, {n}) as n)",
    "a unique key each": ", unique_keys => (select array_agg('k' || n) from"
    " generate_series(1, {n}) as n)",
}
WAITING = {
    "one job": "",
    "one key": BULK["one serial key"].replace("'k'", "'k0'"),
    "a key each": BULK["a serial key each"].replace("'k' ||", "'k' || {start} +"),
}
TABLES = "taskboard.jobs, taskboard.history, taskboard.serial_keys, taskboard.unique_keys"


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Run something; the milliseconds it took, and its answer."""
    began = perf_counter()
    answer = call()
    return (perf_counter() - began) * 1000, answer


def add(db: Db, count: int, keys: str) -> float:
    """Add one batch of jobs; the milliseconds it took."""
    return timed(lambda: db.execute(
        f"select count(*) from taskboard.enqueue_many('mail',"
        f" array_fill('{{}}'::jsonb, array[{count}]){keys.format(n=count)})".encode()
    ).fetchone())[0]  # fmt: skip


def bulk(db: Db, count: int, rounds: int) -> None:
    took: dict[str, list[float]] = {name: [] for name in BULK}
    for _ in range(rounds):
        for name, keys in BULK.items():
            db.execute(f"truncate {TABLES}".encode())
            db.execute("checkpoint")
            took[name].append(add(db, count, keys))
    floor = statistics.median(took["no key"])
    print(f"| enqueue_many, {count:,} jobs | ms | ratio |\n|---|---|---|")
    for name, times in took.items():
        middle = statistics.median(times)
        print(f"| {name} | {middle:,.0f} | {middle / floor:.2f} |", flush=True)
    print()


def life(db: Db, turns: int) -> dict[str, float]:
    """Let some jobs live while the others wait; the median milliseconds of each call."""
    took: dict[str, list[float]] = {}

    def step(name: str, statement: str, *arguments: Any) -> Any:
        milliseconds, row = timed(lambda: db.execute(statement.encode(), arguments).fetchone())
        took.setdefault(name, []).append(milliseconds)
        return row

    claim = (
        "select c.job_id, c.lease_token,"
        " (select j.serial_key from taskboard.jobs as j where j.id = c.job_id)"
        " from taskboard.claim() as c"
    )
    for _ in range(turns):
        job_id, token, key = step("claim", claim)
        step("enqueue, same key", "select taskboard.enqueue('mail', serial_key => %s)", key)
        step("complete, hand over", "select taskboard.complete(%s, %s)", job_id, token)
        job_id, token, key = step("claim", claim)
        step("enqueue, same key", "select taskboard.enqueue('mail', serial_key => %s)", key)
        step("cancel the running one", "select taskboard.cancel(%s, force => true)", job_id)
    return {name: statistics.median(times[len(times) // 4 :]) for name, times in took.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1_000_000)
    parser.add_argument("--bulk", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--postgres", default="auto")
    options = parser.parse_args()
    server = make_server(options.postgres, {"shared_buffers": "512MB", "max_wal_size": "4GB"})
    try:
        migrate(server.dsn("postgres"))
        with psycopg.connect(
            server.dsn("postgres"), autocommit=True, prepare_threshold=None,
            options="-c statement_timeout=600s",
        ) as db:  # fmt: skip
            bulk(db, options.bulk, options.rounds)
            found = {}
            for name, keys in WAITING.items():
                db.execute(f"truncate {TABLES}".encode())
                db.execute("select taskboard.enqueue('mail', serial_key => 'k0')")
                for start in range(0, options.jobs if keys else 0, options.bulk):
                    count = min(options.bulk, options.jobs - start)
                    add(db, count, keys.replace("{start}", str(start)))
                found[name] = life(db, options.turns)
            print(f"| {options.jobs:,} jobs wait | alone, ms | under one key | under a key each |")
            print("|---|---|---|---|")
            for call, alone in found["one job"].items():
                one, each = (found[name][call] / alone for name in ("one key", "a key each"))
                print(f"| {call} | {alone:.2f} | {one:.2f} | {each:.2f} |")
    finally:
        server.close()


if __name__ == "__main__":
    main()
