"""Measure two shards against one, in one run, and print ratios and what limits them.

    python tests/bench/sharding.py [--seconds S] [--rounds N] [--clients N]

Needs Debian's PostgreSQL 15 with PL/Proxy. Each shard and the proxy is a durable server of this
program's own, all on this machine: where its cores are busy, more servers cannot be faster, and
the last column says how busy they were. In the cases with a core each, a shard and its clients have
one core, as if it were a machine of its own. Quote ratios, not rates.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import psycopg

sys.path.insert(0, str(Path(__file__).parents[1]))

from shards.sharded import DEBIAN, Sharded, connect_shards, install
from support import OwnServer
from taskboard.migrate import migrate

PAYLOAD = '{"to": "ada@example.com", "subject": "Hello", "text": "about a hundred bytes of text"}'
ENQUEUE = f"select * from taskboard.enqueue('email', '{PAYLOAD}');\n"
MANY = (
    "select count(*) from taskboard.enqueue_many('email',"
    f" array_fill('{PAYLOAD}'::jsonb, array[100]));\n"
)
WORK = (
    "select array_agg(job_id) as ids, array_agg(lease_token) as tokens"
    " from taskboard.claim(max_jobs => 10) \\gset\n"
    "select count(*) from taskboard.complete_many(':ids', ':tokens');\n"
)


def busy() -> tuple[int, int]:
    """Ticks that this machine's cores worked, and all of them."""
    ticks = [int(n) for n in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def rate(
    script: str, dsns: list[str], clients: int, seconds: int, jobs: int, pinned: bool
) -> tuple[float, float]:
    """Run a script on some databases at once; jobs a second of all, and how busy the cores were."""
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as file:
        file.write(script)
        file.flush()
        before = busy()
        running = [
            subprocess.Popen(
                [*(["taskset", "-c", str(core)] if pinned else []), f"{DEBIAN}/pgbench", "-n",
                 "-M", "simple", "-c", str(clients if pinned else clients // len(dsns)),
                 "-j", "1", "-T", str(seconds), "-f", file.name, dsn],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for core, dsn in enumerate(dsns)
        ]  # fmt: skip
        said = [process.communicate(timeout=seconds * 5 + 60) for process in running]
        after = busy()
    found = [
        float(line.split()[2]) for out, _ in said for line in out.splitlines() if "tps = " in line
    ]
    if len(found) < len(dsns):
        raise RuntimeError(said[0][1][-500:])
    return sum(found) * jobs, (after[0] - before[0]) / (after[1] - before[1])


def fill(dsn: str, jobs: int) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("truncate taskboard.jobs, taskboard.history")
        for _ in range(0, jobs, 50_000):
            conn.execute(
                "select count(*) from taskboard.enqueue_many('email', array_fill(%s::jsonb,"
                " array[50000]))",
                [PAYLOAD],
            )
        conn.execute("vacuum analyze taskboard.jobs")
        conn.execute("checkpoint")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=4)
    options = parser.parse_args()
    servers = [OwnServer(Path(DEBIAN), {"max_wal_size": "4GB"}) for _ in range(3)]
    try:
        shards = [server.dsn() for server in servers[:2]]
        proxies = []
        for dsn in shards:
            migrate(dsn)
        with psycopg.connect(servers[2].dsn(), autocommit=True) as conn:
            for count in (1, 2):
                conn.execute(f"create database proxy_{count}")
                sharded = Sharded(servers[2].dsn(f"proxy_{count}"), shards[:count])
                install(sharded.proxy, shards[0])
                connect_shards(sharded)
                proxies.append(sharded.proxy)
        print(f"{os.cpu_count()} cores for all servers and clients, {options.clients} clients\n")
        print("| what | two shards to one (spread) | one, jobs/s | two, jobs/s | cores busy |")
        print("|---|---|---|---|---|")

        def compare(
            name: str, script: str, one: list[str], two: list[str], jobs: int = 1,
            before: Callable[[], None] = lambda: None, pinned: bool = False,
        ) -> None:  # fmt: skip
            rates: dict[str, list[float]] = {"one": [], "two": []}
            worked: list[float] = []
            for turn in range(options.rounds):
                both = [("one", one), ("two", two)]
                for side, dsns in both if turn % 2 else both[::-1]:
                    before()
                    moved, load = rate(
                        script, dsns, options.clients, options.seconds, jobs, pinned
                    )
                    rates[side].append(moved)
                    worked.append(load)
            ratios = [b / a for a, b in zip(rates["one"], rates["two"], strict=True)]
            middle = {side: statistics.median(found) for side, found in rates.items()}
            print(
                f"| {name} | {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
                f" | {middle['one']:,.0f} | {middle['two']:,.0f}"
                f" | {statistics.median(worked):.0%} |",
                flush=True,
            )

        def refill() -> None:
            for dsn in shards:
                fill(dsn, 12_000 * options.seconds)

        def pin(cores: list[set[int]]) -> None:
            for server, allowed in zip(servers, cores, strict=False):
                os.sched_setaffinity(server.pid, allowed)  # sessions to come have it, too

        work, every = "claim 10, complete 10", set(range(os.cpu_count() or 1))
        compare("enqueue, straight to the shards", ENQUEUE, shards[:1], shards)
        compare("enqueue, through the proxy", ENQUEUE, proxies[:1], proxies[1:])
        compare("enqueue_many of 100, through the proxy", MANY, proxies[:1], proxies[1:], 100)
        compare(f"{work}, straight to the shards", WORK, shards[:1], shards, 10, refill)
        if len(every) > 1:
            pin([{0}, {1}])
            compare("enqueue, a core each", ENQUEUE, shards[:1], shards, pinned=True)
            compare(f"{work}, a core each", WORK, shards[:1], shards, 10, refill, pinned=True)
            pin([every, every])
    finally:
        for server in servers:
            server.close()


if __name__ == "__main__":
    main()
