"""Each verb of the console: what it does, its JSON, its SQL, and what it says to a mistake."""

from __future__ import annotations

import csv
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row

from console.conftest import Console, Standing, enqueue
from support import Connection, rows, session
from taskboard.console import verb
from taskboard.console.verbs import VERBS
from taskboard.localpg import binaries

NOBODY = "00000000-0000-7000-8000-000000000000"


# Words in capitals are ids of jobs in that state; ~ is a blank.
COMMANDS = [
    "jobs", "jobs --state failed", "jobs --queue mails --kind ready --limit 3", "job COMPLETED",
    "queues", "workers", "incidents", "incidents --what lease_lapsed --worker gone",
    "incidents --job STALE --limit 1", "retry FAILED", "retry FAILED COMPLETED", "retry --failed",
    "retry --failed --queue default --kind failed --limit 5", "cancel READY",
    "cancel READY RUNNING --reason it's~over", "cancel RUNNING --force",
    "resolve HELD main --happened yes", "resolve HELD main --happened no --reason it~came~back",
    "retry FAILED --reason the~address~is~right~now", "retry --failed --reason again",
    "pause --reason dunning", "resume mails --reason paid", "evict w1 --reason burnt", "pause",
    "pause mails",
    "pause --schedule report", "resume", "resume mails", "resume --schedule report", "evict w1",
    "limit mails", "limit mails --none", "limit mails --running 3",
    "limit mails --starts 100 --per 1m --lease 90s", "prune",
    "prune --keep 30d", "schedules", "schedule daily 30~2~*~*~1-5 mail {\"n\":1}"
    " --time-zone Europe/Berlin --misfire all --queue mails --priority 2",
    "unschedule report", "configure history 30~days", "configure", "configure lease",
]  # fmt: skip


def words(command: str, jobs: dict[str, str]) -> list[str]:
    ids = {state.upper(): job_id for state, job_id in jobs.items()}
    return [ids.get(word, word.replace("~", " ")) for word in command.split()]


def test_every_verb_is_among_the_commands_that_are_tried() -> None:
    tried = {command.split()[0] for command in COMMANDS}
    assert {each.name for each in VERBS if each.module == "verb"} == tried


def test_commands_run_the_sql_that_they_show(
    standing: Standing, connect: Callable[..., Connection], console: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    dsn, jobs = standing
    script = ""
    for command in COMMANDS:
        shown = console(*words(command, jobs), "--show-sql")
        assert (shown.code, shown.err) == (0, "")
        script += f"begin;\n{shown.out}rollback;\n\\echo ---\n"
    done = subprocess.run(
        [binaries() / "psql", "-X", "-q", "--csv", "-v", "ON_ERROR_STOP=1", dsn],
        input=script, capture_output=True, text=True, check=True,
    )  # fmt: skip

    conn = connect(dsn=dsn, row_factory=dict_row)

    @contextmanager
    def undone(name: str, rights: str) -> Iterator[Connection]:
        conn.execute("begin")
        yield conn
        conn.execute("rollback")

    monkeypatch.setattr(verb, "connection", undone)
    for command, by_psql in zip(COMMANDS, done.stdout.split("---\n"), strict=False):
        said = console(*words(command, jobs))
        assert said.code == 0 and said.out, command
        assert said.err == "" or (said.err.startswith("note: ") and "RUNNING" in command), command
        said = console(*words(command, jobs), "--json")
        assert said.code == 0, command
        answer = said.json
        if answer == {"done": True}:
            assert len(by_psql.splitlines()) == 2, command  # a void or a true
            continue
        header, *lines = csv.reader(by_psql.splitlines())
        seen = [dict(zip(header, line, strict=False)) for line in lines]
        for row in answer if isinstance(answer, list) else [answer]:
            assert row.keys() - {"effects", "incidents", "documents"} == set(header), command
            # Whatever does not change from call to call is the same.
            kept = {"job_id", "state", "queue", "kind", "what", "worker", "name", "step"}
            same = {name: str(row[name] or "") for name in kept & row.keys()}
            assert any(same.items() <= line.items() for line in seen), (command, row, seen)


def state_of(db: Connection, job_id: str) -> str:
    found: str = rows(db, "select state from taskboard.job(%s)", [job_id])[0][0]
    return found


def test_jobs_are_listed_newest_first_and_filtered(
    standing: Standing, console: Console
) -> None:
    jobs = standing[1]
    listed = [row["job_id"] for row in console("jobs", "--json").json]
    assert sorted(listed) == sorted(jobs.values()) and listed[0] == jobs["scheduled"]
    assert [row["job_id"] for row in console("jobs", "--json", "--limit", 1).json] == listed[:1]
    (row,) = console("jobs", "--json", "--state", "held").json
    assert (row["job_id"], row["kind"], row["state"]) == (jobs["held"], "held", "held")
    none = console("jobs", "--kind", "nothing")
    assert (none.code, none.out, none.err) == (0, "", "no such jobs\n")
    assert console("jobs", "--kind", "nothing", "--json").json == []


def test_job_shows_effects_incidents_and_documents(
    standing: Standing, console: Console
) -> None:
    jobs = standing[1]
    whole = console("job", jobs["completed"], "--json").json
    assert (whole["state"], whole["attempt"]) == ("completed", 1)
    assert [effect["state"] for effect in whole["effects"]] == ["done"]
    assert whole["documents"][0]["result"] == {"sent": True}
    whole = console("job", jobs["stale"], "--json").json
    assert [incident["what"] for incident in whole["incidents"]] == ["lease_lapsed"]
    text = console("job", jobs["failed"]).out
    assert "no such address" in text and "documents" in text and "\neffects" not in text


def test_nothing_in_a_job_can_steer_the_terminal(
    standing: Standing, console: Console
) -> None:
    text = console("job", standing[1]["ready"]).out
    assert "\x1b" not in text and r"ann\u001b[31m" in text


def test_verbs_do_what_they_say(db: Connection, jobs: dict[str, str], console: Console) -> None:
    assert console("resolve", jobs["held"], "main", "--happened", "no").code == 0
    whole = console("job", jobs["held"], "--json").json
    assert [effect["state"] for effect in whole["effects"]] == ["did not happen"]
    assert whole["incidents"][-1]["detail"] == "main happened: no"
    assert state_of(db, jobs["held"]) == "ready"
    assert console("cancel", jobs["ready"], "--reason", "twice").code == 0
    assert state_of(db, jobs["ready"]) == "cancelled"
    assert console("evict", "w1").code == 0
    assert state_of(db, jobs["running"]) == "expired"
    retried = console("retry", "--failed", "--json").json
    assert retried == [{"job_id": jobs["failed"], "state": "ready"}]
    assert console("pause", "default").out == "paused default\n"
    assert rows(db, "select 1 from taskboard.claim()") == []
    assert console("resume", "default").out == "resumed default\n"
    assert console("limit", "default", "--running", "0").out == "default: running 0\n"
    assert rows(db, "select 1 from taskboard.claim()") == []
    assert console("limit", "default").out == "default: running 0\n"
    assert rows(db, "select 1 from taskboard.claim()") == []
    assert console("limit", "default", "--none").out == "default: no limits\n"
    assert rows(db, "select 1 from taskboard.claim()") == [(1,)]
    assert console("configure", "history", "30 days").out == "configured\n"
    assert rows(db, "select history from taskboard.settings")[0][0].days == 30
    shown = {row["setting"]: row["value"] for row in console("configure", "--json").json}
    assert shown["history"] == "720:00:00" and shown["notify"] == "true" and "one_row" not in shown
    (row,) = console("configure", "lease", "--json").json
    assert row == {"setting": "lease", "value": "00:01:00"}
    assert "no such setting" in console("configure", "colour").err
    assert console("pause", "--schedule", "report").out == "paused\n"
    assert rows(db, "select paused_at is null from taskboard.schedule_list") == [(False,)]
    assert console("unschedule", "report").out == "removed\n"
    assert rows(db, "select from taskboard.schedule_list") == []


def test_of_many_jobs_those_that_can_be_retried_are(
    db: Connection, jobs: dict[str, str], console: Console
) -> None:
    said = console("retry", NOBODY, jobs["running"], jobs["failed"])
    assert said.code == 1 and jobs["failed"] in said.out
    assert f"{NOBODY}: taskboard: no such job\nhint: The id" in said.err
    assert f"{jobs['running']}: taskboard: the job is running" in said.err
    assert state_of(db, jobs["failed"]) == "ready"


def test_limits_are_told_as_they_hold_wherever_somebody_may_look(
    db: Connection, login: Callable[..., str], console: Console
) -> None:
    assert console("limit", "default").out == "default: no limits\n"
    wanted = ["--running", "3", "--starts", "100", "--per", "1m", "--lease", "30s"]
    told = "default: running 3, starts 100 per 1 min, lease 30 s\n"
    assert console("limit", "default", *wanted).out == told
    watcher = login("taskboard_observer")
    assert console("limit", "default", TASKBOARD_DATABASE_URL=watcher).out == told
    shown = console("limit", "default", "--json", TASKBOARD_DATABASE_URL=watcher).json
    assert (shown["max_running"], shown["starts_per"]) == (3, 60)
    # What is not given has no limit, as in SQL.
    assert console("limit", "default", "--starts", "5", "--per", "90s").code == 0
    (row,) = console("queues", "--json").json
    assert (row["queue"], row["kind"], row["max_running"], row["max_starts"]) == (
        "default", None, None, 5)  # fmt: skip
    enqueue(db)
    (row,) = console("queues", "--json").json
    assert (row["kind"], row["ready"], row["starts_per"]) == ("mail", 1, 90)
    assert console("limit", "default", "--none", "--json").json == {"done": True}
    details = rows(db, "select detail from taskboard.incident_list order by id")
    assert details == [
        ("running 3, starts 100 per 00:01:00, lease 00:00:30",), ("starts 5 per 00:01:30",),
        ("no limits",),
    ]  # fmt: skip


def test_a_name_that_nobody_uses_is_remarked_on(db: Connection, console: Console) -> None:
    enqueue(db, queue="hello")
    for command in (["pause"], ["resume"], ["limit"], ["limit", "--running", "3"]):
        said = console(command[0], "hllo", *command[1:])
        assert (said.code, said.err) == (0, "note: no job is or was in a queue hllo\n")
        assert console(command[0], "hello", *command[1:]).err == ""
    assert console("pause", "hllo", "--json").json["queue"] == "hllo"
    shown = {row["queue"]: row["paused"] for row in console("queues", "--json").json}
    assert shown == {"hello": False, "hllo": True}
    said = console("evict", "nosuch")
    assert said.err == "nobody of this name holds a lease; see taskboard workers\n"
    assert "look at their hosts" in console("workers").err


def test_what_retry_and_cancel_leave_as_it_is_is_explained(
    db: Connection, jobs: dict[str, str], console: Console
) -> None:
    held, running, later = (jobs[state] for state in ("held", "running", "scheduled"))
    said = console("retry", held)
    assert (said.code, said.err) == (
        0, f"note: {held} is held: answer it with taskboard resolve {held} main"
        " --happened yes|no\n")  # fmt: skip
    said = console("cancel", running)
    assert said.err == (
        f"note: {running} is asked to stop, at its next renewal; --force does not wait\n")
    assert console("cancel", running, "--force").err == ""
    said = console("cancel", jobs["completed"], jobs["failed"])
    assert said.err == (
        f"note: {jobs['completed']} had ended already: completed\n"
        f"note: {jobs['failed']} had ended already: failed\n")  # fmt: skip
    assert console("retry", jobs["failed"]).err == ""
    said = console("retry", later, jobs["ready"])
    found = re.fullmatch(
        f"note: {later} runs at 2.*; to run it now: (taskboard cancel .*); (taskboard .*)\n",
        said.err)  # fmt: skip
    assert found
    for command in found.groups():
        said = console(*command.split()[1:])
        assert (said.code, said.err) == (0, "")
    assert state_of(db, later) == "ready"


MISTAKES: list[tuple[str, int, str]] = [
    ("jobs --state lost", 2, "invalid choice: 'lost'"),
    ("jobs --limit 0", 2, "give a number from 1 to 100000"),
    ("job 42", 2, "'42' is no job's id; see taskboard jobs"),
    (f"job {NOBODY}", 1, "no such job: the id is wrong, or its history has been pruned"),
    (f"cancel {NOBODY}", 1, "no such job\nhint: The id is wrong"),
    ("cancel", 2, "the following arguments are required: ID"),
    ("retry", 2, "retry which jobs?\nhint: name their ids, or say --failed"),
    (f"retry {NOBODY} --failed", 2, "--failed takes no ids\nhint: "),
    (f"retry {NOBODY} --queue mails", 2, "retry which jobs?"),
    ("resolve HELD main", 2, "the following arguments are required: --happened"),
    ("resolve HELD main --happened maybe", 2, "say yes or no"),
    ("resolve HELD second --happened yes", 1, "not held for this step\nhint: It is held for the"),
    ("resolve HELD No! --happened yes", 2, "hint: "),
    ("retry RUNNING", 1, "the job is running\nhint: Cancel it first"),
    ("pause mails --schedule report", 2, "pause a queue or a schedule?"),
    ("pause --schedule nothing", 1, "there is no such schedule"),
    ("unschedule nothing", 1, "there is no such schedule"),
    ("limit mails --starts 5", 2, "max_starts and starts_per go together\nhint: For 100 starts"),
    ("limit mails --starts 5 --per soon", 2, "'soon' is no duration: write 90s"),
    ("limit mails --none --running 3", 2, "limits, or none?\nhint: leave --none out"),
    ("limit mails --running -1", 2, "a limit is negative\nhint: "),
    ("schedule x 30~2~*~* mail", 2, "it has five fields\nhint: a rule is 'minute hour day"),
    ("schedule x 61~2~*~*~* mail", 2, "bad minute\nhint: "),
    ("schedule x 0~0~31~2~* mail", 2, "bad day-of-month\nhint: "),
    ("schedule x 0~0~*~*~* mail --time-zone Mars/Olympus", 2, "is not known here\nhint: "),
    ("schedule x 0~0~*~*~* mail {", 2, "the payload is not JSON: "),
    ("schedule x 0~0~*~*~* mail {'a':1}", 2, "hint: in the shell, put the payload in single"),
    ("schedule x 0~0~*~*~* mail {\"a\":\"\\u0000\"}", 2, "PostgreSQL keeps no \\u0000 in JSON"),
    ("enqueue mail {\"a\":\"\\u0000\"}", 2, "PostgreSQL keeps no \\u0000 in JSON"),
    ("enqueue mail {a:1}", 2, "hint: in the shell, put the payload in single quotes"),
    ("configure colour red", 2, "no such setting\nhint: Settings: backoff, "),
    ("configure history long", 2, "not a value for history\nhint: Counts and durations are"
     " positive, durations like 90 s, 36 hours or 30 days;"),
    ("enqueue mail --max-attempts 0", 2, "max_attempts is out of bounds\nhint: "),
    ("pause --schedule report --reason fire", 2, "no reason is kept of a schedule\nhint: "),
    ("prune --keep -1d", 2, "expected one argument"),
    ("enqueue mail {", 2, "the payload is not JSON"),
    ("frobnicate", 2, "invalid choice: 'frobnicate'"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "code", "text"), MISTAKES, ids=[m[0] for m in MISTAKES])
def test_a_mistake_is_told_in_a_line_with_a_hint(
    command: str, code: int, text: str, standing: Standing, console: Console
) -> None:
    said = console(*words(command, standing[1]))
    assert (said.code, said.out) == (code, "") and text in said.err


def test_who_may_not_is_told_which_role_would(
    jobs: dict[str, str], login: Callable[..., str], console: Console
) -> None:
    watcher = login("taskboard_observer")
    assert console("queues", TASKBOARD_DATABASE_URL=watcher).code == 0
    whole = console("job", jobs["failed"], "--json", TASKBOARD_DATABASE_URL=watcher).json
    assert whole["state"] == "failed" and whole["documents"] is None
    text = console("job", jobs["failed"], TASKBOARD_DATABASE_URL=watcher).out
    assert "documents: not for console_" in text and "no such address" not in text
    said = console("cancel", jobs["ready"], TASKBOARD_DATABASE_URL=watcher)
    assert (said.code, said.out) == (1, "")
    assert "permission denied" in said.err and "hint: grant taskboard_operator to" in said.err


DENIED = [
    "pause", "pause mails --json", "resume", "resume --json", "pause --schedule report",
    "limit mails --running 3", "configure history 30~days", "unschedule report", "evict w1",
    "retry --failed", "cancel READY RUNNING", "schedule x 0~0~*~*~* mail", "prune", "enqueue mail",
    "enqueue mail - --lines", "upcoming", "upcoming --json", "uninstall --yes",
]  # fmt: skip


@pytest.mark.parametrize("command", DENIED)
def test_a_login_without_rights_is_told_who_may(
    command: str, standing: Standing, console: Console
) -> None:
    dsn, jobs = standing
    name = f"console_stranger_{os.getpid()}"
    with session(dsn) as db:
        db.execute(f"create role {name} login password 'secret'")
        try:
            stranger = make_conninfo(dsn, user=name, password="secret")
            said = console(*words(command, jobs), stdin=b"{}", TASKBOARD_DATABASE_URL=stranger)
        finally:
            db.execute(f"drop role {name}")
    role = {"enqueue": "producer", "upcoming": "observer"}.get(command.split()[0], "operator")
    hint = f'grant taskboard_{role} to "{name}"'
    if command.startswith("uninstall"):
        hint = "only the owner of the schema taskboard"
    assert said.code == 1 and said.out in ("", "0 jobs enqueued\n")
    assert re.match(r"taskboard: (permission denied|must be owner)", said.err)
    assert f"\nhint: {hint}" in said.err


def test_a_database_without_taskboard_is_told_from_one_that_is_away(
    empty_dsn: str, console: Console
) -> None:
    said = console("jobs", TASKBOARD_DATABASE_URL=empty_dsn)
    assert (said.code, "hint: run: taskboard migrate" in said.err) == (1, True)
    said = console("jobs", TASKBOARD_DATABASE_URL="postgresql://ann@127.0.0.1:1/shop")
    assert said.code == 1 and said.err.startswith("taskboard: connection failed")
    assert "hint: check host, user, password and database in TASKBOARD_DATABASE_URL" in said.err
    for command in ("migrate", "enqueue mail", "queues", "upcoming", "uninstall --yes"):
        for change in ({"dbname": "nowhere"}, {"user": "nobody"}, {"host": "no.invalid"}):
            wrong = make_conninfo(empty_dsn, **change)
            said = console(*command.split(), TASKBOARD_DATABASE_URL=wrong)
            assert said.code == 1 and "hint: check host, user, password" in said.err, said
    said = console("jobs", TASKBOARD_DATABASE_URL="postgresql://%zz")
    assert said.code == 2 and "hint: write postgresql://" in said.err


def test_the_command_alone_prints_its_help(console: Console) -> None:
    said = console()
    assert (said.code, said.err) == (2, "") and said.out == console("--help").out


def test_help_has_an_example_of_each_command(console: Console) -> None:
    whole = console("--help").out
    names = re.findall(r"^    ([a-z]+)\b", whole, re.M)
    assert {each.name for each in VERBS} | {"run", "migrate", "demo", "psql", "enqueue"} == {*names}
    for name in names:
        said = console(name, "--help")
        assert said.code == 0 and re.search(rf"example:\n  (\w+=\S+ )?taskboard {name}", said.out)
        # psql has its own way, and the demo is a play.
        if name not in ("psql", "demo"):
            assert "--json" in said.out and "--show-sql" in said.out, name
    assert "exit codes:" in whole and "NO_COLOR" in whole and "examples:" in whole


def test_colours_are_for_terminals_without_no_color(
    standing: Standing, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    from taskboard.console import output

    assert "\x1b" not in console("jobs").out
    monkeypatch.setattr(output, "colourful", lambda stream: True)
    assert "\x1b[31mfailed\x1b[0m" in console("jobs").out
    monkeypatch.undo()

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert output.colourful(Terminal()) and not output.colourful(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not output.colourful(Terminal())


def test_a_reader_that_has_seen_enough_is_no_error(standing: Standing) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m taskboard jobs | head -1; exit ${{PIPESTATUS[0]}}"],
        env={"TASKBOARD_DATABASE_URL": standing[0], "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.startswith("job_id") and done.stderr == ""
