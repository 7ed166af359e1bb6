"""Telling the database how attempts ended, until it is known to know: each call may be repeated."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar
from uuid import UUID

import psycopg

from taskboard import db
from taskboard.attempts import Attempt
from taskboard.connections import Call, InTheWay, Link, Pool, Weather, array, ask, one_line
from taskboard.job import Ending, Failed, clean
from taskboard.leases import now

log = logging.getLogger(__name__)

T = TypeVar("T")

BATCH = 1000
PATIENCE = 0.2  # seconds for which a batch holds up the next one
CALLS: dict[str, Call[Any]] = {
    "complete": db.complete, "fail": db.fail, "release": db.release,
}  # fmt: skip
# What lease_status says when an earlier try, whose answer was lost, did settle the attempt.
SETTLED = ("given_back", "cancelled", "held")


class Settler:
    """Holds the attempts that have ended, and settles them in batches.

    It asks on pooled connections, and on the link where there is none to be had: a lock in the way
    then holds up neither claims nor other batches. What it concerns is settled by itself, later.

    `left` is told of each that is over. `failed`: a job of this runner's has failed.
    """

    def __init__(self, link: Link, pool: Pool, left: Callable[[Attempt], None]) -> None:
        self._link, self._pool, self._left = link, pool, left
        self.waiting: dict[Attempt, None] = {}
        self.failed = False
        self._wanted = asyncio.Event()
        self._group: asyncio.TaskGroup
        # In a batch under way, or set aside since a lock is in the way; the latter are at work too.
        self._at_work, self._aside = set[Attempt](), set[Attempt]()
        self._missed = set[Attempt]()  # the database was away when they were to be settled
        # Whatever is locked, these leave a part of the pool to the handlers.
        self._batches = asyncio.Semaphore(max(2, pool.max_size // 2))
        self._singles = asyncio.Semaphore(max(1, pool.max_size // 4))

    @property
    def behind(self) -> bool:
        """Whether an outage left something unsettled; a claim might have it done again."""
        return bool(self._missed)

    def add(self, attempt: Attempt, ending: Ending) -> None:
        """Settle an attempt soon."""
        attempt.ending, lease = ending, attempt.lease
        # A renewal that comes after that would only be refused.
        lease.renew_at = max(lease.renew_at, now() + lease.length / 6)
        self.waiting[attempt] = None
        self._wanted.set()

    def release(self, attempts: Iterable[Attempt]) -> None:
        """Give back soon what has not begun."""
        for attempt in attempts:
            self.add(attempt, Ending("release"))

    async def run(self) -> None:
        """Settle for ever. A batch waits for the one before it, but not while that is held up."""
        async with asyncio.TaskGroup() as self._group:
            while True:
                await self._wanted.wait()
                if self.behind:
                    await asyncio.sleep(self._link.delay)
                self._wanted.clear()
                if batch := [one for one in self.waiting if one not in self._at_work][:BATCH]:
                    self._at_work.update(batch)
                    task = self._group.create_task(self._settle_all(batch))
                    await asyncio.wait({task}, timeout=None if self.behind else PATIENCE)

    async def _settle_all(self, batch: list[Attempt]) -> None:
        async with self._batches:
            try:
                for verb in CALLS:
                    await self._settle_many(verb, [a for a in batch if a.ending.verb == verb])
                for attempt in batch:
                    if attempt in self.waiting and attempt not in self._aside:
                        await self._settle(attempt)
            except Weather:
                self._missed.update(self.waiting.keys() & set(batch) - self._aside)
        self._at_work.difference_update(set(batch) - self._aside)
        self._wanted.set()

    async def _settle_many(self, verb: str, attempts: list[Attempt]) -> None:
        """Complete, fail or release together what need not be alone."""
        # One attempt of a job: answers name the job.
        together = list({each.job.id: each for each in attempts if not each.alone}.values())
        if len(together) < 2:
            return
        owners = (attempt.lease.owner for attempt in together)
        ids, tokens = (array(each) for each in zip(*owners, strict=True))
        endings = [attempt.ending for attempt in together]
        answers: dict[UUID, Any]
        asked: tuple[Any, ...]
        try:
            if verb == "complete":
                results = [ending.result for ending in endings]
                asked = ids, tokens, results if any(results) else None
                answers = dict.fromkeys(await self._ask(db.complete_many, *asked), True)
            elif verb == "release":
                delays = [ending.after for ending in endings]
                asked = ids, tokens, delays if any(delays) else None
                answers = dict.fromkeys(await self._ask(db.release_many, *asked), True)
            else:
                more = (list(each) for each in zip(*(e.arguments for e in endings), strict=True))
                failed = await self._ask(db.fail_many, ids, tokens, *more)
                answers = {answer.job_id: answer for answer in failed}
        except InTheWay as exc:  # one row that is locked holds up no others
            return self._set_aside(together, exc)
        except psycopg.Error:  # nor does one document that is refused
            answers = {}
        for attempt in together:
            attempt.alone = True
            if answer := answers.get(attempt.job.id):
                self._note(attempt, answer)

    async def _settle(self, attempt: Attempt) -> None:
        ending, owner = attempt.ending, attempt.lease.owner
        answer, status = None, ""
        # The link is for all: what a lock may be in the way of has time to wait for the pool.
        wait = 5.0 if attempt in self._aside else 0.2
        try:
            if ending.verb:
                asked = *owner, *ending.arguments
                answer = await self._ask(CALLS[ending.verb], *asked, wait=wait)
            if not answer:
                status = str(await self._ask(db.lease_status, *owner, wait=wait))
        except InTheWay as exc:
            return self._set_aside([attempt], exc)
        except Weather:
            if ending.verb:
                self.waiting[attempt] = self.waiting.pop(attempt)  # the others go first next time
                raise
            status = "not asked"
        except psycopg.Error as exc:
            if not ending.plain:
                attempt.ending = ending.strip(clean(exc))
                return
            status = f"settling was refused: {clean(exc)}"
        self._note(attempt, answer, status)

    async def _ask(self, call: Call[T], *arguments: Any, wait: float = 0.2) -> T:
        return await ask(self._pool, self._link, call, *arguments, wait=wait)

    def _set_aside(self, attempts: Iterable[Attempt], why: InTheWay) -> None:
        """Settle each by itself, as soon as nothing is in its way any more."""
        if not self._aside:
            log.warning("settling: in the way, trying again: %s", why)
        self._missed.difference_update(attempts)
        for attempt in set(attempts) - self._aside:
            self._aside.add(attempt)
            self._group.create_task(self._settle_aside(attempt))

    async def _settle_aside(self, attempt: Attempt) -> None:
        pause = 0.1
        with suppress(Weather):  # a batch goes on with it, then
            while attempt in self.waiting:
                async with self._singles:
                    await self._settle(attempt)
                await asyncio.sleep(pause)
                pause = min(pause * 2, 5)
        if attempt in self.waiting:
            self._missed.add(attempt)
        self._aside.discard(attempt)
        self._at_work.discard(attempt)
        self._wanted.set()

    def _note(self, attempt: Attempt, answer: Any, status: str = "") -> None:
        """Conclude from the database's answer, or from the token's status where there is none."""
        ending = attempt.ending
        ours = bool(answer) or (ending.verb in ("fail", "release") and status in SETTLED)
        what = f"{ending.verb}d"
        if not answer:
            what = status if ours or status == "held" else f"lease lost ({status})"
            if status == "completed_by_you":
                what, then = "completed", f", then {ending.note}" if ending.note else ""
                attempt.ending = replace(ending, note=f"in its own transaction{then}")
        elif isinstance(answer, Failed):
            again = answer.again_in
            what = answer.state if again is None else f"failed, again in {max(again, 0):.0f} s,"
        self.failed |= ours and ending.verb == "fail" and what != "cancelled"
        fine = answer and ending.verb != "fail"
        self._close(attempt, what, logging.INFO if fine else logging.WARNING)

    def _close(self, attempt: Attempt, what: str, level: int = logging.INFO) -> None:
        """The attempt is over: one line about it."""
        del self.waiting[attempt]
        self._missed.discard(attempt)
        self._left(attempt)
        if log.isEnabledFor(level):
            job, note = attempt.job, one_line(attempt.ending.note)
            fields = {
                "job": str(job.id), "kind": job.kind, "attempt": job.attempt, "outcome": what,
                "seconds": round(now() - attempt.started_at, 3),
            }  # fmt: skip
            line = "job=%(job)s kind=%(kind)s attempt=%(attempt)d %(outcome)s %(seconds).2fs"
            line += ": %(note)s" if note else ""
            # By hand, because log.log() looks for its caller: a tenth of the time of a short job.
            where, said, more = (__file__, 0), fields | {"note": note}, {"fields": fields}
            log.handle(log.makeRecord(log.name, level, *where, line, said, None, extra=more))
