"""What the runner is told: environment and arguments, checked once, before anything starts."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Self

from taskboard.urls import fault

ENVIRONMENT = {
    "database_url": "TASKBOARD_DATABASE_URL",
    "listen_url": "TASKBOARD_LISTEN_URL",
    "smtp_url": "TASKBOARD_SMTP_URL",
    "mail_from": "TASKBOARD_MAIL_FROM",
    "stripe_api_key": "STRIPE_API_KEY",
    "stripe_base": "TASKBOARD_STRIPE_BASE",
}
HOW_LONG = "give 1 to 200 characters"


class SettingsError(Exception):
    """A setting that cannot work. `hint` says what to do about it."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that can be chosen about a runner.

    An empty `database_url` leaves the choice to libpq's PG* variables. `poll` and `grace` are
    seconds; `poll` is 5 with LISTEN and 1 without unless given. No `lease` means that the
    database decides. No `queues` means all of them, no `kinds` all that have a handler.
    """

    database_url: str = field(default="", repr=False)
    listen_url: str | None = field(default=None, repr=False)
    smtp_url: str | None = field(default=None, repr=False)
    mail_from: str | None = None
    stripe_api_key: str | None = field(default=None, repr=False)
    stripe_base: str | None = None
    pool: int = 10
    concurrency: int | None = None
    queues: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    lease: timedelta | None = None
    poll: float | None = None
    listen: bool = True
    grace: float = 25.0
    worker: str = field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}")
    until_empty: bool = False
    log_json: bool = False
    dev: bool = False  # mails and charges go to servers of our own

    @classmethod
    def load(cls, environ: Mapping[str, str] = os.environ, **arguments: Any) -> Self:
        """Read the environment; arguments that are not None go before it. Raises SettingsError."""
        found = {name: environ[key] for name, key in ENVIRONMENT.items() if environ.get(key)}
        return cls(**found | {k: v for k, v in arguments.items() if v is not None})

    @property
    def slots(self) -> int:
        """How many handlers may run at once."""
        return self.concurrency or self.pool - 2

    def __post_init__(self) -> None:
        for name in ("database_url", "listen_url"):
            if wrong := fault(getattr(self, name) or ""):
                raise SettingsError(f"{ENVIRONMENT[name]} {wrong[0]}", wrong[1])
        if not 3 <= self.pool <= 1002:
            raise SettingsError(
                f"a pool of {self.pool} is out of bounds: at most pool - 2 jobs run at once, as one"
                " connection renews the leases and one claims and settles",
                "give --pool 3 to 1002; the default is 10",
            )
        if self.concurrency is not None and not 1 <= self.concurrency <= self.pool - 2:
            raise SettingsError(
                f"concurrency {self.concurrency} does not fit a pool of {self.pool}",
                f"give 1 to {self.pool - 2} (pool - 2), or a larger --pool",
            )
        _check_span("poll", self.poll, 0.05, 60)
        _check_span("grace", self.grace, 0, 86400)
        _check_span("lease", None if self.lease is None else self.lease.total_seconds(), 0.1, 86400)
        for what, names in ("queue", self.queues), ("kind", self.kinds), ("worker", [self.worker]):
            if not all(1 <= len(name) <= 200 for name in names):
                raise SettingsError(f"the name of a {what} is empty or too long", HOW_LONG)


def _check_span(name: str, value: float | None, least: float, most: float) -> None:
    if value is not None and not least <= value <= most:
        hint = f"give {least:g} to {most:g} seconds"
        raise SettingsError(f"{name} {value:g} is out of bounds", hint)
