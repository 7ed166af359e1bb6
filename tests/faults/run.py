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
from dataclasses import dataclass

from faults.load import Load
from mutants.variants import MUTANTS, Mutant
from support import CARELESS, Databases, OwnServer, make_server, session
from taskboard.migrate import migrate

# A process that dies loses nothing that it wrote: the system has it. A power cut is not tried.
DURABLE = {"fsync": "off", "full_page_writes": "off", "max_connections": "100"}

# By the row's place, as the claim does it, a wait for a row that another claim has changed ends
# with nothing; by its id, with a second claim. The plan is believed for longer: more claims meet.
BY_ID = Mutant(
    "claim in two steps, look then update by id",
    "S1",
    "20_claim.sql",
    (
        ("between 0 and 0.02", "between 0 and 60"),
        ("        for update skip locked) as due", "        ) as due"),
        (
            "where j.ctid = any (v_picked) and l.id",
            "where j.id = any (array(select x.id from taskboard.jobs as x"
            " where x.ctid = any (v_picked))) and l.id",
        ),
    ),
    (),
)

MUTANT = {mutant.name: mutant for mutant in (*MUTANTS, BY_ID)}
NOT_DURABLE = "synchronous_commit=off"
NOTICED = (
    "token ignored in complete",
    "look at the token, then complete by id",
    "renew without a deadline",
    "renew reads the clock before the lock",
    "begin_effect reads the clock before the lock",
    "reclaim a minute early",
    BY_ID.name,
    "attempts counted only when a lease was lost",
    "completion of a finished job by anybody",
    "completion not repeatable",
    "finishing and the look for a repeat with one snapshot",
    "an effect that is done looks done to its own attempt only",
    "the last witness is right",
    "effect key per attempt",
    NOT_DURABLE,
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a run did and found."""

    what: str
    jobs: int
    calls: int
    unanswered: int
    ended: int
    restarts: int
    undecided: int
    seconds: float
    violations: list[str]

    def __str__(self) -> str:
        return (
            f"{self.what}: {self.jobs} jobs, {self.calls} calls ({self.unanswered} unanswered),"
            f" {self.ended} sessions ended, {self.restarts} restarts, {self.seconds:.1f} s,"
            f" {self.undecided} jobs undecided, {len(self.violations)} violations"
        )


@dataclass(slots=True)
class Bench:
    """A server with databases to run in, each a copy of one with Taskboard."""

    server: OwnServer
    databases: Databases
    template: str

    def run(self, what: str, seed: int, seconds: float, *, restarts: bool) -> Verdict:
        """Run a load once on a fresh database; `what` is a mutant's name, or empty."""
        began = time.monotonic()
        dsn = self.server.dsn(self.databases.create(self.template))
        if what in MUTANT:
            with session(dsn) as conn, conn.transaction():
                conn.execute("set local search_path = pg_catalog, pg_temp")
                conn.execute(MUTANT[what].text().encode())
        load = Load(dsn, seed, self.restart if restarts else None)
        history = load.run(seconds)
        violations = history.violations()
        return Verdict(
            what or "as released", len(history.ops), history.calls, history.unanswered, load.ended,
            load.restarts, history.undecided, time.monotonic() - began, violations,
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


def notice(what: str, postgres: str, place: Bench, seed: int, patience: float) -> Verdict:
    """Run a mutant, again and again, until it is noticed or patience ends."""
    if what == NOT_DURABLE:
        place = bench(postgres, CARELESS | {"wal_writer_delay": "10s"})
    try:
        until = time.monotonic() + patience
        while True:
            verdict = place.run(what, seed, 1.5, restarts=what == NOT_DURABLE)
            if verdict.violations or time.monotonic() > until:
                return verdict
            seed += 1
    finally:
        if what == NOT_DURABLE:
            place.server.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="faults.run", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--postgres", default="auto")
    parser.add_argument("--mutants", action="store_true")
    asked = parser.parse_args()
    wrong, runs = 0, []
    place = bench(asked.postgres)
    try:
        until, seed = time.monotonic() + asked.seconds, asked.seed
        while (left := until - time.monotonic()) > 0:
            verdict = place.run("", seed, min(left, 15), restarts=True)
            print(f"seed {seed}, {verdict}", *verdict.violations, sep="\n", flush=True)
            wrong += len(verdict.violations) + verdict.undecided
            runs.append(verdict)
            seed += 1
        print(
            f"{len(runs)} runs: {sum(v.jobs for v in runs)} jobs, {sum(v.calls for v in runs)}"
            f" calls ({sum(v.unanswered for v in runs)} unanswered),"
            f" {sum(v.restarts for v in runs)} restarts,"
            f" {sum(len(v.violations) for v in runs)} violations", flush=True,
        )  # fmt: skip
        for what in NOTICED if asked.mutants else ():
            began = time.monotonic()
            verdict = notice(what, asked.postgres, place, asked.seed, 30)
            after = time.monotonic() - began
            said = verdict.violations[0].splitlines()[0] if verdict.violations else "NOT NOTICED"
            print(f"{what}: {after:.1f} s: {said}", flush=True)
            wrong += not verdict.violations
    finally:
        place.server.close()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
