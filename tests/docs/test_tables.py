"""What sql/README.md shows of a job's life is what the tests play."""

from __future__ import annotations

from pathlib import Path

import pytest

from races.verb_by_verb import TABLES, Table, markdown
from sql.life import STEPS, mermaid

LIFE = (Path(__file__).parents[2] / "sql/README.md").read_text()


def test_the_diagram_is_drawn_from_the_table_that_is_played() -> None:
    drawn = mermaid()
    assert f"```mermaid\n{drawn}\n```" in LIFE
    assert {step.how for step in STEPS if step.how not in drawn} == set()


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.title)
def test_the_tables_of_verb_against_verb_are_those_that_are_played(table: Table) -> None:
    assert markdown(table) in LIFE
