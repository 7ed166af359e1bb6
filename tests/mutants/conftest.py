"""The mutants run tests of the races and the life by the model, with their fixtures."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import Phase

from races.conftest import named, quick
from support import Connection, add_empty

__all__ = ["named", "quick"]


@pytest.fixture
def empty(db: Connection) -> Callable[[], None]:
    """Takes away every row, in the middle of a test."""
    add_empty(db)

    def take_away() -> None:
        db.execute("call public.empty()")

    return take_away


@pytest.fixture
def phases() -> tuple[Phase, ...]:
    """That a life goes wrong is enough: it need not be shortened."""
    return (Phase.generate,)
