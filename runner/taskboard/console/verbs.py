"""The table of verbs: what each is called, what it is told, and the one statement it runs.

In a statement, {call} stands for the arguments that were given, named; {where} for a condition on
those that were given; any other {name} for that argument's value.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from taskboard.cli import MAIL, UsageError, check_payload, duration, integer
from taskboard.console.output import cell

Argument = tuple[tuple[str, ...], dict[str, Any]]
Given = dict[str, Any]

OBSERVER, OPERATOR = "taskboard_observer", "taskboard_operator"
STATES = (
    "scheduled", "ready", "running", "expired", "blocked", "held",
    "completed", "failed", "cancelled",
)  # fmt: skip


class Mistake(UsageError):
    """What was asked cannot be done like that; the hint is not optional."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message, hint)


@dataclass(frozen=True, slots=True)
class Verb:
    """A row of the table.

    `sql` is a statement, or a function that chooses one by what was given, or refuses it. `role`
    may call it.
    `one`: the answer is one row. `each`: the argument that is a list, with a statement for every
    item. `done`: said when the answer is void; `none`: when there is no row, or false.
    `more`: further statements about the same thing, by name; their rows go below.
    `now`: a statement for one row about what holds afterwards, and how that is said.
    `notes`: an argument, and a statement about it; its rows are told as well, on stderr.
    """

    name: str
    summary: str
    example: str
    role: str = ""
    sql: str | Callable[[Given], str] = ""
    arguments: tuple[Argument, ...] = ()
    one: bool = False
    each: str = ""
    done: str = ""
    none: str = ""
    more: Mapping[str, str] | None = None
    now: tuple[str, Callable[[dict[str, Any]], str]] | None = None
    notes: tuple[str, str] = ("", "")
    module: str = "verb"

    @property
    def names(self) -> list[str]:
        """The arguments, by the names they have in SQL."""
        return [options.get("dest") or flags[0].lstrip("-") for flags, options in self.arguments]


def argument(*flags: str, **options: Any) -> Argument:
    return flags, options


def span(text: str) -> str:
    """Read a duration; in seconds, as a day is an hour more or less when the clocks change."""
    return f"{duration(text).total_seconds()} seconds"


def job_id(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no job's id; see taskboard jobs") from None


def yes_no(text: str) -> bool:
    if text not in ("yes", "no"):
        raise argparse.ArgumentTypeError("say yes or no")
    return text == "yes"


def count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 100_000:
        raise argparse.ArgumentTypeError("give a number from 1 to 100000")
    return int(text)


def port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError("give a port from 0 to 65535")
    return int(text)


def flag(*flags: str, **options: Any) -> Argument:
    return argument(*flags, action="store_true", default=None, **options)


JOB = argument("job_id", type=job_id, metavar="ID", help="the job")
JOBS = argument("job_id", type=job_id, nargs="+", metavar="ID", help="the jobs")
LIMIT = argument("--limit", type=count, default=50, metavar="N", help="at most so many (50)")
QUEUE, KIND = argument("--queue", help="only this queue"), argument("--kind", help="only this kind")
REASON = argument("--reason", metavar="TEXT", help="kept with the incident")
SCHEDULE = argument("name", metavar="NAME", help="the schedule")


def choose_retry(given: Given) -> str:
    if given["job_id"] and "failed" in given:
        raise Mistake("--failed takes no ids", "leave one of them out")
    if given["job_id"] and given.keys() <= {"job_id", "reason"}:
        return "select * from taskboard.retry({call})"
    if given.pop("failed", False) and not given["job_id"]:
        return "select * from taskboard.retry_failed({call})"
    raise Mistake("retry which jobs?", "name their ids, or say --failed [--queue Q] [--kind K]")


# What became of a job that was not finished, or had ended already.
WAITS = """\
select case j.state
    when 'held' then format('%1$s is held: answer it with'
      ' taskboard resolve %1$s %2$s --happened yes|no', j.job_id, j.held_step)
    when 'scheduled' then format('%1$s runs at %2$s; to run it now:'
      ' taskboard cancel %1$s; taskboard retry %1$s', j.job_id, j.claimable_at::timestamptz(0))
  end
from taskboard.job({job_id}) as j"""
GOES_ON = """\
select case
    when j.state = 'running' then format('%s is asked to stop, at its next renewal; --force does'
      ' not wait', j.job_id)
    when j.state <> 'cancelled' then format('%s had ended already: %s', j.job_id, j.state)
  end
from taskboard.job({job_id}) as j"""


def choose_pause(verb: str) -> Callable[[Given], str]:
    def choose(given: Given) -> str:
        if "name" not in given:
            return f"select * from taskboard.{verb}({{call}})"
        if "queue" in given:
            raise Mistake(f"{verb} a queue or a schedule?", "name one of them")
        if "reason" in given:
            raise Mistake("no reason is kept of a schedule", "leave --reason out")
        paused = str(verb == "pause").lower()
        return f"select taskboard.pause_schedule({{call}}, paused => {paused})"

    return choose


LIMITS = (
    "select {queue}::text as queue, q.max_running, q.max_starts, q.starts_per, q.lease"
    "\nfrom (values ({queue}::text)) as asked (name)"
    "\nleft join taskboard.queue_list as q on q.queue = asked.name"
)


def choose_limit(given: Given) -> str:
    none = given.pop("none", False)
    if none and len(given) > 1:
        raise Mistake("limits, or none?", "leave --none out, or all others")
    return "select taskboard.limit_queue({call})" if none or len(given) > 1 else LIMITS


def tell_limits(row: dict[str, Any]) -> str:
    said = {
        "running": row["max_running"],
        "starts": row["starts_per"] and f"{row['max_starts']} per {cell(row['starts_per'])}",
        "lease": row["lease"] and cell(row["lease"]),
    }
    limits = ", ".join(f"{name} {text}" for name, text in said.items() if text is not None)
    return f"{row['queue']}: {limits or 'no limits'}"


def choose_setting(given: Given) -> str:
    if "value" in given:
        return "select taskboard.configure({call})"
    return "select * from taskboard.setting_list{where}\norder by setting"


NO_JOBS = (
    "select 'no job is or was in a queue ' || {queue}"
    "\nwhere not exists (select from taskboard.queue_stats as s where s.queue = {queue})"
)

STILL_PAUSED = (
    "\nunion all"
    "\nselect 'all queues are paused still: taskboard resume'"
    "\nfrom taskboard.queue_list as q where q.queue is null"
)


def choose_schedule(given: Given) -> str:
    """Check the rule before it is stored, as the database does not read it, and the payload."""
    from datetime import UTC, datetime

    from taskboard.schedules import RuleError, first_after

    check_payload(given.get("payload", "{}"))
    try:
        first_after(given["cron"], given.get("time_zone", "UTC"), datetime.now(UTC))
    except RuleError as exc:
        raise Mistake(
            str(exc),
            "a rule is 'minute hour day month weekday', say '30 2 * * 1-5', and a time zone is"
            " named like Europe/Berlin",
        ) from None
    return "select taskboard.schedule({call})"


def pausing(verb: str, summary: str, done: str) -> Verb:
    return Verb(
        verb, summary, f"taskboard {verb} mails", OPERATOR, choose_pause(verb),
        (argument("queue", nargs="?", metavar="QUEUE", help="none: all queues"),
         argument("--schedule", dest="name", metavar="NAME", help="a schedule instead"), REASON),
        one=True, done=done, none="there is no such schedule",
        notes=("queue", NO_JOBS + STILL_PAUSED * (verb == "resume")),
    )  # fmt: skip


VERBS = (
    Verb(
        "jobs", "list jobs, the newest first", "taskboard jobs --state failed --limit 20",
        OBSERVER,
        "select job_id, state, queue, kind, attempt, worker, created_at, claimable_at, finished_at"
        "\nfrom taskboard.job_list{where}\norder by job_id desc\nlimit {limit}",
        (argument("--state", choices=STATES, metavar="STATE", help=f"only {', '.join(STATES)}"),
         QUEUE, KIND, LIMIT),
        none="no such jobs",
    ),
    Verb(
        "job", "show a job, its effects, incidents and documents",
        "taskboard job 0198c2a5-7c1e-7d3f-9a55-d1f0c8e10000",
        OBSERVER, "select * from taskboard.job({call})", (JOB,), one=True,
        none="no such job: the id is wrong, or its history has been pruned",
        more={
            "effects": "select step, attempt,"
            " case state when 'refused' then 'did not happen' else state end as state,"
            "\n  begun_at, ended_at, idempotency_key"
            "\nfrom taskboard.effect_list\nwhere job_id = {job_id}\norder by begun_at",
            "incidents": "select happened_at, what, worker, by_role, detail"
            "\nfrom taskboard.incident_list\nwhere job_id = {job_id}\norder by id",
            "documents": "select * from taskboard.job_documents({call})",
        },
    ),
    Verb(
        "queues", "count what waits, what runs and what has just ended; show pauses and limits",
        "taskboard queues", OBSERVER,
        "select coalesce(s.queue, q.queue) as queue, s.kind, s.priority,"
        "\n  coalesce(s.paused, q.paused_at is not null) as paused, s.ready, s.scheduled,"
        "\n  s.running, s.expired, s.blocked, s.held, s.oldest_ready_at, r.completed_per_minute,"
        "\n  r.failed_per_minute, r.median_seconds, q.max_running, q.max_starts, q.starts_per"
        "\nfrom taskboard.queue_stats as s"
        "\nleft join taskboard.queue_rates as r on r.queue = s.queue and r.kind = s.kind"
        "\nfull join (select * from taskboard.queue_list as l where l.queue is not null) as q"
        "\n  on q.queue = s.queue"
        "\norder by s.priority, queue, s.kind",
        none="no queue has had a job yet",
    ),
    Verb(
        "workers", "list who holds leases", "taskboard workers", OBSERVER,
        "select * from taskboard.worker_list\norder by worker",
        none="nobody holds a lease; runners without a job are not recorded: look at their hosts, or"
        " at /readyz",
    ),
    Verb(
        "incidents", "list what went wrong, and what people did",
        "taskboard incidents --what lease_lapsed", OBSERVER,
        "select happened_at, what, job_id, queue, kind, worker, by_role, detail"
        "\nfrom taskboard.incident_list{where}\norder by id desc\nlimit {limit}",
        (argument("--what", help="only these, for example write_refused"),
         argument("--job", dest="job_id", type=job_id, metavar="ID", help="only of this job"),
         argument("--worker", help="only of this worker"), QUEUE, KIND, LIMIT),
        none="no such incidents",
    ),
    Verb(
        "retry", "bring finished jobs back, with a new budget of attempts",
        "taskboard retry --failed --queue mails", OPERATOR, choose_retry,
        (argument("job_id", type=job_id, nargs="*", metavar="ID", help="the jobs"),
         flag("--failed", help="all that failed, the oldest first"), QUEUE, KIND,
         argument("--limit", dest="max_jobs", type=count, metavar="N",
                  help="with --failed: at most so many (1000)"), REASON),
        each="job_id", none="nothing has failed", notes=("job_id", WAITS),
    ),
    Verb(
        "cancel", "cancel jobs; a running one is told to stop",
        "taskboard cancel 0198c2a5-7c1e-7d3f-9a55-d1f0c8e10000 --reason 'wrong price'", OPERATOR,
        "select * from taskboard.cancel({call})",
        (JOBS, argument("--reason", metavar="TEXT", help="kept with the job"),
         flag("--force", help="a running one at once: its lease is void")),
        each="job_id", notes=("job_id", GOES_ON),
    ),
    Verb(
        "resolve", "say whether the effect of a held job took place",
        "taskboard resolve 0198c2a5-7c1e-7d3f-9a55-d1f0c8e10000 main --happened yes", OPERATOR,
        "select * from taskboard.resolve({call})",
        (JOB, argument("step", metavar="STEP", help="which effect; see taskboard job ID"),
         argument("--happened", type=yes_no, required=True, metavar="yes|no",
                  help="yes: it is not repeated"), REASON),
        one=True,
    ),
    pausing("pause", "let nobody claim from a queue; what runs goes on", "paused"),
    pausing("resume", "end a pause", "resumed"),
    Verb(
        "evict", "let the leases of a dead worker lapse now",
        "taskboard evict web-3-4711", OPERATOR, "select * from taskboard.evict({call})",
        (argument("worker", metavar="WORKER", help="see taskboard workers"), REASON),
        none="nobody of this name holds a lease; see taskboard workers",
    ),
    Verb(
        "limit", "show a queue's limits, or set them all at once: what is not given has none",
        "taskboard limit mails --running 10 --starts 100 --per 1m", OPERATOR, choose_limit,
        (argument("queue", metavar="QUEUE", help="alone: show, change nothing"),
         argument("--running", dest="max_running", type=integer, metavar="N",
                  help="so many at once"),
         argument("--starts", dest="max_starts", type=integer, metavar="N",
                  help="so many starts …"),
         argument("--per", dest="starts_per", type=span, metavar="DURATION", help="… in this time"),
         argument("--lease", type=span, metavar="DURATION", help="how long a claim lasts (60s)"),
         flag("--none", help="no limits")),
        one=True, now=(LIMITS, tell_limits), notes=("queue", NO_JOBS),
    ),
    Verb(
        "prune", "forget old finished jobs, effects and incidents",
        "taskboard prune --keep 30d", OPERATOR, "select * from taskboard.prune({call})",
        (argument("--keep", type=span, metavar="DURATION", help="what is younger (the setting)"),),
    ),
    Verb(
        "schedules", "list the schedules", "taskboard schedules", OBSERVER,
        "select name, cron, time_zone, queue, kind, misfire, next_at, last_at, last_job_id,"
        " paused_at\nfrom taskboard.schedule_list\norder by name",
        none="there are no schedules",
    ),
    Verb(
        "schedule", "enqueue a job at each occurrence of a cron rule",
        f"taskboard schedule report '30 2 * * 1-5' email {MAIL} --time-zone Europe/Berlin",
        OPERATOR, choose_schedule,
        (SCHEDULE,
         argument("cron", metavar="CRON", help="minute, hour, day, month, weekday"),
         argument("kind", metavar="KIND", help="which handler"),
         argument("payload", nargs="?", metavar="PAYLOAD", help="JSON ({})"),
         argument("--time-zone", dest="time_zone", metavar="NAME", help="of the rule (UTC)"),
         argument("--queue", help="of the jobs (default)"),
         argument("--priority", type=integer, metavar="0-9", help="of the jobs (5)"),
         argument("--misfire", choices=("skip", "one", "all"),
                  help="what to do about occurrences that nobody was there for (one)")),
        one=True, done="scheduled",
    ),
    Verb(
        "upcoming", "show when schedules run next", "taskboard upcoming report --limit 5",
        OBSERVER,
        arguments=(
            argument("name", nargs="?", metavar="NAME", help="only this schedule"),
            argument("--limit", type=count, default=20, metavar="N", help="at most so many (20)")),
        none="no schedule runs: there is none, or it is paused", module="upcoming",
    ),
    Verb(
        "unschedule", "remove a schedule; its jobs stay", "taskboard unschedule report", OPERATOR,
        "select taskboard.unschedule({call})", (SCHEDULE,),
        one=True, done="removed", none="there is no such schedule",
    ),
    Verb(
        "configure", "change a default or a limit of the database; alone: list them",
        "taskboard configure history '30 days'", OPERATOR, choose_setting,
        (argument("setting", nargs="?", metavar="NAME", help="alone: show its value"),
         argument("value", nargs="?", metavar="VALUE", help="its new value")),
        done="configured", none="there is no such setting; taskboard configure lists them",
    ),
    Verb(
        "board", "serve a web page over all this, for reading or for operators",
        "taskboard board --operator", OBSERVER,
        arguments=(
            argument("--bind", default="127.0.0.1", metavar="ADDRESS",
                     help="where to listen (127.0.0.1); elsewhere say who may come in"),
            argument("--port", type=port, default=8080, metavar="N", help="0: any free one (8080)"),
            argument("--operator", action="store_true",
                     help="with forms to retry, cancel, resolve …, and documents"),
            argument("--login", action="store_true",
                     help="people log in with the token in TASKBOARD_BOARD_TOKEN"),
            argument("--trusted-header", dest="trusted_header", metavar="NAME",
                     help="a proxy has logged people in, and names them in this header"),
            argument("--trusted-proxy", dest="trusted_proxy", action="append", metavar="ADDRESS",
                     help="… from this address or network (repeatable)"),
            argument("--host", action="append", metavar="NAME",
                     help="a name by which browsers reach the board (repeatable)")),
        module="board",
    ),
    Verb(
        "doctor", "look for what is wrong or risky, as a runner would see it",
        "taskboard doctor shop.jobs --pool 20",
        arguments=(
            argument("modules", nargs="*", metavar="MODULE", help="modules with handlers, as run"),
            argument("--pool", type=int, metavar="N", help="connections of a runner (10)"),
            argument("--older-than", type=duration, default="5m", metavar="DURATION",
                     help="from when on transactions and ready jobs are remarked on (5m)")),
        module="doctor",
    ),
    Verb(
        "shards", "print the functions of a PL/Proxy database before several of these",
        "taskboard shards | psql --single-transaction proxy", module="shards",
    ),
    Verb(
        "uninstall", "drop Taskboard and all its jobs from the database",
        "taskboard uninstall --yes",
        arguments=(
            flag("--yes", help="do not ask"),
            flag("--force", help="even with live jobs, or with what is not ours on top of it")),
        module="uninstall",
    ),
)  # fmt: skip
