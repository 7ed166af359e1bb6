"""The mutants run tests of the races, with their fixtures."""

from __future__ import annotations

from races.conftest import named, quick

__all__ = ["named", "quick"]
