"""Marking a function as the handler of a kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Handler = Callable[[Any], Any]  # of a Context


def handler(kind: str) -> Callable[[Handler], Handler]:
    """Mark a function as the handler of `kind`, in a module named to `taskboard run`."""

    def mark(function: Handler) -> Handler:
        function.taskboard_kind = kind  # type: ignore[attr-defined]
        return function

    return mark
