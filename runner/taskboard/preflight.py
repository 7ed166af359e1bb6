"""Before the first claim: which handlers there are, whether the database fits, and saying so."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

import psycopg

from taskboard import db, version
from taskboard.connections import REFUSED, Link, Weather, one_line
from taskboard.handlers import Handler
from taskboard.settings import Settings, SettingsError

log = logging.getLogger(__name__)
T = TypeVar("T")

HINTS = {
    "startup": "take `options` out of TASKBOARD_DATABASE_URL and PGOPTIONS: the pooler passes on no"
    " setting; alter role … set … does the same",
    "login": "check user, password and database in TASKBOARD_DATABASE_URL, or the PG* variables",
    "version": "`taskboard migrate` upgrades the database; or run the matching release",
    "3F000": "the schema is not installed here: run `taskboard migrate`",
    "42883": "the functions are not installed here: run `taskboard migrate`",
}


def find_handlers(
    settings: Settings, modules: Sequence[str]
) -> tuple[dict[str, Handler], dict[str, str]]:
    """Collect the handlers that are configured, and why others are off, both by kind.

    A module's handler goes before the built-in one of its kind. Raises SettingsError.
    """
    found: dict[str, Handler] = {}
    off: dict[str, str] = {}
    try:
        if settings.smtp_url and settings.mail_from:
            from taskboard.handlers.email import email_handler
            from taskboard.mail import MailSettings

            server = MailSettings.from_url(settings.smtp_url, settings.mail_from)
            found["email"] = email_handler(server)
        else:
            off["email"] = mail_lacks(settings)
        if settings.stripe_api_key:
            from taskboard.handlers.stripe import stripe_handler
            from taskboard.stripe_calls import StripeSettings

            account = StripeSettings(settings.stripe_api_key, settings.stripe_base)
            found["stripe"] = stripe_handler(account)
            log.info("stripe: the key is of mode %s", account.mode)
        else:
            off["stripe"] = "set STRIPE_API_KEY"
    except ValueError as exc:
        raise SettingsError(str(exc), "correct the setting, or unset it") from None
    own: dict[str, Handler] = {}
    sys.path.insert(0, os.getcwd())
    for name in modules:
        if (better := _dotted(name)) != name:
            raise SettingsError(f"there is no module {name}", f"write taskboard run {better}")
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as exc:
            raise SettingsError(*_missing(name, exc)) from None
        except Exception as exc:  # whatever somebody's module does
            raise SettingsError(
                f"{name} cannot be imported: {_place(exc)}: {type(exc).__name__}: {one_line(exc)}",
                f"python -c 'import {name}' shows the whole way there",
            ) from None
        marked = [(getattr(each, "taskboard_kind", None), each) for each in vars(module).values()]
        kinds = [(kind, each) for kind, each in marked if isinstance(kind, str) and callable(each)]
        if not kinds:
            raise SettingsError(f"{name} has no handler", 'put @handler("kind") above a function')
        for kind, handler in kinds:
            if own.setdefault(kind, handler) is not handler:
                raise SettingsError(f"two handlers for {kind}", "give each a kind of its own")
            off.pop(kind, None)
    return found | own, off


def mail_lacks(settings: Settings) -> str:
    """Say what is to be set before mail can be sent; at least one of them is not."""
    url, sender = settings.smtp_url, settings.mail_from
    given = {"TASKBOARD_SMTP_URL": url, "TASKBOARD_MAIL_FROM": sender}
    return f"set {' and '.join(name for name in given if not given[name])}"


def _dotted(name: str) -> str:
    """Write what names a file here, or a function in one, as its module's name."""
    path = name.partition(":")[0].removesuffix(".py").removeprefix("./").rstrip("/")
    return name if path.startswith((".", "/")) else path.replace("/", ".")


def _missing(name: str, exc: ModuleNotFoundError) -> tuple[str, str]:
    """Say which module there is not, and what helps: the one named, or one that it needs."""
    if exc.name is None or not f"{name}.".startswith(f"{exc.name}."):
        return f"{name} ({_place(exc)}) needs a module {exc.name}", "install it where this runs"
    return f"there is no module {name}", "name it as in `import`, from the folder that it is in"


def _place(exc: Exception) -> str:
    """Name file and line of what went wrong, in the module rather than here."""
    if isinstance(exc, SyntaxError) and exc.filename:
        return f"{exc.filename} line {exc.lineno}"
    ours, frames = os.path.dirname(__file__), traceback.extract_tb(exc.__traceback__)
    theirs = [frame for frame in frames if os.path.dirname(frame.filename) != ours]
    last = (theirs or frames)[-1]
    return f"{last.filename} line {last.lineno}"


async def introduce(
    link: Link, settings: Settings, handlers: Mapping[str, Handler], off: Mapping[str, str]
) -> None:
    """Wait for the database, check that it fits, and say what this runner does.

    Raises SettingsError when waiting does not help.
    """
    while True:
        try:
            installed = str(await link.call(db.version))
            break
        except Weather as exc:
            if REFUSED.search(str(exc)):
                hint = HINTS["startup" if "startup parameter" in str(exc) else "login"]
                raise SettingsError(f"cannot log in: {exc}", hint) from None
            await asyncio.sleep(link.delay)
        except psycopg.Error as exc:
            raise refused(link, "cannot use the database", exc) from None
    own = version()
    if installed.split(".")[:2] != own.split(".")[:2]:
        raise SettingsError(
            f"the database has taskboard {installed}, this runner is {own}", HINTS["version"]
        )
    if not await _answer(link.call(db.may_claim), True):
        raise SettingsError("this login may not claim", _grant(link))
    place = _place_of(link)
    # Whether there is somebody to hear a notification; a pooler passes none on.
    pooled = await _answer(link.call(db.is_pooled), False)
    listens = settings.listen and (not pooled or bool(settings.listen_url))
    log.info(
        "taskboard %s: worker %s, %s, queues %s, %d slots, at most %d connections%s, %s",
        own, settings.worker, place, ", ".join(settings.queues) or "all", settings.slots,
        settings.pool + settings.listen, " through a pooler" if pooled else "",
        "listening" if listens else "polling only",
    )  # fmt: skip
    if settings.dev:
        log.warning(
            "--dev: mails and charges of %s are printed, not sent, and their jobs end as completed",
            place,
        )
    waiting = dict(await _answer(link.call(db.count_ready, list(settings.queues) or None), []))
    reasons = dict.fromkeys(waiting, "no handler here")
    reasons |= {kind: f"off ({reason})" for kind, reason in off.items()}
    reasons |= dict.fromkeys(handlers, "on")
    for kind, reason in sorted(reasons.items()):
        count = waiting.get(kind, 0)
        jobs = f", {count} job{'s' * (count > 1)} waiting" if count else ""
        log.info("%s: %s%s", kind, reason, jobs)


def refused(link: Link, what: str, exc: psycopg.Error) -> SettingsError:
    """Make an error of what the database will refuse again, with what helps."""
    hint = HINTS.get(exc.sqlstate or "") or exc.diag.message_hint or "see the server's log"
    if isinstance(exc, psycopg.errors.InsufficientPrivilege):
        hint = _grant(link)
    return SettingsError(f"{what}: {one_line(exc)}", hint)


def _grant(link: Link) -> str:
    login = link.conn.info.user if link.conn else "the login of the runner"
    return f'grant taskboard_worker to "{login}"'


def _place_of(link: Link) -> str:
    """Name the database that we have come to."""
    info = link.conn and link.conn.info
    return f"database {info.dbname} at {info.host}" if info else "a database"


async def _answer(call: Awaitable[T], otherwise: T) -> T:
    """Await what is only said, and need not be known."""
    with suppress(Weather, psycopg.Error):
        return await call
    return otherwise
