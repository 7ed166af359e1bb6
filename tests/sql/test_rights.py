"""Roles that may use only named queues: elsewhere they find nothing and change nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from psycopg import sql
from verbs import (
    Db,
    Row,
    call,
    claim,
    claim_one,
    clock,
    enqueue,
    everything,
    leased,
    own,
    pairs,
    query,
    refuses,
    state,
)

from support import expire

pytestmark = pytest.mark.rows_only

PREFIX = f"taskboard_test_rights_{os.getpid()}"
TEAM, FREE, LIMITED, MEMBER, PLAIN, SWITCHER = (
    f"{PREFIX}_{name}" for name in ("team", "free", "limited", "member", "plain", "switcher")
)


@dataclass(frozen=True, slots=True)
class Caller:
    """A way to be limited to the queue `mine`: a login, and the role that it sets."""

    login: str | None
    role: str | None = None


CALLERS = {
    "a limited login": Caller(LIMITED),
    "a member of a limited role": Caller(MEMBER),
    "a superuser who has set a limited role": Caller(None, TEAM),
    "a login that has set a limited role": Caller(SWITCHER, TEAM),
    "a limited login that has set a role without limits": Caller(LIMITED, FREE),
    "a member of a limited role that has set a role without limits": Caller(MEMBER, FREE),
}


def as_owner(db: Db, statement: str, *names: str) -> None:
    query(db, sql.SQL(statement).format(*map(sql.Identifier, names)))


@pytest.fixture(scope="module")
def roles(server: Any) -> Iterator[None]:
    """Roles of the cluster, which outlive a database."""
    made = (TEAM, FREE, LIMITED, MEMBER, PLAIN, SWITCHER)
    with psycopg.connect(server.dsn(), autocommit=True) as conn:
        for name in made:
            as_owner(conn, "create role {} nologin", name)
        for name in (TEAM, FREE, LIMITED, MEMBER, PLAIN):
            as_owner(conn, "grant taskboard_producer, taskboard_worker to {}", name)
        as_owner(conn, "grant {} to {}, {}", TEAM, MEMBER, SWITCHER)
        as_owner(conn, "grant {} to {}, {}", FREE, LIMITED, MEMBER)
        yield
        for name in made:
            as_owner(conn, "drop role {}", name)


@pytest.fixture
def be(roles: None, connect: Callable[..., Db]) -> Callable[..., Db]:
    """Open a session as a login, and let it set a role. A login is what `session_user` says."""

    def open_session(login: str | None = None, role: str | None = None) -> Db:
        conn = connect(login or "test")
        if login is not None:
            as_owner(conn, "set session authorization {}", login)
        if role is not None:
            as_owner(conn, "set role {}", role)
        return conn

    return open_session


def limit(db: Db) -> None:
    """Limit the login and the team to their queue."""
    for name in (LIMITED, TEAM):
        call(db, "allow_queue", role_name=name, queue="mine")


@pytest.fixture(params=CALLERS)
def caller(request: pytest.FixtureRequest, db: Db, be: Callable[..., Db]) -> Db:
    """The session of somebody who is limited to the queue `mine`."""
    who = CALLERS[request.param]
    conn = be(who.login, who.role)
    limit(db)
    return conn


@pytest.fixture
def limited(db: Db, be: Callable[..., Db]) -> Db:
    """The session of a login that is limited to the queue `mine`."""
    conn = be(LIMITED)
    limit(db)
    return conn


def refused(conn: Db, verb: str, **arguments: Any) -> str | None:
    """Make a call that must raise; its code."""
    try:
        answer = call(conn, verb, **arguments)
    except psycopg.Error as error:
        assert "theirs" not in str(error)
        return error.sqlstate
    raise AssertionError(f"{verb} was accepted: {answer}")


def test_own_work_goes_on(db: Db, caller: Db) -> None:
    job_id = enqueue(caller, queue="mine")
    keyed = enqueue(caller, queue="mine", unique_key="u", serial_key="s", delay="1 h")
    many = call(caller, "enqueue_many", kind="mail", payloads=[{}, {}], queue="mine")
    assert call(caller, "next_claimable_at")[0]["next_claimable_at"] < clock(db)
    job = claim_one(caller)
    assert job["job_id"] == job_id
    assert len(call(caller, "renew", **own(job))) == 1
    assert call(caller, "lease_status", **own(job))[0]["lease_status"] == "current"
    assert len(call(caller, "require_lease", **own(job))) == 1
    assert call(caller, "begin_effect", **own(job))[0]["state"] == "fresh"
    assert call(caller, "end_effect", **own(job))[0]["state"] == "done"
    assert call(caller, "release", **own(job))[0]["state"] == "ready"
    job = claim_one(caller)
    assert call(caller, "fail", **own(job), retry_in="0")[0]["state"] == "ready"
    jobs = claim(caller, max_jobs=3)
    assert {row["job_id"] for row in jobs} == {job_id, *(row["job_id"] for row in many)}
    assert len(call(caller, "renew_many", **pairs(*jobs))) == 3
    assert len(call(caller, "complete", **own(jobs[0]))) == 1
    assert len(call(caller, "complete_many", **pairs(*jobs))) == 3
    assert len(call(caller, "wait_for", job_id=job_id)) == 1
    assert state(caller, job_id) == "completed"
    assert call(caller, "cancel", job_id=keyed)[0]["state"] == "cancelled"


def test_a_foreign_queue_takes_in_nothing(db: Db, caller: Db) -> None:
    enqueue(db, queue="theirs")
    before = everything(db)
    options: list[Row] = [{}, {"priority": 1}, {"kind": "new"}, {"unique_key": "u"}]
    for queue in ("theirs", "new", "default"):
        plain = {"kind": "mail", "queue": queue}
        for option in options:
            assert refused(caller, "enqueue", **plain | option) == "42501"
        assert refused(caller, "enqueue_many", **plain, payloads=[{}]) == "42501"
    assert everything(db) == before


@pytest.mark.parametrize("holder_is", ["live", "live until claimed", "ended"])
def test_a_key_held_by_a_foreign_job_is_refused_without_its_id(
    db: Db, caller: Db, holder_is: str
) -> None:
    if holder_is == "ended":
        job = leased(db, queue="theirs", unique_key="u", unique_for="1 h")
        call(db, "complete", **own(job))
        holder = job["job_id"]
    else:
        until = "end" if holder_is == "live" else "claim"
        holder = enqueue(db, queue="theirs", unique_key="u", unique_until=until)
    before = everything(db)
    plain = {"kind": "mail", "queue": "mine"}
    for verb, arguments in (
        ("enqueue", {"unique_key": "u", "serial_key": "s"}),
        ("enqueue_many", {"payloads": [{}, {}], "unique_keys": ["a", "u"]}),
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege) as error:
            call(caller, verb, **plain | arguments)
        assert str(holder) not in str(error.value)
        assert "one namespace" in (error.value.diag.message_hint or "")
    assert everything(db) == before


def test_an_own_holder_of_a_key_is_told_and_so_is_one_that_nobody_knows_any_more(
    db: Db, caller: Db
) -> None:
    options = {"kind": "mail", "queue": "mine", "unique_key": "u", "unique_for": "1 h"}
    (first,) = call(caller, "enqueue", **options)
    assert call(caller, "enqueue", **options) == [first | {"created": False}]
    job = claim_one(caller)
    call(caller, "complete", **own(job))
    assert call(caller, "enqueue", **options) == [first | {"created": False}]
    query(db, "delete from taskboard.history")
    assert call(caller, "enqueue", **options) == [first | {"created": False}]


def test_roles_without_limits_are_told_the_holder_wherever_it_is(
    db: Db, be: Callable[..., Db]
) -> None:
    limit(db)
    holder = enqueue(db, queue="theirs", unique_key="u")
    (row,) = call(be(PLAIN), "enqueue", kind="mail", queue="mine", unique_key="u")
    assert row == {"job_id": holder, "created": False}


def test_foreign_queues_look_empty_to_a_worker(db: Db, caller: Db) -> None:
    lapsed, waiting = leased(db, queue="other"), enqueue(db, queue="theirs")
    expire(db, lapsed["job_id"])
    before = everything(db)
    for queues in (None, ["theirs"], ["theirs", "other", "mine"]):
        assert claim(caller, queues=queues, max_jobs=10) == []
        assert call(caller, "next_claimable_at", queues=queues)[0]["next_claimable_at"] is None
    assert everything(db) == before
    mine = enqueue(caller, queue="mine")
    assert [job["job_id"] for job in claim(caller, max_jobs=10)] == [mine]
    assert (state(db, waiting), state(db, lapsed["job_id"])) == ("ready", "expired")


def test_exhausted_jobs_of_a_foreign_queue_are_left_alone_by_claims(db: Db, caller: Db) -> None:
    job = leased(db, queue="theirs", max_lost_leases=1)
    expire(db, job["job_id"])
    for _ in range(3):
        assert claim(caller, max_jobs=10) == []
    assert state(db, job["job_id"]) == "expired"


def test_with_a_stolen_token_a_foreign_job_still_looks_unknown(db: Db, caller: Db) -> None:
    job = leased(db, queue="theirs")
    call(db, "begin_effect", **own(job))
    before = everything(db)
    for verb in ("renew", "complete", "fail", "release", "begin_effect", "end_effect"):
        assert call(caller, verb, **own(job)) == [], verb
    for verb in ("renew_many", "complete_many", "release_many"):
        assert call(caller, verb, **pairs(job)) == [], verb
    assert call(caller, "lease_status", **own(job))[0]["lease_status"] == "unknown_job"
    assert refused(caller, "require_lease", **own(job)) == "TB001"
    assert everything(db) == before
    call(db, "complete", **own(job))
    assert call(caller, "complete", **own(job)) == []
    assert call(caller, "complete_many", **pairs(job)) == []
    assert call(caller, "lease_status", **own(job))[0]["lease_status"] == "unknown_job"


def test_a_batch_with_foreign_jobs_does_the_own_ones(db: Db, caller: Db) -> None:
    foreign, mine = leased(db, queue="theirs"), leased(db, queue="mine")
    renewed = call(caller, "renew_many", **pairs(foreign, mine))
    assert [row["job_id"] for row in renewed] == [mine["job_id"]]
    done = call(caller, "complete_many", **pairs(foreign, mine))
    assert [row["job_id"] for row in done] == [mine["job_id"]]
    assert state(db, foreign["job_id"]) == "running"


def test_foreign_jobs_look_unknown_to_a_producer(db: Db, caller: Db) -> None:
    live, done = enqueue(db, queue="theirs", delay="1 h"), leased(db, queue="theirs")
    call(db, "complete", **own(done), result={"secret": 1})
    before = everything(db)
    for job_id in (live, done["job_id"]):
        assert call(caller, "job", job_id=job_id) == []
        assert refused(caller, "cancel", job_id=job_id) == "TB002"
        assert refused(caller, "cancel", job_id=job_id, force=True) == "TB002"
        assert call(caller, "wait_for", job_id=job_id, at_most="0.01 s") == []
    assert everything(db) == before


def test_a_foreign_job_that_waits_is_not_waited_for(db: Db, limited: Db) -> None:
    job_id = enqueue(db, queue="theirs")
    query(limited, "set statement_timeout = '2 s'")
    assert call(limited, "wait_for", job_id=job_id, at_most="4 minutes") == []


def test_figures_show_a_limited_worker_its_own_queues_only(db: Db, limited: Db) -> None:
    for queue in ("mine", "theirs"):
        enqueue(db, queue=queue)
    shown = {row["queue"] for row in query(limited, "select queue from taskboard.queue_stats")}
    assert shown == {"mine"}
    assert [row["jobs"] for row in call(limited, "count_ready")] == [1]


def test_schedules_of_foreign_queues_are_neither_shown_nor_advanced(db: Db, limited: Db) -> None:
    for queue in ("mine", "theirs"):
        call(db, "schedule", name=queue, cron="* * * * *", kind="mail", queue=queue)
        call(db, "advance_schedule", name=queue, due_at=None, next_at="2020-01-01Z")
    assert [row["name"] for row in call(limited, "due_schedules")] == ["mine"]
    step = {"due_at": "2020-01-01Z", "next_at": "9999-01-01Z"}
    assert call(limited, "advance_schedule", name="mine", **step)[0]["advance_schedule"] is not None
    # Passing over an occurrence is as good as deleting the schedule.
    for enqueueing in (False, True):
        answer = call(limited, "advance_schedule", name="theirs", **step, enqueue=enqueueing)
        assert answer == [{"advance_schedule": None}]
    (row,) = query(db, "select next_at from taskboard.schedules where name = 'theirs'")
    assert row["next_at"].year == 2020


def test_a_session_keeps_no_notes_about_foreign_lanes(db: Db, limited: Db) -> None:
    for queue in ("theirs", "mine"):
        enqueue(db, queue=queue)
    claim(limited)
    foreign = query(db, "select id from taskboard.lanes where queue = 'theirs'")
    notes = query(
        limited,
        "select current_setting('taskboard.plan_' || n, true) as plan from generate_series(0, 7) n",
    )
    noted = {
        int(lane)
        for row in notes
        if row["plan"]
        for lane in row["plan"].split("/")[2].strip("{}").split(",")
    }
    assert noted and noted.isdisjoint(lane["id"] for lane in foreign)


def test_a_forged_plan_of_foreign_lanes_gives_a_limited_role_nothing(db: Db, limited: Db) -> None:
    for _ in range(3):
        enqueue(db, queue="theirs")
    forge = """
        select set_config('taskboard.plan_' || (key & 7), concat_ws('/', key,
          extract(epoch from clock_timestamp()), %(lanes)s::integer[], zeros, zeros, sides, ones,
          zeros, zeros, zeros, zeros, zeros, 30), false)
        from (select hashtextextended(format('%%s/%%s', null::text[], null::text[]), 0) as key,
          array_fill(0, n) as zeros, array_fill(1, n) as ones, array_fill(2, n) as sides
          from (select array[cardinality(%(lanes)s::integer[])] as n) as one) as plan"""
    lanes = [
        row["id"]
        for row in query(db, "select id from taskboard.lanes where queue = 'theirs' order by id")
    ]
    query(limited, forge, lanes=lanes)
    assert claim(limited) == []
    # Who is not limited may believe it.
    query(db, "delete from taskboard.queue_rights")
    query(db, "update taskboard.settings set queue_rights = false")
    query(limited, forge, lanes=lanes)
    assert len(claim(limited)) == 1


def test_a_definer_function_of_the_application_does_not_lift_the_limit(
    db: Db, limited: Db
) -> None:
    name = f"public.wrapper_{os.getpid()}"
    query(
        db,
        f"create function {name}() returns setof uuid language sql security definer"
        " as $$ select job_id from taskboard.claim(queues => array['theirs']) $$",
    )
    try:
        enqueue(db, queue="theirs")
        assert query(limited, f"select * from {name}()") == []
        assert len(query(db, f"select * from {name}()")) == 1
    finally:
        query(db, f"drop function {name}()")


def test_roles_without_limits_use_every_queue(db: Db, be: Callable[..., Db]) -> None:
    limit(db)
    plain = be(PLAIN)
    for queue in ("mine", "theirs"):
        job = leased(plain, queue=queue)
        assert len(call(plain, "complete", **own(job))) == 1
    assert len(call(db, "complete", **own(leased(db, queue="theirs")))) == 1


def test_a_role_may_be_allowed_several_queues_itself_and_by_membership(
    db: Db, be: Callable[..., Db]
) -> None:
    limit(db)
    member = be(MEMBER)
    assert refused(member, "enqueue", kind="mail", queue="own") == "42501"
    for _ in range(2):
        call(db, "allow_queue", role_name=MEMBER, queue="own")
    for queue in ("own", "mine"):
        assert enqueue(member, queue=queue) == claim_one(member, queues=[queue])["job_id"]
    assert refused(member, "enqueue", kind="mail", queue="theirs") == "42501"
    # Among its roles' queues, the role that it sets has only its own.
    as_owner(member, "set role {}", TEAM)
    assert refused(member, "enqueue", kind="mail", queue="own") == "42501"
    enqueue(member, queue="mine")


def test_limits_hold_at_once_for_sessions_that_are_open(db: Db, be: Callable[..., Db]) -> None:
    session = be(LIMITED)
    job = leased(session, queue="theirs")
    limit(db)
    assert call(session, "complete", **own(job)) == []
    assert refused(session, "enqueue", kind="mail", queue="theirs") == "42501"
    call(db, "disallow_queue", role_name=LIMITED, queue="mine")
    assert len(call(session, "complete", **own(job))) == 1


def test_who_loses_the_last_queue_is_not_limited_any_more_and_others_still_are(
    db: Db, be: Callable[..., Db]
) -> None:
    limit(db)
    call(db, "allow_queue", role_name=LIMITED, queue="second")
    session, member = be(LIMITED), be(MEMBER)
    call(db, "disallow_queue", role_name=LIMITED, queue="second")
    assert refused(session, "enqueue", kind="mail", queue="second") == "42501"
    call(db, "disallow_queue", role_name=LIMITED, queue="mine")
    enqueue(session, queue="theirs")
    assert refused(member, "enqueue", kind="mail", queue="theirs") == "42501"
    call(db, "disallow_queue", role_name=TEAM, queue="mine")
    enqueue(member, queue="theirs")
    assert query(db, "select queue_rights from taskboard.settings") == [{"queue_rights": False}]


def test_a_limit_stays_with_a_role_that_is_renamed(db: Db, be: Callable[..., Db]) -> None:
    limit(db)
    session = be(LIMITED)
    as_owner(db, "alter role {} rename to {}", LIMITED, f"{LIMITED}_2")
    try:
        assert refused(session, "enqueue", kind="mail", queue="theirs") == "42501"
    finally:
        as_owner(db, "alter role {} rename to {}", f"{LIMITED}_2", LIMITED)


def test_only_the_owner_limits_roles(db: Db, be: Callable[..., Db]) -> None:
    for role in ("producer", "worker", "operator", "observer"):
        session = be(None, f"taskboard_{role}")
        for verb in ("allow_queue", "disallow_queue"):
            assert refused(session, verb, role_name=LIMITED, queue="mine") == "42501"


def test_absurd_limits_are_refused(db: Db, roles: None) -> None:
    refuses(
        db,
        "allow_queue",
        {"role_name": LIMITED, "queue": "mine"},
        [
            ({"queue": None}, "22004"),
            ({"queue": ""}, "22023"),
            ({"queue": "q" * 201}, "22023"),
            ({"role_name": None}, "22023"),
            ({"role_name": ""}, "22023"),
            ({"role_name": f"{PREFIX}_nobody"}, "22023"),
            ({"role_name": "public"}, "22023"),
        ],
    )


def test_an_odd_role_name_is_taken_literally(db: Db, be: Callable[..., Db]) -> None:
    name = f'{PREFIX} "odd'
    as_owner(db, "create role {} nologin in role taskboard_producer", name)
    try:
        session = be(name)
        call(db, "allow_queue", role_name=name, queue="mine")
        assert refused(session, "enqueue", kind="mail", queue="theirs") == "42501"
        enqueue(session, queue="mine")
        call(db, "disallow_queue", role_name=name, queue="mine")
        enqueue(session, queue="theirs")
    finally:
        as_owner(db, "drop role {}", name)
