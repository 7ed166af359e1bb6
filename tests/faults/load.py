"""Producers, workers and a nemesis at work on one database; every call goes into a history."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import UUID

import psycopg
from psycopg.types.json import Jsonb

from faults.calls import Client, Unanswered
from faults.history import NEVER, History, Hold, Op
from support import rows, session

LEASES = ("0.1 s", "0.15 s", "0.25 s")
DRAIN = 15.0  # seconds in which everything must end, once faults have stopped

Owner = tuple[UUID, UUID]


@dataclass(slots=True)
class Load:
    """`restart` restarts the server at once, if there may be such a thing."""

    dsn: str
    seed: int
    restart: Callable[[], None] | None = None
    history: History = field(default_factory=History)
    owners: deque[Owner] = field(default_factory=lambda: deque(maxlen=40))
    calm: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    restarts: int = 0
    ended: int = 0

    def run(self, seconds: float, producers: int = 2, workers: int = 6) -> History:
        """Faults for some seconds; then none, until all jobs have ended."""
        threads: list[Callable[[], None]] = [self._nemesis, self._holder]
        threads += [partial(self._produce, n) for n in range(producers)]
        threads += [partial(self._work, n) for n in range(workers)]
        with ThreadPoolExecutor(len(threads)) as pool:
            running = [pool.submit(thread) for thread in threads]
            try:
                time.sleep(seconds)
            finally:
                self.calm.set()
                self._drain()
                self.over.set()
            for result in running:
                result.result(30)
        self._look()
        return self.history

    def _client(self, name: str) -> Client:
        return Client(self.dsn, name, self.over.is_set)

    def call(self, client: Client, verb: str, owner: Owner, **more: Any) -> Any:
        """Call a verb about one lease; answer its row. What is refused by an error is no call."""
        arguments = {"job_id": owner[0], "lease_token": owner[1]} | more
        self.history.calls += 1
        began, ended, row = time.time(), NEVER, None
        try:
            found = client.call(verb, **arguments)
            ended, row = time.time(), found[0] if found else None
        except Unanswered:
            self.history.unanswered += 1
        except psycopg.Error:
            return None
        if verb == "lease_status":
            if row is None:
                return None
            row = Status(row.lease_status)
        happened = more.get("happened", True)
        self.history.add(owner[0], Op(verb, began, ended, owner[1], row, happened))
        return row

    def _claim(self, client: Client, dice: random.Random, most: int) -> list[Any]:
        self.history.calls += 1
        began, slow = time.time(), dice.random() < 0.15 and not self.calm.is_set()
        try:
            if slow:
                client.sql("begin")
            found = client.call("claim", max_jobs=most, lease=dice.choice(LEASES))
            if slow:
                time.sleep(dice.random() * 0.05)
                client.sql(how := dice.choice(("commit", "commit", "rollback")))
                found = found if how == "commit" else []
        except Unanswered:
            self.history.unanswered += 1
            self.history.lost_claims.append(began)
            return []
        except psycopg.Error:
            if slow:
                client.sql("rollback")
            return []
        ended = time.time()
        for job in found:
            self.history.add(job.job_id, Op("claim", began, ended, job.lease_token, job))
            self.owners.append((job.job_id, job.lease_token))
        return found

    def _produce(self, number: int) -> None:
        dice, client, made = random.Random(f"{self.seed}/p{number}"), self._client("producer"), 0
        while not self.calm.is_set():
            made += 1
            key = f"{number}/{made}"
            began, tries = time.time(), 0
            while True:
                tries += 1
                self.history.calls += 1
                try:
                    slow = dice.random() < 0.1
                    if slow:
                        client.sql("begin")
                    ((job_id, created),) = client.call(
                        "enqueue", kind="k", payload=Jsonb(key), unique_key=key, unique_for="1 h",
                        max_attempts=100_000, max_lost_leases=100_000,
                        serial_key=f"s{dice.randrange(3)}" if dice.random() < 0.15 else None,
                    )
                    if slow:
                        time.sleep(dice.random() * 0.2)
                        client.sql("commit")
                    break
                except Unanswered:
                    self.history.unanswered += 1
                except psycopg.Error:  # refused, as by lock_timeout
                    client.sql("rollback")
            if tries == 1 and not created:
                self.history.problems.append(f"{key} was enqueued by nobody, and is there")
            self.history.add(job_id, Op("enqueue", began, time.time()))
            # As many as are worked off, so that workers meet.
            time.sleep(dice.random() * 0.02 if made % 40 else 0.2)
        client.close()

    def _work(self, number: int) -> None:
        dice = random.Random(f"{self.seed}/w{number}")
        client, other = self._client("worker"), self._client("worker")
        with ThreadPoolExecutor(1) as aside:
            while not self.over.is_set():
                with suppress(psycopg.OperationalError, Unanswered):
                    jobs = self._claim(client, dice, dice.choice((1, 1, 2, 4)))
                    for job in jobs:
                        owner = (job.job_id, job.lease_token)
                        if self.calm.is_set():
                            self.call(client, "complete", owner)
                        else:
                            self._attempt(client, other, aside, dice, owner)
                    if not self.calm.is_set() and self.owners and dice.random() < 0.5:
                        self._meddle(client, dice, dice.choice(list(self.owners)))
                    time.sleep(0.002 if jobs else 0.01)
        client.close()
        other.close()

    def _attempt(
        self, client: Client, other: Client, aside: ThreadPoolExecutor, dice: random.Random,
        owner: Owner,
    ) -> None:  # fmt: skip
        """What a worker does with a lease, in time or late."""
        while dice.random() < 0.6:
            self._stall(dice)
            if dice.random() < 0.5:
                self.call(client, "renew", owner)
            elif self.call(client, "begin_effect", owner) is not None:
                self._stall(dice)
                while dice.random() < 0.6:
                    self.call(client, "end_effect", owner, happened=dice.random() < 0.7)
        self._stall(dice)
        match dice.choice(("complete",) * 4 + ("fail", "release", "twice", "slowly", "nothing")):
            case "complete":
                self.call(client, "complete", owner)
                if dice.random() < 0.3:
                    self.call(client, "complete", owner)
            case "fail":
                self.call(client, "fail", owner, retry_in="0")
            case "release":
                self.call(client, "release", owner)
            case "twice":  # the first in a transaction that takes its time, the second meanwhile
                again = aside.submit(self._later, other, owner)
                self._slowly(client, owner, 0.04)
                again.result(30)
            case "slowly":
                self._slowly(client, owner, dice.random() * 0.2)

    def _later(self, client: Client, owner: Owner) -> None:
        time.sleep(0.015)
        with suppress(psycopg.OperationalError):
            self.call(client, "complete", owner)

    def _slowly(self, client: Client, owner: Owner, seconds: float) -> None:
        """Complete in a transaction that ends later."""
        self.history.calls += 1
        began, ended, row = time.time(), NEVER, None
        try:
            client.sql("begin")
            found = client.call("complete", job_id=owner[0], lease_token=owner[1])
            time.sleep(seconds)
            client.sql("commit")
            ended, row = time.time(), found[0] if found else None
        except Unanswered:
            self.history.unanswered += 1
        except psycopg.Error:
            client.sql("rollback")
            return
        self.history.add(owner[0], Op("complete", began, ended, owner[1], row))

    def _stall(self, dice: random.Random) -> None:
        if not self.calm.is_set():
            time.sleep(dice.choice((0.0, 0.0, 0.0, 0.01, 0.05, 0.2)))

    def _meddle(self, client: Client, dice: random.Random, owner: Owner) -> None:
        """Act on a lease that some worker has or had."""
        verb = dice.choice(
            ("renew", "complete", "release", "begin_effect", "end_effect") + ("lease_status",) * 3
        )
        self.call(client, verb, owner)

    def _holder(self) -> None:
        """Lock a leased job now and then, for some time, and change nothing."""
        dice, client = random.Random(f"{self.seed}/holder"), self._client("holder")
        while not self.calm.is_set():
            with suppress(Unanswered, psycopg.Error):
                client.sql("begin")
                found = client.sql(
                    "with held as (select id from taskboard.jobs where lease_token is not null"
                    " and claimable_at > clock_timestamp() limit 1 for update skip locked)"
                    " select id from held"
                )
                got = time.time()
                if found:
                    time.sleep(dice.random() * 0.3)
                let_go = time.time()
                client.sql("rollback")
                if found:
                    self.history.holds[found[0].id].append(Hold(got, let_go))
            time.sleep(0.01)
        client.close()

    def _nemesis(self) -> None:
        dice = random.Random(f"{self.seed}/nemesis")
        while not self.calm.wait(dice.random() * 0.3):
            if self.restart is not None and dice.random() < 0.15:
                self.restart()
                self.restarts += 1
                continue
            with suppress(psycopg.OperationalError), session(self.dsn, "nemesis") as conn:
                found = rows(
                    conn, "select pg_terminate_backend(pid) from pg_stat_activity where pid ="
                    " (select pid from pg_stat_activity where datname = current_database() and"
                    " application_name in ('worker', 'producer') order by random() limit 1)",
                )  # fmt: skip
                self.ended += len(found)

    def _drain(self) -> None:
        """L1: with no more faults, all jobs end, found by the same sessions as before."""
        until = time.monotonic() + DRAIN
        while time.monotonic() < until:
            with suppress(psycopg.OperationalError), session(self.dsn, "drain") as conn:
                if not rows(conn, "select from taskboard.jobs limit 1"):
                    return
            time.sleep(0.05)
        with session(self.dsn, "drain") as conn:
            left = rows(conn, "select job_id, state from taskboard.job_list"
                              " where finished_at is null")  # fmt: skip
        self.history.problems.append(f"{len(left)} jobs do not end, as {left[0]}")

    def _look(self) -> None:
        """S6: how each job that is known has ended, or that it has vanished."""
        client = Client(self.dsn, "look")
        found: dict[UUID, Any] = {}
        for row in client.sql("select id, state, attempt, lease_token from taskboard.history"):
            if row.id in found:
                self.history.problems.append(f"job {row.id} ended twice")
            found[row.id] = row
        live = {row.id for row in client.sql("select id from taskboard.jobs")}
        client.close()
        for job_id in list(self.history.ops):
            if job_id in found:
                self.history.add(job_id, Op("job", time.time(), time.time(), None, found[job_id]))
            elif job_id not in live:
                self.history.problems.append(f"job {job_id} was there, and is not")


class Status(tuple[str]):
    """The answer of lease_status, as a row."""

    def __new__(cls, status: str) -> Status:
        return super().__new__(cls, (status,))

    @property
    def status(self) -> str:
        return self[0]

    def _asdict(self) -> dict[str, str]:
        return {"status": self[0]}
