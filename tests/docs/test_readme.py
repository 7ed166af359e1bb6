"""Every command, transcript and program that the documents show is run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.transcript import blocks, normal, play, steps
from support import Connection
from taskboard.localpg import binaries

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for path in [ROOT / "README.md", *ROOT.glob("*/README.md"), *ROOT.glob("sql/*.md")]
    if "```psql" in path.read_text()
)


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_each_transcript_shows_what_psql_answers(document: Path, dsn: str) -> None:
    transcript = [
        step for block in blocks(ROOT / document) if block.language == "psql"
        for step in steps(block)
    ]  # fmt: skip
    assert transcript
    answers = play(str(binaries() / "psql"), dsn, transcript)
    shown = [f"{step.statement}\n{normal(step.output)}" for step in transcript]
    seen = [f"{s.statement}\n{normal(a)}" for s, a in zip(transcript, answers, strict=True)]
    assert seen == shown


def test_each_command_and_program_of_the_readme_runs(dsn: str, tmp_path: Path) -> None:
    environment = os.environ | {
        "TASKBOARD_DATABASE_URL": dsn, "HOME": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    ran = []
    for block in blocks(ROOT / "README.md"):
        if block.language == "python":
            (name,) = re.findall(r"^# (\w+\.py)$", block.text, re.M)
            (tmp_path / name).write_text(block.text)
            subprocess.run([sys.executable, name], cwd=tmp_path, env=environment, check=True)
        elif block.language == "sh":
            done = subprocess.run(
                ["bash", "-euc", block.text], cwd=tmp_path, env=environment, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout
            ran.append(done.stdout)
    assert len(ran) >= 2 and "kind=hello attempt=1 completed" in ran[-1]


def test_the_sql_of_the_security_page_runs(db: Connection) -> None:
    found = [one.text for one in blocks(ROOT / "sql/SECURITY.md") if one.language == "sql"]
    assert found
    for text in found:
        db.execute(text.encode())


def test_the_lines_quoted_from_the_functions_stand_there() -> None:
    readme = (ROOT / "README.md").read_text()
    for name, quoted in re.findall(r"\(`(sql/\w+\.sql)`\):\n\n```sql\n(.*?)```", readme, re.S):
        assert quoted in (ROOT / name).read_text(), name
    assert readme.count("```sql") == 2


def test_the_readme_is_short_and_its_table_names_every_function(db: object) -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 300
    granted = re.findall(r"^    (\w+) +(?:producer|worker|operator|observer)", (
        ROOT / "sql/90_grants.sql").read_text(), re.M)  # fmt: skip
    missing = [name for name in granted if f"`{name}" not in readme and f"{name}(" not in readme]
    assert missing == []


def test_the_recipes_for_ones_own_transaction_enqueue_and_answer_in_columns(
    db: Connection,
) -> None:
    readme = (ROOT / "README.md").read_text()
    found = re.findall(r"^\| (psycopg|SQLAlchemy|Django|Node \(pg\)) \| `(.*)` \|$", readme, re.M)
    recipes = dict(found)
    assert len(recipes) == 4
    for recipe in recipes.values():
        assert "select job_id, created from taskboard.enqueue('email', " in recipe
    names = {"conn": db, "mail": {"to": "ann@example.com"}}
    exec(recipes["psycopg"], names)
    assert names["created"] is True


def test_the_page_says_what_a_newcomer_stumbles_over() -> None:
    readme = (ROOT / "README.md").read_text()
    for words in (
        "`. .venv/bin/activate`", "Stop any `taskboard run` first", "`?starttls=off`",
        "grant the runner's login what its handlers touch", "](sql/README.md#words)",
    ):  # fmt: skip
        assert words in readme
    assert "one knob" not in readme
