"""The command `taskboard`: arguments, and which part of the package does the work.

Everything heavy is imported by the command that needs it, so that help comes at once. Databases
and keys come from the environment alone: arguments can be read by every user of a machine.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import taskboard

if TYPE_CHECKING:
    from psycopg import Error

    from taskboard.settings import Settings

OK, FAILED, USAGE = 0, 1, 2
UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
DURATION = re.compile(r"(\d+(?:\.\d*)?)(ms|s|m|h|d)?")
NO_CONNECTION = re.compile("connection (failed|is bad|timeout)|failed to resolve|could not transl")
NO_CONNECTION_HINT = (
    "check host, user, password and database in TASKBOARD_DATABASE_URL, or the PG* variables, and"
    " whether the server runs"
)
PRODUCER = 'grant taskboard_producer to "{user}"'
MAIL = """'{"to": "ann@example.com", "subject": "Hello", "text": "Hi"}'"""

ENVIRONMENT = """\
environment:
  TASKBOARD_DATABASE_URL   postgresql://user:password@host/database; without it (and without
                           PGHOST, PGDATABASE and PGSERVICE) an embedded PostgreSQL is used
                           run and migrate take several, with spaces between: the shards
  TASKBOARD_LISTEN_URL     the server itself, where the URL above leads to a pooler
  TASKBOARD_DATA           the folder of the embedded PostgreSQL
  TASKBOARD_SMTP_URL, TASKBOARD_MAIL_FROM          needed for jobs of the kind email
  STRIPE_API_KEY, TASKBOARD_STRIPE_BASE            needed for jobs of the kind stripe
  NO_COLOR                 no colours, on a terminal either

exit codes:
  0 done   1 it failed   2 not understood, or a setting is wrong   130 interrupted
  run, too: 3 with --until-empty, a job failed   4 handlers did not end when asked to stop

examples:
  taskboard demo
  taskboard migrate
  taskboard enqueue hello '{"name": "Ada"}'
  taskboard run hello --until-empty
  taskboard jobs --state failed --json
"""


class UsageError(Exception):
    """What was asked cannot be done like that; `hint` says how it can."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class Refused(UsageError):
    """This login may not do what was asked."""

    def __init__(self, exc: Error, rights: str, user: str) -> None:
        super().__init__(
            exc.diag.message_primary or str(exc),
            exc.diag.message_hint or rights.format(user=user),
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code, as the help of all describes them."""
    open_closed_streams()
    given = list(sys.argv[1:] if argv is None else argv)
    # psql has its own way with arguments: they are passed on as they are.
    passed_on = given[1:] if given[:1] == ["psql"] and given[1:] != ["--help"] else []
    parser = make_parser()
    if not given:
        parser.print_help()
        return USAGE
    arguments = parser.parse_args(given[: len(given) - len(passed_on)])
    arguments.passed_on = passed_on
    try:
        code = int(arguments.command(arguments))
        sys.stdout.flush()  # here, where what comes of it can be told
        return code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except _expected() as exc:
        return explain(exc)
    except OSError as exc:  # the output could not be written: a full disk
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return explain(exc)


def open_closed_streams() -> None:
    """Put nothing in the place of streams that our caller has closed."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def make_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    from taskboard.console import register

    parser = argparse.ArgumentParser(
        prog="taskboard", description="A job queue inside PostgreSQL.", epilog=ENVIRONMENT,
        allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"taskboard {taskboard.version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, function: Any, summary: str, example: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name, help=summary, description=summary, epilog=f"example:\n  {example}",
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        sub.set_defaults(command=function)
        return sub

    sub = command(
        "demo", demo, "see a dead worker's jobs come back, on a throwaway database",
        "taskboard demo --step",
    )  # fmt: skip
    sub.add_argument("--step", action="store_true", help="wait for Enter before each step")

    sub = command(
        "migrate", migrate, "install or upgrade Taskboard in the database",
        "TASKBOARD_DATABASE_URL=postgresql://ann@localhost/shop taskboard migrate",
    )  # fmt: skip
    sub.add_argument(
        "--wait", type=duration, default=timedelta(seconds=60), metavar="DURATION",
        help="how long to wait for others who migrate, or hold a lock (60s)",
    )  # fmt: skip
    sub.add_argument("--json", action="store_true", help="print an object: version, applied")
    sub.add_argument("--show-sql", action="store_true", help="print it for psql, do nothing")

    sub = command("run", run, "run jobs", "taskboard run shop.jobs --queue orders --pool 20")
    sub.add_argument(
        "modules", nargs="*", metavar="MODULE", help="a module with @handler functions"
    )
    sub.add_argument("--queue", dest="queues", action="append", help="only this queue (repeatable)")
    sub.add_argument("--kind", dest="kinds", action="append", help="only this kind (repeatable)")
    sub.add_argument("--pool", type=int, metavar="N", help="connections; handlers get N - 2 (10)")
    sub.add_argument("--concurrency", type=int, metavar="N", help="handlers at once (pool - 2)")
    sub.add_argument("--lease", type=duration, metavar="DURATION", help="instead of the job's own")
    sub.add_argument(
        "--grace", type=duration, metavar="DURATION", help="for handlers to end in, at a stop (25s)"
    )
    sub.add_argument(
        "--poll", type=duration, metavar="DURATION",
        help="look for jobs this often (5s, or 1s without LISTEN)",
    )  # fmt: skip
    sub.add_argument(
        "--no-listen", action="store_true", help="poll only, for example behind a pooler"
    )
    sub.add_argument("--worker", metavar="NAME", help="this runner's name (host and process id)")
    sub.add_argument(
        "--until-empty", action="store_true",
        help="stop when nothing is ready: exit code 0, or 3 when something failed",
    )  # fmt: skip
    sub.add_argument(
        "--dev", action="store_true",
        help="print each mail and charge instead of sending it; their jobs are completed: only for"
        " a database of your own",
    )  # fmt: skip
    sub.add_argument("--log-json", "--json", action="store_true", help="log JSON, an object a line")
    sub.add_argument(
        "--metrics", metavar="[HOST:]PORT", help="serve /metrics, /healthz and /readyz there"
    )
    sub.add_argument("--show-sql", action="store_true", help="print the calls it makes, do nothing")

    sub = command("enqueue", enqueue, "add a job, print its id", f"taskboard enqueue email {MAIL}")
    sub.add_argument("kind", metavar="KIND", help="which handler: email, stripe, or one of yours")
    sub.add_argument(
        "payload", nargs="?", default="{}", metavar="PAYLOAD", help="JSON; - reads it from stdin"
    )
    sub.add_argument("--queue", help="default")
    sub.add_argument("--priority", type=integer, metavar="0-9", help="lower runs first (5)")
    sub.add_argument("--delay", type=duration, metavar="DURATION", help="run it this much later")
    sub.add_argument(
        "--run-at", type=instant, metavar="TIMESTAMP", help="run it then: 2026-07-01T08:00:00+02:00"
    )
    sub.add_argument(
        "--unique-key", metavar="KEY", help="at most one job of the kind lives with it"
    )
    sub.add_argument(
        "--unique-for", type=duration, metavar="DURATION", help="keep the key this long, at least"
    )
    sub.add_argument("--serial-key", metavar="KEY", help="jobs with it run one after the other")
    sub.add_argument(
        "--max-attempts", type=integer, metavar="N", help="failures until it is given up"
    )
    sub.add_argument("--lease", type=duration, metavar="DURATION", help="how long a claim lasts")
    sub.add_argument(
        "--timeout", type=duration, metavar="DURATION", help="longest run of an attempt"
    )
    sub.add_argument(
        "--on-unknown", choices=("retry", "hold"),
        help="when nobody knows whether its effect happened: repeat it, or ask a person",
    )  # fmt: skip
    sub.add_argument(
        "--lines", action="store_true", help="a job for each line of JSON; PAYLOAD must be -"
    )
    sub.add_argument("--json", action="store_true", help="print an object, with `created`")
    sub.add_argument("--show-sql", action="store_true", help="print the SQL, do nothing")

    command(
        "psql", psql, "open psql on the database; what follows is for psql",
        "taskboard psql -c 'select * from taskboard.queue_stats'",
    )  # fmt: skip
    register(command)
    return parser


def integer(text: str) -> int:
    """Read a number that fits into the database's integer."""
    try:
        if abs(value := int(text)) < 2**31:
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is no number, or too large a one")


def duration(text: str) -> timedelta:
    """Read 90, 90s, 1.5m, 2h, 7d, 500ms."""
    if found := DURATION.fullmatch(text):
        try:
            return timedelta(seconds=float(found[1]) * UNITS[found[2] or "s"])
        except OverflowError:
            pass
    raise argparse.ArgumentTypeError(f"{text!r} is no duration: write 90s, 5m, 2h or 7d")


def instant(text: str) -> str:
    """Check that a text says when, wherever it is read: a wall clock alone does not."""
    try:
        if datetime.fromisoformat(text).tzinfo is not None:
            return text
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(
        f"{text!r} is no instant: write 2026-07-01T08:00:00+02:00, with the offset, or Z for UTC"
    )


def demo(arguments: argparse.Namespace) -> int:
    from taskboard import demo

    return demo.main(step=arguments.step)


def migrate(arguments: argparse.Namespace) -> int:
    import json

    from taskboard import several

    if arguments.show_sql:
        print("\\i '{}'".format(str(taskboard.SQL / "install.sql").replace("'", "''")))
        return OK
    for each in several.load():
        with database(each, migrated=False) as settings:
            url = settings.listen_url or settings.database_url
            applied = bring_up_to_date(url, wait=arguments.wait.total_seconds())
        if arguments.json:
            print(json.dumps({"version": taskboard.version(), "applied": applied}))
        else:
            print(f"taskboard {taskboard.version()}: {', '.join(applied) or 'already up to date'}")
    return OK


def bring_up_to_date(url: str, wait: float = 60.0) -> list[str]:
    """Migrate a database; answer which steps were applied, if any."""
    from taskboard.migrate import migrate

    report = migrate(url, wait=wait)
    for notice in report.notices:
        print(f"note: {notice}", file=sys.stderr)
    return list(report.applied)


def run(arguments: argparse.Namespace) -> int:
    from taskboard import process, several

    if arguments.show_sql:
        print("\n".join(f"{text};" for text in worker_calls()))
        return OK
    options: dict[str, Any] = {
        name: getattr(arguments, name)
        for name in ("pool", "concurrency", "lease", "worker", "until_empty", "log_json", "dev")
    } | {"listen": not arguments.no_listen}
    for name in ("queues", "kinds"):
        options[name] = tuple(getattr(arguments, name) or ()) or None
    for name in ("grace", "poll"):
        given = getattr(arguments, name)
        options[name] = None if given is None else given.total_seconds()
    with ExitStack() as stack:
        if arguments.dev:
            options |= stack.enter_context(dev_servers())
        first, *others = several.load(**options)
        settings = stack.enter_context(database(first))
        return process.main(settings, arguments.modules, others, arguments.metrics)


def worker_calls() -> list[str]:
    """List what a runner calls, in the order of a job's life, with $1 … for its arguments."""
    from taskboard import db, schedules

    values = [value for module in (db, schedules) for value in vars(module).values()]
    calls = [getattr(value, "__doc__", None) or "" for value in values if callable(value)]
    return [_numbered(call) for call in calls if call.startswith("select ")]


def _numbered(call: str) -> str:
    """Write its parameters as $1, $2 …"""
    first, *rest = call.split("%s")
    return first + "".join(f"${number}{part}" for number, part in enumerate(rest, 1))


def enqueue(arguments: argparse.Namespace) -> int:
    import json

    from taskboard.console.verb import connection, statement

    lines = arguments.lines
    if lines and arguments.payload != "-":
        raise UsageError("--lines reads standard input: write - for the payload")
    payload = sys.stdin.read() if arguments.payload == "-" and not lines else arguments.payload
    if not lines:
        check_payload(payload)
    options = {
        name: getattr(arguments, name)
        for name in ("queue", "priority", "run_at", "unique_key", "serial_key", "max_attempts",
                     "on_unknown")
    }  # fmt: skip
    for name in ("delay", "unique_for", "lease", "timeout"):
        given = getattr(arguments, name)
        # In seconds: a day would be an hour more or less when the clocks change.
        options[name] = None if given is None else f"{given.total_seconds()} seconds"
    options = {name: value for name, value in options.items() if value is not None}

    given = {"kind": arguments.kind, "payload": payload} | options
    if lines:
        from taskboard.console.lines import enqueue_lines, show_lines

        if arguments.show_sql:
            return show_lines(arguments.kind, options, check_json)
        with database(one_database()) as settings:
            url = settings.database_url
            return enqueue_lines(url, arguments.kind, options, check_json, arguments.json)

    if arguments.show_sql:
        print(f"{statement('select * from taskboard.enqueue({call})', given)};")
        return OK
    # As parameters: the server logs the text of a statement that fails.
    named = ", ".join(f"{name} => %({name})s" for name in given)
    with connection("taskboard enqueue", PRODUCER) as conn:
        [row] = conn.execute(f"select * from taskboard.enqueue({named})".encode(), given)
    job_id, created = row["job_id"], row["created"]
    if arguments.json:
        print(json.dumps({"job_id": str(job_id), "created": created}))
    else:
        print(job_id)
        if not created:
            print("note: this job already held the unique key", file=sys.stderr)
    return OK


def check_json(text: str) -> None:
    """Refuse what is no JSON, by ValueError or RecursionError."""
    import json

    json.loads(text, parse_constant=_refuse_constant)


def check_payload(text: str) -> None:
    """Refuse a payload that is no JSON. Raises UsageError."""
    try:
        check_json(text)
    except (ValueError, RecursionError) as exc:
        hint = "in the shell, put the payload in single quotes, keys and texts in double ones"
        raise UsageError(f"the payload is not JSON: {exc}", hint) from None


def psql(arguments: argparse.Namespace) -> int:
    import shutil
    import subprocess

    from psycopg import pq

    given = one_database()
    named = is_named(given)
    with database(given) as settings:
        program = (shutil.which("psql") if named else None) or embedded_psql()
        # By environment: arguments would show the password to every user of the machine.
        options = {
            option.envvar.decode(): option.val.decode()
            for option in pq.Conninfo.parse(settings.database_url.encode())
            if option.envvar and option.val is not None
        }
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # psql knows what to do with it
        try:
            command = [program, *arguments.passed_on]
            return subprocess.run(command, env=os.environ | options, check=False).returncode
        finally:
            signal.signal(signal.SIGINT, before)


def embedded_psql() -> str:
    """Find the psql of the embedded PostgreSQL. Raises LocalError."""
    from taskboard.localpg import LocalError, NotInstalledError, binaries

    try:
        return str(binaries() / "psql")
    except NotInstalledError as exc:
        hint = f"install postgresql-client, or {exc.hint}"
        raise LocalError("psql is not installed here", hint) from None


def is_named(settings: Settings) -> bool:
    """Tell whether the environment names a database; else the embedded one is used."""
    # With PGHOSTADDR, too, we would start one server and then go to another, to migrate that.
    places = ("PGHOST", "PGHOSTADDR", "PGDATABASE", "PGSERVICE")
    return bool(settings.database_url or any(os.environ.get(name) for name in places))


def one_database(**arguments: Any) -> Settings:
    """Read the settings of a command that takes one database. Raises UsageError."""
    from taskboard import several

    first, *others = several.load(**arguments)
    if others:
        raise UsageError(
            f"TASKBOARD_DATABASE_URL names {len(others) + 1} databases",
            "only run and migrate take several: name one",
        )
    return first


@contextmanager
def database(settings: Settings, *, migrated: bool = True) -> Iterator[Settings]:
    """Answer settings with a database: the named one, or the embedded one, brought up to date."""
    if is_named(settings):
        yield settings
        return
    from dataclasses import replace

    from taskboard import localpg
    from taskboard.settings import SettingsError

    try:
        localpg.binaries()
    except localpg.NotInstalledError as exc:
        hint = f"set TASKBOARD_DATABASE_URL, or {exc.hint}"
        raise SettingsError(f"no database is named, and {exc}", hint) from None
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that the server is left in order
        if signal.getsignal(number) != signal.SIG_IGN:  # as of nohup
            signal.signal(number, _leave)
    with localpg.shared() as local:
        print(local.hint, file=sys.stderr, flush=True)
        if migrated and (applied := bring_up_to_date(local.dsn)):
            done = f"taskboard {taskboard.version()}: {', '.join(applied)}"
            print(done, file=sys.stderr, flush=True)
        yield replace(settings, database_url=local.dsn, listen_url=None)


@contextmanager
def dev_servers() -> Iterator[dict[str, str]]:
    """Run SMTP and Stripe servers of ours in a thread; answer the settings that lead there.

    Raises SettingsError where the environment names real ones.
    """
    import asyncio
    from contextlib import AsyncExitStack
    from threading import Thread

    from taskboard.dev.smtp import DevSmtp, Envelope
    from taskboard.dev.stripe import Call, DevStripe
    from taskboard.settings import SettingsError

    for name in ("TASKBOARD_SMTP_URL", "STRIPE_API_KEY"):
        if os.environ.get(name):
            what = f"--dev sends nothing, and {name} is set"
            raise SettingsError(what, "unset it, or leave out --dev")

    def show_mail(mail: Envelope) -> None:
        print(f"mail to {', '.join(mail.recipients)}: {mail.message['Subject']}", flush=True)

    def show_call(call: Call) -> None:
        again = " (the answer of an earlier request)" if call.replayed else ""
        print(f"stripe {call.method} {call.path}: {call.status}{again}", flush=True)

    async def start() -> dict[str, str]:
        smtp = await stack.enter_async_context(DevSmtp(on_mail=show_mail))
        stripe = await stack.enter_async_context(DevStripe(on_charge=show_call))
        return {
            "smtp_url": smtp.url,
            "mail_from": os.environ.get("TASKBOARD_MAIL_FROM") or "taskboard@example.com",
            "stripe_api_key": "sk_test_taskboard",  # never the real one
            "stripe_base": stripe.url,
        }

    # A proxy that the environment names would look for them on its own machine.
    direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    os.environ["no_proxy"] = f"{direct},127.0.0.1" if direct else "127.0.0.1"
    loop, stack = asyncio.new_event_loop(), AsyncExitStack()
    Thread(target=loop.run_forever, name="taskboard-dev", daemon=True).start()
    try:
        yield asyncio.run_coroutine_threadsafe(start(), loop).result()
    finally:
        asyncio.run_coroutine_threadsafe(stack.aclose(), loop).result(5)
        loop.call_soon_threadsafe(loop.stop)


def _leave(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _expected() -> tuple[type[Exception], ...]:
    """List the errors that are a user's or the weather's, not a bug of ours."""
    from psycopg import Error

    from taskboard.localpg import LocalError
    from taskboard.migrate import MigrateError
    from taskboard.settings import SettingsError

    return UsageError, SettingsError, UnicodeError, LocalError, MigrateError, Error


def explain(exc: Exception) -> int:
    """Say on stderr what went wrong and what helps; return the exit code."""
    from psycopg import Error

    from taskboard.settings import SettingsError

    hint, code = getattr(exc, "hint", None), FAILED
    message = str(exc).strip()
    if isinstance(exc, Error):
        state = exc.sqlstate or ""
        message = exc.diag.message_primary or message
        hint = exc.diag.message_hint
        if state == "22P05" and "\\u0000" in (exc.diag.message_detail or ""):
            message = "PostgreSQL keeps no \\u0000 in JSON"
        if state in ("3F000", "42883", "42P01"):
            message, hint = "Taskboard is not installed in this database", "run: taskboard migrate"
        code = USAGE if state.startswith("22") else FAILED
    elif isinstance(exc, UnicodeError):
        message, hint, code = f"not UTF-8: {exc}", "check arguments, environment and input", USAGE
    elif isinstance(exc, UsageError | SettingsError) and not isinstance(exc, Refused):
        code = USAGE
    if not hint and NO_CONNECTION.match(message):
        hint = NO_CONNECTION_HINT
    print(f"taskboard: {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
    return code
