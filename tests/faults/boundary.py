"""Crashes at the boundary: mails and charges are counted while runners are killed around them.

`python -m faults.boundary --seed 1 --crashes 2000`, in tests/. Runners take jobs that mail and
charge; each is killed, at a point that the seed chooses, between claim, gate, call, answer, record
and completion, and the next one finds what it left. In the end every job must have completed, with
exactly one charge; one mail to each recipient, or more only where an open record tells of an
unknown outcome and the policy is `retry`. With `--mutants` each broken variant must be noticed, as
well. Exits with 1 when something is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl
from uuid import UUID

import psycopg
from aiosmtpd.smtp import SMTP, Envelope
from psycopg.types.json import Jsonb

from faults.boundary_worker import POINTS
from mutants.variants import MUTANTS, Mutant
from support import CARELESS, Connection, Databases, make_server, rows, session
from taskboard.dev.stripe import DevStripe
from taskboard.migrate import migrate

# Points on the other side of the wire: it kills the runner that it talks with. A request that was
# asked for comes late: not before another runner has charged for the job, if one does.
THERE = ("mail taken", "charge asked", "charge made")
RUNNERS = 3
LIVE = 24  # jobs at a time
LEASE = 0.5
LATE = 8.0  # seconds at most, until what was asked for is performed
PATIENCE = 120.0  # seconds in which every job must end, once nobody is killed any more

HOLD_IGNORED = Mutant(
    "hold ignored",
    "E1",
    "33_effects.sql",
    (("(v_job.on_unknown = 'hold'", "(false"),),
    (),
)
KEY_PER_ATTEMPT = next(each for each in MUTANTS if each.name == "effect key per attempt")
BROKEN = {each.name: each for each in (KEY_PER_ATTEMPT, HOLD_IGNORED)}
# Broken variants, and the point that tells them soonest.
NOTICED = {
    KEY_PER_ATTEMPT.name: "charge asked", HOLD_IGNORED.name: "mail taken", "no gate": "mail taken",
}  # fmt: skip


@dataclass(slots=True)
class World:
    """What exists outside the database, whoever made it."""

    mails: Counter[str] = field(default_factory=Counter)  # by recipient; each job has its own
    keys: dict[str, Any] = field(default_factory=dict)
    objects: dict[str, dict[str, Any]] = field(default_factory=lambda: DevStripe().objects)

    def charges(self) -> Counter[str]:
        """How often money was taken, by job."""
        made = list(self.objects["charges"].values())
        intents = self.objects["payment_intents"]
        return Counter(intents[c["payment_intent"]]["metadata"]["taskboard_job"] for c in made)


class Slot:
    """A runner after the other, the servers that they talk with, and who dies when."""

    def __init__(self, number: int, world: World) -> None:
        self.number, self.world = number, world
        self.stripe = Stripe(self)
        self.smtp_port, self.talking = 0, 0
        self.pid, self.point, self.left = 0, "", 0

    def at(self, point: str) -> bool:
        """Kill the runner, if its plan says so; answers whether it did."""
        self.left -= point == self.point
        if point != self.point or self.left != 0 or not self.pid:
            return False
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        return True

    @property
    def quiet(self) -> bool:
        """Whether nothing of a dead runner is under way any more."""
        return not self.talking and not self.stripe.talking

    @property
    def waits(self) -> bool:
        """Whether something is still to come of what a dead runner asked for."""
        return bool(self.stripe.late) or not (self.pid or self.quiet)

    async def handle_RCPT(
        self, server: SMTP, session: Any, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        # The late ones are deferred until the others have had their mail: a step of its own.
        if address.startswith("late") and not self.world.mails[address.replace("late", "ann", 1)]:
            return "450 later"
        envelope.rcpt_tos.append(address)
        return "250 ok"

    async def handle_DATA(self, server: SMTP, session: Any, envelope: Envelope) -> str:
        self.world.mails.update(envelope.rcpt_tos)
        self.at("mail taken")
        await asyncio.sleep(random.random() * 0.1)
        return "250 taken"

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(lambda: Talk(self, loop=loop), "127.0.0.1", 0)
        self.smtp_port = listener.sockets[0].getsockname()[1]
        await self.stripe.__aenter__()
        self.close = listener.close

    async def shut(self) -> None:
        self.close()
        await self.stripe.__aexit__()


class Talk(SMTP):
    """A conversation with a mail server that knows whether somebody is there."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.event_handler.talking += 1
        super().connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.event_handler.talking -= 1
        super().connection_lost(error)


class Stripe(DevStripe):
    """All of them share their keys and objects; each kills the runner that it talks with."""

    def __init__(self, slot: Slot) -> None:
        super().__init__(keys=slot.world.keys, objects=slot.world.objects)
        self.slot = slot
        self.on_charge = self._made
        self.late: set[object] = set()  # tasks that perform what was asked for

    @property
    def talking(self) -> int:
        return len(self._clients) - len(self.late)

    def _made(self, call: object) -> None:
        if asyncio.current_task() not in self.late:
            self.slot.at("charge made")
        self.hold_seconds = random.random() * 0.1

    async def _answer(
        self, method: str, url: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, Any], bool]:
        task = asyncio.current_task()
        if method == "POST" and self.slot.at("charge asked"):
            self.late.add(task)
            job = dict(parse_qsl(body.decode()))["metadata[taskboard_job]"]
            until = time.monotonic() + LATE
            charges = self.slot.world.charges
            while not charges()[job] and time.monotonic() < until:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        try:
            return await super()._answer(method, url, headers, body)
        finally:
            self.late.discard(task)


@contextmanager
def serving(slots: list[Slot]) -> Iterator[None]:
    """Run the servers in a thread, with a loop of their own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    for slot in slots:
        asyncio.run_coroutine_threadsafe(slot.open(), loop).result(10)
    yield
    for slot in slots:
        asyncio.run_coroutine_threadsafe(slot.shut(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


@dataclass(frozen=True, slots=True)
class Facts:
    """What a job is to do; `policy` is its on_unknown."""

    kind: str
    policy: str
    names: list[str]


@dataclass(slots=True)
class Trial:
    """One run on a fresh database. `crashes` and `seconds` bound it, whichever comes first."""

    dsn: str
    seed: int
    crashes: int
    seconds: float
    broken: str = ""
    lives_for: float = 6.0  # seconds; then a runner that is not at its point is asked to stop
    log: Path = Path(os.devnull)
    world: World = field(default_factory=World)
    slots: list[Slot] = field(init=False)
    jobs: dict[UUID, Facts] = field(default_factory=dict)
    died: Counter[str] = field(default_factory=Counter)  # by point
    started: int = 0
    judged_at: float = 0.0
    answered: Counter[UUID] = field(default_factory=Counter)  # with yes, by a person
    calm: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    wrong: list[str] = field(default_factory=list)

    def run(self) -> list[str]:
        """Kill runners until the bound, let all jobs end, and judge; answers what is wrong."""
        self.slots = [Slot(n, self.world) for n in range(RUNNERS)]
        threads = [threading.Thread(target=self._keep_running, args=(slot,)) for slot in self.slots]
        ends_at = time.monotonic() + self.seconds
        with serving(self.slots), session(self.dsn) as db:
            db.execute("update taskboard.settings set backoff = '0.05 s', backoff_max = '1 s'")
            for thread in threads:
                thread.start()
            try:
                draw = random.Random(self.seed)
                while self.died.total() < self.crashes and not self.wrong:
                    if time.monotonic() > ends_at:
                        break
                    self._look_after(db, draw)
                self.calm.set()
                ends_at = time.monotonic() + PATIENCE
                while (left := self._look_after(db, None)) and not self.wrong:
                    if time.monotonic() > ends_at:
                        self.wrong.append(f"{left} jobs do not end")
            finally:
                self.calm.set()
                self.over.set()
                asked: set[int] = set()  # once each: a second signal ends a runner at once
                while any(thread.is_alive() for thread in threads):
                    for slot in self.slots:
                        if slot.pid not in asked:
                            asked.add(slot.pid)
                            self._terminate(slot)
                    time.sleep(0.05)
            if not self.wrong:
                self._judge(db, over=True)
        return self.wrong

    def _look_after(self, db: Connection, draw: random.Random | None) -> int:
        """Add jobs, answer for a person, let waiting jobs be due; answers how many jobs live."""
        found = rows(db, "select job_id, state from taskboard.job_list where state <> 'completed'")
        for _ in range((8 if self.broken else LIVE) - len(found) if draw else 0):
            self._enqueue(db, draw)
        for job, state in found:
            if state == "held" and not any(slot.waits for slot in self.slots):
                self._resolve(db, job)
        db.execute(
            "update taskboard.jobs set claimable_at = clock_timestamp() where lease_token is null"
            " and claimable_at > clock_timestamp() and claimable_at <> 'infinity'"
        )
        if time.monotonic() > self.judged_at + 0.3:
            self._judge(db, over=False)
            self.judged_at = time.monotonic()
        time.sleep(0.02)
        return len(found)

    def _enqueue(self, db: Connection, draw: random.Random | None) -> None:
        assert draw is not None
        kind, policy = draw.choice(("email", "stripe")), draw.choice(("retry", "hold"))
        name = f"+{draw.getrandbits(64):x}@example.com"
        names = ["ann" + name, "late" + name][: draw.choice((1, 1, 2))]
        payload: dict[str, Any] = {"to": names, "subject": "Hello"}
        if kind == "stripe":
            card = {"payment_method": "pm_card_visa", "confirm": True}
            params = card | {"amount": draw.randint(100, 9999), "currency": "eur"}
            payload = {"operation": "payment_intents.create", "params": params}
        [(job,)] = rows(
            db,
            "select job_id from taskboard.enqueue(%s, %s, on_unknown => %s, lease => %s,"
            " max_attempts => 100000, max_lost_leases => 100000)",
            (kind, Jsonb(payload), policy, f"{LEASE} s"),
        )
        self.jobs[job] = Facts(kind, policy, names)

    def _resolve(self, db: Connection, job: UUID) -> None:
        """Say, as a person would who looks there, whether what a job is held for did happen."""
        open_steps = rows(
            db, "select distinct step from taskboard.effect_list where job_id = %s"
            " and state = 'open'", (job,),
        )  # fmt: skip
        for (step,) in open_steps:
            if step == "payment_intents.create":
                happened = self.world.charges()[str(job)] > 0
            else:
                happened = self.world.mails[self.jobs[job].names[step == "send/2"]] > 0
            with suppress(psycopg.errors.DatabaseError):  # of its steps only one is the question
                db.execute("select taskboard.resolve(%s, %s, %s)", (job, step, happened))
                self.answered[job] += happened

    def _keep_running(self, slot: Slot) -> None:
        """Start a runner when the one before is dead, and see how it ends."""
        draw = random.Random(self.seed * 100 + slot.number)
        zygote = subprocess.Popen(
            [sys.executable, "-m", "faults.boundary_worker"], text=True, stderr=self.log.open("a"),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )  # fmt: skip
        assert zygote.stdin and zygote.stdout
        try:
            while not self.over.is_set() and not self.wrong:
                plan = self._plan(slot, draw)
                print(json.dumps(plan), file=zygote.stdin, flush=True)
                slot.pid = int(zygote.stdout.readline())
                ended = threading.Timer(self.lives_for, self._terminate, [slot])
                if plan["point"]:  # else it lives until all is over
                    ended.start()
                code = int(zygote.stdout.readline())
                ended.cancel()
                slot.pid = 0
                if code == -signal.SIGKILL:
                    self.died[plan["point"]] += 1
                elif code not in (0, -signal.SIGTERM):  # that, before it listens to signals
                    self.wrong.append(f"a runner ended with {code}, its plan was {plan}")
                if draw.random() < 0.5:  # the host is known to be dead
                    with session(self.dsn) as db:
                        db.execute("select taskboard.evict(%s)", (plan["settings"]["worker"],))
                until = time.monotonic() + 10
                while not slot.quiet and time.monotonic() < until:
                    time.sleep(0.002)
        finally:
            zygote.kill()
            zygote.wait()

    def _terminate(self, slot: Slot) -> None:
        if slot.pid:
            with suppress(ProcessLookupError):
                os.kill(slot.pid, signal.SIGTERM)

    def _plan(self, slot: Slot, draw: random.Random) -> dict[str, Any]:
        self.started += 1
        point, nth = draw.choice(POINTS + THERE * 8), draw.choice((1, 1, 1, 2, 3))
        if self.broken:
            point, nth = NOTICED[self.broken], draw.choice((1, 2, 3))
        if self.calm.is_set():
            point = ""
        slot.point, slot.left = point, nth
        return {
            "point": point, "nth": nth, "broken": self.broken,
            "settings": {
                "database_url": self.dsn, "worker": f"{slot.number}-{self.started}",
                "smtp_url": f"smtp://127.0.0.1:{slot.smtp_port}?starttls=off&timeout=5",
                "stripe_base": slot.stripe.url,
            },
        }  # fmt: skip

    def _judge(self, db: Connection, *, over: bool) -> None:
        """Compare what happened with what is on record; until it is over, look for too much."""
        charges, mails = self.world.charges(), self.world.mails.copy()
        open_steps = rows(db, "select job_id, step from taskboard.effect_list where state = 'open'")
        unknown = Counter(open_steps)
        for job, facts in self.jobs.items():
            least = int(over and not (facts.kind == "email" and self.answered[job]))
            if facts.kind == "stripe":
                if not least <= (count := charges[str(job)]) <= 1:
                    self.wrong.append(f"{job} ({facts.policy}) has {count} charges")
                continue
            for name in facts.names:
                # A late one is in the first step, too, if that is repeated.
                steps = ("send", "send/2") if name.startswith("late") else ("send",)
                times = sum(unknown[job, step] for step in steps)
                if not least <= mails[name] <= (1 if facts.policy == "hold" else 1 + times):
                    self.wrong.append(
                        f"{job} ({facts.policy}) mailed {name} {mails[name]} times,"
                        f" with {times} unknown outcomes on record"
                    )

    def __str__(self) -> str:
        kinds = Counter(facts.kind for facts in self.jobs.values())
        again = sum(count - 1 for count in self.world.mails.values() if count > 1)
        return (
            f"{self.broken or 'as released'}: {self.died.total()} crashes of {self.started} runners"
            f" at {len(self.died)} points, {len(self.jobs)} jobs; {kinds['stripe']} that charge,"
            f" {len(self.world.objects['charges'])} charges; {kinds['email']} that mail,"
            f" {self.world.mails.total()} mails, of them {again} again after an unknown outcome;"
            f" {self.answered.total()} questions answered with yes; {len(self.wrong)} violations"
        )


def trial(
    dsn: str, broken: str, seed: int, crashes: int, seconds: float, log: Path, lives_for: float = 6
) -> Trial:
    """Run one, with a broken variant, if one is named, on a database with Taskboard."""
    if broken in BROKEN:
        with session(dsn) as db, db.transaction():
            db.execute("set local search_path = pg_catalog, pg_temp")
            db.execute(BROKEN[broken].text().encode())
    one = Trial(dsn, seed, crashes, seconds, broken, lives_for, log)
    one.run()
    return one


def main() -> int:
    parser = argparse.ArgumentParser(prog="faults.boundary", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--crashes", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--postgres", default="auto")
    parser.add_argument("--mutants", action="store_true")
    asked = parser.parse_args()
    bad = 0
    with ExitStack() as stack:
        server = make_server(asked.postgres, CARELESS)
        stack.callback(server.close)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        databases = Databases(server, "boundary")
        template = databases.create()
        migrate(server.dsn(template))
        for what in ("", *(NOTICED if asked.mutants else ())):
            began, log = time.monotonic(), folder / f"log {what}"
            bounds = (1000, 120.0) if what else (asked.crashes, asked.seconds)
            dsn = server.dsn(databases.create(template))
            found = trial(dsn, what, asked.seed, *bounds, log)
            print(f"{found}, {time.monotonic() - began:.0f} s", *found.wrong[:5], sep="\n")
            print(*sorted(found.died.items()), flush=True)
            bad += bool(found.wrong) != bool(what)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
