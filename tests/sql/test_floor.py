"""The scan floor: a session's note of where a lane begins hides no job, and keeps claims short.

A floor goes wrong quietly: the job stays in the table, and one session never sees it again. So the
tests ask *long-lived* sessions that have raised their floors, and those that look for a hidden job
are tried on variants of the function that raise floors too early.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any
from uuid import UUID, uuid4

import pytest
from verbs import (
    Db,
    Row,
    call,
    claim,
    claim_one,
    clock,
    enqueue,
    leased,
    own,
    pairs,
    query,
    set_default,
)

from support import CARELESS, expire
from taskboard.migrate import migrate

rows_only = pytest.mark.rows_only

Connect = Callable[..., Db]
Act = Callable[[Db], UUID]

GAP = 0.022
"""Seconds between two claims of which each looks at the floors, in the databases of these tests."""

# Floors that rise too early. The first asks nobody. The second asks whether anybody has ended who
# began after us, instead of whether all have who began before. The third takes "one above the last
# that ended" for its own id: somebody who still runs may lie at or above that.
BROKEN: dict[str, list[tuple[str, str]]] = {
    "adopted at once": [
        ("pg_snapshot_xmin(pg_current_snapshot())::text::bigint >= o.by as adopt", "true as adopt"),
        ("o.by <> 0 and ", ""),
        ("case when l.adopt then l.candidate else", "case when l.adopt then l.seen else"),
        ("when l.adopt then l.candidate_place else", "when l.adopt then l.seen_place else"),
    ],
    "bounded by xmax": [("pg_snapshot_xmin(", "pg_snapshot_xmax(")],
    "xmax for its own id": [
        (
            "v_mine bigint := pg_current_xact_id()::text::bigint",
            "v_mine bigint := pg_snapshot_xmax(pg_current_snapshot())::text::bigint",
        )
    ],
}


def rewrite(db: Db, function: str, changes: list[tuple[str, str]]) -> None:
    """Replace text in a function of the schema; fails when the text is not there once."""
    (row,) = query(
        db, "select pg_get_functiondef(to_regproc(%(name)s)) as text", name=f"taskboard.{function}"
    )
    text: str = row["text"]
    for old, new in changes:
        assert text.count(old) == 1, f"{function} has {text.count(old)} times: {old}"
        text = text.replace(old, new)
    query(db, text)


def lanes(db: Db) -> list[int]:
    return [row["id"] for row in query(db, "select id from taskboard.lanes order by id")]


SLOTS = [f"taskboard.plan_{n}" for n in range(8)]
"""The settings in which a session keeps its plans."""


def hints(session: Db) -> dict[str, list[str]]:
    """What a session remembers: the fields of each plan, by the setting that holds it."""
    found = query(
        session,
        "select name, current_setting(name, true) as hint from unnest(%(names)s::text[]) as name",
        names=SLOTS,
    )
    return {row["name"]: row["hint"].split("/") for row in found if row["hint"]}


def give_hint(session: Db, name: str, text: str) -> None:
    query(session, "select set_config(%(name)s, %(text)s, false)", name=name, text=text)


def numbers(field: str) -> list[float]:
    return [float(number) for number in field.strip("{}").split(",")]


def floors(session: Db) -> dict[int, float]:
    """The floors of a session by lane, in seconds since 1970; 0 is none."""
    return {
        int(lane): floor
        for plan in hints(session).values()
        for lane, floor in zip(numbers(plan[2]), numbers(plan[3]), strict=True)
    }


def floor_age(session: Db) -> float:
    """How many seconds ago the lowest of a session's floors lies; infinite without one."""
    now = clock(session).timestamp()
    known = floors(session)
    return max(now - known[lane] if known.get(lane) else float("inf") for lane in lanes(session))


def ids(jobs: list[Row]) -> list[UUID]:
    return [job["job_id"] for job in jobs]


def poll(session: Db, times: int = 5, **options: Any) -> list[Row]:
    """Claim so many times, each time with a look at the floors; all that it got."""
    found: list[Row] = []
    for _ in range(times):
        time.sleep(GAP)
        found += claim(session, **{"max_jobs": 5} | options)
    return found


@pytest.fixture
def dsn(dsn: str, db_settings: Callable[[str, str], str], request: pytest.FixtureRequest) -> str:
    """A database on a server that can prepare transactions, which one that was named may not."""
    if db_settings(dsn, "max_prepared_transactions") != "0":
        return dsn
    server = request.getfixturevalue("server_factory")(**CARELESS)
    migrate(server.dsn())
    found: str = server.dsn()
    return found


@pytest.fixture
def db(db: Db) -> Db:
    """Where sessions look at the floors every 20 ms and not every 0.1 s, so that they meet more."""
    (row,) = query(db, "select pg_get_functiondef('taskboard.plan_scan'::regproc) as text")
    text = row["text"].replace("'0.1'::text", "'0.02'::text")
    assert "'0.02'::text" in text
    query(db, text)
    return db


@pytest.fixture
def db_settings(connect: Connect) -> Callable[[str, str], str]:
    """Ask a server for a setting."""

    def ask(dsn: str, name: str) -> str:
        (row,) = query(connect("ask", dsn=dsn), "select current_setting(%(n)s) as is", n=name)
        found: str = row["is"]
        return found

    return ask


def raise_floors(session: Db) -> Db:
    """Poll until the floors are close behind; nothing must be ready."""
    until = time.monotonic() + 4
    while floor_age(session) > 0.5:
        assert time.monotonic() < until, "the floors do not rise"
        assert poll(session, 1) == []
    return session


@pytest.fixture
def worker(db: Db, connect: Connect) -> Db:
    """A session whose floors have risen. Nothing notifies, which a prepared transaction may not."""
    set_default(db, "notify", False)
    call(db, "complete", **own(leased(db)))
    return raise_floors(connect("worker"))


# Exact interleavings: somebody takes its transaction id and reads the clock, the worker claims and
# claims, and only then it commits. One for each way in which a job can become claimable.


def by_enqueue(db: Db) -> Act:
    return enqueue


def by_enqueue_with_options(db: Db) -> Act:
    return lambda conn: enqueue(conn, unique_key="u", serial_key="s", run_at="2020-01-01Z")


def by_enqueue_with_a_delay(db: Db) -> Act:
    return lambda conn: enqueue(conn, delay="0.01 s")


def by_enqueue_many(db: Db) -> Act:
    return lambda conn: call(conn, "enqueue_many", kind="mail", payloads=[{}])[0]["job_id"]


def by_enqueue_in_a_savepoint(db: Db) -> Act:
    def act(conn: Db) -> UUID:
        for end in ("rollback to a", "release a"):
            query(conn, "savepoint a")
            job_id = enqueue(conn)
            query(conn, end)
        return job_id

    return act


def by_release(db: Db) -> Act:
    job = leased(db)
    return lambda conn: call(conn, "release", **own(job))[0]["job_id"]


def by_fail(db: Db) -> Act:
    job = leased(db)
    return lambda conn: call(conn, "fail", **own(job), retry_in="0")[0]["job_id"]


def by_a_short_renewal(db: Db) -> Act:
    job = leased(db)
    return lambda conn: call(conn, "renew", **own(job), lease="0.1 s")[0]["job_id"]


def by_a_short_renewal_of_many(db: Db) -> Act:
    job = leased(db)
    return lambda conn: call(conn, "renew_many", **pairs(job), lease="0.1 s")[0]["job_id"]


def by_a_short_claim(db: Db) -> Act:
    def act(conn: Db) -> UUID:
        enqueue(conn)
        job_id: UUID = claim_one(conn, lease="0.1 s")["job_id"]
        return job_id

    return act


def by_evict(db: Db) -> Act:
    leased(db, worker="dead")
    return lambda conn: call(conn, "evict", worker="dead")[0]["job_id"]


def by_retry(db: Db) -> Act:
    job = leased(db)
    call(db, "fail", **own(job), permanent=True)
    return lambda conn: call(conn, "retry", job_id=job["job_id"])[0]["job_id"]


def held(db: Db) -> tuple[Row, Row]:
    """A job that waits for a person; the claims that began and that asked again."""
    first = leased(db, on_unknown="hold")
    call(db, "begin_effect", **own(first))
    expire(db, first["job_id"])
    second = claim_one(db)
    assert call(db, "begin_effect", **own(second))[0]["state"] == "held"
    return first, second


def by_resolve(db: Db) -> Act:
    job = held(db)[0]
    return lambda conn: call(
        conn, "resolve", job_id=job["job_id"], step="main", happened=False
    )[0]["job_id"]  # fmt: skip


def by_evidence(db: Db) -> Act:
    job = held(db)[0]
    return lambda conn: call(conn, "end_effect", **own(job))[0]["job_id"]


def behind(db: Db, **options: Any) -> tuple[Row, UUID]:
    """A running job, and the one that waits behind it for their key."""
    return leased(db, serial_key="s", **options), enqueue(db, serial_key="s")


def handed_over(verb: str, **arguments: Any) -> Callable[[Db], Act]:
    def prepare(db: Db) -> Act:
        first, second = behind(db)

        def act(conn: Db) -> UUID:
            proof = {"job_id": first["job_id"]} if verb == "cancel" else own(first)
            assert len(call(conn, verb, **proof, **arguments)) == 1
            return second

        return act

    return prepare


def by_complete_many(db: Db) -> Act:
    first, second = behind(db)
    return lambda conn: (call(conn, "complete_many", **pairs(first)), second)[1]


def by_the_end_of_an_exhausted_job(db: Db) -> Act:
    first, second = behind(db, max_lost_leases=1)

    def act(conn: Db) -> UUID:
        expire(conn, first["job_id"])
        call(conn, "maintain")
        return second

    return act


def by_a_schedule(db: Db) -> Act:
    call(db, "schedule", name="s", cron="* * * * *", kind="mail")
    due, following = "2020-01-01 00:00Z", "2020-01-01 00:01Z"
    call(db, "advance_schedule", name="s", due_at=None, next_at=due)
    return lambda conn: call(conn, "advance_schedule", name="s", due_at=due, next_at=following)[0][
        "advance_schedule"
    ]


WRITERS: dict[str, Callable[[Db], Act]] = {
    "enqueue": by_enqueue,
    "enqueue with options": by_enqueue_with_options,
    "enqueue with a delay": by_enqueue_with_a_delay,
    "enqueue_many": by_enqueue_many,
    "enqueue in a savepoint": by_enqueue_in_a_savepoint,
    "release": by_release,
    "fail": by_fail,
    "short renewal": by_a_short_renewal,
    "short renewal of many": by_a_short_renewal_of_many,
    "short claim": by_a_short_claim,
    "evict": by_evict,
    "retry": by_retry,
    "resolve": by_resolve,
    "evidence": by_evidence,
    "turn after complete": handed_over("complete"),
    "turn after complete_many": by_complete_many,
    "turn after fail": handed_over("fail", permanent=True),
    "turn after cancel": handed_over("cancel", force=True),
    "turn after exhaustion": by_the_end_of_an_exhausted_job,
    "schedule": by_a_schedule,
}


def late(db: Db, worker: Db, other: Db, writer: str, ending: str = "commit") -> tuple[UUID, bool]:
    """Let a writer commit late; tell the job, and whether the worker still finds it."""
    act = WRITERS[writer](db)
    raise_floors(worker)
    query(other, "begin")
    job_id = act(other)
    began = time.monotonic()
    assert poll(worker, 20 if writer.startswith("short") else 5) == []
    if ending == "prepare":
        gid = str(uuid4())
        query(other, f"prepare transaction '{gid}'")
        assert poll(worker) == []
        query(other, f"commit prepared '{gid}'")
    else:
        query(other, ending)
    time.sleep(max(0.0, 0.11 - (time.monotonic() - began) if writer.startswith("short") else 0.0))
    (row,) = call(worker, "next_claimable_at")
    told = row["next_claimable_at"] is not None and row["next_claimable_at"] <= clock(db)
    found = job_id in ids(poll(worker))
    assert told == found, "next_claimable_at and claim do not agree"
    return job_id, found


@rows_only
@pytest.mark.parametrize("writer", WRITERS)
def test_a_job_that_becomes_claimable_in_a_transaction_that_commits_late_is_found(
    db: Db, worker: Db, connect: Connect, writer: str
) -> None:
    _, found = late(db, worker, connect("writer"), writer)
    assert found


@rows_only
@pytest.mark.parametrize("writer", ["enqueue", "enqueue in a savepoint", "release", "retry"])
def test_a_job_of_a_prepared_transaction_is_found_once_that_commits(
    db: Db, worker: Db, connect: Connect, writer: str
) -> None:
    _, found = late(db, worker, connect("writer"), writer, "prepare")
    assert found


@rows_only
def test_a_producer_with_an_old_transaction_id_hides_nothing(
    db: Db, worker: Db, connect: Connect
) -> None:
    producer, other = connect("producer"), connect("other")
    query(producer, "begin")
    query(producer, "select pg_current_xact_id()")
    assert poll(worker) == []
    early = enqueue(producer)
    assert poll(worker) == []
    between = enqueue(other)
    assert ids(poll(worker)) == [between]
    late = enqueue(producer)
    query(producer, "commit")
    assert set(ids(poll(worker))) == {early, late}


@rows_only
def test_floors_rise_again_once_a_late_transaction_has_ended(
    db: Db, worker: Db, connect: Connect
) -> None:
    producer = connect("producer")
    query(producer, "begin")
    enqueue(producer)
    poll(worker)
    began = time.monotonic()
    time.sleep(0.2)
    poll(worker)
    assert floor_age(worker) > time.monotonic() - began, "somebody older still runs"
    query(producer, "rollback")
    raise_floors(worker)
    poll(worker)
    assert floor_age(worker) < time.monotonic() - began


@rows_only
def test_floors_rise_where_a_queue_is_limited_too(db: Db, worker: Db) -> None:
    call(db, "limit_queue", queue="default", max_running=100, max_starts=1000, starts_per="1 s")
    call(db, "limit_queue", queue="other", max_running=1)
    time.sleep(0.6)
    raise_floors(worker)


# A worker that takes its own claim back. What a session notes in a transaction goes with it, but
# for one case: `prepare transaction` keeps the notes, and the transaction may still be undone.


@rows_only
@pytest.mark.parametrize("end", ["rollback", "rollback to a", "prepare"])
@pytest.mark.parametrize("claims", [1, 3])
def test_a_claim_that_is_undone_hides_nothing_from_its_own_session(
    db: Db, worker: Db, connect: Connect, end: str, claims: int
) -> None:
    producer = connect("producer")
    query(producer, "begin")
    job_id = enqueue(producer)
    # The job comes when the worker has looked, so that its date lies before the candidate.
    assert poll(worker) == []
    query(producer, "commit")
    query(worker, "begin")
    query(worker, "savepoint a")
    assert ids(poll(worker, claims)) == [job_id]
    if end == "prepare":
        gid = str(uuid4())
        query(worker, f"prepare transaction '{gid}'")
        query(worker, f"rollback prepared '{gid}'")
    else:
        query(worker, end)
        if end != "rollback":
            query(worker, "commit")
    assert ids(poll(worker)) == [job_id]


@rows_only
def test_the_second_round_of_a_claim_that_is_undone_hides_nothing_from_its_own_session(
    db: Db, connect: Connect
) -> None:
    """By a plan of the first of many lanes a claim got some jobs, and by a new plan no more."""
    set_default(db, "notify", False)
    jobs = [enqueue(db, queue=f"q{n}") for n in range(40)]
    call(db, "complete_many", **pairs(*claim(db, max_jobs=len(jobs))))
    call(db, "complete", **own(leased(db, queue="hot", priority=0)))
    producer, worker = connect("producer"), connect("worker")
    query(producer, "begin")
    job_id = enqueue(producer, queue="hot", priority=0)
    # The job comes when the worker has looked, so that its date lies before the candidate.
    assert claim(worker, max_jobs=2) == []
    query(producer, "commit")
    ((name, plan),) = hints(worker).items()
    assert plan[13] == "cut"
    # That the plan is old enough for a look, though a claim may still do with it.
    plan[1] = f"{float(plan[1]) - 1:.6f}"
    plan[12] = "0.9"
    give_hint(worker, name, "/".join(plan))
    query(worker, "begin")
    assert ids(claim(worker, max_jobs=2)) == [job_id]
    gid = str(uuid4())
    query(worker, f"prepare transaction '{gid}'")
    query(worker, f"rollback prepared '{gid}'")
    assert ids(poll(worker, max_jobs=2)) == [job_id]


@rows_only
def test_a_claim_that_is_undone_hides_nothing_from_other_sessions(
    db: Db, worker: Db, connect: Connect
) -> None:
    other = connect("other")
    job_id = enqueue(db)
    query(other, "begin")
    assert ids(claim(other)) == [job_id]
    assert poll(worker) == []
    query(other, "rollback")
    assert ids(poll(worker)) == [job_id]


# The same by chance: producers and workers that do everything they may, for some seconds.


def span(dice: random.Random) -> str:
    return f"{dice.random() / 20:.6f} s"


def end(conn: Db, how: str, dice: random.Random, longest: float) -> bool:
    """End a transaction, a prepared one after a while; tell whether it was committed."""
    if how == "prepare":
        gid = str(uuid4())
        query(conn, f"prepare transaction '{gid}'")
        time.sleep(dice.random() * longest)
        how = dice.choice(["commit", "rollback"])
        query(conn, f"{how} prepared '{gid}'")
    else:
        query(conn, how)
    return how == "commit"


def produce(conn: Db, queue: str, seed: int, longest: float, until: float) -> list[UUID]:
    """Enqueue in transactions of every kind until the clock says stop; the jobs that committed."""
    dice = random.Random(seed)
    kept: list[UUID] = []

    def add() -> list[UUID]:
        options: dict[str, Any] = dice.choice(
            [
                {}, {}, {"delay": span(dice)}, {"serial_key": str(dice.randint(1, 99))},
                {"run_at": "2020-01-01Z"}, {"priority": dice.randint(0, 9)}, {"kind": "bill"},
            ]
        )  # fmt: skip
        added = [enqueue(conn, queue=queue, **options) for _ in range(dice.randint(1, 2))]
        time.sleep(dice.random() * longest)
        return added

    while time.monotonic() < until:
        query(conn, "begin")
        if dice.random() < 0.3:
            query(conn, "select pg_current_xact_id()")
        added = add()
        if dice.random() < 0.4:
            query(conn, "savepoint a")
            more = add()
            if dice.random() < 0.5:
                query(conn, "rollback to a")
            else:
                added += more
        ending = dice.choice(["commit", "commit", "rollback", "prepare"])
        kept += added if end(conn, ending, dice, longest) else []
        time.sleep(dice.random() * longest / 4)
    return kept


def work(conn: Db, queue: str, seed: int, pause: float, stop: Event) -> None:
    """Claim from one session and do anything with the jobs until told to stop."""
    dice = random.Random(seed)
    while not stop.is_set():
        undo = dice.random() < 0.2
        if undo:
            query(conn, "begin")
        jobs = claim(
            conn, queues=[queue], max_jobs=dice.randint(1, 4), lease=dice.choice(["0.1 s", "5 s"])
        )
        for job in jobs:
            outcome = dice.choice(["complete"] * 5 + ["release", "fail", "retry", "lapse"])
            if outcome == "complete":
                call(conn, "complete", **own(job))
            elif outcome == "fail":
                call(conn, "fail", **own(job), retry_in=span(dice))
            elif outcome == "retry":
                if call(conn, "fail", **own(job), permanent=True):
                    call(conn, "retry", job_id=job["job_id"])
            elif outcome == "release" or job["lease"].total_seconds() > 1:
                call(conn, "release", **own(job))
        if undo:
            time.sleep(dice.random() * pause)
            end(conn, dice.choice(["commit", "rollback", "prepare"]), dice, pause)
        time.sleep(dice.random() * pause)


def finish(conn: Db, queue: str, patience: float) -> None:
    """Complete what this session finds, until its queue is empty or it has long found nothing."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        if jobs := claim(conn, queues=[queue], max_jobs=50):
            call(conn, "complete_many", **pairs(*jobs))
            until = time.monotonic() + patience
        elif not query(
            conn, "select 1 from taskboard.live_jobs where queue = %(q)s limit 1", q=queue
        ):
            return
        time.sleep(GAP)


def hidden(
    db: Db, connect: Connect, *, queues: int, producers: int, others: int, longest: float,
    pause: float, seconds: float, patience: float = 2.0,
) -> tuple[int, int]:  # fmt: skip
    """Run a load. Of each queue one session completes jobs, so that what is hidden from it stays;
    others claim and give back only. Tells how many jobs there were and how many were never found.
    """
    for name in ("max_attempts", "max_lost_leases"):
        set_default(db, name, 1_000_000)
    set_default(db, "notify", False)
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    stop = Event()
    until = time.monotonic() + seconds
    with ThreadPoolExecutor(64) as threads:
        finders = {f"q{n}": connect(f"finder {n}") for n in range(queues)}
        working = [
            threads.submit(work, conn, queue, seed + n, pause, stop)
            for n, (queue, conn) in enumerate(
                [*finders.items()]
                + [(f"q{n % queues}", connect(f"other {n}")) for n in range(others)]
            )
        ]
        kept = [
            threads.submit(produce, connect("producer"), f"q{n % queues}", seed - n, longest, until)
            for n in range(producers)
        ]
        try:
            committed = [job_id for each in kept for job_id in each.result()]
        finally:
            stop.set()
        for each in working:
            each.result()
        for ending in [threads.submit(finish, conn, queue, patience)
                       for queue, conn in finders.items()]:  # fmt: skip
            ending.result()
    (row,) = query(
        db,
        "select count(*) as done from taskboard.history"
        " where id = any (%(ids)s) and state = 'completed'",
        ids=committed,
    )
    undone = query(
        db,
        "select 1 from taskboard.history where queue ~ '^q[0-9]' and id <> all (%(ids)s)",
        ids=committed,
    )
    assert undone == [], "a job was done that was never committed"
    return len(committed), len(committed) - row["done"]


@rows_only
def test_under_a_busy_load_every_job_is_found_by_the_same_sessions(
    db: Db, connect: Connect
) -> None:
    jobs, lost = hidden(
        db, connect, queues=2, producers=3, others=2, longest=0.01, pause=0.002, seconds=3
    )
    assert jobs > 50 and lost == 0


@rows_only
def test_under_a_quiet_load_every_job_is_found_by_the_same_session(
    db: Db, connect: Connect
) -> None:
    jobs, lost = hidden(
        db, connect, queues=1, producers=1, others=0, longest=0.06, pause=0.01, seconds=3
    )
    assert jobs > 10 and lost == 0


@pytest.mark.parametrize("how", BROKEN)
def test_a_floor_that_rises_too_early_hides_jobs_in_these_tests(
    db: Db, worker: Db, connect: Connect, how: str
) -> None:
    rewrite(db, "plan_scan", BROKEN[how])
    producer = connect("producer")
    # By the exact steps; somebody else's transaction on this server may spoil a round.
    assert not all(late(db, worker, producer, "enqueue")[1] for _ in range(5))
    # And by chance, which on a busy machine may need another try.
    for _ in range(12):
        for table in ("jobs", "history", "serial_keys"):
            query(db, f"delete from taskboard.{table}")
        _, lost = hidden(
            db, connect, queues=1, producers=1, others=0, longest=0.06, pause=0.01, seconds=1.2,
            patience=0.3,
        )  # fmt: skip
        if lost:
            return
    raise AssertionError("no job was hidden")


# Hints that cannot be trusted.

# Changes of a plan's fields by their number from 1: times are offsets from now in seconds.
UNTRUE: list[dict[int, float | str]] = [
    # Set in the future, or over a minute ago, with floors that have not come yet.
    {2: 2, 4: 3600, 10: 3600}, {2: -61, 4: 3600, 10: 3600}, {2: 3600, 4: 3600, 9: 3600, 10: 3600},
    {2: "0", 4: 3600, 10: 3600}, {2: "Infinity", 4: 3600}, {2: "NaN", 4: 3600},
    # For other arguments.
    {1: "1", 4: 3600, 10: 3600}, {1: "", 4: 3600}, {1: "x", 4: 3600},
    # The floor was last begun anew in the future, or long ago.
    {2: -1, 9: 3600}, {2: -1, 9: -3600},
]  # fmt: skip

GARBAGE = ["", " ", "x", "1", "1/2/3", "/////////////", "'; drop table taskboard.jobs; --", "{}"]


@rows_only
def test_hints_that_are_garbage_or_of_another_time_hide_nothing(db: Db, worker: Db) -> None:
    hid: list[object] = []
    for change in [*GARBAGE, *UNTRUE]:
        now = clock(db).timestamp()
        for name, plan in hints(worker).items():
            text = change if isinstance(change, str) else ""
            if isinstance(change, dict):
                for field, value in change.items():
                    given = str(value) if isinstance(value, str) else f"{now + value:.6f}"
                    many = plan[field - 1].startswith("{")
                    plan[field - 1] = (
                        "{" + ",".join([given] * len(numbers(plan[2]))) + "}" if many else given
                    )
                text = "/".join(plan)
            give_hint(worker, name, text)
        job_id = enqueue(db)
        if ids(poll(worker, 3)) != [job_id]:
            hid.append(change)
    assert hid == []


def step_back(session: Db, seconds: float) -> None:
    """What a session finds when the clock was so far ahead at its last look."""
    for name, plan in hints(session).items():
        plan[1] = f"{float(plan[1]) + seconds:.6f}"
        for field in (3, 8, 9):
            plan[field] = "{" + ",".join(f"{n + seconds:.6f}" for n in numbers(plan[field])) + "}"
        give_hint(session, name, "/".join(plan))


@rows_only
@pytest.mark.parametrize("seconds", [0.2, 3600])
def test_a_clock_that_stepped_back_hides_nothing_from_a_session_that_polls(
    db: Db, worker: Db, seconds: float
) -> None:
    poll(worker)
    step_back(worker, seconds)
    assert poll(worker, 2) == []
    job_id = enqueue(db)
    assert ids(poll(worker)) == [job_id]


def test_a_clock_that_stepped_back_while_a_session_slept_hides_a_job_for_a_minute_at_most(
    db: Db, worker: Db
) -> None:
    # Let the half minute be short.
    rewrite(db, "plan_scan", [("between 0 and 30", "between 0 and 0.3")])
    raise_floors(worker)
    step_back(worker, 0.3)
    job_id = enqueue(db)
    time.sleep(0.35)
    until = time.monotonic() + 3
    found: list[Row] = []
    while not found and time.monotonic() < until:
        found = poll(worker, 1)
        time.sleep(0.04)
    assert ids(found) == [job_id]


@rows_only
def test_a_session_that_forgets_its_hints_finds_everything(db: Db, worker: Db) -> None:
    poll(worker)
    query(worker, "discard all")
    assert hints(worker) == {}
    job_id = enqueue(db)
    assert ids(poll(worker, 1)) == [job_id]


@rows_only
def test_a_session_keeps_a_few_plans_of_at_most_64_lanes_and_no_lane_is_passed_over(
    db: Db, worker: Db
) -> None:
    for _ in range(2):
        added = {enqueue(db, f"kind {n}") for n in range(40)}
        jobs = poll(worker, 3, max_jobs=100)
        assert set(ids(jobs)) == added
        call(db, "complete_many", **pairs(*jobs))
    assert len(lanes(db)) == 82
    for n in range(20):
        claim(worker, kinds=[f"kind {n}"])
    assert len(hints(worker)) <= 8
    assert all(len(numbers(plan[2])) <= 96 for plan in hints(worker).values())


@rows_only
def test_a_lane_that_appears_is_found_by_the_next_claim_that_has_room(
    db: Db, worker: Db
) -> None:
    first = enqueue(db)
    assert ids(claim(worker)) == [first]
    other = enqueue(db, "another kind", priority=0)
    assert ids(claim(worker)) == [other]


@rows_only
def test_a_claim_that_a_job_awaits_makes_no_plan_and_the_one_after_it_does(
    db: Db, worker: Db
) -> None:
    """A worker that was woken is not to wait while its session looks at floors and new lanes."""
    call(db, "complete_many", **pairs(*poll(worker, 1, max_jobs=10)))
    (name,) = hints(worker)
    made = hints(worker)[name][1]
    first, other = enqueue(db), enqueue(db, "another kind", priority=0)
    time.sleep(GAP)
    assert ids(claim(worker, max_jobs=10)) == [first]
    assert hints(worker)[name][1] == made
    assert ids(claim(worker, max_jobs=10)) == [other]
    assert hints(worker)[name][1] != made


# What the floor is for.


def buffers(session: Db, statement: str) -> int:
    """How many buffers a statement touches."""
    (row,) = query(session, f"explain (analyze, buffers, format json) {statement}")
    (plan,) = row["QUERY PLAN"] if isinstance(row["QUERY PLAN"], list) else json.loads(
        row["QUERY PLAN"]
    )
    found: int = plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"]
    return found


def claim_buffers(session: Db) -> float:
    """The median number of buffers that a claim of one job touches, with a look at the floors."""
    counts = []
    for _ in range(7):
        time.sleep(GAP)
        query(session, "begin")
        counts.append(buffers(session, "select * from taskboard.claim(worker => 'measured')"))
        query(session, "rollback")
    return statistics.median(counts)


ONE_BY_ONE = "select taskboard.enqueue('mail') from generate_series(1, 5000)"
IN_ONE_CALL = "select taskboard.enqueue_many('mail', array_fill('{}'::jsonb, array[5000]))"


def drained(
    db: Db, worker: Db, other: Db, added: str, held: str, lease: str = "0.1 s"
) -> tuple[float, float, float]:
    """Drain thousands of jobs while another transaction is open. The buffers that a claim touches
    before, afterwards, and afterwards in a session without floors."""
    query(db, "alter table taskboard.jobs set (autovacuum_enabled = off)")
    query(db, added)
    query(other, "begin isolation level repeatable read")
    query(other, held)
    before = claim_buffers(worker)
    for _ in range(40):
        jobs = claim(worker, max_jobs=100, lease=lease)
        call(worker, "complete_many", **pairs(*jobs))
    time.sleep(0.1)
    # What is found is given up at once: the first row of a lane would end the look at it.
    call(worker, "complete_many", **pairs(*poll(worker, 5, max_jobs=1)))
    after = claim_buffers(worker)
    query(worker, "discard all")
    claim(worker, kinds=["none"])
    return before, after, buffers(worker, "select * from taskboard.claim()")


@pytest.mark.parametrize("added", [ONE_BY_ONE, IN_ONE_CALL], ids=["one by one", "in one call"])
@pytest.mark.parametrize("lease", ["0.1 s", "60 s"], ids=["deadlines past", "deadlines ahead"])
def test_claims_stay_short_while_an_old_snapshot_is_held(
    db: Db, worker: Db, connect: Connect, added: str, lease: str
) -> None:
    """What is finished leaves dead entries where it waited, and where its deadline was."""
    before, after, without = drained(
        db, worker, connect("reader"), added, "select count(*) from taskboard.jobs", lease
    )
    assert without > 4 * before, "there is nothing to step over: this shows nothing"
    assert after < 2 * before


def test_claims_grow_while_a_writing_transaction_is_held(
    db: Db, worker: Db, connect: Connect
) -> None:
    before, after, _ = drained(
        db, worker, connect("writer"), ONE_BY_ONE, "select pg_current_xact_id()"
    )
    assert after > 4 * before
