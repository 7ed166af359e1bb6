"""A claim reads the claim index in order and stops: it costs the same in front of any backlog."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from verbs import Db, call, claim, own, pairs, query

Connect = Callable[..., Db]

MANY = 200_000


def fill(db: Db, sets: str, count: int = MANY, kind: str = "mail", returning: bool = False) -> None:
    """Insert many live jobs in one statement; `sets` gives the columns that differ, of `n`."""
    query(
        db,
        f"""
        insert into taskboard.jobs (
          id, lane_id, run_at, created_at, payload, claimable_at, lease_token, leased_by,
          lease_granted, claimed_at, attempt, waits_for, serial_key, serial_no)
        select taskboard.new_job_id(
          taskboard.job_id_head(clock_timestamp()), gen_random_uuid(), 0, '0000'),
          l.id, clock_timestamp(),
          clock_timestamp(), '{{"n": 1}}', {sets}
        from generate_series(1, %(count)s) as n
        cross join lateral (
          select id from taskboard.lanes as l
          where l.kind = %(kind)s and l.returning = %(returning)s limit 1) as l
        """,
        count=count,
        kind=kind,
        returning=returning,
    )


READY = "clock_timestamp(), null, null, null, null, 0, null, null, null"
SCHEDULED = (
    "clock_timestamp() + n * interval '1 minute' + interval '1 day',"
    " null, null, null, null, 0, null, null, null"
)
LEASED = (
    "clock_timestamp() + interval '1 hour' + n * interval '1 ms', gen_random_uuid(), 'w',"
    " interval '1 hour', clock_timestamp(), 1, null, null, null"
)
BLOCKED = "'infinity', null, null, null, null, 0, 'turn', 'k' || mod(n, 100), n"
HELD = "'infinity', null, null, null, null, 1, 'person', null, null"


def fill_history(db: Db, count: int) -> None:
    query(
        db,
        """
        insert into taskboard.history (
          id, finished_at, attempt, priority, failures, lost_leases, lease_token, run_at,
          created_at, claimed_at, state, queue, kind, on_unknown, payload)
        select gen_random_uuid(), clock_timestamp(), 1, 5, 0, 0, gen_random_uuid(),
          clock_timestamp(), clock_timestamp(), clock_timestamp(), 'completed', 'default', 'mail',
          'retry', '{}'
        from generate_series(1, %(count)s) as n
        """,
        count=count,
    )


def touched(session: Db, verb: str = "claim", arguments: str = "max_jobs => 10") -> int:
    """How many buffers a call touches."""
    (row,) = query(
        session,
        f"explain (analyze, buffers, format json) select * from taskboard.{verb}({arguments})",
    )
    plans: Any = row["QUERY PLAN"]
    (plan,) = json.loads(plans) if isinstance(plans, str) else plans
    found: int = plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"]
    return found


def scans(session: Db) -> dict[str, int]:
    """What this session's open transaction has read of the live jobs so far."""
    (row,) = query(
        session,
        "select seq_scan, seq_tup_read, idx_scan, idx_tup_fetch from pg_stat_xact_user_tables"
        " where relid = 'taskboard.jobs'::regclass",
    )
    return {name: int(count or 0) for name, count in row.items()}


def live_through(db: Db, session: Db) -> None:
    """Let a session call each verb once while there is one job at most."""
    for end in ("complete", "complete_many", "cancel"):
        call(session, "enqueue", kind="mail", unique_key="u", serial_key="s")
        for back in ("release", "fail", ""):
            (job,) = claim(session, max_jobs=10)
            if back:
                call(session, back, **own(job))
                query(db, "update taskboard.jobs set claimable_at = clock_timestamp()")
        for verb in ("renew", "require_lease", "lease_status", "begin_effect", "end_effect"):
            call(session, verb, **own(job))
        call(session, "renew_many", **pairs(job))
        call(session, "job", job_id=job["job_id"])
        call(session, "next_claimable_at")
        if end == "cancel":
            call(session, "cancel", job_id=job["job_id"], force=True)
        else:
            call(session, end, **(pairs(job) if end == "complete_many" else own(job)))


@pytest.fixture(params=["new", "emptied", "vacuumed", "vacuumed, its pages kept"])
def how_empty(request: pytest.FixtureRequest) -> str:
    """How the table was empty when a session made its plans."""
    found: str = request.param
    return found


def warmed(db: Db, session: Db, how: str) -> Db:
    """Let a session plan all of its statements, for good, while the queue is empty.

    Nothing analyzes the tables later but the test: autovacuum might come in between.
    """
    for table in ("jobs", "lanes", "unique_keys", "serial_keys", "effects"):
        query(db, f"alter table taskboard.{table} set (autovacuum_enabled = off)")
    for kind in ("mail", "later", "waiting"):
        call(db, "enqueue", kind=kind)
    if "kept" in how:  # as under an old snapshot: no rows, it says, and yet a tree of some height
        fill(db, READY, 5000)
    for table in ("jobs", "unique_keys", "serial_keys", "effects"):
        if how == "new":
            query(db, f"truncate taskboard.{table}")
        else:
            query(db, f"delete from taskboard.{table}")
        if "vacuumed" in how:
            query(db, f"vacuum (analyze, truncate {'kept' not in how}) taskboard.{table}")
    for _ in range(7):
        live_through(db, session)
    return session


@pytest.fixture
def warm(db: Db, connect: Connect) -> Db:
    """A session that made its plans on a table that was vacuumed while it was empty."""
    return warmed(db, connect("warm"), "vacuumed")


def test_a_claim_costs_the_same_before_and_after_analyze_in_front_of_a_backlog(
    db: Db, warm: Db, connect: Connect
) -> None:
    empty = touched(warm, arguments="max_jobs => 10, kinds => '{mail}'")
    fill(db, READY)
    fill(db, SCHEDULED, kind="later")
    fill(db, LEASED, 50_000, returning=True)
    fill(db, BLOCKED, 50_000, kind="waiting")
    fill(db, HELD, 1_000, kind="waiting")
    fill_history(db, 100_000)
    costs = {}
    for when in ("never analyzed", "analyzed"):
        if when == "analyzed":
            query(db, "analyze taskboard.jobs, taskboard.lanes, taskboard.history")
        for who, session in (("warm", warm), ("fresh", connect("fresh"))):
            if who == "fresh":  # what a session reads once, of the catalogue
                touched(session)
            claim(session, max_jobs=10)
            costs[when, who, "claim"] = touched(session)
            costs[when, who, "claim of a kind"] = touched(
                session, arguments="max_jobs => 10, kinds => '{mail}'"
            )
            costs[when, who, "next"] = touched(session, "next_claimable_at", "")
            costs[when, who, "none"] = touched(session, arguments="kinds => '{later,waiting}'")
    # Ten jobs are looked up and changed, each with its entries in two indexes: some 20 for each.
    assert {key: cost for key, cost in costs.items() if cost > 300} == {}, empty
    query(warm, "begin")
    claim(warm)
    before = scans(warm)
    assert len(claim(warm, max_jobs=10)) == 10
    after = scans(warm)
    assert after["seq_scan"] == before["seq_scan"], "the live jobs were read whole"
    assert after["idx_tup_fetch"] - before["idx_tup_fetch"] < 60
    query(warm, "rollback")


def test_a_session_that_made_its_plans_on_an_empty_table_reads_no_backlog(
    db: Db, connect: Connect, how_empty: str
) -> None:
    session = warmed(db, connect("warm"), how_empty)
    fill(db, READY, 30_000)
    for statement in (
        "insert into taskboard.unique_keys (kind, key, job_id, live)"
        " select 'mail', n::text, gen_random_uuid(), true from generate_series(1, 30000) as n",
        "insert into taskboard.serial_keys (key, turn_of, turn_no, last_no)"
        " select n::text, gen_random_uuid(), n, n from generate_series(1, 30000) as n",
        "insert into taskboard.effects (job_id, step, lease_token, attempt, idempotency_key,"
        " begun_at) select gen_random_uuid(), 'main', gen_random_uuid(), 1, '', clock_timestamp()"
        " from generate_series(1, 30000) as n",
    ):
        query(db, statement)
    jobs = claim(db, max_jobs=100)
    costs = {}
    for name in ("unique_key", "serial_key"):
        costs[f"enqueue {name}"] = touched(session, "enqueue", f"'mail', {name} => '77'")
    for verb in (
        "renew", "require_lease", "lease_status", "begin_effect", "end_effect", "release", "fail",
        "complete", "renew_many", "complete_many", "fail_many", "job", "cancel",
        "next_claimable_at", "claim",
    ):  # fmt: skip
        job = jobs.pop()
        job_id, token = (f"'{job[name]}'::uuid" for name in ("job_id", "lease_token"))
        arguments = {
            "renew_many": f"array[{job_id}], array[{token}]", "job": job_id,
            "complete_many": f"array[{job_id}], array[{token}]",
            "fail_many": f"array[{job_id}], array[{token}], null, null, array[true]",
            "cancel": f"{job_id}, force => true", "next_claimable_at": "",
            "claim": "max_jobs => 10",
        }.get(verb, f"{job_id}, {token}")  # fmt: skip
        costs[verb] = touched(session, verb, arguments)
    assert {verb: cost for verb, cost in costs.items() if cost > 300} == {}


def test_the_plan_of_a_claim_sorts_nothing_but_lanes(db: Db, warm: Db) -> None:
    """By the server's own notes about the statements inside the function."""
    fill(db, READY, 20_000)
    plans: list[str] = []
    query(warm, "load 'auto_explain'")
    for name, value in {
        "auto_explain.log_min_duration": "0", "auto_explain.log_nested_statements": "on",
        "auto_explain.log_analyze": "on", "auto_explain.log_timing": "off",
        "auto_explain.log_format": "json", "client_min_messages": "log",
    }.items():  # fmt: skip
        query(warm, f"set {name} = '{value}'")
    warm.add_notice_handler(lambda notice: plans.append(notice.message_primary or ""))
    assert len(claim(warm, max_jobs=10)) == 10
    query(warm, "reset client_min_messages")
    nodes = [
        node
        for text in plans
        if '"Plan": {' in text
        for node in walk(json.loads(text[text.index("{"):])["Plan"])
    ]  # fmt: skip
    of_jobs = [node for node in nodes if node.get("Relation Name") == "jobs"]
    assert {node["Node Type"] for node in of_jobs} - {"ModifyTable"} <= {
        "Index Scan", "Index Only Scan", "Tid Scan",
    }  # fmt: skip
    assert "jobs_claim" in {node.get("Index Name") for node in of_jobs}
    assert max(node["Actual Rows"] * node["Actual Loops"] for node in of_jobs) <= 20
    sorted_rows = [node["Actual Rows"] for node in nodes if node["Node Type"] == "Sort"]
    assert max(sorted_rows, default=0) <= 10


def walk(node: dict[str, Any]) -> list[dict[str, Any]]:
    return [node] + [below for child in node.get("Plans", []) for below in walk(child)]


def test_drained_and_filled_again_a_claim_costs_what_it_cost(db: Db, warm: Db) -> None:
    costs = []
    for _ in range(3):
        query(
            db,
            "select taskboard.enqueue_many('mail', array_fill('{}'::jsonb, array[20000]))",
        )
        claim(warm, max_jobs=10)
        costs.append(touched(warm))
        query(db, "delete from taskboard.jobs")
        query(db, "vacuum taskboard.jobs")
        assert claim(warm, max_jobs=10) == []
    assert max(costs) < 300 and max(costs) < 1.5 * min(costs)


def test_ending_exhausted_jobs_reads_no_backlog(db: Db, warm: Db) -> None:
    fill(db, LEASED, 20_000, returning=True)
    fill(db, READY, 20_000)
    plan = "taskboard.plan_scan(null, null, null), clock_timestamp(), 100"
    query(warm, f"select taskboard.sweep_exhausted({plan})")
    assert touched(warm, "sweep_exhausted", plan) < 250
    # Expired leases that are not exhausted are what a claim takes first, and no more of them.
    query(
        db,
        "update taskboard.jobs set claimable_at = clock_timestamp() where lease_token is not null",
    )
    claim(warm, max_jobs=10)
    assert touched(warm, "sweep_exhausted", plan) < 450
    # Each lapse is recorded, too.
    assert touched(warm) < 800


def test_an_eviction_reads_no_backlog(db: Db, warm: Db) -> None:
    fill(db, READY, 20_000)
    claim(warm, max_jobs=10, worker="dead")
    assert touched(warm, "evict", "'nobody'") < 100
    assert touched(warm, "evict", "'dead'") < 400


def test_a_completion_and_a_renewal_cost_the_same_beside_a_long_history(
    db: Db, warm: Db
) -> None:
    fill(db, READY, 20_000)
    fill_history(db, 20_000)
    jobs = claim(warm, max_jobs=10)
    for verb in ("renew", "complete"):
        first, second = jobs.pop(), jobs.pop()
        for job in (first, second):
            cost = touched(warm, verb, f"'{job['job_id']}', '{job['lease_token']}'")
        assert cost < 100
    job = jobs.pop()
    call(warm, "complete", job_id=job["job_id"], lease_token=job["lease_token"])
    # A repeat looks into the history, and there into each day.
    assert touched(warm, "complete", f"'{job['job_id']}', '{job['lease_token']}'") < 100


WAITING = {
    "one key": "array_fill('s'::text, array[20000])",
    "a key each": "array(select 'k' || n from generate_series(1, 20000) as n)",
}


def test_a_turn_is_handed_over_at_the_same_cost_however_many_jobs_and_keys_wait(
    db: Db, warm: Db
) -> None:
    costs = {}
    for kind, keys in WAITING.items():
        query(
            db,
            "select count(*) from taskboard.enqueue_many(%(kind)s,"
            f" array_fill('{{}}'::jsonb, array[20000]), serial_keys => {keys})",
            kind=kind,
        )
        for end in ("complete", "cancel"):
            costs[kind, end, "claim"] = touched(warm, arguments=f"kinds => array['{kind}']")
            (job,) = query(
                db,
                "select id, lease_token as token, serial_key as key from taskboard.jobs"
                " where lease_token is not null",
            )
            costs[kind, end, "join"] = touched(
                warm, "enqueue", f"'{kind}', serial_key => '{job['key']}'"
            )
            costs[kind, end] = touched(
                warm, end,
                f"'{job['id']}', " + (f"'{job['token']}'" if end == "complete" else "'', true"),
            )  # fmt: skip
            (turn,) = query(
                db, "select turn_no from taskboard.serial_keys where key = %(key)s", **job
            )
            assert turn["turn_no"] > 1, "the turn was not handed on"
    assert {key: cost for key, cost in costs.items() if cost > 150} == {}


def test_a_batch_of_plain_jobs_reads_no_serial_keys_that_are_gone(
    db: Db, warm: Db, connect: Connect
) -> None:
    old = connect("old")
    query(old, "begin isolation level repeatable read")
    query(old, "select 1 as one from taskboard.jobs")
    keys = [f"k{n}" for n in range(1000)]
    for _ in range(10):
        call(db, "enqueue_many", kind="mail", payloads=[{}] * 1000, serial_keys=keys)
        call(db, "complete_many", **pairs(*claim(db, max_jobs=1000)))
    call(db, "enqueue", kind="plain")
    (job,) = claim(db)
    ids = f"array['{job['job_id']}'::uuid], array['{job['lease_token']}'::uuid]"
    assert touched(warm, "complete_many", ids) < 150
    query(old, "rollback")


def test_a_batch_changes_the_row_of_a_serial_key_once_however_many_jobs_it_adds(db: Db) -> None:
    query(db, "begin")
    for _ in range(2):
        call(db, "enqueue_many", kind="mail", payloads=[{}] * 200, serial_keys=["s", "t"] * 100)
    (changes,) = query(
        db,
        "select n_tup_ins + n_tup_upd as count from pg_stat_xact_user_tables"
        " where relid = 'taskboard.serial_keys'::regclass",
    )
    query(db, "commit")
    assert changes["count"] == 4


@pytest.mark.parametrize("limit", ["first", "when all wait already"])
def test_jobs_that_wait_make_a_claim_under_max_running_no_dearer(
    db: Db, connect: Connect, limit: str
) -> None:
    for _ in range(40):
        call(db, "enqueue", kind="mail")
    session = connect()
    if limit == "first":
        call(db, "limit_queue", queue="default", max_running=20)
    jobs = claim(session, max_jobs=20)
    for job in jobs[:8]:
        call(session, "fail", **own(job), retry_in="1 hour")
    for job in jobs[8:15]:
        call(session, "release", **own(job), delay="1 hour")
    # A thousand for each, and what waits for a turn or a person.
    query(
        db,
        "insert into taskboard.jobs (id, lane_id, claimable_at, run_at, created_at, payload,"
        "  waits_for)"
        " select gen_random_uuid(), j.lane_id, case n.n % 20 when 0 then 'infinity' else"
        "  j.claimable_at end, j.run_at, j.created_at, j.payload,"
        "  case n.n % 20 when 0 then 'person' end"
        " from taskboard.jobs as j, generate_series(1, 2000) as n"
        " where j.attempt > 0 and j.lease_token is null",
    )
    call(db, "limit_queue", queue="default", max_running=10)
    claim(session, max_jobs=1)
    costs = [touched(session, arguments="max_jobs => 1") for _ in range(3)]
    assert max(costs) < 200, costs
    (row,) = query(db, "select count(*) from taskboard.job_list where state = 'running'")
    assert row["count"] == 9
    assert len(claim(session, max_jobs=10)) == 1
    # One of a kind that is newer than the limit, and one whose time has come.
    call(db, "enqueue", kind="new", priority=0)
    call(session, "complete_many", **pairs(*jobs[15:]))
    time.sleep(0.11)  # for so long a session does with a plan that lacks lanes which are new
    (new,) = claim(session)
    assert new["kind"] == "new"
    call(session, "release", **own(new), delay="0")
    query(db, "update taskboard.jobs set claimable_at = clock_timestamp() where id = %(id)s",
          id=jobs[0]["job_id"])  # fmt: skip
    time.sleep(0.11)
    again = claim(session, max_jobs=3)
    assert {new["job_id"], jobs[0]["job_id"]} <= {job["job_id"] for job in again}
    (row,) = query(
        db,
        "select bool_and((l.returns_to = l.id) = (j.lease_token is not null)) as apart"
        " from taskboard.jobs as j join taskboard.lanes as l on l.id = j.lane_id"
        " where l.returning and j.claimable_at < 'infinity'",
    )
    assert row["apart"] is True


# Looks of people and boards, and how many buffers each may touch.
LOOKS = {
    "select * from taskboard.job_list order by job_id desc limit 50": 100,
    "select * from taskboard.job_list where queue = 'default' order by job_id desc limit 9": 100,
    "select * from taskboard.worker_list": 100,
    "select * from taskboard.queue_stats": 600,
    "select * from taskboard.queue_list": 20,
    "select * from taskboard.queue_rates": 100,
    "select * from taskboard.incident_list order by id desc limit 50": 20,
}


def test_a_look_at_what_is_new_or_runs_reads_no_backlog_and_no_history(db: Db) -> None:
    for kind in ("mail", "later"):
        call(db, "enqueue", kind=kind)
    fill(db, READY, 30_000)
    fill(db, SCHEDULED, 30_000, kind="later")
    fill_history(db, 30_000)
    query(db, "update taskboard.history set finished_at = finished_at - interval '20 minutes'")
    for table in ("jobs", "history", "lanes"):
        query(db, f"vacuum analyze taskboard.{table}")
    claim(db, max_jobs=100, worker="a")
    costs = {}
    for look in LOOKS:
        query(db, look)
        (row,) = query(db, f"explain (analyze, buffers, format json) {look}")
        (plan,) = row["QUERY PLAN"]
        costs[look] = plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"]
        if "job_list" in look:
            assert "Sort" not in [node["Node Type"] for node in walk(plan["Plan"])]
    assert {look: cost for look, cost in costs.items() if cost > LOOKS[look]} == {}


def test_large_payloads_make_no_verb_dearer_but_the_claim_that_returns_them(
    db: Db, warm: Db
) -> None:
    # A megabyte that cannot be compressed, 20 times: more than 100 pages each.
    query(
        db,
        "select count(*) from taskboard.enqueue_many('large', array_fill((select"
        " to_jsonb(string_agg(md5(n::text || 'x'), '')) from generate_series(1, 30000) as n),"
        " array[20]))",
    )
    call(db, "enqueue_many", kind="small", payloads=[{"n": 1}] * 20)
    (large,) = claim(db, kinds=["large"], max_jobs=1)
    costs = {}
    for _ in range(2):  # the first reads the catalogue
        costs["claim"] = touched(warm, arguments="max_jobs => 10, kinds => '{small}'")
        for verb in ("renew", "release"):
            costs[verb] = touched(warm, verb, f"'{large['job_id']}', '{large['lease_token']}'")
        (large,) = claim(db, kinds=["large"], max_jobs=1)
    for look in ("queue_stats", "worker_list", "job_list order by job_id desc limit 20"):
        (row,) = query(db, f"explain (analyze, buffers, format json) table taskboard.{look}")
        (plan,) = row["QUERY PLAN"]
        costs[look] = plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"]
    assert {verb: cost for verb, cost in costs.items() if cost > 300} == {}
