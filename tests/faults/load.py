"""Producers and workers on one database; every call goes into a history.

Beside them work the operators (operators.py) and what goes wrong (nemesis.py).
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID

import psycopg
from psycopg.types.json import Jsonb

from faults import operators
from faults.calls import Client, Unanswered
from faults.history import History
from faults.keys import Keyed, Shared
from faults.nemesis import Faults, Nemesis
from faults.process import LEASES, Noted
from faults.rules import FINAL, NEVER, Op, Row
from support import rows, session

PATIENCE = 0.7  # seconds after which a client behind a proxy takes a call for unanswered

# Waited too long for a lock; wrong state of a job; the server is shutting down or starting.
REFUSALS = (None, "55P03", "TB003", "57P01", "57P02", "57P03")

Owner = tuple[UUID, UUID]


class Aim(Enum):
    """What a load does more of than of anything else."""

    ALL = "everything"
    LEASES = "leases"
    BATCHES = "batches"
    EFFECTS = "effects"
    HOLD = "unknown effects that hold a job"
    SERIAL = "serial keys"
    UNIQUE = "unique keys"
    OPERATORS = "operators"
    QUIET = "one slow producer, one worker that polls, and nothing that goes wrong"


class Wanted(NamedTuple):
    """A job that a producer asks for, once more each time that it gets no answer."""

    unique: str
    serial: str | None
    hold: bool
    shared: bool  # others ask for jobs with the same unique key


@dataclass(slots=True)
class Load:
    """Faults, and what of them there is, are the nemesis'; `quiet`: seconds without progress."""

    dsn: str
    seed: int
    faults: Faults = field(default_factory=Faults)
    quiet: float = 15.0
    aim: Aim = Aim.ALL
    history: History = field(default_factory=History)
    owners: deque[Owner] = field(default_factory=lambda: deque(maxlen=40))
    asked: dict[str, tuple[float, Wanted]] = field(default_factory=dict)  # by the payload
    clients: list[Client] = field(default_factory=list)
    calm: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    nemesis: Nemesis = field(init=False)

    def run(self, seconds: float, producers: int = 2, workers: int = 6) -> History:
        """Faults for some seconds; then none, until all jobs have ended."""
        self.nemesis = Nemesis(self.dsn, self.seed, self.faults, self.calm)
        threads: list[Callable[[], None]] = [self._look_at_clients]
        if self.aim == Aim.QUIET:
            producers, workers = 1, 1
        else:
            people = 3 if self.aim == Aim.OPERATORS else 1
            threads += [self.nemesis.run]
            threads += [partial(operators.operate, self, n) for n in range(people)]
            holders = 3 if self.aim in (Aim.LEASES, Aim.EFFECTS) else 1
            threads += [partial(operators.hold_rows, self, n) for n in range(holders)]
        threads += [partial(self._produce, n) for n in range(producers)]
        threads += [partial(self._work, n) for n in range(workers)]
        with ThreadPoolExecutor(len(threads)) as pool:
            running = [pool.submit(thread) for thread in threads]
            try:
                until = time.monotonic() + seconds
                while time.monotonic() < until and not any(each.done() for each in running):
                    time.sleep(0.05)
            finally:
                self.calm.set()
                self.nemesis.stop()
                self._drain()
                self.over.set()
            for result in running:
                result.result(30)
        for noted in self.nemesis.noted():
            self._note(noted)
        self._look()
        return self.history

    def client(self, name: str, number: int = 0) -> Client:
        """A connection; of every two one goes through a proxy, if there is one."""
        dsn, patience = self.nemesis.way(self.dsn, number)
        client = Client(dsn, name, self.over.is_set, PATIENCE if patience else NEVER)
        self.clients.append(client)
        return client

    def _look_at_clients(self) -> None:
        while not self.over.wait(0.03):
            for client in self.clients:
                client.look()

    def add(self, job_id: UUID, op: Op) -> None:
        self.history.add(job_id, op)

    def op(self, verb: str, began: float, ended: float, *more: Any, **options: Any) -> Op:
        """A call, with the server's clock of that time."""
        behind, ahead = self.nemesis.clock_off(began, ended)
        return Op(verb, began, ended, *more, **options, behind=behind, ahead=ahead)

    def timed(self, client: Client, verb: str, **arguments: Any) -> tuple[float, float, list[Any]]:
        """Call: when it began, when it was answered, and what. Raises psycopg.Error: refused."""
        self.history.verbs[verb] += 1
        began = time.time()
        try:
            found = client.call(verb, **arguments)
        except Unanswered:
            self.history.unanswered += 1
            return began, NEVER, []
        except psycopg.Error as exc:
            self.refused(verb, exc)
            raise
        return began, time.time(), found

    def refused(self, verb: str, exc: psycopg.Error) -> None:
        """An error says that nothing has changed. Most of them nobody should ever get."""
        self.history.refused[exc.sqlstate or ""] += 1
        timed_out = self.faults.clock is not None and exc.sqlstate == "57014"  # by a clock set
        if exc.sqlstate not in REFUSALS and not timed_out:
            self.history.problems.append(f"{verb} was refused with {exc.sqlstate}: {exc}")

    def call(self, client: Client, verb: str, owner: Owner, **more: Any) -> Any:
        """Call a verb about one lease; answer its row. What is refused by an error is no call."""
        arguments = {"job_id": owner[0], "lease_token": owner[1]} | more
        try:
            began, ended, found = self.timed(client, verb, **arguments)
        except psycopg.Error:
            return None
        row = found[0] if found else None
        if verb == "lease_status":
            if row is None:
                return None
            row = Row(status=row.lease_status)
        asked = "permanent" if more.get("permanent") else ""
        happened = more.get("happened", True)
        self.add(owner[0], self.op(verb, began, ended, owner[1], row, happened, asked))
        return row

    def call_many(self, client: Client, verb: str, owners: list[Owner]) -> None:
        """Call renew_many or complete_many; each of the leases is a call of its own."""
        jobs, tokens = [job_id for job_id, _ in owners], [token for _, token in owners]
        try:
            began, ended, found = self.timed(client, verb, job_ids=jobs, lease_tokens=tokens)
        except psycopg.Error:
            return
        told = {row.job_id: row for row in found}
        for job_id, token in owners:
            one = verb.removesuffix("_many")
            self.add(job_id, self.op(one, began, ended, token, told.get(job_id)))

    def _claim(self, client: Client, dice: random.Random, name: str, most: int) -> list[Any]:
        self.history.verbs["claim"] += 1
        began = time.time()
        slow = dice.random() < self._more(Aim.QUIET, 0.15, 0) and not self.calm.is_set()
        try:
            if slow:
                client.sql("begin")
            found = client.call("claim", max_jobs=most, lease=dice.choice(LEASES), worker=name)
            if slow:
                time.sleep(dice.random() * 0.05)
                client.sql(how := dice.choice(("commit", "commit", "rollback")))
                found = found if how == "commit" else []
        except Unanswered:
            self.history.unanswered += 1
            self.history.lost.claims.append(began)
            return []
        except psycopg.Error as exc:
            self.refused("claim", exc)
            if slow:
                with suppress(Unanswered):
                    client.sql("rollback")
            return []
        ended = time.time()
        for job in found:
            self.add(job.job_id, self.op("claim", began, ended, job.lease_token, job, worker=name))
            self.owners.append((job.job_id, job.lease_token))
        return found

    def _produce(self, number: int) -> None:
        dice = random.Random(f"{self.seed}/p{number}")
        client, made = self.client("producer", number), 0
        while not self.calm.is_set():
            wanted = []
            for _ in range(dice.choice((1, 1, 1, 1, 3, 5))):
                made += 1
                shared = dice.random() < self._more(Aim.UNIQUE, 0.1, 0.8)
                serial = dice.random() < self._more(Aim.SERIAL, 0.2, 0.9)
                wanted.append(Wanted(
                    f"u{dice.randrange(4)}" if shared else f"{number}/{made}",
                    f"s{dice.randrange(int(self._more(Aim.SERIAL, 3, 12)))}" if serial else None,
                    dice.random() < self._more(Aim.HOLD, 0.25, 1), shared))  # fmt: skip
            self._add_jobs(client, dice, f"{number}/{made}", wanted)
            if self.aim == Aim.QUIET:
                continue
            # As many as are worked off, so that workers meet.
            time.sleep(dice.random() * 0.02 * len(wanted) if made % 40 else 0.2)
        client.close()

    def _add_jobs(
        self, client: Client, dice: random.Random, name: str, wanted: list[Wanted]
    ) -> None:
        """Enqueue jobs of one policy, until that is answered."""
        first, tries, shared = wanted[0], 0, wanted[0].shared
        wanted = [each._replace(hold=first.hold, shared=shared) for each in wanted
                  if each.shared == shared]  # fmt: skip
        options: dict[str, Any] = {
            "kind": "k", "on_unknown": "hold" if first.hold else "retry",
            "max_attempts": 100_000, "max_lost_leases": 100_000,
            "queue": dice.choice(("default", "default", "default", "other")),
        }  # fmt: skip
        if not shared:
            options["unique_for"] = "1 h"
        while not self.over.is_set():
            tries += 1
            began, slow = time.time(), dice.random() < self._more(Aim.QUIET, 0.1, 1)
            payloads = [f"{name}/{tries}/{n}" for n in range(len(wanted))]
            self.asked |= {text: (began, each) for text, each in zip(payloads, wanted, strict=True)}
            verb, keys = "enqueue_many", {
                "payloads": [Jsonb(text) for text in payloads],
                "unique_keys": [each.unique for each in wanted],
                "serial_keys": [each.serial for each in wanted],
            }  # fmt: skip
            if len(wanted) == 1:
                verb, keys = "enqueue", {
                    "payload": Jsonb(payloads[0]), "unique_key": first.unique,
                    "serial_key": first.serial,
                }  # fmt: skip
            self.history.verbs[verb] += 1
            try:
                if slow:
                    client.sql("begin")
                found = client.call(verb, **options, **keys)
                if slow:
                    time.sleep(dice.random() * self._more(Aim.QUIET, 0.2, 0.06))
                    client.sql("commit")
                break
            except Unanswered:
                self.history.unanswered += 1
            except psycopg.Error as exc:
                self.refused(verb, exc)
                with suppress(Unanswered):
                    client.sql("rollback")
        else:
            return
        ended = time.time()
        for place, (row, each) in enumerate(zip(found, wanted, strict=True)):
            if row.created:
                keyed = Keyed(row.job_id, began, ended, None, each.serial, place)
                self.history.keys.append(keyed._replace(unique=each.unique if shared else None))
                asked = "hold" if each.hold else ""
                self.add(row.job_id, self.op("enqueue", began, ended, asked=asked))
            elif shared:
                self.history.shared.append(Shared(each.unique, row.job_id, began, ended))
            elif tries == 1 and len({other.unique for other in wanted}) == len(wanted):
                self.history.problems.append(f"{each} was enqueued by nobody, and is there")
            _ = self.history.ops[row.job_id]  # it must be there in the end

    def _work(self, number: int) -> None:
        dice, name = random.Random(f"{self.seed}/w{number}"), f"w{number}"
        client, other = self.client("worker", number), self.client("worker", number + 1)
        with ThreadPoolExecutor(1) as aside:
            while not self.over.is_set():
                with suppress(psycopg.OperationalError, Unanswered):
                    jobs = self._claim(client, dice, name, self._most(dice))
                    mine = [(job.job_id, job.lease_token) for job in jobs]
                    if self.calm.is_set() or self.aim == Aim.QUIET:
                        for owner in mine:
                            self.call(client, "complete", owner)
                    elif mine and self.aim == Aim.HOLD:
                        self._testify_late(client, dice, mine[0])
                    elif len(mine) > 1 and dice.random() < self._more(Aim.BATCHES, 0.4, 1):
                        self._attempt_many(client, dice, mine)
                    else:
                        for owner in mine:
                            self._attempt(client, other, aside, dice, owner)
                    if (
                        not self.calm.is_set() and self.aim != Aim.QUIET and self.owners
                        and dice.random() < 0.5
                    ):  # fmt: skip
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
            if dice.random() < self._more(Aim.LEASES, self._more(Aim.EFFECTS, 0.5, 0.1), 0.8):
                self.call(client, "renew", owner)
            elif self.call(client, "begin_effect", owner) is not None:
                self._stall(dice)
                while dice.random() < 0.6:
                    self.call(client, "end_effect", owner, happened=dice.random() < 0.7)
        self._stall(dice)
        endings = ("complete",) * 4 + ("fail", "release", "twice", "slowly", "nothing")
        if self.aim == Aim.OPERATORS:
            endings = ("complete", "fail", "release", "release", "nothing")
        match dice.choice(endings):
            case "complete":
                self.call(client, "complete", owner)
                if dice.random() < 0.3:
                    self.call(client, "complete", owner)
            case "fail" if dice.random() < 0.5:
                self.call(client, "fail", owner, permanent=True)
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

    def _testify_late(self, client: Client, dice: random.Random, owner: Owner) -> None:
        """Give a job back with its effect begun, and say what came of it while another asks."""
        begun = self.call(client, "begin_effect", owner)
        if begun is None or begun.state == "held":
            return
        if begun.state == "done" or dice.random() < 0.2:
            self.call(client, "complete", owner)
            return
        self.call(client, "release", owner)
        time.sleep(dice.random() * 0.06)
        self.call(client, "end_effect", owner, happened=dice.random() < 0.7)

    def _attempt_many(self, client: Client, dice: random.Random, owners: list[Owner]) -> None:
        """The same for a batch, with leases of others in it, in any order."""
        owners = list(dict((*dice.sample(list(self.owners), k=min(2, len(self.owners))), *owners))
                      .items())  # fmt: skip
        while dice.random() < 0.6:
            self._stall(dice)
            dice.shuffle(owners)
            self.call_many(client, "renew_many", owners)
        self._stall(dice)
        dice.shuffle(owners)
        for _ in range(dice.choice((1, 1, 2))):
            self.call_many(client, "complete_many", owners)

    def _later(self, client: Client, owner: Owner) -> None:
        time.sleep(0.015)
        with suppress(psycopg.OperationalError):
            self.call(client, "complete", owner)

    def _slowly(self, client: Client, owner: Owner, seconds: float) -> None:
        """Complete in a transaction that ends later."""
        self.history.verbs["complete"] += 1
        began, ended, row = time.time(), NEVER, None
        try:
            client.sql("begin")
            found = client.call("complete", job_id=owner[0], lease_token=owner[1])
            time.sleep(seconds)
            client.sql("commit")
            ended, row = time.time(), found[0] if found else None
        except Unanswered:
            self.history.unanswered += 1
        except psycopg.Error as exc:
            self.refused("complete", exc)
            with suppress(Unanswered):
                client.sql("rollback")
            return
        self.add(owner[0], self.op("complete", began, ended, owner[1], row))

    def _stall(self, dice: random.Random) -> None:
        if not self.calm.is_set():
            time.sleep(dice.choice((0.0, 0.0, 0.0, 0.01, 0.05, 0.2)))

    def _meddle(self, client: Client, dice: random.Random, owner: Owner) -> None:
        """Act on a lease that some worker has or had."""
        verbs = ("renew", "complete", "release", "begin_effect", "end_effect", "end_effect")
        verbs += ("lease_status",) * 3
        self.call(client, dice.choice(verbs), owner)

    def _more(self, aim: Aim, usual: float, aimed: float) -> float:
        """How likely something is, which is another thing if it is what the load aims at."""
        return aimed if self.aim == aim else usual

    def _most(self, dice: random.Random) -> int:
        """How many jobs to claim."""
        return dice.choice((4, 8) if self.aim == Aim.BATCHES else (1, 1, 2, 4))

    def _drain(self) -> None:
        """L1: with no more faults, all jobs end, found by the same sessions as before."""
        least, since = float("inf"), time.monotonic()
        while time.monotonic() < since + self.quiet:
            with suppress(psycopg.OperationalError), session(self.dsn, "drain") as conn:
                left = len(rows(conn, "select 1 from taskboard.jobs"))
                if not left:
                    return
                if left < least:
                    least, since = left, time.monotonic()
            time.sleep(0.05)
        with session(self.dsn, "drain") as conn:
            left_over = rows(
                conn, "select state, count(*) from taskboard.job_list where state <> all (%s)"
                " group by 1 order by 1", [list(FINAL)],
            )  # fmt: skip
        self.history.problems.append(f"jobs do not end: {dict(left_over)}")

    def _note(self, noted: Noted) -> None:
        """A call that a process of its own made."""
        self.history.verbs[noted.verb] += 1
        if noted.refused:
            return
        ended = NEVER if noted.rows is None else noted.ended
        self.history.unanswered += noted.rows is None
        if noted.verb == "claim":
            if noted.rows is None:
                self.history.lost.claims.append(noted.began)
            for row in noted.rows or ():
                self.add(row.job_id, self.op(
                    "claim", noted.began, ended, row.lease_token, row,
                    worker=noted.arguments["worker"]))  # fmt: skip
            return
        row = noted.rows[0] if noted.rows else None
        job_id, token = noted.arguments["job_id"], noted.arguments["lease_token"]
        self.add(job_id, self.op(noted.verb, noted.began, ended, token, row))

    def _look(self) -> None:
        """S6: how each job that is known has ended, or that it has vanished."""
        client = Client(self.dsn, "look")
        found: dict[UUID, Any] = {}
        for row in client.sql(
            "select id, state, attempt, lease_token, payload #>> '{}' as payload"
            " from taskboard.history"
        ):
            if row.id in found:
                self.history.problems.append(f"job {row.id} ended twice")
            found[row.id] = row
        live = {row.id: row for row in client.sql(
            "select id, payload #>> '{}' as payload from taskboard.jobs")}  # fmt: skip
        client.close()
        for job_id, ops in list(self.history.ops.items()):
            row = found.get(job_id) or live.get(job_id)
            if row is None:
                self.history.problems.append(f"job {job_id} was there, and is not")
                continue
            if row.payload in self.asked and all(op.verb != "enqueue" for op in ops):
                began, wanted = self.asked[row.payload]  # nobody was told that it was added
                asked = "hold" if wanted.hold else ""
                self.add(job_id, self.op("enqueue", began, NEVER, asked=asked))
            if job_id in found:
                now = time.time()
                self.add(job_id, self.op("job", now, now, None, row))
