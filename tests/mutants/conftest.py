"""The mutants run tests of the races, with their fixture."""

from __future__ import annotations

from races.conftest import named

__all__ = ["named"]
