"""What people do to jobs while these are worked on, and rows that somebody merely locks."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg

from faults.calls import Client, Unanswered
from faults.history import Hold
from faults.keys import Pause
from faults.rules import NEVER

if TYPE_CHECKING:
    from faults.load import Load

HELD = "select id from taskboard.jobs where waits_for = 'person' limit 5"
# Two ways to have nothing claimed from a queue, and the way back.
STOPS: tuple[tuple[tuple[str, dict[str, int]], tuple[str, dict[str, int]]], ...] = (
    (("pause", {}), ("resume", {})),
    (("limit_queue", {"max_running": 0}), ("limit_queue", {})),
)
LEASED = (
    "with held as (select id from taskboard.jobs where lease_token is not null"
    " and claimable_at > clock_timestamp() limit 1 for update skip locked) select id from held"
)


def operate(load: Load, number: int) -> None:
    """Cancel, retry, evict, pause; answer for what is held, until there is nothing left to do."""
    dice, client = random.Random(f"{load.seed}/o{number}"), load.client("operator")
    while not load.over.is_set():
        with suppress(Unanswered, psycopg.Error):
            for row in client.sql(HELD):
                if load.calm.is_set() or dice.random() < 0.3:
                    resolve(load, client, dice, row.id)
            if not load.calm.is_set() and load.owners:
                act(load, client, dice, pauses=number == 0)
        time.sleep(dice.random() * (0.01 if load.aim.name == "OPERATORS" else 0.08))
    client.close()


def act(load: Load, client: Client, dice: random.Random, *, pauses: bool) -> None:
    job_id, _ = dice.choice(list(load.owners)[-8:])  # so that it is about what is going on
    acts = ("cancel", "cancel", "retry", "retry", "evict", "failed", "answer", "pause", "maintain")
    match dice.choice(acts):
        case "cancel":
            one(load, client, "cancel", job_id, force=dice.random() < 0.5)
        case "retry":
            one(load, client, "retry", job_id)
        case "evict":
            evict(load, client, f"w{dice.randrange(6)}")
        case "failed":
            retry_failed(load, client)
        case "answer":
            resolve(load, client, dice, job_id)
        case "pause" if pauses and dice.random() < (1 if load.aim.name == "OPERATORS" else 0.3):
            # One may, or nobody would know whose resume ended it.
            pause(load, client, dice)
        case "maintain":
            load.timed(client, "maintain")


def one(load: Load, client: Client, verb: str, job_id: UUID, **more: Any) -> None:
    """Call a verb about one job. What is refused by an error is no call."""
    try:
        began, ended, found = load.timed(client, verb, job_id=job_id, **more)
    except psycopg.Error:
        return
    asked = "force" if more.get("force") else ""
    row = found[0] if found else None
    op = load.op(verb, began, ended, None, row, more.get("happened", True), asked)
    load.add(job_id, op)


def resolve(load: Load, client: Client, dice: random.Random, job_id: UUID) -> None:
    one(load, client, "resolve", job_id, step="main", happened=dice.random() < 0.5)


def evict(load: Load, client: Client, worker: str) -> None:
    began, ended, found = load.timed(client, "evict", worker=worker)
    if ended == NEVER:
        load.history.lost.evictions.append((began, worker))
    for row in (row for row in found if row.state != "busy"):
        load.add(row.job_id, load.op("evict", began, ended, None, row, worker=worker))


def retry_failed(load: Load, client: Client) -> None:
    began, ended, found = load.timed(client, "retry_failed", max_jobs=3)
    if ended == NEVER:
        load.history.lost.retries.append(began)
    for row in found:
        load.add(row.job_id, load.op("retry", began, ended, None, row))


def pause(load: Load, client: Client, dice: random.Random) -> None:
    """Stop a queue for a moment. It is let go on until that is answered."""
    (stop, how), (go_on, no_more) = dice.choice(STOPS)
    _, since, _ = load.timed(client, stop, queue="other", **how)
    time.sleep(dice.random() * 0.3)
    while True:
        with suppress(psycopg.OperationalError):
            until, ended, _ = load.timed(client, go_on, queue="other", **no_more)
            if since != NEVER:
                load.history.pauses.append(Pause("other", since, until))
            if ended != NEVER:
                return
            since = NEVER
        if load.over.wait(0.02):
            return


def hold_rows(load: Load, number: int) -> None:
    """Lock a leased job now and then, for some time, and change nothing."""
    dice, client = random.Random(f"{load.seed}/h{number}"), load.client("holder")
    while not load.calm.is_set():
        with suppress(Unanswered, psycopg.Error):
            client.sql("begin")
            found = client.sql(LEASED)
            got = time.time()
            if found:
                time.sleep(dice.random() * 0.3)
            let_go = time.time()
            client.sql("rollback")
            if found:
                load.history.holds[found[0].id].append(Hold(got, let_go))
        time.sleep(0.01)
    client.close()
