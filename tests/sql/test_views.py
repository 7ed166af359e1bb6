from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid4

import pytest
from psycopg import sql
from verbs import (
    Db,
    Row,
    call,
    change,
    claim,
    claim_one,
    clock,
    enqueue,
    everything,
    incidents,
    leased,
    own,
    pairs,
    query,
    raises,
    set_default,
)

from support import expire

pytestmark = pytest.mark.rows_only

ROLES = ("producer", "worker", "operator", "observer")


def every_state(db: Db) -> tuple[dict[str, UUID], list[str]]:
    """One job in each state (by state), and every token that was given out for them."""
    given = []

    def lease(**options: Any) -> Row:
        job = leased(db, **options)
        given.append(str(job["lease_token"]))
        return job

    jobs: dict[str, UUID] = {}
    for final, verb, arguments in (
        ("completed", "complete", {"result": {"n": 1}}),
        ("failed", "fail", {"permanent": True, "error": "boom"}),
    ):
        job = lease()
        call(db, "begin_effect", **own(job))
        call(db, verb, **own(job), **arguments)
        jobs[final] = job["job_id"]
    job = lease()
    call(db, "cancel", job_id=job["job_id"], force=True)
    jobs["cancelled"] = job["job_id"]
    job = lease(on_unknown="hold")
    call(db, "begin_effect", **own(job))
    call(db, "fail", **own(job), permanent=True)
    jobs["held"] = job["job_id"]
    job = lease(serial_key="s")
    call(db, "begin_effect", **own(job))
    jobs["running"] = job["job_id"]
    jobs["blocked"] = enqueue(db, serial_key="s")
    job = lease()
    call(db, "fail", **own(job), error="later")
    jobs["scheduled"] = job["job_id"]
    job = lease()
    expire(db, job["job_id"])
    again = claim_one(db)
    given.append(str(again["lease_token"]))
    # Refused writes, whose incidents must not show what was presented.
    for verb in ("complete", "fail", "release", "renew", "begin_effect", "end_effect"):
        call(db, verb, **own(job))
    call(db, "complete_many", **pairs(job))
    call(db, "renew_many", **pairs(job))
    expire(db, job["job_id"])
    jobs["expired"] = job["job_id"]
    jobs["ready"] = enqueue(db, payload={"to": "ada"}, unique_key="u")
    return jobs, given


def public_views(db: Db) -> list[str]:
    """The views that some role of ours may read."""
    return [
        row["name"]
        for row in query(
            db,
            "select distinct c.relname as name from pg_class as c"
            " cross join unnest(%(roles)s::text[]) as r (name)"
            " where c.relnamespace = 'taskboard'::regnamespace and c.relkind = 'v'"
            " and has_table_privilege(r.name, c.oid, 'select') order by 1",
            roles=[f"taskboard_{role}" for role in ROLES],
        )
    ]


def content_of(db: Db, view: str) -> list[str]:
    """Every row of a view, as text."""
    statement = sql.SQL("select v::text as content from taskboard.{} as v")
    return [row["content"] for row in query(db, statement.format(sql.Identifier(view)))]


def test_each_state_is_shown_by_its_name(db: Db) -> None:
    jobs, _ = every_state(db)
    shown = {row["job_id"]: row["state"] for row in query(db, "select * from taskboard.job_list")}
    assert shown == {job_id: name for name, job_id in jobs.items()}
    for name, job_id in jobs.items():
        (row,) = call(db, "job", job_id=job_id)
        assert row["state"] == name
    (blocked_row,) = call(db, "job", job_id=jobs["blocked"])
    (held_row,) = call(db, "job", job_id=jobs["held"])
    assert blocked_row["claimable_at"] is None and held_row["claimable_at"] is None
    assert held_row["held_step"] == "main"


def test_no_view_has_a_column_for_a_token_or_shows_one(db: Db) -> None:
    _, given = every_state(db)
    views = public_views(db)
    assert {"job_list", "queue_stats", "incident_list", "effect_list"} <= set(views)
    for view in views:
        (columns,) = query(
            db,
            "select array_agg(attname::text) as names from pg_attribute"
            " where attrelid = ('taskboard.' || %(view)s)::regclass",
            view=view,
        )
        assert not [name for name in columns["names"] if "token" in name], view
        for row in content_of(db, view):
            assert not [token for token in given if token in row], view
    assert len(content_of(db, "incident_list")) > 8, "too little was looked at"


def test_no_function_for_people_shows_a_token(db: Db) -> None:
    jobs, given = every_state(db)
    for job_id in jobs.values():
        for verb in ("job", "job_documents"):
            for row in call(db, verb, job_id=job_id):
                assert not any("token" in column for column in row)
                assert not [token for token in given if token in str(row)]


def test_no_view_shows_a_payload_or_a_result(db: Db) -> None:
    enqueue(db, payload={"secret": "s3cret"}, headers={"secret": "s3cret"})
    call(db, "complete", **own(claim_one(db)), result={"secret": "s3cret"})
    job = leased(db, payload={"secret": "s3cret"})
    call(db, "begin_effect", **own(job))
    call(db, "end_effect", **own(job), result={"secret": "s3cret"})
    for view in public_views(db):
        assert "s3cret" not in str(content_of(db, view)), view


def test_queue_stats_count_the_live_jobs_of_each_queue_kind_and_priority(db: Db) -> None:
    every_state(db)
    other = enqueue(db, "bill", queue="slow", priority=1, run_at="2020-01-01Z")
    rows = {
        (row["queue"], row["kind"], row["priority"]): row
        for row in query(db, "select * from taskboard.queue_stats")
    }
    assert set(rows) == {("default", "mail", 5), ("slow", "bill", 1)}
    mail, bill = rows["default", "mail", 5], rows["slow", "bill", 1]
    names = ("ready", "scheduled", "running", "expired", "blocked", "held")
    assert [mail[name] for name in names] == [1, 1, 1, 1, 1, 1]
    assert [bill[name] for name in names] == [1, 0, 0, 0, 0, 0]
    (row,) = call(db, "job", job_id=other)
    assert bill["oldest_ready_at"] == row["claimable_at"] < clock(db)
    assert not mail["paused"] and not bill["paused"]


def test_a_queue_that_ran_empty_is_still_listed(db: Db) -> None:
    call(db, "complete", **own(leased(db)))
    (row,) = query(db, "select * from taskboard.queue_stats")
    assert (row["ready"], row["running"], row["oldest_ready_at"]) == (0, 0, None)


def test_what_is_ready_or_expired_is_counted_by_kind_for_the_named_queues(db: Db) -> None:
    every_state(db)
    enqueue(db, "bill", queue="slow", priority=1)
    enqueue(db, "bill", queue="slow")
    enqueue(db, "later", delay="1 h")
    found = {row["kind"]: row["jobs"] for row in call(db, "count_ready")}
    assert found == {"mail": 2, "bill": 2}
    assert call(db, "count_ready", queues=["slow", "empty"]) == [{"kind": "bill", "jobs": 2}]
    raises(db, "22004", "count_ready", queues=[None])


def test_the_worker_list_says_who_holds_what(db: Db) -> None:
    first, second = leased(db, worker="a"), leased(db, worker="a")
    leased(db, worker="b")
    expire(db, second["job_id"])
    rows = {row["worker"]: row for row in query(db, "select * from taskboard.worker_list")}
    assert (rows["a"]["holds"], rows["a"]["expired"]) == (2, 1)
    assert (rows["b"]["holds"], rows["b"]["expired"]) == (1, 0)
    assert rows["a"]["leased_until"] == first["lease_expires_at"]


def test_a_worker_was_last_seen_at_its_last_claim_or_renewal(db: Db) -> None:
    job = leased(db, worker="a", lease="1 hour")
    leased(db, worker="b")
    change(db, job["job_id"], "claimable_at = claimable_at - interval '20 minutes'")
    before = clock(db)
    for seen_again in (False, True):
        if seen_again:
            call(db, "renew", **own(job))
        rows = {row["worker"]: row for row in query(db, "select * from taskboard.worker_list")}
        assert set(rows) == {"a", "b"}
        assert (rows["a"]["last_seen_at"] > before) == seen_again


def test_the_rates_are_those_of_the_last_five_minutes(db: Db) -> None:
    for _ in range(2):
        call(db, "complete", **own(leased(db)))
    call(db, "fail", **own(leased(db)), permanent=True)
    call(db, "cancel", job_id=enqueue(db))
    old = leased(db)
    call(db, "complete", **own(old))
    query(
        db,
        "update taskboard.history set finished_at = finished_at - interval '6 minutes'"
        " where id = %(id)s",
        id=old["job_id"],
    )
    call(db, "complete", **own(leased(db, "bill")))
    rates = {row["kind"]: row for row in query(db, "select * from taskboard.queue_rates")}
    names = ("completed_per_minute", "failed_per_minute", "cancelled_per_minute")
    assert [float(rates["mail"][name]) for name in names] == [0.4, 0.2, 0.2]
    assert [float(rates["bill"][name]) for name in names] == [0.2, 0, 0]
    assert 0 <= rates["mail"]["median_seconds"] < 10


def test_the_documents_of_a_job_are_shown_live_and_finished(db: Db) -> None:
    job = leased(db, payload={"n": 1}, headers={"h": 2})
    call(db, "fail", **own(job), error="boom", retry_in="0")
    assert call(db, "job_documents", job_id=job["job_id"]) == [
        {"payload": {"n": 1}, "headers": {"h": 2}, "result": None, "error": "boom"}
    ]
    call(db, "complete", **own(claim_one(db)), result={"r": 3})
    (row,) = call(db, "job_documents", job_id=job["job_id"])
    assert (row["payload"], row["headers"], row["result"]) == ({"n": 1}, {"h": 2}, {"r": 3})


def test_an_unknown_job_has_no_row_and_null_is_refused(db: Db) -> None:
    assert call(db, "job", job_id=uuid4()) == []
    assert call(db, "job_documents", job_id=uuid4()) == []
    raises(db, "22004", "job", job_id=None)
    raises(db, "22004", "job_documents", job_id=None)


def test_looking_changes_nothing(db: Db) -> None:
    jobs, _ = every_state(db)
    before, recorded = everything(db), incidents(db)
    for view in public_views(db):
        query(db, sql.SQL("select * from taskboard.{}").format(sql.Identifier(view)))
    for job_id in jobs.values():
        call(db, "job", job_id=job_id)
    assert everything(db) == before and incidents(db) == recorded


# Incidents: evidence of what went wrong, and of what people did.


@pytest.mark.parametrize(
    "verb", ["complete", "fail", "release", "renew", "begin_effect", "end_effect"]
)
def test_a_refused_write_is_recorded_with_its_reason(db: Db, verb: str) -> None:
    job = leased(db)
    expire(db, job["job_id"])
    claim_one(db, worker="b")
    call(db, verb, **own(job))
    *_, incident = query(db, "select * from taskboard.incident_list order by id")
    assert (incident["what"], incident["job_id"]) == ("write_refused", job["job_id"])
    assert incident["detail"] == f"{verb}: not_current"
    assert incident["by_role"] == db.info.user


def test_whatever_is_recorded_of_a_job_names_its_queue_and_kind(db: Db) -> None:
    first = leased(db, kind="post", queue="side", on_unknown="hold")
    call(db, "begin_effect", **own(first))
    expire(db, first["job_id"])
    second = claim_one(db)
    call(db, "complete", **own(first))
    call(db, "begin_effect", **own(second))
    call(db, "end_effect", **own(first))
    third = claim_one(db)
    call(db, "begin_effect", step="other", **own(third))
    call(db, "release", **own(third))
    call(db, "begin_effect", step="other", **own(claim_one(db)))
    call(db, "resolve", job_id=first["job_id"], step="other", happened=True)
    done = claim_one(db)
    call(db, "complete", **own(done))
    call(db, "renew", **own(done))
    seen = query(db, "select what, queue, kind from taskboard.incident_list where job_id = "
                 f"'{first['job_id']}'")  # fmt: skip
    assert {row["what"] for row in seen} == {
        "lease_lapsed", "write_refused", "job_held", "evidence_arrived", "job_resolved",
    }  # fmt: skip
    assert {(row["queue"], row["kind"]) for row in seen} == {("side", "post")}


def test_the_happy_path_writes_no_incident(db: Db) -> None:
    job = leased(db, unique_key="u", serial_key="s")
    call(db, "renew", **own(job))
    call(db, "begin_effect", **own(job))
    call(db, "end_effect", **own(job))
    call(db, "complete", **own(job))
    call(db, "complete", **own(job))
    assert claim(db) == [] and call(db, "maintain") and incidents(db) == []


def test_operators_acts_are_recorded_with_their_role_and_reason(
    db: Db, connect: Callable[..., Db]
) -> None:
    held = leased(db, on_unknown="hold")
    call(db, "begin_effect", **own(held))
    call(db, "fail", **own(held), retry_in="0")
    assert call(db, "begin_effect", **own(claim_one(db)))[0]["state"] == "held"
    running, waiting = leased(db, worker="a"), enqueue(db)
    last = max(row["id"] for row in query(db, "select id from taskboard.incident_list"))
    operator = connect()
    operator.execute("set role taskboard_operator")
    call(operator, "cancel", job_id=waiting, reason="wrong month")
    call(operator, "retry", job_id=waiting, reason="right after all")
    call(operator, "cancel", job_id=running["job_id"], reason="too long")
    call(operator, "evict", worker="a", reason="burnt")
    call(operator, "cancel", job_id=running["job_id"], reason="hangs", force=True)
    call(operator, "resolve", job_id=held["job_id"], step="main", happened=True, reason="asked")
    call(operator, "pause", queue="default", reason="dunning")
    call(operator, "resume", queue="default", reason="paid")
    call(operator, "pause", reason="fire")
    call(operator, "resume")
    rows = query(
        db, "select * from taskboard.incident_list where id > %(last)s order by id", last=last
    )
    assert [(row["what"], row["job_id"], row["detail"]) for row in rows] == [
        ("job_cancelled", waiting, "wrong month"),
        ("job_retried", waiting, "was cancelled; right after all"),
        ("cancel_requested", running["job_id"], "too long"),
        ("worker_evicted", None, "1 leases lapse; burnt"),
        ("job_cancelled", running["job_id"], "hangs"),
        ("job_resolved", held["job_id"], "main happened: yes; asked"),
        ("queue_paused", None, "dunning"),
        ("queue_resumed", None, "paid"),
        ("queue_paused", None, "fire"),
        ("queue_resumed", None, None),
    ]
    assert {row["by_role"] for row in rows} == {"taskboard_operator"}


def test_a_flood_of_refusals_is_capped(db: Db) -> None:
    set_default(db, "incidents_per_minute", 3)
    job = leased(db)
    call(db, "release", **own(job), delay="1 h")
    for _ in range(6):
        assert call(db, "release", **own(job)) == []
    assert len(incidents(db)) == 3
    query(db, "update taskboard.incidents set happened_at = happened_at - interval '1 minute'")
    call(db, "release", **own(job))
    assert len(incidents(db)) == 4
