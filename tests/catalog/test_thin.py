"""The worker stays thin: its size, what it imports, and that all of its SQL is calls."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from matrix import ROOT, matrix

PACKAGE = ROOT / "runner" / "taskboard"
THIN = [PACKAGE / f"{name}.py" for name in ("worker", "leases", "wake", "db", "settings")]
THIN += sorted((PACKAGE / "handlers").glob("*.py"))
AT_MOST = 900  # lines, all of them
BESIDE = ("cli", "console", "demo", "dev", "localpg", "migrate")  # never imported by a worker

# As a whole: `select taskboard.f(…)`, or `select … from taskboard.f(…)` and from nothing else.
CALL = re.compile(r"select (?:(?!.*\b(?:join|where|union)\b).+ from )?taskboard\.(\w+)\([^()]*\)")
MAKERS = ("one", "every")  # of coroutines from SQL; nothing else sends any


def names_of(path: Path) -> str:
    """The name under which a file is imported."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[str]:
    """The modules of this package that a file imports, also within its functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("taskboard"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("taskboard"):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            raise AssertionError(f"{path}: a relative import would not be seen here")


def imported_by_a_worker() -> dict[str, Path]:
    """All modules of this package that a worker's process can import, by name."""
    modules = {names_of(path): path for path in PACKAGE.rglob("*.py")}
    found: dict[str, Path] = {}
    wanted = ["taskboard", "taskboard.process"]
    while wanted:
        name = wanted.pop()
        if name in modules and name not in found:
            found[name] = modules[name]
            wanted += imports(modules[name])
    return found


def name_of(node: ast.expr) -> str:
    """The last name of `x` or `module.x`."""
    return getattr(node, "id", "") or getattr(node, "attr", "")


def calls(path: Path) -> list[str]:
    """The functions that the SQL of a file calls, in its order; fails where SQL is no call."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and name_of(node.func) in MAKERS:
            text = getattr(node.args[0], "value", None)
            call = CALL.fullmatch(re.sub(r"::(jsonb|uuid)\[\]", "", str(text)))
            assert call, f"{path.name}, line {node.lineno}: no call of a function: {text}"
            found.append((node.lineno, call[1]))
    return [name for _, name in sorted(found)]


def test_the_worker_has_at_most_900_lines() -> None:
    sizes = {names_of(path): len(path.read_text().splitlines()) for path in THIN}
    assert sum(sizes.values()) <= AT_MOST, sizes


def test_what_a_worker_imports_is_nothing_that_stands_beside_it() -> None:
    found = imported_by_a_worker()
    assert {names_of(path) for path in THIN} <= set(found), "the worker's own files are not found"
    assert not [name for name in found if name.split(".")[1:2] and name.split(".")[1] in BESIDE]


def test_a_started_worker_has_loaded_nothing_that_stands_beside_it() -> None:
    check = (
        "import sys, taskboard.process, taskboard.handlers.email, taskboard.handlers.stripe;"
        " print(*(m for m in sys.modules if m.startswith('taskboard.')))"
    )
    command = [sys.executable, "-c", check]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "taskboard.worker" in loaded
    assert not [name for name in loaded if name.split(".")[1] in BESIDE]


def test_every_sql_string_of_a_worker_is_a_call_that_its_role_may_make() -> None:
    allowed = {name for name, roles in matrix().items() if "worker" in roles}
    sources = {
        name: calls(path)
        for name, path in imported_by_a_worker().items()
        if name != "taskboard.connections"  # where the makers are
    }
    assert [name for name, called in sorted(sources.items()) if called] == [
        "taskboard.db", "taskboard.schedules",
    ]  # fmt: skip
    assert {called for each in sources.values() for called in each} <= allowed


def test_only_the_makers_of_calls_send_sql() -> None:
    for name, path in imported_by_a_worker().items():
        senders = [
            node.lineno
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute)
            and node.attr in ("execute", "executemany", "stream", "copy", "exec_", "send_query")
        ]
        assert len(senders) == (name == "taskboard.connections"), f"{name}: lines {senders}"


def test_the_calls_stand_in_the_order_of_the_files_with_their_functions() -> None:
    at = {
        name: path.name
        for path in sorted((ROOT / "sql").glob("[0-9]*.sql"))
        for name in re.findall(r"create or replace function taskboard\.(\w+)", path.read_text())
    }
    for before, after in pairwise(calls(PACKAGE / "db.py")):
        assert at[before] <= at[after], f"{after} stands behind {before}"


@pytest.mark.parametrize(
    "text",
    [
        "select 1", "select pg_backend_pid()", "select kind from taskboard.queue_stats",
        "listen taskboard", "begin", "update taskboard.jobs set attempt = 1", "set role x",
        "select j.id from taskboard.jobs as j join taskboard.claim() as c on true",
        "select (select 1 from taskboard.jobs where true) from taskboard.version()",
        "select taskboard.version() from taskboard.jobs",
    ],
)  # fmt: skip
def test_sql_that_is_no_call_is_noticed(text: str, tmp_path: Path) -> None:
    (tmp_path / "some.py").write_text(f'ask = connections.one("{text}", bool)\n')
    with pytest.raises(AssertionError, match="no call of a function"):
        calls(tmp_path / "some.py")


def test_no_module_uses_a_private_name_of_another() -> None:
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        modules = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("taskboard")
            for alias in node.names
        }
        used = {name for name in modules if name.startswith("_")} | {
            f"{node.value.id}.{node.attr}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
            and node.value.id in modules
            and node.attr.startswith("_") and not node.attr.startswith("__")
        }  # fmt: skip
        assert not used, f"{path.name}: {used}"
