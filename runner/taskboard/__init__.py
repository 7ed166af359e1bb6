"""Taskboard: a job queue inside PostgreSQL, and the thin runner beside it."""

from __future__ import annotations

import re
from pathlib import Path

_HERE = Path(__file__).parent
# An installed package carries its SQL; a checkout has it two folders up.
_ROOT = _HERE if (_HERE / "sql").is_dir() else _HERE.parent.parent
SQL = _ROOT / "sql"
MIGRATIONS = _ROOT / "migrations"


def version() -> str:
    """Return the version of this package, from the one place that states it."""
    text = (SQL / "01_version.sql").read_text(encoding="utf-8")
    found = re.search(r"select '([^']+)'::text", text)
    assert found, "sql/01_version.sql states no version"
    return found[1]
