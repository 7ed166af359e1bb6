"""What a claim costs in front of many jobs, against a claim in an empty queue.

Two databases, one of them filled, and one session for each: they take turns call by call, so that
a ratio of medians means something on a noisy machine. The buffers that a claim touches are counted
too; these do not depend on the machine at all.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from time import perf_counter

from lines import OURS, Line
from machine import Db, Rig
from rows_sql import Options, say
from sides import BULK, PAYLOAD, Side, taskboard

EMPTY = "empty queue"
NAMED, ALL = "queues => '{default}', kinds => '{email}'", ""


def claim_latency(rig: Rig, sides: Sequence[Side], options: Options) -> list[Line]:
    empty, full = taskboard(), taskboard()
    empty.name, full.name = "claim empty", "claim full"
    for side in (empty, full):
        side.set_up(rig)
    lines = []
    for what, count, fill, kind in CASES:
        many = max(int(count * options.scale), 10)
        with rig.connect(full.dsn) as db:
            renew(full, db)
            fill(db, many)
            for table in ("jobs", "lanes", "serial_keys", "history"):
                db.execute(f"vacuum analyze taskboard.{table}".encode())
            db.execute("checkpoint")
        for scope, arguments in (("one queue named", NAMED), ("all queues", ALL)):
            lanes = kind == "lanes" and scope == "all queues"
            line = Line(
                "claim",
                f"claim, {what.format(many)}, {scope}",
                "ms",
                "≤ 5 ms" if lanes else "≤ 1.2",
                base=EMPTY,
            )
            measure(rig, empty, full, arguments, options, line)
            lines.append(line)
            say(f"  {line.what}: {line.cell(OURS)}; {EMPTY} {line.cell(EMPTY)}")
        with rig.connect(full.dsn) as db:
            renew(full, db)
    return lines


def renew(side: Side, db: Db) -> None:
    """Empty a database of ours again, lanes and keys too."""
    db.execute("truncate taskboard.jobs, taskboard.history, taskboard.serial_keys, taskboard.lanes")


def measure(
    rig: Rig, empty: Side, full: Side, arguments: str, options: Options, line: Line
) -> None:
    claim = f"select job_id, lease_token from taskboard.claim({arguments})".encode()
    took: dict[str, list[float]] = {OURS: [], EMPTY: []}
    with rig.connect(empty.dsn) as one, rig.connect(full.dsn) as two:
        for turn in range(options.turns + options.turns // 10):
            for name, db in ((EMPTY, one), (OURS, two)):
                db.execute(f"select taskboard.enqueue('email', '{PAYLOAD}')".encode())
                began = perf_counter()
                job = db.execute(claim).fetchone()
                milliseconds = (perf_counter() - began) * 1000
                assert job is not None, "nothing was ready"
                db.execute("select taskboard.complete(%s, %s)", job)
                if turn >= options.turns // 10:
                    took[name].append(milliseconds)
        line.add(EMPTY, statistics.median(took[EMPTY]))
        line.add(OURS, statistics.median(took[OURS]))
        for db in (one, two):
            db.execute(f"select taskboard.enqueue('email', '{PAYLOAD}')".encode())
        line.notes[EMPTY] = (
            f"(p99 {percentile(took[EMPTY], 99):.2f}), {buffers(one, arguments)} buffers"
        )
        line.notes[OURS] = (
            f"(p99 {percentile(took[OURS], 99):.2f}), {buffers(two, arguments)} buffers"
        )


def percentile(values: Sequence[float], of: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * of // 100)]


def buffers(db: Db, arguments: str) -> int:
    """How many buffers a claim touches; what it did is undone."""
    db.execute("begin")
    (plans,) = db.execute(
        "explain (analyze, buffers, format json)"
        f" select * from taskboard.claim({arguments})".encode()
    ).fetchone() or ([],)
    db.execute("rollback")
    plan = (json.loads(plans) if isinstance(plans, str) else plans)[0]["Plan"]
    found: int = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
    return found


def add(db: Db, count: int, options: str = "") -> None:
    for start in range(0, count, BULK):
        n = min(BULK, count - start)
        db.execute(
            f"select count(*) from taskboard.enqueue_many('email',"
            f" array_fill('{PAYLOAD}'::jsonb, array[{n}]){options.format(n=n)})".encode()
        )


def ready(db: Db, count: int) -> None:
    add(db, count)


def scheduled(db: Db, count: int) -> None:
    add(db, count, ", delay => '24 hours'")


def blocked(db: Db, count: int) -> None:
    """A thousand keys, of each the first job is leased, all others wait for it."""
    keys = min(1000, count // 2)
    option = (
        ", serial_keys => (select array_agg('k' || mod(n, {keys})) from"
        " generate_series(1, {n}) as n)"
    ).replace("{keys}", str(keys))
    add(db, keys, option)
    lease(db, keys)
    add(db, count, option)


def leased(db: Db, count: int) -> None:
    add(db, count)
    lease(db, count)


def lease(db: Db, count: int) -> None:
    while count > 0:
        (found,) = db.execute(
            "select count(*) from taskboard.claim(max_jobs => %s, lease => '24 hours')",
            [min(count, 1000)],
        ).fetchone() or (0,)
        assert found, "nothing was ready"
        count -= found


def finished(db: Db, count: int) -> None:
    """Copies of one finished job, whatever columns history has, an hour back at most."""
    add(db, 1)
    db.execute("select taskboard.complete(job_id, lease_token) from taskboard.claim()")
    columns = [
        str(name)
        for (name,) in db.execute(
            "select quote_ident(attname) from pg_attribute where attnum > 0 and not attisdropped"
            " and attrelid = 'taskboard.history'::regclass and attgenerated = '' order by attnum"
        )
    ]
    new = {
        "id": "gen_random_uuid()",
        "lease_token": "gen_random_uuid()",
        "finished_at": "greatest(h.finished_at - n * interval '0.3 ms',"
        " date_trunc('day', h.finished_at, 'UTC'))",
    }
    db.execute(
        f"insert into taskboard.history ({', '.join(columns)})"
        f" select {', '.join(new.get(name, 'h.' + name) for name in columns)}"
        f" from taskboard.history as h cross join generate_series(1, {count}) as n".encode()
    )


def lanes(db: Db, count: int) -> None:
    """A queue makes two lanes; the last jobs are finished, so nearly all lanes are empty."""
    db.execute(
        "select count(*) from generate_series(1, %s) as n"
        " cross join lateral taskboard.enqueue('email', queue => 'q' || n)",
        [max(count // 2 - 5, 1)],
    )
    db.execute("truncate taskboard.jobs")


Fill = Callable[[Db, int], None]
CASES: list[tuple[str, int, Fill, str]] = [
    ("{:,} ready", 1_000_000, ready, ""),
    ("{:,} scheduled", 1_000_000, scheduled, ""),
    ("{:,} blocked", 1_000_000, blocked, ""),
    ("{:,} finished", 10_000_000, finished, ""),
    ("{:,} leased", 100_000, leased, ""),
    ("{:,} lanes", 10_000, lanes, "lanes"),
]
