"""The conformance kit: plays the script with a client program, and jobs with a worker program.

    python tests/clients/kit.py --client 'node client.js' --worker 'node worker.js'

The database is named by TASKBOARD_DATABASE_URL, or --dsn; its login is in the roles
taskboard_producer, taskboard_worker and taskboard_operator. README.md has the rest.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from clients.client import Client, environment, named, own_session
from clients.script import CASES, Play
from clients.situations import SITUATIONS, Bench


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one case or situation; `fault` says which step went wrong, and how."""

    name: str
    fault: str
    seconds: float


def judged(name: str, play: Callable[[], None]) -> Outcome:
    began, fault = time.monotonic(), ""
    try:
        play()
    except AssertionError as exc:
        fault = str(exc) or "AssertionError"
    except Exception as exc:  # a wrong client leads the kit where it did not expect to be
        fault = f"{type(exc).__name__}: {exc}"
    return Outcome(name, fault, time.monotonic() - began)


def play_script(command: str, dsn: str, only: str = "") -> Iterator[Outcome]:
    """Play the cases whose name contains `only`, each with a queue of its own."""
    run = f"kit-{uuid4().hex[:8]}"
    clients: dict[str, Client] = {}

    def client(actor: str) -> Client:
        if actor not in clients:
            clients[actor] = Client(command, environment(named(dsn, f"{run}-{actor}")))
        return clients[actor]

    def end_clients() -> None:
        while clients:
            clients.popitem()[1].close()

    with own_session(dsn) as kit:
        try:
            for number, (name, steps) in enumerate(CASES.items(), 1):
                if only in name:
                    play = Play(kit, client, f"{run}-{number}")
                    yield (outcome := judged(name, partial(play.play, steps)))
                    if outcome.fault and not any(one.answers for one in clients.values()):
                        return  # it does not start, or does not know a word of ours
                    if outcome.fault:
                        end_clients()  # in whatever state they are
                    clear(kit, f"{run}-{number}")
        finally:
            end_clients()


def play_worker(command: str, dsn: str, only: str = "") -> list[Outcome]:
    """Put a worker through the situations whose name contains `only`, all at the same time."""

    def play(name: str) -> Outcome:
        with Bench(command, dsn, f"kit-{uuid4().hex[:8]}") as bench:
            outcome = judged(name, partial(SITUATIONS[name], bench))
            clear(bench.kit, bench.queue)
        return outcome

    with ThreadPoolExecutor(len(SITUATIONS)) as pool:
        return list(pool.map(play, [name for name in SITUATIONS if only in name]))


def run(client: str | None, worker: str | None, dsn: str, only: str = "") -> list[Outcome]:
    """Play the script with the client, and at the same time jobs with the worker."""
    with ThreadPoolExecutor(2) as pool:
        script = pool.submit(lambda: list(play_script(client, dsn, only)) if client else [])
        jobs = pool.submit(lambda: play_worker(worker, dsn, only) if worker else [])
        return script.result() + jobs.result()


def clear(kit: psycopg.Connection[Any], queue: str) -> None:
    """Leave nothing alive behind."""
    kit.execute(
        "select taskboard.cancel(job_id, 'the kit has ended', true)"
        " from taskboard.job_list where queue = %s and finished_at is null",
        [queue],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the conformance kit against a client.")
    parser.add_argument("--client", metavar="COMMAND", help="answers requests on standard input")
    parser.add_argument("--worker", metavar="COMMAND", help="works the queue TASKBOARD_QUEUE")
    parser.add_argument("--dsn", default=os.environ.get("TASKBOARD_DATABASE_URL"))
    parser.add_argument("--only", default="", metavar="TEXT", help="what has TEXT in its name")
    args = parser.parse_args()
    if not args.dsn or not (args.client or args.worker):
        parser.error("give --client or --worker, and a database by TASKBOARD_DATABASE_URL")
    outcomes = run(args.client, args.worker, args.dsn, args.only)
    for outcome in outcomes:
        print(f"{'FAILED' if outcome.fault else 'ok':6} {outcome.seconds:5.1f} s  {outcome.name}")
        if outcome.fault:
            print(f"       {outcome.fault}")
    passed = sum(not outcome.fault for outcome in outcomes)
    print(f"{passed} of {len(outcomes)} passed")
    return 0 if outcomes and passed == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
