"""A worker as a process of its own, to be stopped, continued and killed at any point.

`python -m faults.process DSN NAME SEED JOURNAL`, in tests/. It writes down each call before it
makes it, and the answer after, so that whoever kills it knows what was under way.
"""

from __future__ import annotations

import os
import pickle
import random
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psycopg

from faults.calls import Client, Unanswered
from faults.rules import Row

LEASES = ("0.1 s", "0.15 s", "0.25 s")


class Noted(NamedTuple):
    """A call; `rows` is None without an answer, `refused` when an error said that it was none."""

    verb: str
    arguments: dict[str, Any]
    began: float
    ended: float = 0.0
    rows: list[Row] | None = None
    refused: bool = False


class Worker:
    def __init__(self, dsn: str, name: str, seed: str, journal: Path) -> None:
        self.client, self.name = Client(dsn, "process"), name
        self.dice = random.Random(f"{seed}/{name}")
        self.journal = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def call(self, verb: str, **arguments: Any) -> list[Row]:
        noted = Noted(verb, arguments, time.time())
        os.write(self.journal, pickle.dumps(noted))
        try:
            rows = [Row(**row._asdict()) for row in self.client.call(verb, **arguments)]
        except Unanswered:
            return []
        except psycopg.Error:
            os.write(self.journal, pickle.dumps(noted._replace(refused=True)))
            return []
        os.write(self.journal, pickle.dumps(noted._replace(ended=time.time(), rows=rows)))
        return rows

    def attempt(self, job: Row) -> None:
        owner = {"job_id": job.job_id, "lease_token": job.lease_token}
        while self.dice.random() < 0.5:
            self.stall()
            verb = self.dice.choice(("renew", "begin_effect", "end_effect"))
            self.call(verb, **owner)
        self.stall()
        verb = self.dice.choice(("complete", "complete", "complete", "release", "fail"))
        for _ in range(self.dice.choice((1, 1, 2))):
            self.call(verb, **owner, **({"retry_in": "0"} if verb == "fail" else {}))

    def stall(self) -> None:
        time.sleep(self.dice.choice((0.0, 0.0, 0.01, 0.05)))

    def run(self) -> None:
        while True:
            with suppress(psycopg.OperationalError):
                most, lease = self.dice.choice((1, 2)), self.dice.choice(LEASES)
                for job in self.call("claim", max_jobs=most, lease=lease, worker=self.name):
                    self.attempt(job)
            time.sleep(0.02)


def read(journal: Path) -> Iterator[Noted]:
    """What a process did; of each call the last that was noted."""
    noted: dict[float, Noted] = {}
    with suppress(EOFError, pickle.UnpicklingError, FileNotFoundError), open(journal, "rb") as file:
        while True:
            each: Noted = pickle.load(file)
            noted[each.began] = each
    return iter(noted.values())


if __name__ == "__main__":
    from faults import process  # so that what is noted can be read by others

    process.Worker(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4])).run()
