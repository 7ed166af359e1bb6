"""The programs of this folder work: their structure is asserted, never a time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from support import Connection, rows

HERE = Path(__file__).parent
ROWS = "enqueue", "bulk", "drain", "batches", "sustained", "claim", "runner", "pickup", "wake"


def run(program: str, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, HERE / program, *words], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture
def choice(request: pytest.FixtureRequest) -> str:
    """The server that the programs are to start: of the same version as this run's."""
    given: str = request.config.getoption("--postgres")
    return "auto" if "=" in given or "://" in given else given


def test_every_row_is_measured_on_both_sides_and_written_with_charts(
    tmp_path: Path, choice: str
) -> None:
    printed = run("bench.py", "--smoke", "--postgres", choice, "--out", str(tmp_path))
    found = json.loads((tmp_path / "bench.json").read_text())
    lines = found["lines"]
    assert tuple(dict.fromkeys(line["row"] for line in lines)) == ROWS
    assert all(figure > 0 for line in lines for figure in line["samples"]["Taskboard"])
    beside_the_floor = [line for line in lines if line["base"] == "floor"]
    assert {line["row"] for line in beside_the_floor} == {"enqueue", "bulk", "drain", "batches"}
    assert all(line["ratios"]["Taskboard"] for line in beside_the_floor)
    assert {"machine", "PostgreSQL", "a write made durable", "this run"} <= set(found["machine"])
    for line in lines:
        assert f"| {line['what']} |" in printed
    assert (tmp_path / "bench.md").read_text().strip() == printed.strip()
    charts = sorted(tmp_path.glob("*.svg"))
    assert {chart.stem for chart in charts} >= set(ROWS) - {"sustained"}
    for chart in charts:
        assert ElementTree.parse(chart).getroot().tag.endswith("svg")


def test_the_page_of_costs_has_each_verb_that_is_counted_and_each_verb_exists(
    db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    import cost

    page = (HERE / "COST.md").read_text()
    made = page[page.index(cost.BEGIN) : page.index(cost.END)]
    names = [line.split("|")[1].strip() for line in made.splitlines() if line.startswith("| ")]
    assert names[1:] == [verb.name for verb in cost.VERBS]
    functions = {
        name
        for (name,) in rows(
            db, "select proname from pg_proc where pronamespace = 'taskboard'::regnamespace"
        )
    }
    assert {verb.call.split("(")[0].removeprefix("taskboard.") for verb in cost.VERBS} <= functions


def test_tables_with_many_dead_rows_come_with_settings_of_their_own(db: Connection) -> None:
    found = dict(
        rows(
            db,
            "select relname, array_to_string(reloptions, ' ') from pg_class"
            " where relnamespace = 'taskboard'::regnamespace and relkind = 'r'",
        )
    )
    for table in ("jobs", "unique_keys", "serial_keys", "effects"):
        assert "autovacuum_vacuum_scale_factor=0.05" in found[table]
        assert "autovacuum_vacuum_cost_delay=0" in found[table]
