"""Measure Taskboard against a floor of plain SQL, and against others, and print one table.

    python tests/bench/bench.py                     all rows, about eight minutes
    python tests/bench/bench.py --peers             the same beside others, about fifteen
    python tests/bench/bench.py --rows enqueue,drain --seconds 1 --rounds 3
    python tests/bench/bench.py --smoke             every row for a moment, to see that it works

One durable PostgreSQL of this program's own (`--postgres BIN` for another version), a database for
each side, pgbench for the calls; all sides take turns in short slices. A figure is the median over
the rounds, first as the ratio to the floor in the same round, with its spread. `--out FOLDER` gets
the table, all samples as JSON, and charts. Machines differ and are noisy: quote ratios, not rates.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic

sys.path.insert(0, str(Path(__file__).parents[1]))

import charts
import peers
import rows_claim
import rows_runner
import rows_sql
import rows_wake
import statements
from lines import Line, as_json, table
from machine import Rig, describe
from rows_sql import Options, say
from sides import Side, floor, taskboard

Row = Callable[[Rig, Sequence[Side], Options], list[Line]]
ROWS: dict[str, Row] = {
    "enqueue": rows_sql.enqueue,
    "bulk": rows_sql.bulk,
    "drain": rows_sql.drain,
    "batches": rows_sql.batches,
    "sustained": rows_sql.sustained,
    "claim": rows_claim.claim_latency,
    "runner": rows_runner.runner,
    "pickup": rows_runner.pickup,
    "wake": rows_wake.wake,
}
SMOKE = Options(seconds=0.1, rounds=1, clients=(2,), scale=0.0005, sustained=1, turns=3)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default=",".join(ROWS), help="which rows: " + ", ".join(ROWS))
    parser.add_argument("--seconds", type=float, help="of a slice (2; with peers 1)")
    parser.add_argument(
        "--rounds", type=int, help="how often each side has its turn (3; with peers 2)"
    )
    parser.add_argument("--clients", default="1,4,8", help="of enqueue and drain (1,4,8)")
    parser.add_argument("--scale", type=float, default=1, help="of the backlogs, 1 is 1 M jobs")
    parser.add_argument("--sustained", type=float, default=60, help="seconds under a snapshot (60)")
    parser.add_argument("--turns", type=int, default=200, help="claims and pick-ups timed (200)")
    parser.add_argument("--postgres", default="auto", help="auto, wheel, or a folder with initdb")
    parser.add_argument("--protocol", default="simple", choices=["simple", "extended", "prepared"])
    parser.add_argument(
        "--statements",
        action="store_true",
        help="tell which statements inside our functions took the time; it costs some of it",
    )
    parser.add_argument("--smoke", action="store_true", help="every row for a moment")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for table, JSON and charts")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    peers.add_arguments(parser)
    return parser.parse_args()


def chosen(given: argparse.Namespace) -> Options:
    if given.smoke:
        return SMOKE
    beside = bool(given.peers is not None or given.pgmq_sql or given.pgque_sql)
    return Options(
        seconds=given.seconds if given.seconds is not None else (1 if beside else 2),
        rounds=given.rounds or (2 if beside else 3),
        clients=tuple(int(n) for n in given.clients.split(",")),
        scale=given.scale,
        sustained=given.sustained,
        turns=given.turns,
    )


def main() -> None:
    given, began = arguments(), monotonic()
    options, names = chosen(given), given.rows.split(",")
    for name in names:
        if name not in ROWS:
            sys.exit(f"no row {name}; there are {', '.join(ROWS)}")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        rig = Rig(
            given.postgres,
            Path(folder),
            careless=given.smoke,
            **(statements.SETTINGS if given.statements else {}),
        )
        try:
            rig.protocol = given.protocol
            machine = describe(rig, Path(folder))
            sides = [floor(), taskboard()]
            for side in sides:
                side.set_up(rig)
            found, absent = peers.ready(given, rig, Path(folder))
            sides += found
            lines: list[Line] = []
            for name in names:
                say(f"{name} …")
                lines += ROWS[name](rig, sides, options)
            if given.statements:
                say(statements.told(rig, sides[1].dsn))
        finally:
            with suppress(Exception):
                rig.close()
    machine["this run"] = (
        f"{options.rounds} rounds of {options.seconds:g} s, pgbench -M {given.protocol},"
        f" {monotonic() - began:,.0f} s in all; load at the end {os.getloadavg()[0]:.1f}"
    )
    facts = [{"side": side.name} | side.guarantees for side in sides]
    facts += [{"side": name, "not measured": why} for name, why in absent.items()]
    text = "\n\n".join(
        [
            "\n".join(f"* {name}: {value}" for name, value in machine.items()),
            table(lines),
            *([peers.guarantees(facts)] if len(facts) > 2 else []),
        ]
    )
    print(as_json(machine, lines, facts) if given.json else text)
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "bench.md").write_text(text + "\n")
        (given.out / "bench.json").write_text(as_json(machine, lines, facts) + "\n")
        for name, drawing in charts.of(lines).items():
            (given.out / name).write_text(drawing)
        say(f"written to {given.out}")


if __name__ == "__main__":
    main()
