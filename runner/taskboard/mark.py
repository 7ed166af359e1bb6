"""Marking a function as the handler of a kind."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

Handler = Callable[[Any], Any]  # of a Context


def handler(kind: str) -> Callable[[Handler], Handler]:
    """Mark a function as the handler of `kind`, in a module named to `taskboard run`.

    Raises TypeError for what cannot be one.
    """
    if not isinstance(kind, str):
        raise TypeError('write @handler("kind")')

    def mark(function: Handler) -> Handler:
        name = getattr(function, "__name__", function)
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"{name} would do nothing when it is called, because of its yield:"
                " write def or async def without one"
            )
        with suppress(ValueError):  # it does not tell its parameters
            parameters = inspect.signature(function)
            try:
                parameters.bind(None)
            except TypeError:
                raise TypeError(f"{name} has to take one argument, the context") from None
        function.taskboard_kind = kind  # type: ignore[attr-defined]
        return function

    return mark
