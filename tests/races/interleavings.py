"""Every order of the steps of some sessions, played on a real server, and judged by its history.

Like PostgreSQL's isolation tester, but what is expected is no text: the calls of each order are
written down, and there must be an order of their effects that keeps the promises (faults/rules.py).
A step that waits for a lock is seen to wait; the session goes on with its next step when it is let.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import UUID

import psycopg

from faults.history import History
from faults.keys import Keyed, Shared
from faults.rules import Op, Row
from races.sessions import PATIENCE, Session

WAITING = (
    "select cardinality(pg_blocking_pids(%s)) > 0"
    " or exists (select from pg_stat_activity where pid = %s and wait_event = 'PgSleep')"
)


class Call(NamedTuple):
    """A verb with its arguments; what stands for a job or a token is looked up when it is made."""

    verb: str
    arguments: Mapping[str, Any]


Step = str | Call  # begin, commit, rollback, or any statement; or a call


def call(verb: str, **arguments: Any) -> Call:
    return Call(verb, arguments)


@dataclass(slots=True)
class Play:
    """One order of steps. `names` are jobs and tokens by the name that steps call them."""

    sessions: Mapping[str, Session]
    names: dict[str, Any] = field(default_factory=dict)
    history: History = field(default_factory=History)
    answers: dict[str, list[Any]] = field(default_factory=dict)  # by session and number
    waited: Counter[str] = field(default_factory=Counter)
    open: dict[str, list[tuple[Call, float, list[Any]]]] = field(default_factory=dict)

    def run(self, order: Sequence[str], scripts: Mapping[str, Sequence[Step]]) -> None:
        """Play steps in this order of their sessions; who waits does what it could not do later."""
        left = {name: list(steps) for name, steps in scripts.items()}
        running: dict[str, Future[None]] = {}
        due = list(order)
        while due or running:
            ready = next((name for name in due if name not in running), None)
            if ready is None:
                done, _ = wait(running.values(), PATIENCE, "FIRST_COMPLETED")
                assert done, f"{sorted(running)} wait for each other: {' '.join(order)}"
            else:
                due.remove(ready)
                session = self.sessions[ready]
                running[ready] = session.thread.submit(self.step, ready, left[ready].pop(0))
            for name in list(running):
                if not self._waits(name, running[name]):
                    running.pop(name).result()

    def _waits(self, name: str, future: Future[None]) -> bool:
        """Tell whether a step waits for another session; false once it has ended."""
        session = self.sessions[name]
        pid = session.conn.info.backend_pid
        until = time.monotonic() + PATIENCE
        while not wait([future], 0.002).done:
            assert time.monotonic() < until, f"{name} neither ended nor was seen to wait"
            if session.observer.execute(WAITING, (pid, pid)).fetchone() == (True,):
                self.waited[name] += 1
                return True
        return False

    def step(self, name: str, step: Step) -> None:
        """Make one step; what a transaction did counts from its commit."""
        session, began = self.sessions[name], time.time()
        if isinstance(step, str):
            if step == "begin":
                self.open[name] = []
            session.sql(step)
            for made, at, found in self.open.pop(name, []) if step == "commit" else ():
                self.note(made, at, time.time(), found)
            if step == "rollback":
                self.open.pop(name, None)
            return
        made = Call(step.verb, {key: self.look_up(value) for key, value in step.arguments.items()})
        told = self.answers.setdefault(name, [])
        try:
            found = session.call(made.verb, **made.arguments)
        except psycopg.Error as exc:
            told.append(exc.sqlstate)
            self.open.get(name, []).clear()
            return
        told.append(found)
        if name in self.open:
            self.open[name].append((made, began, found))
        else:
            self.note(made, began, time.time(), found)
        if made.verb == "claim" and found:
            self.names[f"token of {name}"] = found[0].lease_token

    def look_up(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.look_up(each) for each in value]
        if isinstance(value, str) and value.startswith("token of"):
            return self.names.get(value, UUID(int=0))
        return self.names.get(value, value) if isinstance(value, str) else value

    def note(self, made: Call, began: float, ended: float, found: list[Any]) -> None:
        """Write a call down as calls about single jobs."""
        add, arguments = self.history.add, made.arguments
        match made.verb:
            case "enqueue":
                ((job_id, created),) = found
                keys = arguments.get("unique_key"), arguments.get("serial_key")
                if created:
                    asked = "hold" if arguments.get("on_unknown") == "hold" else ""
                    self.history.keys.append(Keyed(job_id, began, ended, *keys))
                    add(job_id, Op("enqueue", began, ended, asked=asked))
                else:
                    self.history.shared.append(Shared(keys[0], job_id, began, ended))
            case "claim":
                for job in found:
                    add(job.job_id, Op("claim", began, ended, job.lease_token, job, worker="w"))
            case "complete_many" | "renew_many":
                rows = {row.job_id: row for row in found}
                pairs = zip(arguments["job_ids"], arguments["lease_tokens"], strict=True)
                for job_id, token in pairs:
                    verb = made.verb.removesuffix("_many")
                    add(job_id, Op(verb, began, ended, token, rows.get(job_id)))
            case "evict":
                for row in (row for row in found if row.state != "busy"):
                    add(row.job_id, Op("evict", began, ended, None, row, worker="w"))
            case "schedule" | "advance_schedule":
                pass
            case _:
                row = found[0] if found else None
                asked = "force" if arguments.get("force") else ""
                asked = "permanent" if arguments.get("permanent") else asked
                if made.verb == "lease_status":
                    row = Row(status=row.lease_status)
                happened = arguments.get("happened", True)
                token = arguments.get("lease_token")
                op = Op(made.verb, began, ended, token, row, happened, asked)
                add(arguments["job_id"], op)

    def look(self, session: Session) -> None:
        """The last look at what has become of the jobs."""
        now = time.time()
        for row in session.sql("select id, state, attempt, lease_token from taskboard.history"):
            self.history.add(row.id, Op("job", now, now, None, row))
        lost = set(self.history.ops) - {
            row.id for row in session.sql(
                "select id from taskboard.jobs union all select id from taskboard.history")
        }  # fmt: skip
        assert not lost, f"gone: {lost}"


def orders(scripts: Mapping[str, Sequence[Step]]) -> Iterator[tuple[str, ...]]:
    """Every order of the steps of sessions; within a session they stay in order."""

    def following(left: Mapping[str, int]) -> Iterator[tuple[str, ...]]:
        if not any(left.values()):
            yield ()
        for name, count in left.items():
            if count:
                for rest in following({**left, name: count - 1}):
                    yield (name, *rest)

    return following({name: len(steps) for name, steps in scripts.items()})


@dataclass(frozen=True, slots=True)
class Scenario:
    """`before` is played first, by A; `after` last, by A, when all others have ended."""

    before: Sequence[Step]
    scripts: Mapping[str, Sequence[Step]]
    after: Sequence[Step] = ()
    check: Callable[[Play], None] = lambda play: None


def play_all(
    scenario: Scenario, sessions: Mapping[str, Session], empty: Callable[[], None]
) -> tuple[int, int, list[str]]:
    """Play every order: how many there are, in how many somebody waited, and what was wrong."""
    count = waited = 0
    wrong: list[str] = []
    for order in orders(scenario.scripts):
        empty()
        play, a = Play(sessions), sessions["A"]
        for number, step in enumerate(scenario.before, 1):
            play.step("A", step)
            if isinstance(step, Call) and step.verb == "enqueue":
                play.names[f"job {number}"] = play.answers["A"][-1][0].job_id
            if isinstance(step, Call) and step.verb == "claim":
                tokens = {job.job_id: job.lease_token for job in play.answers["A"][-1]}
                play.names |= {
                    f"token {name.split()[1]}": tokens.get(job_id)
                    for name, job_id in play.names.items() if name.startswith("job")
                }  # fmt: skip
        play.answers.clear()
        said = " ".join(order)
        try:
            play.run(order, scenario.scripts)
            for step in scenario.after:
                play.step("A", step)
            play.look(a)
            scenario.check(play)
        except AssertionError as exc:
            wrong.append(f"{said}: {exc}")
        wrong += [f"{said}: {text}" for text in play.history.violations()]
        for session in sessions.values():
            session.conn.rollback()
        count += 1
        waited += bool(play.waited)
    return count, waited, wrong
