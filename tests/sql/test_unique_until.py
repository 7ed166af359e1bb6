"""`unique_until => 'claim'`: one job waits and one runs, so that no event is lost while it runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

import pytest
from verbs import (
    Db,
    Row,
    blocked,
    call,
    claim,
    claim_one,
    ended,
    enqueue,
    leased,
    own,
    pairs,
    query,
    refuses,
    row_of,
    state,
    states,
)

from support import expire

pytestmark = pytest.mark.rows_only

Connect = Callable[..., Db]


def event(db: Db, key: str = "k", **options: Any) -> tuple[UUID, bool]:
    """An event that must lead to a run after it; the job that will run, and whether it is new."""
    (row,) = call(db, "enqueue", kind="mail", unique_key=key, unique_until="claim", **options)
    return row["job_id"], row["created"]


def test_events_that_come_while_a_job_waits_lead_to_one_run(db: Db) -> None:
    first, created = event(db)
    assert created
    assert [event(db) for _ in range(3)] == [(first, False)] * 3
    assert len(claim(db, max_jobs=10)) == 1


def test_an_event_that_comes_while_the_job_runs_leads_to_one_more_run(db: Db) -> None:
    first, _ = event(db)
    assert claim_one(db)["job_id"] == first
    second, created = event(db)
    assert created and second != first
    assert [event(db) for _ in range(3)] == [(second, False)] * 3
    assert states(db, first, second) == ["running", "ready"]


def test_with_a_serial_key_the_other_run_begins_when_this_one_has_ended(db: Db) -> None:
    first, _ = event(db, serial_key="k")
    job = claim_one(db)
    second, _ = event(db, serial_key="k")
    assert event(db, serial_key="k") == (second, False)
    assert states(db, first, second) == ["running", "blocked"]
    assert claim(db) == []
    call(db, "complete", **own(job))
    assert claim_one(db)["job_id"] == second
    assert event(db, serial_key="k")[1]


@pytest.mark.parametrize("verb", ["complete", "fail", "release", "lapse", "cancel"])
def test_however_the_first_run_ends_the_waiting_job_keeps_the_key(db: Db, verb: str) -> None:
    first, _ = event(db, max_lost_leases=9)
    job = claim_one(db)
    second, _ = event(db, delay="1 h")
    if verb == "lapse":
        expire(db, first)
    elif verb == "cancel":
        call(db, "cancel", job_id=first, force=True)
    else:
        call(db, verb, **own(job), **({"permanent": True} if verb == "fail" else {}))
    assert event(db) == (second, False)
    # A claim of the first again, if it lives, must not free what is not its own.
    for again in claim(db):
        assert again["job_id"] == first
        call(db, "complete", **own(again))
    assert event(db) == (second, False)
    assert state(db, second) == "scheduled"


@pytest.mark.parametrize("verb", ["fail", "release", "lapse"])
def test_a_job_that_was_claimed_and_waits_again_does_not_hold_the_key(db: Db, verb: str) -> None:
    first, _ = event(db, max_lost_leases=9)
    job = claim_one(db)
    if verb == "lapse":
        expire(db, first)
    else:
        call(db, verb, **own(job), **({"retry_in": "0"} if verb == "fail" else {}))
    second, created = event(db)
    assert created and second != first
    assert {row["job_id"] for row in claim(db, max_jobs=10)} == {first, second}


def test_the_key_is_free_again_when_the_waiting_job_is_cancelled(db: Db) -> None:
    first, _ = event(db)
    call(db, "cancel", job_id=first)
    second, created = event(db)
    assert created and second != first


def test_a_waiting_job_that_is_brought_back_still_frees_its_key_when_claimed(db: Db) -> None:
    first, _ = event(db)
    call(db, "cancel", job_id=first)
    call(db, "retry", job_id=first)
    assert event(db) == (first, False)
    assert claim_one(db)["job_id"] == first
    assert event(db)[1], "an event that comes while it runs must lead to another run"


def test_until_the_end_is_the_default_and_the_two_keep_out_of_each_others_way(db: Db) -> None:
    holder = enqueue(db, unique_key="k")
    assert event(db) == (holder, False)
    job = claim_one(db)
    assert event(db) == (holder, False), "the holder said until its end"
    call(db, "complete", **own(job))
    waiting, created = event(db)
    assert created
    (row,) = call(db, "enqueue", kind="mail", unique_key="k")
    assert row == {"job_id": waiting, "created": False}


def test_a_batch_of_events_frees_each_key_on_its_own(db: Db) -> None:
    rows = call(
        db, "enqueue_many", kind="mail", payloads=[{}] * 4, unique_keys=["a", "b", "a", None],
        unique_until="claim",
    )  # fmt: skip
    assert [row["created"] for row in rows] == [True, True, False, True]
    jobs = claim(db, max_jobs=10)
    assert len(jobs) == 3
    assert query(db, "select 1 from taskboard.unique_keys") == []
    assert event(db, "a")[1] and event(db, "b")[1]
    call(db, "complete_many", **pairs(*jobs))
    assert not event(db, "a")[1] and not event(db, "b")[1]


def test_the_history_of_a_claimed_job_names_no_key_that_it_does_not_hold(db: Db) -> None:
    first, _ = event(db)
    call(db, "complete", **own(claim_one(db)))
    assert ended(db, first)["unique_key"] is None


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_an_event_beside_a_claim_waits_for_its_end_and_is_never_lost(
    db: Db, connect: Connect, end: str
) -> None:
    first, _ = event(db)
    worker, producer = connect("worker"), connect("producer")
    query(worker, "begin")
    assert claim_one(worker)["job_id"] == first
    arguments = {"kind": "mail", "unique_key": "k", "unique_until": "claim"}
    with blocked(db, producer, "enqueue", **arguments) as answer:
        query(worker, end)
        (row,) = answer.result()
    if end == "commit":
        assert row["created"] and states(db, first, row["job_id"]) == ["running", "ready"]
    else:
        assert row == {"job_id": first, "created": False} and state(db, first) == "ready"


def test_an_event_that_commits_while_the_job_runs_leads_to_one_more_run(
    db: Db, connect: Connect
) -> None:
    first, _ = event(db)
    producer = connect("producer")
    query(producer, "begin")
    assert event(producer) == (first, False)
    # The claim must not wait. What runs now cannot see what the producer has written.
    query(db, "set statement_timeout = '2 s'")
    for job in claim(db):
        call(db, "complete", **own(job))
    query(producer, "commit")
    assert len(claim(db)) == 1


def test_every_event_is_followed_by_a_run_however_many_come(db: Db, connect: Connect) -> None:
    """The payload of a run tells what it saw: a counter that events raise before they enqueue."""
    for statement in (
        "create table public.seen (n integer)",
        "create sequence public.events",
    ):
        query(db, statement)
    try:

        def produce(session: Db) -> None:
            for _ in range(40):
                query(session, "select nextval('public.events')")
                event(session, serial_key="k")

        def work(session: Db) -> None:
            while not done.done() or query(session, "select 1 from taskboard.jobs limit 1"):
                for job in claim(session, lease="60 s"):
                    query(
                        session,
                        "insert into public.seen select last_value from public.events",
                    )
                    call(session, "complete", **own(job))

        sessions: list[Db] = [connect(f"s{n}") for n in range(6)]
        with ThreadPoolExecutor(8) as threads:
            producing = [threads.submit(produce, session) for session in sessions[:3]]
            done = threads.submit(lambda: [each.result() for each in producing])
            for working in [threads.submit(work, session) for session in sessions[3:]]:
                working.result()
        (row,) = query(db, "select max(n) as last, count(*) as runs from public.seen")
        assert row["last"] == 120 and 1 <= row["runs"] <= 120
    finally:
        query(db, "drop table public.seen")
        query(db, "drop sequence public.events")


def test_absurd_wishes_are_refused(db: Db) -> None:
    wrong: list[tuple[Row, str]] = [
        ({"unique_until": None}, "22023"),
        ({"unique_until": ""}, "22023"),
        ({"unique_until": "start"}, "22023"),
        ({"unique_until": "claim", "unique_for": "1 h"}, "22023"),
    ]
    refuses(db, "enqueue", {"kind": "mail", "unique_key": "k"}, wrong)
    many: Row = {"kind": "mail", "payloads": [{}], "unique_keys": ["k"]}
    refuses(db, "enqueue_many", many, wrong)


def test_without_a_key_the_wish_changes_nothing(db: Db) -> None:
    job = leased(db, unique_until="claim")
    assert row_of(db, job["job_id"])["unique_key"] is None
    assert len(call(db, "complete", **own(job))) == 1
