"""Count what each verb costs a job: WAL bytes, pages touched, records, syncs; none is a time.

    python tests/bench/cost.py [--jobs N] [--postgres BIN] [--write]

WAL by `pg_current_wal_insert_lsn()` around many calls; pages by `explain (analyze, buffers, wal)`,
which counts what a function does inside, at the median of some calls in a warm session; commits
that wait for the disk by the call (each verb is one round trip and one commit, and a batch is one
of both). `--write` puts the table into COST.md, where the rest of the model stands.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from machine import Db, Rig
from sides import PAYLOAD, floor, taskboard

PAGE = Path(__file__).parent / "COST.md"
BEGIN, END = "<!-- made by cost.py -->\n", "<!-- end -->\n"


@dataclass(frozen=True, slots=True)
class Verb:
    """A call with its arguments, made for each time anew, and how many jobs it is for."""

    name: str
    call: str
    before: Callable[[Db, int], Iterator[tuple[Any, ...]]]  # rows of arguments
    jobs: int = 1


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one job."""

    wal: float
    records: float
    pages: float
    trips: float


def nothing(db: Db, count: int) -> Iterator[tuple[Any, ...]]:
    yield from (() for _ in range(count))


def ready(db: Db, count: int, many: int = 1) -> Iterator[tuple[Any, ...]]:
    """So many ready jobs, then no arguments."""
    for start in range(0, count * many, 10_000):
        db.execute(
            f"select count(*) from taskboard.enqueue_many('email', array_fill('{PAYLOAD}'::jsonb,"
            f" array[{min(10_000, count * many - start)}]))".encode()
        )
    return nothing(db, count)


def leased(db: Db, count: int, many: int = 1) -> Iterator[tuple[Any, ...]]:
    """Id and token of leased jobs; of many, as arrays."""
    ready(db, count, many)
    found = []
    for _ in range(-(-count * many // 1000)):
        found += db.execute(
            "select job_id, lease_token from taskboard.claim(max_jobs => least(1000, %s))",
            [count * many],
        ).fetchall()
    for n in range(count):
        mine = found[n * many : (n + 1) * many]
        yield mine[0] if many == 1 else ([i for i, _ in mine], [t for _, t in mine])


def begun(db: Db, count: int) -> Iterator[tuple[Any, ...]]:
    for job in leased(db, count):
        db.execute("select taskboard.begin_effect(%s, %s)", job)
        yield job


def finished(db: Db, count: int) -> Iterator[tuple[Any, ...]]:
    for job in leased(db, count):
        db.execute("select taskboard.fail(%s, %s, 'no', permanent => true)", job)
        yield job[:1]


def waiting(db: Db, count: int) -> Iterator[tuple[Any, ...]]:
    ready(db, count)
    yield from db.execute("select id from taskboard.jobs where lease_token is null").fetchall()


OWN = "(%s::uuid, %s::uuid)"
MANY = "(%s::uuid[], %s::uuid[])"
VERBS = [
    Verb("enqueue", f"taskboard.enqueue('email', '{PAYLOAD}')", nothing),
    Verb(
        "enqueue, unique key",
        f"taskboard.enqueue('email', '{PAYLOAD}', unique_key => gen_random_uuid()::text)",
        nothing,
    ),
    Verb(
        "enqueue, serial key",
        f"taskboard.enqueue('email', '{PAYLOAD}', serial_key => gen_random_uuid()::text)",
        nothing,
    ),
    Verb(
        "enqueue_many of 1,000",
        f"taskboard.enqueue_many('email', array_fill('{PAYLOAD}'::jsonb, array[1000]))",
        nothing,
        1000,
    ),
    Verb("claim", "taskboard.claim('{default}', '{email}', 1)", ready),
    Verb(
        "claim of 100",
        "taskboard.claim('{default}', '{email}', 100)",
        lambda db, count: ready(db, count, 100),
        100,
    ),
    Verb("claim, nothing ready", "taskboard.claim('{default}', '{email}', 1)", nothing),
    Verb("renew", f"taskboard.renew{OWN}", leased),
    Verb(
        "renew_many of 100",
        f"taskboard.renew_many{MANY}",
        lambda db, count: leased(db, count, 100),
        100,
    ),
    Verb("require_lease", f"taskboard.require_lease{OWN}", leased),
    Verb("begin_effect", f"taskboard.begin_effect{OWN}", leased),
    Verb("end_effect", f"taskboard.end_effect{OWN}", begun),
    Verb("complete", f"taskboard.complete{OWN}", leased),
    Verb(
        "complete_many of 100",
        f"taskboard.complete_many{MANY}",
        lambda db, count: leased(db, count, 100),
        100,
    ),
    Verb("fail", "taskboard.fail(%s::uuid, %s::uuid, 'no')", leased),
    Verb("release", f"taskboard.release{OWN}", leased),
    Verb("cancel", "taskboard.cancel(%s::uuid)", waiting),
    Verb("retry", "taskboard.retry(%s::uuid)", finished),
    Verb("next_claimable_at", "taskboard.next_claimable_at()", nothing),
    Verb("lease_status", f"taskboard.lease_status{OWN}", leased),
]


def measure(db: Db, verb: Verb, count: int) -> Cost:
    """Let a verb be called, first to count its WAL, then to count its pages."""
    count = max(count // verb.jobs, 8)
    db.execute(
        "truncate taskboard.jobs, taskboard.history, taskboard.unique_keys,"
        " taskboard.serial_keys, taskboard.effects"
    )
    calls = list(verb.before(db, count + 3))
    db.execute("vacuum analyze taskboard.jobs")
    statement = f"select * from {verb.call}".encode()
    for arguments in calls[:3]:  # what a session does once
        db.execute(statement, arguments or None)
    (before,) = db.execute("select pg_current_wal_insert_lsn()").fetchone() or ("",)
    for arguments in calls[3:]:
        db.execute(statement, arguments or None)
    (wal,) = db.execute(
        "select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), %s)", [before]
    ).fetchone() or (0,)
    plans = []
    for arguments in list(verb.before(db, 8)):
        (found,) = db.execute(
            b"explain (analyze, buffers, wal, format json) " + statement, arguments or None
        ).fetchone() or ([],)
        plans.append((json.loads(found) if isinstance(found, str) else found)[0]["Plan"])

    def middle(*names: str) -> float:
        return statistics.median(sum(plan.get(name, 0) for name in names) for plan in plans)

    return Cost(
        float(wal) / (len(calls) - 3) / verb.jobs,
        middle("WAL Records") / verb.jobs,
        middle("Shared Hit Blocks", "Shared Read Blocks") / verb.jobs,
        1 / verb.jobs,
    )


def plain(rig: Rig) -> dict[str, float]:
    """WAL bytes of the floor's statements, for comparison."""
    side = floor()
    side.set_up(rig)
    with rig.connect(side.dsn) as db:
        found = {}
        for name, script, jobs in (("enqueue", side.enqueue, 1), ("bulk", side.bulk(1000), 1000)):
            db.execute(script.encode())
            found[name] = wal_of(db, script, 20 if jobs > 1 else 300) / jobs
        pick = (
            "with picked as (update floor set locked_until = now() where id = any (array("
            "select id from floor where locked_until is null order by run_at, id limit 1"
            " for update skip locked)) returning id) select id from picked"
        )
        found["claim"] = wal_of(db, pick, 300)
        found["complete"] = wal_of(
            db, "delete from floor where id = (select min(id) from floor)", 300
        )
        return found


def wal_of(db: Db, statement: str, times: int) -> float:
    (before,) = db.execute("select pg_current_wal_insert_lsn()").fetchone() or ("",)
    for _ in range(times):
        db.execute(statement.encode())
    (wal,) = db.execute(
        "select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), %s)", [before]
    ).fetchone() or (0,)
    return float(wal) / times


def table(costs: dict[str, Cost], floors: dict[str, float], version: str) -> str:
    lines = [
        f"Of one job, PostgreSQL {version}, a payload of about 100 bytes, `full_page_writes` off:",
        "",
        "| verb | WAL, bytes | WAL records | pages touched | round trips |",
        "|---|---|---|---|---|",
    ]
    for name, cost in costs.items():
        lines.append(
            f"| {name} | {cost.wal:,.0f} | {short(cost.records)} | {short(cost.pages)}"
            f" | {short(cost.trips)} |"
        )
    lines += [
        "",
        "Plain SQL on one table without history, WAL bytes: "
        + ", ".join(f"{name} {wal:,.0f}" for name, wal in floors.items())
        + ".",
    ]
    return "\n".join(lines) + "\n"


def short(value: float) -> str:
    if value >= 10 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.3f}" if value < 0.01 else f"{value:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=500, help="of each verb")
    parser.add_argument("--postgres", default="auto")
    parser.add_argument("--write", action="store_true", help="put the table into COST.md")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rig = Rig(given.postgres, Path(folder), autovacuum="off", full_page_writes="off")
        try:
            side = taskboard()
            side.set_up(rig)
            with rig.connect(side.dsn) as db:
                (version,) = db.execute("show server_version").fetchone() or ("?",)
                costs = {verb.name: measure(db, verb, given.jobs) for verb in VERBS}
            text = table(costs, plain(rig), str(version).split()[0])
        finally:
            with suppress(Exception):
                rig.close()
    print(text)
    if given.write:
        page = PAGE.read_text()
        page = re.sub(f"(?s)({BEGIN}).*?({END})", lambda m: m[1] + text + m[2], page)
        PAGE.write_text(page)


if __name__ == "__main__":
    main()
