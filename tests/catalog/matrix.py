"""The privilege matrix of sql/90_grants.sql, and the objects of an installed schema."""

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
