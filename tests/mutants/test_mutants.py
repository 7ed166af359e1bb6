"""Load each broken variant into a fresh database: the tests that it names must fail."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module

import psycopg
import pytest

from mutants.variants import MUTANTS, Mutant
from support import Connection

CASES = [
    pytest.param(mutant, node, id=f"{mutant.name}, {node.rpartition('::')[2]}")
    for mutant in MUTANTS
    for node in mutant.caught_by
]


def find(node: str) -> tuple[Callable[..., None], dict[str, str]]:
    """Find a test by its node id below tests/, and the values of its parameters."""
    path, _, name = node.partition("::")
    name, _, values = name.partition("[")
    module = import_module(path.removesuffix(".py").replace("/", "."))
    test: Callable[..., None] = getattr(module, name)
    arguments: list[str] = []
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            names = mark.args[0]
            arguments += names.split(",") if isinstance(names, str) else names
    chosen = values.removesuffix("]").split("-") if values else []
    return test, dict(zip(arguments, chosen, strict=True))


@pytest.mark.parametrize(("mutant", "node"), CASES)
def test_broken_variant_is_noticed_by(
    mutant: Mutant, node: str, db: Connection, request: pytest.FixtureRequest
) -> None:
    test, arguments = find(node)
    with db.transaction():
        db.execute("set local search_path = pg_catalog, pg_temp")
        db.execute(mutant.text().encode())
    fixtures = {
        name: request.getfixturevalue(name)
        for name in inspect.signature(test).parameters
        if name not in arguments
    }
    # What a test says when it notices: an assertion, an error of the database, or none of it.
    with pytest.raises((AssertionError, psycopg.Error, pytest.fail.Exception)):
        test(**fixtures, **arguments)


def test_every_promise_that_sql_keeps_has_a_variant_that_breaks_it() -> None:
    promises = {mutant.promise for mutant in MUTANTS}
    assert promises >= {"S1", "S2", "S3", "S4", "S5", "S7", "L1", "E1"}
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
