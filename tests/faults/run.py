"""Load, faults, and a verdict: `python -m faults.run --seed 1 --seconds 60`, in tests/.

With `--mutants` each broken variant must be noticed, as well. Exits with 1 when something is wrong.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from faults import failover
from faults.broken import BY_ATTEMPT, NOT_DURABLE, NOTICED, Broken, broken
from faults.clock import Clock
from faults.failover import Clients, Standby
from faults.load import Aim, Load
from faults.nemesis import Faults
from support import CARELESS, Databases, OwnServer, make_server, session
from taskboard.migrate import migrate

# A process that dies loses nothing that it wrote: the system has it. A power cut is not tried.
DURABLE = {"fsync": "off", "full_page_writes": "off", "max_connections": "100"}

AS_RELEASED = Broken("as released")
AIMS = tuple(Aim)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a run did and found."""

    what: str
    jobs: int
    calls: int
    unanswered: int
    faults: Mapping[str, int]
    verbs: Mapping[str, int]
    refused: Mapping[str, int]
    undecided: int
    seconds: float
    violations: list[str]

    def __str__(self) -> str:
        faults = ", ".join(f"{kind} {count}" for kind, count in sorted(self.faults.items()))
        refused = ", ".join(f"{code} {count}" for code, count in sorted(self.refused.items()))
        return (
            f"{self.what}: {self.jobs} jobs, {self.calls} calls ({self.unanswered} unanswered),"
            f" {self.seconds:.1f} s, {self.undecided} jobs undecided,"
            f" {len(self.violations)} violations; {faults}; refused: {refused or 'none'}"
        )


@dataclass(slots=True)
class Bench:
    """A server with databases to run in, each a copy of one with Taskboard."""

    server: OwnServer
    databases: Databases
    template: str
    clock: Clock | None = None

    def run(
        self, what: Broken, seed: int, seconds: float, *, restarts: bool, proxies: int = 0,
        processes: int = 0, quiet: float = 15.0,
    ) -> Verdict:  # fmt: skip
        """Run a load once on a fresh database."""
        began = time.monotonic()
        dsn = self.server.dsn(self.databases.create(self.template))
        load_variant(dsn, what)
        faults = Faults(self.restart if restarts else None, proxies, processes, self.clock)
        load = Load(dsn, seed, faults, quiet, what.aim)
        history = load.run(seconds)
        violations = history.violations()
        return Verdict(
            what.name, len(history.ops), history.calls, history.unanswered,
            load.nemesis.done, history.verbs, history.refused, history.undecided,
            time.monotonic() - began, violations,
        )  # fmt: skip

    def restart(self) -> None:
        """Restart the server as `pg_ctl -m immediate` does: without a checkpoint."""
        os.kill(self.server.pid, signal.SIGQUIT)
        self.server.cluster.down()
        self.server.start()


def bench(postgres: str, settings: Mapping[str, str] = DURABLE) -> Bench:
    server = make_server(postgres, settings)
    assert isinstance(server, OwnServer), "only a server of ours is restarted"
    databases = Databases(server, "faults")
    template = databases.create()
    migrate(server.dsn(template))
    return Bench(server, databases, template)


def notice(what: Broken, postgres: str, place: Bench, seed: int, patience: float) -> Verdict:
    """Run a broken variant, again and again, until it is noticed or patience ends."""
    if what.name == BY_ATTEMPT:
        return fail_over(what, postgres)
    if what.name == NOT_DURABLE:
        place = bench(postgres, CARELESS | {"wal_writer_delay": "10s"})
    try:
        until = time.monotonic() + patience
        while True:
            verdict = place.run(what, seed, 1.5, restarts=what.name == NOT_DURABLE, quiet=2)
            if verdict.violations or time.monotonic() > until:
                return verdict
            seed += 1
    finally:
        if what.name == NOT_DURABLE:
            place.server.close()


def fail_over(what: Broken, postgres: str) -> Verdict:
    """Let an asynchronous standby fall behind its primary and take over; look what came twice."""
    began, settings = time.monotonic(), DURABLE | {"autovacuum": "off"}
    with ExitStack() as stack:
        primary = make_server(postgres, settings)
        stack.callback(primary.close)
        assert isinstance(primary, OwnServer), "a standby needs a server of ours"
        migrate(primary.dsn())
        load_variant(primary.dsn(), what)
        standby = Standby(primary.bin, settings, primary)
        stack.callback(standby.close)
        failover.wait_for_standby(primary, synchronous=False)
        clients = Clients(failover.both(primary, standby))
        with clients.at_work():
            time.sleep(0.5)
            failover.stop_receiving(standby)
            time.sleep(0.3)
            failover.kill(primary)
            failover.promote(standby)
            time.sleep(0.5)
    calls = len(clients.enqueued) + len(clients.claimed) + len(clients.completed)
    return Verdict(
        what.name, len(clients.enqueued), calls, len(clients.unanswered), {"failover": 1}, {}, {},
        0, time.monotonic() - began, failover.issued_twice(clients),
    )  # fmt: skip


def load_variant(dsn: str, what: Broken) -> None:
    with session(dsn) as conn, conn.transaction():
        conn.execute("set local search_path = pg_catalog, pg_temp")
        conn.execute((what.text or "").encode())


def main() -> int:
    parser = argparse.ArgumentParser(prog="faults.run", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--postgres", default="auto")
    parser.add_argument("--mutants", action="store_true")
    parser.add_argument("--only", default="", metavar="TEXT", help="variants with this in the name")
    asked = parser.parse_args()
    wrong, runs = 0, []
    place = bench(asked.postgres)
    try:
        until, seed = time.monotonic() + asked.seconds, asked.seed
        while (left := until - time.monotonic()) > 0:
            aim = AIMS[seed % len(AIMS)]
            verdict = place.run(
                Broken(f"as released, more of {aim.value}", aim), seed, min(left, 15),
                restarts=True, proxies=2, processes=1,
            )  # fmt: skip
            print(f"seed {seed}, {verdict}", *verdict.violations, sep="\n", flush=True)
            wrong += len(verdict.violations) + verdict.undecided
            runs.append(verdict)
            seed += 1
        print(
            f"{len(runs)} runs: {sum(v.jobs for v in runs)} jobs, {sum(v.calls for v in runs)}"
            f" calls ({sum(v.unanswered for v in runs)} unanswered),"
            f" {sum(len(v.violations) for v in runs)} violations", flush=True,
        )  # fmt: skip
        for name, aim in NOTICED.items() if asked.mutants else ():
            if asked.only not in name:
                continue
            began = time.monotonic()
            verdict = notice(broken(name, aim), asked.postgres, place, asked.seed, 30)
            after = time.monotonic() - began
            said = verdict.violations[0].splitlines()[0] if verdict.violations else "NOT NOTICED"
            print(f"{name}: {after:.1f} s: {said}", flush=True)
            wrong += not verdict.violations
    finally:
        place.server.close()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
