"""The page about the board, figures and traces: what it names is there, and its example runs."""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from docs.transcript import blocks
from support import Connection, rows
from taskboard.cli import make_parser
from taskboard.console.board import access, figures, queries, samples
from taskboard.console.verbs import VERBS
from taskboard.handlers import Context
from taskboard.health import LATE, PARTS, STUCK_AFTER, Health, outcome_of

PAGE = Path(__file__).parents[2] / "runner/BOARD.md"
TEXT = PAGE.read_text()


def test_its_options_are_those_of_the_command() -> None:
    (board,) = [verb for verb in VERBS if verb.name == "board"]
    known = {flags[0] for flags, _ in board.arguments} | {"--metrics"}
    named = set(re.findall(r"(--[a-z][a-z-]+)", TEXT))
    assert named <= known and known - named <= {"--bind", "--port"}
    assert make_parser().parse_args(["run", "--metrics", "9090"]).metrics == "9090"


def test_its_numbers_are_those_of_the_code() -> None:
    assert (queries.WINDOW, queries.LOOKS_FOR, queries.ANSWERS_WITHIN) == (20_000, 0.6, 5000)
    assert (access.TRIES, access.TRIES_WITHIN, access.SESSION_LASTS) == (10, 60.0, 12 * 3600.0)
    assert (samples.LOOK_EVERY, samples.MINUTES, LATE, STUCK_AFTER) == (10.0, 60, 30.0, 120.0)


def test_its_figures_are_those_that_are_served() -> None:
    health = Health()
    served = {
        metric.name + ("_total" if metric.type == "counter" else ""): metric
        for metric in health.registry.collect()
    }
    section = TEXT.partition("## Figures")[2].partition("## Traces")[0]
    named = set(re.findall(r"`(taskboard_\w+)[{`]", section))
    of_the_board = set(re.findall(r"^# TYPE (\w+)", figures.text([], datetime.now(UTC)), re.M))
    assert set(served) <= named <= set(served) | of_the_board
    for outcome in re.search(r"settled: (.*?) \|", TEXT)[1].split(", "):  # type: ignore[index]
        assert outcome in ("retried", "lease_lost", "other") or outcome_of(outcome) == outcome
    assert f"| {', '.join(PARTS)}: 1 or 0 |" in TEXT


def test_its_example_hands_a_trace_on(
    db: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for OpenTelemetry, which tells what it was asked."""
    (program,) = [block.text for block in blocks(PAGE) if block.language == "python"]
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    spans: list[Any] = []

    class Tracer:
        def start_as_current_span(self, name: str, **options: Any) -> Any:
            spans.append((name, options))
            return SimpleNamespace(__enter__=None, __exit__=None)

    stand_in: Any = ModuleType("opentelemetry")
    stand_in.propagate = SimpleNamespace(
        inject=lambda carrier: carrier.update(traceparent=parent), extract=dict
    )
    stand_in.trace = SimpleNamespace(
        get_tracer=lambda name: Tracer(), SpanKind=SimpleNamespace(CONSUMER="consumer")
    )
    monkeypatch.setitem(sys.modules, "opentelemetry", stand_in)
    names: dict[str, Any] = {}
    exec(compile(program, "traced.py", "exec"), names)
    names["enqueue"](db, "{}")
    [(headers,)] = rows(
        db, "select d.headers from taskboard.job_list as j,"
        " taskboard.job_documents(j.job_id) as d where j.kind = 'order'",
    )  # fmt: skip
    context = Context.trace_context.fget(SimpleNamespace(job=SimpleNamespace(headers=headers)))
    with pytest.raises((AttributeError, TypeError)):  # the stand-in opens no span
        names["order"](SimpleNamespace(trace_context=context)).send(None)
    assert spans == [("order", {"context": {"traceparent": parent}, "kind": "consumer"})]
