"""Enqueue with wake-ups on against off: a commit that notifies takes a lock of the whole database.

Idle listeners sleep, marked as such, and wait for a queue that gets nothing. A busy one is a runner
that has a backlog to work on, so that it takes as much of the machine with wake-ups as without. On
and off take turns; the runner is there in both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

from lines import OURS, Line
from machine import Rig
from rows_runner import working
from rows_sql import Options, in_turns, plural, settle
from sides import Side, taskboard

OFF = "wake-ups off"
AT_MOST = 15_000  # jobs that a runner does in a second


@contextmanager
def idle(rig: Rig, dsn: str, count: int = 4) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(count):
            db = stack.enter_context(rig.connect(dsn))
            db.execute("select taskboard.listen('{quiet}')")
        yield


def wake(rig: Rig, sides: Sequence[Side], options: Options) -> list[Line]:
    on, off = taskboard(), taskboard()
    on.name, off.name = OURS, OFF
    for side in (on, off):
        name = side.name
        side.name = "wake " + name
        side.set_up(rig)
        side.name = name
    with rig.connect(off.dsn) as db:
        db.execute("update taskboard.settings set notify = false")
    counts = (1, 8, 64) if max(options.clients) > 2 else (2,)
    seconds = options.seconds if options.seconds <= 1 else max(options.seconds / 2, 1)
    lines = []
    for listeners in ("idle", "busy"):
        for clients in counts:
            line = Line(
                "wake",
                f"enqueue, wake-ups on to off, {listeners} listeners, {plural(clients)}",
                "jobs/s",
                "≥ 0.95",
                base=OFF,
            )

            def measure(side: Side, clients: int = clients, listeners: str = listeners) -> float:
                with rig.connect(side.dsn) as db:
                    side.empty(db)
                    if listeners == "busy":
                        side.fill(db, int(AT_MOST * (seconds + 1)))
                busy = listeners == "busy"
                with (
                    nullcontext() if busy else idle(rig, side.dsn),
                    working(rig, side, 10, "rate", 600, 100_000_000) if busy else nullcontext(),
                ):
                    settle(min(1.0, seconds * 5) if busy else 0.05)  # the runner has come up
                    return rig.run(side.dsn, side.enqueue, clients, seconds).tps

            lines.append(in_turns([on, off], options.fewer(3), line, measure))
    return lines
