"""Rates of plain calls: enqueue, bulk, drain one by one and in batches, and under an old snapshot.

All sides take turns in slices of some seconds, so that a noisy moment meets them all, and each
round begins with another side. pgbench does the calls of every side alike.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import sleep

from lines import Line
from machine import Rig
from sides import Side


@dataclass(frozen=True, slots=True)
class Options:
    """How long and how often; `scale` shrinks the backlogs."""

    seconds: float = 2
    rounds: int = 4
    clients: Sequence[int] = (1, 4, 8)
    scale: float = 1
    sustained: float = 60
    turns: int = 200

    def fewer(self, rounds: int) -> int:
        """Rounds of a row whose turns take long."""
        return min(self.rounds, rounds)

    def span(self) -> float:
        """What pgbench makes of the seconds of a slice."""
        return max(self.seconds, 0.2)


SLOW_BULK = 15_000.0  # jobs/s; below, a statement of 100,000 would hold up all others


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def in_turns(
    sides: Sequence[Side], rounds: int, line: Line, measure: Callable[[Side], float]
) -> Line:
    """Measure all sides round by round; one that fails is named with its reason."""
    out: set[str] = set()
    for turn in range(rounds):
        start = turn % len(sides)
        for side in [*sides[start:], *sides[:start]]:
            if side.name in out:
                continue
            try:
                line.add(side.name, measure(side))
            except Exception as exc:
                if side.name in ("floor", "Taskboard"):
                    raise
                out.add(side.name)
                line.samples.pop(side.name, None)
                line.notes[side.name] = "failed: " + str(exc).splitlines()[0][:80]
                say(f"{side.name}: {exc}")
    say(f"  {line.what}: " + "; ".join(f"{name} {line.cell(name)}" for name in line.samples))
    return line


def enqueue(rig: Rig, sides: Sequence[Side], options: Options) -> list[Line]:
    def measure(side: Side, clients: int) -> float:
        with rig.connect(side.dsn) as db:
            side.empty(db)
        return rig.run(side.dsn, side.enqueue, clients, options.seconds).tps

    return [
        in_turns(
            sides,
            options.rounds,
            Line("enqueue", f"enqueue, one per transaction, {plural(clients)}", "jobs/s", "≥ 0.85"),
            lambda side, clients=clients: measure(side, clients),
        )
        for clients in options.clients
    ]


def bulk(rig: Rig, sides: Sequence[Side], options: Options) -> list[Line]:
    def measure(side: Side, count: int) -> float:
        with rig.connect(side.dsn) as db:
            side.empty(db)
            db.execute("checkpoint")
            before = side.left(db)
            found = rig.run(side.dsn, side.bulk(count), 1, options.seconds)
            return (side.left(db) - before) / found.transactions * found.tps

    lines = []
    for count in (1000, 100_000):
        if count > 1000 and options.scale < 0.1:
            continue
        line = Line("bulk", f"enqueue, {count:,} a statement", "jobs/s", "≥ 0.85")
        slow = {
            side.name: "takes too long"
            for side in sides
            if lines
            and (lines[0].middle(side.name) or 0) < SLOW_BULK
            and side.name not in ("floor", "Taskboard")
        }
        line.notes |= slow
        able = [side for side in sides if side.name not in slow]
        lines.append(
            in_turns(able, options.rounds, line, lambda side, count=count: measure(side, count))
        )
    return lines


def drain(rig: Rig, sides: Sequence[Side], options: Options) -> list[Line]:
    """Claim and complete one by one; what a client could do, all had to give back in time."""
    return [
        drained(
            rig,
            sides,
            options,
            "drain",
            1,
            clients,
            f"drain, claim 1 + complete 1, {plural(clients)}",
        )
        for clients in options.clients
    ]


def batches(rig: Rig, sides: Sequence[Side], options: Options) -> list[Line]:
    clients = 4 if 4 in options.clients else options.clients[0]
    return [
        drained(
            rig, sides, options, "batches", n, clients, f"drain, batches of {n}, {plural(clients)}"
        )
        for n in (10, 100)
    ]


def drained(
    rig: Rig, sides: Sequence[Side], options: Options, row: str, n: int, clients: int, what: str
) -> Line:
    guess = {1: 2_000.0 * min(clients, 3), 10: 8_000.0, 100: 20_000.0}[n]
    rates = {
        side.name: guess if side.name in ("floor", "Taskboard") else guess / 4 for side in sides
    }

    def measure(side: Side) -> float:
        assert side.drain is not None
        # Enough for a quicker moment than the last, and for every client's last batch.
        wanted = int(rates[side.name] * options.span() * 2.2) + n * clients * 2
        while True:
            with rig.connect(side.dsn) as db:
                side.fill(db, wanted)
                before = side.left(db)
                try:
                    found = rig.run(side.dsn, side.drain(n), clients, options.seconds)
                except RuntimeError:
                    # It ran out of jobs (a claim that comes back empty ends pgbench), or is broken.
                    if side.left(db) > n * clients * 2 or wanted > 3_000_000:
                        raise
                    wanted *= 3
                    continue
                moved = before - side.left(db)
            rates[side.name] = rate = moved / found.transactions * found.tps
            return rate

    able = [side for side in sides if side.drain is not None and side.most >= n]
    for side in able:
        with rig.connect(side.dsn) as db:
            side.empty(db)
    goal = "≥ 0.80, above graphile-worker" if n == 1 else "≥ 0.80"
    line = Line(row, what, "jobs/s", goal)
    for side in sides:
        if side not in able:
            line.notes[side.name] = f"no batch of {n}" if side.drain else "no such call"
    return in_turns(able, options.rounds, line, measure)


SNAPSHOT = "select count(*) from pg_class"
WRITING = "select pg_current_xact_id()"  # an id, and nothing else: as any transaction that wrote


def sustained(rig: Rig, sides: Sequence[Side], options: Options) -> list[Line]:
    """Enqueue, claim and complete for long: alone, beside an old snapshot, beside a long writer."""
    window = min(10, max(1, int(options.sustained) // 3))
    first_last = f"last {window} s to first {window} s"
    held = Line(
        "sustained",
        f"sustained, an old snapshot held, {first_last}",
        "of its first",
        "≥ 0.95",
        base="",
    )
    alone = Line(
        "sustained",
        "sustained, an old snapshot held, to its rate without",
        "jobs/s",
        "≥ 0.9",
        base="without a snapshot",
    )
    writer = Line(
        "sustained",
        f"sustained, a long writing transaction, {first_last}",
        "of its first",
        "measured",
        base="",
    )
    clients = 4 if 4 in options.clients else options.clients[0]
    for side in sides:
        if side.drain is None:
            continue
        ours = side.name == "Taskboard"
        quarter = max(1.0, options.sustained / 4)
        seconds = options.sustained if ours else quarter
        try:
            free = run_long(rig, side, clients, quarter, "") if ours else []
            old = run_long(rig, side, clients, seconds, SNAPSHOT)
            span = min(window, len(old) // 2 or 1)
            held.add(side.name, mean(old[-span:]) / mean(old[:span]))
            held.notes[side.name] = (
                f"· {mean(old[:span]):,.0f} → {mean(old[-span:]):,.0f} jobs/s in {len(old)} s"
            )
            held.series[side.name] = old
            if ours:
                held.series[f"{side.name}, no snapshot"] = free
                alone.add(side.name, mean(old))
                alone.add(alone.base, mean(free))
                writing = run_long(rig, side, clients, quarter, WRITING)
                span = min(window, len(writing) // 2 or 1)
                writer.add(side.name, mean(writing[-span:]) / mean(writing[:span]))
                writer.notes[side.name] = (
                    f"· {mean(writing[:span]):,.0f} → {mean(writing[-span:]):,.0f} jobs/s"
                    f" in {len(writing)} s"
                )
                held.series[f"{side.name}, long writer"] = writing
        except RuntimeError as exc:
            if side.name in ("floor", "Taskboard"):
                raise
            held.notes[side.name] = "failed: " + str(exc).splitlines()[0][:80]
    for line in (held, alone, writer):
        say(f"  {line.what}: " + "; ".join(f"{name} {line.cell(name)}" for name in line.samples))
    return [held, alone, writer]


def run_long(rig: Rig, side: Side, clients: int, seconds: float, statement: str) -> list[float]:
    """The rate of each second, of a queue that gets and ends as many jobs; a thousand wait."""
    assert side.drain is not None
    with rig.connect(side.dsn) as db:
        side.empty(db)
        side.fill(db, 1000)
    script = side.enqueue.replace(";\n", " \\gset unused_\n") + side.drain(1)
    if not statement:
        return rig.run(side.dsn, script, clients, seconds, each_second=True).seconds
    with rig.held(side.dsn, statement):
        return rig.run(side.dsn, script, clients, seconds, each_second=True).seconds


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def plural(clients: int) -> str:
    return f"{clients} client" + ("s" if clients > 1 else "")


def settle(seconds: float = 0.2) -> None:
    """Let the server come to rest."""
    sleep(seconds)
