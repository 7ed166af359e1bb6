"""All orders of the steps of sessions about one job, one key, one batch, one schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import pytest

from faults.broken import broken
from races.interleavings import Play, Scenario, Step, call, orders, play_all
from races.sessions import Session
from support import Connection, add_empty

Named = Callable[[str], Session]

OLD = {"job_id": "job 1", "lease_token": "token of A"}
NEW = {"job_id": "job 1", "lease_token": "token of B"}
REPEATED = call("complete", **OLD), call("complete", **NEW)
ADD = call("enqueue", kind="k")
CLAIM = call("claim", worker="w")
EXPIRE = call("evict", worker="w")
LOCK = "select from taskboard.jobs for update"
BATCH = {"job_ids": ["job 1", "job 2"], "lease_tokens": ["token 1", "token 2"]}
BACKWARDS = {key: value[::-1] for key, value in BATCH.items()}
DUE = "2026-01-01 00:00Z"
TWO_LEASED = (ADD, ADD, call("claim", worker="w", max_jobs=2))


def ending(how: str, *steps: Step) -> tuple[Step, ...]:
    return ("begin", *steps, how)


def one_job_is_left_or_done(play: Play) -> None:
    found = play.sessions["A"].sql(
        "select id from taskboard.jobs union all select id from taskboard.history"
    )
    assert len(found) == 1, f"{len(found)} live and finished jobs"


def nothing_is_stuck(play: Play) -> None:
    """What is left can be claimed and completed, job after job."""
    a = play.sessions["A"]
    a.call("evict", worker="w")
    while found := a.call("claim", max_jobs=1):
        a.call("complete", job_id=found[0].job_id, lease_token=found[0].lease_token)
    assert a.sql("select id from taskboard.jobs") == []


def nobody_got_an_error(play: Play) -> None:
    codes = [told for answers in play.answers.values() for told in answers if isinstance(told, str)]
    assert codes == []


def the_second_job_was_renewed_without_a_wait(play: Play) -> None:
    nobody_got_an_error(play)
    assert play.waited["B"] == 0
    for found in play.answers["B"]:
        told = {row.job_id: row.outcome for row in found}
        assert told[play.names["job 2"]] == "renewed"


def one_occurrence(play: Play) -> None:
    nobody_got_an_error(play)
    assert len(play.sessions["A"].sql("select id from taskboard.jobs")) == 1


def no_occurrence(play: Play) -> None:
    nobody_got_an_error(play)
    assert play.sessions["A"].sql("select id from taskboard.jobs") == []


def scenarios() -> dict[str, Scenario]:
    found = {}
    for how in ("commit", "rollback"):
        found[f"claim, claim, {how}"] = Scenario(
            [ADD], {"A": ending(how, CLAIM), "B": ending("commit", CLAIM)},
            [EXPIRE, CLAIM], one_job_is_left_or_done)  # fmt: skip
        found[f"claim, complete, {how}"] = Scenario(
            [ADD, CLAIM, EXPIRE],
            {"A": ending(how, call("complete", **OLD)),
             "B": ending("commit", CLAIM, call("complete", **NEW))},
            REPEATED, one_job_is_left_or_done)  # fmt: skip
        found[f"complete in a transaction, renew_many, {how}"] = Scenario(
            TWO_LEASED,
            {"A": ending(how, call("complete", job_id="job 1", lease_token="token 1")),
             "B": (call("renew_many", **BATCH), call("renew_many", **BACKWARDS))},
            [], the_second_job_was_renewed_without_a_wait)  # fmt: skip
        found[f"complete_many in opposite orders, {how}"] = Scenario(
            TWO_LEASED,
            {"A": ending(how, call("complete_many", **BATCH)),
             "B": ending("commit", call("complete_many", **BACKWARDS))},
            [], nobody_got_an_error)  # fmt: skip
        found[f"evidence, hold, {how}"] = Scenario(
            [call("enqueue", kind="k", on_unknown="hold"), CLAIM, call("begin_effect", **OLD),
             EXPIRE],
            {"A": ending(how, call("end_effect", **OLD)),
             "B": ending("commit", CLAIM, call("begin_effect", **NEW))},
            [call("resolve", job_id="job 1", step="main", happened=False), EXPIRE, CLAIM,
             call("begin_effect", **OLD)],
        )  # fmt: skip
        found[f"retry, cancel, claim, {how}"] = Scenario(
            [ADD, CLAIM, call("complete", **OLD)],
            {"A": ending(how, call("retry", job_id="job 1")),
             "B": (CLAIM, call("complete", **NEW)),
             "C": (call("cancel", job_id="job 1", force=True),)},
            REPEATED, one_job_is_left_or_done)  # fmt: skip
    found["expire, claim, complete"] = Scenario(
        [ADD, CLAIM],
        {"A": (call("complete", **OLD), call("complete", **OLD)), "B": ending("commit", CLAIM),
         "C": (EXPIRE,)},
        REPEATED, one_job_is_left_or_done)  # fmt: skip
    found["renew, lock, expire, claim"] = Scenario(
        [ADD, CLAIM],
        {"A": (call("renew", **OLD),), "B": (CLAIM,), "C": (EXPIRE,), "D": ending("commit", LOCK)},
        [call("renew", **OLD), call("renew", **NEW)], one_job_is_left_or_done)  # fmt: skip
    for one, other in product(("commit", "rollback"), repeat=2):
        unique = call("enqueue", kind="k", unique_key="u")
        found[f"enqueue, enqueue with one unique key, {one}, {other}"] = Scenario(
            [], {"A": ending(one, unique), "B": ending(other, unique)}, [unique],
            one_job_is_left_or_done)  # fmt: skip
        found[f"complete, enqueue with one unique key, {one}, {other}"] = Scenario(
            [unique, CLAIM],
            {"A": ending(one, call("complete", **OLD)), "B": ending(other, unique)}, [unique],
            nobody_got_an_error)  # fmt: skip
        serial = call("enqueue", kind="k", serial_key="s")
        found[f"hand-over, enqueue with one serial key, {one}, {other}"] = Scenario(
            [serial, CLAIM],
            {"A": ending(one, call("complete", **OLD)), "B": ending(other, serial)}, [CLAIM],
            nothing_is_stuck)  # fmt: skip
        found[f"cancel of the next, hand-over of a serial key, {one}, {other}"] = Scenario(
            [serial, serial, serial, CLAIM],
            {"A": ending(one, call("complete", **OLD)),
             "B": ending(other, call("cancel", job_id="job 2"))},
            [CLAIM], nothing_is_stuck)  # fmt: skip
        tick = call("advance_schedule", name="x", due_at=DUE, next_at="2026-01-02 00:00Z")
        found[f"scheduler, scheduler, {one}, {other}"] = Scenario(
            [call("schedule", name="x", cron="0 0 * * *", kind="k"),
             call("advance_schedule", name="x", due_at=None, next_at=DUE)],
            {"A": ending(one, tick), "B": ending(other, tick)}, [],
            one_occurrence if "commit" in (one, other) else no_occurrence)  # fmt: skip
    return found


SCENARIOS = scenarios()


@pytest.fixture
def stage(named: Named, db: Connection) -> tuple[Mapping[str, Session], Callable[[], None]]:
    add_empty(db)
    sessions = {name: named(name) for name in "ABCD"}

    def empty() -> None:
        db.execute("call public.empty()")

    return sessions, empty


def is_wide(what: str) -> bool:
    """What the default suite can do without: orders like those of another scenario."""
    second = what.endswith((", commit, rollback", ", rollback, rollback"))
    alike = ("complete, rollback", "orders, rollback", "hold, rollback", "claim, rollback")
    return second or (what.endswith(alike) and what != "claim, claim, rollback")


@pytest.mark.parametrize(
    "what",
    [pytest.param(name, marks=pytest.mark.wide if is_wide(name) else ()) for name in SCENARIOS],
)
def test_every_order_keeps_the_promises(
    what: str, stage: tuple[Mapping[str, Session], Callable[[], None]]
) -> None:
    count, waited, wrong = play_all(SCENARIOS[what], *stage)
    print(f"{what}: {count} orders, in {waited} somebody waited")
    assert wrong == []
    steps = [len(script) for script in SCENARIOS[what].scripts.values()]
    assert count == math.factorial(sum(steps)) // math.prod(map(math.factorial, steps))


@pytest.mark.parametrize(
    ("variant", "what"),
    [
        ("serial hand-over without the key's lock",
         "hand-over, enqueue with one serial key, commit, commit"),
        ("two runners take the same occurrence", "scheduler, scheduler, commit, commit"),
        *(pytest.param(*case, marks=pytest.mark.wide) for case in (
            ("look at the token, then complete by id", "expire, claim, complete"),
            ("completion not repeatable", "expire, claim, complete"),
        )),
    ],
)  # fmt: skip
def test_some_order_shows_what_is_wrong_with(
    variant: str, what: str, db: Connection,
    stage: tuple[Mapping[str, Session], Callable[[], None]],
) -> None:  # fmt: skip
    with db.transaction():
        db.execute("set local search_path = pg_catalog, pg_temp")
        db.execute((broken(variant).text or "").encode())
    _, _, wrong = play_all(SCENARIOS[what], *stage)
    assert wrong


def test_orders_are_all_there_are() -> None:
    steps: dict[str, Any] = {"A": ["1", "2"], "B": ["3"]}
    assert set(orders(steps)) == {("A", "A", "B"), ("A", "B", "A"), ("B", "A", "A")}
