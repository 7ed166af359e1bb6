"""The privilege matrix: sql/90_grants.sql says who may use what, and what is for nobody."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
ROLES: Final = ("producer", "worker", "operator", "observer")


def matrix() -> Mapping[str, frozenset[str]]:
    """Read who may use what: function or view to the roles, without their prefix."""
    text = (ROOT / "sql" / "90_grants.sql").read_text(encoding="utf-8")
    found = re.search(r"\$matrix\$(.*?)\$matrix\$", text, re.DOTALL)
    assert found is not None, "90_grants.sql has no $matrix$"
    lines = [line.split() for line in found[1].strip().splitlines()]
    assert len({line[0] for line in lines}) == len(lines), "an object stands twice in the matrix"
    return {line[0]: frozenset(line[1:]) for line in lines}


def private(kind: str) -> frozenset[str]:
    """Read what only the owner may touch; `kind` is tables, views, sequences or types."""
    text = (ROOT / "sql" / "90_grants.sql").read_text(encoding="utf-8")
    lines = re.findall(rf"^-- {kind}: (.*)$", text, re.MULTILINE)
    names = [name for line in lines for name in line.split()]
    assert len(set(names)) == len(names), "an object stands twice in the matrix"
    return frozenset(names)


def table_for_people() -> dict[str, frozenset[str]]:
    """Read the same from the table in sql/SECURITY.md."""
    page = (ROOT / "sql" / "SECURITY.md").read_text(encoding="utf-8")
    text = page.partition("## The matrix")[2].partition("\n## ")[0]
    found = {}
    for line in re.findall(r"^\| `(\w+)` \|(.*)\|$", text, re.MULTILINE):
        cells = [cell.strip() for cell in line[1].split("|")]
        assert len(cells) == len(ROLES), line[0]
        found[line[0]] = frozenset(r for r, cell in zip(ROLES, cells, strict=True) if cell)
    return found
