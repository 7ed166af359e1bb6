"""What makes any language a full client: plain types in, plain rows out, under names that stay."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clients.script import CASES, COLUMNS
from support import Connection, rows

ROOT = Path(__file__).parents[2]
# What every driver can send as a text, and get as one.
PLAIN = {
    "uuid", "text", "integer", "bigint", "boolean", "jsonb", "timestamp with time zone", "interval",
    "uuid[]", "text[]", "jsonb[]", "interval[]", "boolean[]", "void",
}  # fmt: skip

PUBLIC = """
    from pg_proc as p
    join pg_type as t on t.oid = p.prorettype
    where p.pronamespace = 'taskboard'::regnamespace
      and exists (
        select from aclexplode(p.proacl) as a join pg_roles as r on r.oid = a.grantee
        where r.rolname ~ '^taskboard_(producer|worker|operator|observer)$')
"""


@pytest.fixture
def arguments(db: Connection) -> dict[str, list[str]]:
    """The types of the arguments of each function that somebody else than the owner may call."""
    found = rows(
        db,
        "select p.proname, array(select format_type(one, null) from unnest(p.proargtypes) as one)"
        + PUBLIC,
    )
    return dict(found)


@pytest.fixture
def results(db: Connection) -> dict[str, list[tuple[str, str]]]:
    """The columns of what each answers to `select *`, with their types, in order."""
    answer = """
        select p.proname, coalesce(
          (select array_agg(array[a.attname, format_type(a.atttypid, null)] order by a.attnum)
            from pg_attribute as a
            where a.attrelid = t.typrelid and a.attnum > 0 and not a.attisdropped),
          (select array_agg(array[o.name, format_type(o.type, null)] order by o.place)
            from unnest(p.proargnames, p.proargmodes, p.proallargtypes)
              with ordinality as o (name, mode, type, place)
            where o.mode in ('o', 't')),
          array[array[p.proname::text, format_type(p.prorettype, null)]])
    """
    found = rows(db, answer + PUBLIC)
    return {name: [(column, kind) for column, kind in columns] for name, columns in found}


def test_no_function_needs_an_argument_that_a_driver_might_not_know(
    arguments: dict[str, list[str]],
) -> None:
    unusual = {
        name: set(types) - PLAIN for name, types in arguments.items() if set(types) - PLAIN
    }  # fmt: skip
    assert unusual == {}
    assert len(arguments) > 30


def test_no_function_answers_with_a_column_that_a_driver_might_not_know(
    results: dict[str, list[tuple[str, str]]],
) -> None:
    unusual = {
        (name, column): kind
        for name, columns in results.items()
        for column, kind in columns
        if kind not in PLAIN
    }
    assert unusual == {}


def test_the_columns_of_each_answer_have_the_names_and_the_order_that_clients_rely_on(
    results: dict[str, list[tuple[str, str]]],
) -> None:
    found = {name: [column for column, _ in columns] for name, columns in results.items()}
    assert found == COLUMNS, "a released answer keeps its columns; new ones come last"


def test_the_page_on_sql_says_of_each_verb_what_zero_rows_mean(db: Connection) -> None:
    sets = {name for (name,) in rows(db, "select p.proname" + PUBLIC + " and p.proretset")}
    page = (ROOT / "sql/README.md").read_text()
    table = page.partition("## Zero rows")[2].partition("## ")[0]
    said = [cells.split("|")[1] for cells in table.splitlines() if cells.startswith("| ")]
    # That of enqueue is a row, not a set: it cannot be empty.
    assert set(re.findall(r"`(\w+)`", " ".join(said))) == sets | {"enqueue"}


def steps() -> Iterator[dict[str, Any]]:
    for case in CASES.values():
        for step in case:
            yield step
            yield from [step["meanwhile"]] if "meanwhile" in step else []


def test_the_script_sends_texts_and_nothing_else() -> None:
    sent = [value for step in steps() for value in step.get("args", {}).values()]
    assert {type(value) for value in sent} == {str, type(None)}


def test_the_script_calls_each_verb_of_producers_and_workers_and_most_of_operators() -> None:
    called = {step.get("call") or step.get("until_true") for step in steps()}
    # What is about a whole database, or works for others than the kit's jobs.
    apart = {
        "configure", "keep_history", "limit_queue", "prune", "maintain", "schedule", "unschedule",
        "pause_schedule", "due_schedules", "advance_schedule", "may_use",
    }  # fmt: skip
    assert called - {None} == set(COLUMNS) - apart
