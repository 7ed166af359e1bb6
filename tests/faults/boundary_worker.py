"""A runner that is killed at a point of its own choosing, forked from a process that is warm.

`python -m faults.boundary_worker` reads plans, one JSON document a line, forks a runner for each,
and answers its process id, then how it ended. The runner is the real one, with its own handlers
for mail and Stripe; only here, in the fork, calls are wrapped so that it can die around them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import ssl
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import httpx
from psycopg.pq import TransactionStatus

from taskboard import db, settle, smtp, stripe_calls
from taskboard.connections import Connection
from taskboard.context import Context
from taskboard.handlers import Effect
from taskboard.preflight import find_handlers
from taskboard.process import run
from taskboard.settings import Settings

CALLS = ("claim", "begin_effect", "end_effect", "complete")
RARE = ("renew_many", "fail", "release")  # not every runner comes there
# Around a call to the database: not sent; sent, its answer not seen; answered.
POINTS = (
    *(f"{call} {when}" for call in CALLS * 3 + RARE for when in ("before", "sent", "after")),
    *("mail before", "mail after", "charge before", "charge after") * 3,
)  # fmt: skip
LIVES_FOR = 150  # seconds; longer is an error: the alarm ends it

Call = Callable[..., Awaitable[Any]]


@dataclass(slots=True)
class Plan:
    """Where a runner dies: the `left`-th time that it comes to `point`."""

    point: str
    left: int

    def reached(self, point: str) -> bool:
        self.left -= point == self.point
        return point == self.point and self.left == 0

    def at(self, point: str) -> None:
        if self.reached(point):
            os.kill(os.getpid(), signal.SIGKILL)


def on_the_wire(conn: Connection) -> bool:
    return conn.pgconn.transaction_status == TransactionStatus.ACTIVE


def around(plan: Plan, name: str, call: Call, conn_in_front: bool = True) -> Call:
    """Wrap a call so that the process can die before it, during it and after it."""

    async def wrapped(*args: Any, **kwargs: Any) -> Any:
        plan.at(f"{name} before")
        if conn_in_front and plan.reached(f"{name} sent"):
            task = asyncio.ensure_future(call(*args, **kwargs))
            sent = partial(on_the_wire, args[0])
            while not (sent() or task.done()):  # noqa: ASYNC110
                await asyncio.sleep(0)
            os.kill(os.getpid(), signal.SIGKILL)
        answer = await call(*args, **kwargs)
        plan.at(f"{name} after")
        return answer

    return wrapped


def without_a_gate() -> None:
    """Break the runner: effects are neither begun nor ended."""

    async def begin(self: Context, step: str = "main", **_: Any) -> Effect:
        return Effect(step, f"{self.job.id}/{step}", "fresh")

    async def end(self: Context, step: str = "main", **_: Any) -> None:
        pass

    Context.begin_effect, Context.end_effect = begin, end  # type: ignore[assignment]


def wrap(plan: Plan) -> None:
    for name in CALLS + RARE:
        setattr(db, name, around(plan, name, getattr(db, name)))
    db.complete_many = around(plan, "complete", db.complete_many)  # type: ignore[assignment]
    for name in settle.CALLS:
        settle.CALLS[name] = getattr(db, name)
    for owner, method, name in (
        (smtp.Conversation, "send", "mail"),
        (stripe_calls.Account, "perform", "charge"),
    ):
        setattr(owner, method, around(plan, name, getattr(owner, method), False))


def work(doc: dict[str, Any]) -> int:
    """Run until the plan, a signal or the alarm ends it."""
    signal.alarm(LIVES_FOR)
    if doc["broken"] == "no gate":
        without_a_gate()
    wrap(Plan(doc["point"], doc["nth"]))
    settings = Settings(
        **doc["settings"], pool=6, poll=0.05, grace=0.3, listen=False,
        mail_from="shop@example.com", stripe_api_key="sk_test_boundary",
    )  # fmt: skip
    handlers, off = find_handlers(settings, [])
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        return runner.run(run(settings, handlers, off))


def main() -> None:
    # What takes longest: to read all certificates, for two servers that speak plainly.
    ssl.create_default_context = cache(ssl.create_default_context)
    httpx.AsyncClient()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(message)s")
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            code = 99
            try:
                code = work(json.loads(line))
            finally:
                os._exit(code)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
