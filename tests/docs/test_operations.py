"""The page for operators: every command is run, and answers what is shown."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict

from docs.console import commands, run, squeezed
from support import Server
from taskboard.localpg import binaries

PAGE = Path(__file__).parents[2] / "runner/OPERATIONS.md"


def test_each_command_for_operators_answers_what_is_shown(
    server_factory: Callable[..., Server], tmp_path: Path
) -> None:
    server = server_factory(fsync="off", full_page_writes="off")
    to = conninfo_to_dict(server.dsn())
    programs = Path(server.name) if Path(server.name).is_dir() else binaries()
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{programs}:{os.environ['PATH']}",
        "HOME": str(tmp_path), "LC_ALL": "C.UTF-8", "PGHOST": str(to["host"]),
        "PGPORT": str(to["port"]), "PGUSER": str(to["user"]), "PGPASSWORD": to.get("password", ""),
    }  # fmt: skip
    shown = commands(PAGE)
    assert len(shown) > 15
    for step, answer in zip(shown, run(shown, tmp_path, environment), strict=True):
        assert squeezed(answer) == squeezed(step.output), step.statement


def test_the_commands_it_names_in_passing_exist() -> None:
    from taskboard.cli import make_parser

    known = re.findall(r"^    ([a-z]+)\b", make_parser().format_help(), re.M)
    named = re.findall(r"`taskboard ([a-z]+)", PAGE.read_text())
    assert len(named) > 15 and set(named) <= set(known)
