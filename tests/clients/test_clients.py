"""Each client of this folder passes the whole kit, with no more rights than its roles have."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from clients.kit import run
from clients.languages import LANGUAGES
from support import Connection, rows

ROOT = Path(__file__).parents[2]
WIDE = ("bash", "node")


def marks(language: str) -> list[pytest.MarkDecorator]:
    if language == "python":
        return []
    return [pytest.mark.wide if language in WIDE else pytest.mark.languages]


@pytest.mark.parametrize(
    "language", [pytest.param(name, marks=marks(name)) for name in LANGUAGES]
)  # fmt: skip
def test_a_client_and_a_worker_in_each_language_pass_the_kit(
    language: str, url: str, tmp_path: Path
) -> None:
    client, worker = LANGUAGES[language].made(tmp_path)
    outcomes = run(client, worker, url)
    assert {one.name: one.fault for one in outcomes if one.fault} == {}
    assert len(outcomes) > 30


@pytest.mark.wide
def test_the_line_for_node_in_the_readme_enqueues_a_job_when_its_transaction_commits(
    url: str, db: Connection
) -> None:
    readme = (ROOT / "README.md").read_text()
    (line,) = re.findall(r"^\| Node \(pg\) \| `(.+)` \|$", readme, re.M)
    program = f"""
        const {{ Client }} = require('pg')
        async function enqueue(client, mail) {{ {line} }}
        async function main() {{
          const client = new Client({{ connectionString: process.argv[1] }})
          await client.connect()
          await client.query('begin')
          await enqueue(client, {{ to: 'rolled back' }})
          await client.query('rollback')
          await client.query('begin')
          await enqueue(client, {{ to: 'ada@example.com' }})
          await client.query('commit')
          await client.end()
        }}
        main()
    """
    subprocess.run(["node", "-e", program, url], env=os.environ, check=True, timeout=60)
    found = rows(db, "select kind, payload from taskboard.claim(max_jobs => 10)")
    assert found == [("email", {"to": "ada@example.com"})]
