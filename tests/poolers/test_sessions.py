"""Sessions of a pool are everybody's: each call may run in another one, after anybody's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import cycle
from typing import Any

import psycopg
import pytest

from catalog.calls import functions
from support import Connection, expire, rows

pytestmark = pytest.mark.wide

Bouncer = Callable[..., str]
Client = Callable[..., Connection]

HINTS = "select count(current_setting('taskboard.plan_' || n, true)) from generate_series(0, 7) n"


def test_the_timeline_of_two_workers_is_the_same_when_each_call_may_run_in_another_session(
    bouncer: Bouncer, client: Client, db: Connection
) -> None:
    pooled = bouncer()
    clients = cycle([client(pooled, f"c{n}") for n in range(8)])

    def ask(sql: str, *args: Any) -> list[tuple[Any, ...]]:
        return rows(next(clients), f"select * from taskboard.{sql}", args)

    ((job_id, created),) = ask("enqueue('mail', '{\"to\": 1}', unique_key => 'u')")
    assert created and ask("enqueue('mail', unique_key => 'u')") == [(job_id, False)]
    ((_, a, *_),) = ask("claim(worker => 'A')")
    assert ask("renew(%s, %s)", job_id, a) and not ask("claim(worker => 'B')")
    expire(db, job_id)
    assert not ask("renew(%s, %s)", job_id, a)
    ((_, b, *_),) = ask("claim(worker => 'B')")
    assert a != b and not ask("complete(%s, %s)", job_id, a)
    assert ask("lease_status(%s, %s)", job_id, a) == [("not_current",)]
    assert ask("begin_effect(%s, %s)", job_id, b)[0][3] == "fresh"
    assert ask("end_effect(%s, %s)", job_id, b)[0][2] == "done"
    done = ask("complete(%s, %s)", job_id, b)
    assert done and ask("complete(%s, %s)", job_id, b) == done
    many = ask("enqueue_many('mail', '{1,2,3}', serial_keys => '{s,s,s}')")
    for first in many:
        ((got, token, *_),) = ask("claim(worker => 'A', max_jobs => 10)")
        assert got == first[0]
        assert ask("fail(%s, %s, 'no', '0 s')", got, token)[0][1] == "ready"
        ((_, token, *_),) = ask("claim(worker => 'B')")
        assert ask("release(%s, %s)", got, token)[0][1] == "ready"
        ((_, token, *_),) = ask("claim(worker => 'C')")
        assert [row[0] for row in ask("complete_many(%s, %s)", [got], [token])] == [got]
    assert ask("pause()") and not ask("claim()") and ask("resume()")
    assert {row[0] for row in ask("retry_failed()")} == set()
    assert rows(db, "select state, count(*) from taskboard.job_list group by 1") == [
        ("completed", 4)
    ]


def test_no_call_leaves_a_setting_a_lock_or_a_statement_to_the_next_client(
    bouncer: Bouncer, client: Client, db: Connection
) -> None:
    pooled = bouncer(size=1)
    one, other = client(pooled, "one"), client(pooled, "other")
    look = (
        "select current_setting('lock_timeout'), current_setting('transaction_isolation'),"
        " current_setting('search_path'), current_setting('enable_seqscan'),"
        " (select count(*) from pg_locks where locktype = 'advisory'),"
        " (select count(*) from pg_prepared_statements),"
        " (select count(*) from pg_listening_channels())"
    )
    before = rows(other, look)
    for function in functions(db):
        if function.name in ("listen", "allow_queue"):
            continue
        rows(one, "select taskboard.enqueue('k')")
        usual = function.usual(*rows(one, "select job_id, lease_token from taskboard.claim()")[0])
        named = ", ".join(f"{name} => {value}" for name, value in usual.items())
        with suppress(psycopg.Error):
            rows(one, f"select * from taskboard.{function.name}({named})")
        assert rows(other, look) == before, function.name
        rows(one, "select taskboard.resume('default'), taskboard.resume()")


def test_hints_that_one_client_left_lead_another_one_to_nothing_that_is_not_its_own(
    bouncer: Bouncer, client: Client, db: Connection
) -> None:
    pooled = bouncer(size=1)
    a, b, every = (client(pooled, name) for name in ("A", "B", "all"))
    for n in range(20):
        db.execute(
            "select taskboard.enqueue('k', queue => %s), taskboard.enqueue(%s, queue => 'both')",
            ["a" if n % 2 else "b", "mail" if n % 2 else "sms"],
        )
    for _ in range(10):
        for conn, scope, wanted in (
            (a, "queues => '{a}'", ("a", "k")), (b, "queues => '{b}'", ("b", "k")),
            (a, "queues => '{both}', kinds => '{mail}'", ("both", "mail")),
            (b, "queues => '{both}', kinds => '{sms}'", ("both", "sms")),
        ):  # fmt: skip
            asked = f"select queue, kind, job_id, lease_token from taskboard.claim({scope})"
            got = rows(conn, asked)
            assert [row[:2] for row in got] == [wanted]
            assert rows(every, "select * from taskboard.complete(%s, %s)", got[0][2:])
    assert rows(a, HINTS)[0][0] > 1, "the hints were shared"
    # A job that is due before every hint is found at once, by whomever.
    for conn in (a, b, every):
        db.execute("select taskboard.enqueue('k', queue => 'a', run_at => now() - interval '1 h')")
        assert len(rows(conn, "select * from taskboard.claim(max_jobs => 9)")) == 1


def test_roles_that_share_a_session_each_get_jobs_of_their_own_queues_alone(
    bouncer: Bouncer, client: Client, db: Connection
) -> None:
    pooled = bouncer(size=1)
    clients = {team: client(pooled, team) for team in ("pooled_red", "pooled_blue")}
    for team in clients:
        db.execute(f"create role {team} in role taskboard_worker; grant {team} to postgres")
    try:
        for team in clients:
            db.execute("select taskboard.allow_queue(%s, %s)", [team, team])
            db.execute("select taskboard.enqueue_many('k', '{1,2,3}', queue => %s)", [team])
        for _ in range(3):
            for team, conn in clients.items():
                with conn.transaction():
                    conn.execute(f"set local role {team}")  # ends with the transaction
                    ((queue, job_id, token),) = rows(
                        conn, "select queue, job_id, lease_token from taskboard.claim()"
                    )
                    assert queue == team
                    other = next(name for name in clients if name != team)
                    conn.execute(f"set local role {other}")
                    assert not rows(conn, "select * from taskboard.renew(%s, %s)", [job_id, token])
                    conn.execute(f"set local role {team}")
                    assert rows(conn, "select * from taskboard.complete(%s, %s)", [job_id, token])
    finally:
        db.execute("drop role pooled_red, pooled_blue")


def test_workers_that_name_themselves_by_their_connection_keep_their_names(
    bouncer: Bouncer, client: Client, db: Connection
) -> None:
    pooled = bouncer(size=1)
    clients = {name: client(pooled, name) for name in ("web-1", "web-2")}
    db.execute("select taskboard.enqueue_many('k', '{1,2,3,4}')")
    for name in ("web-1", "web-2", "web-1", "web-2"):
        rows(clients[name], "select * from taskboard.claim()")
    held = "select worker, holds from taskboard.worker_list order by 1"
    assert rows(db, held) == [("web-1", 2), ("web-2", 2)]


def test_a_client_that_listens_through_the_pooler_costs_others_nothing_but_notifications(
    bouncer: Bouncer, client: Client, db: Connection
) -> None:
    pooled = bouncer(size=1)
    deaf, other = client(pooled, "deaf"), client(pooled, "other")
    assert rows(deaf, "select taskboard.listen()") == [(True,)]
    asleep = "select taskboard.somebody_sleeps('default')"
    assert rows(db, asleep) == [(True,)], "the mark stays in the session that the pool keeps"
    rows(other, "select taskboard.enqueue('k')")
    ((job_id, token),) = rows(other, "select job_id, lease_token from taskboard.claim()")
    assert rows(other, "select * from taskboard.complete(%s, %s)", [job_id, token])
    rows(db, "select taskboard.enqueue('k')")
    assert not list(deaf.notifies(timeout=0.2))
    assert len(rows(deaf, "select * from taskboard.claim()")) == 1, "polling finds it"
    rows(other, "select taskboard.unlisten()")
    assert rows(db, asleep) == [(False,)]


def test_with_statement_pooling_single_calls_work_and_a_transaction_is_refused_by_name(
    bouncer: Bouncer, client: Client
) -> None:
    conn = client(bouncer(pool_mode="statement"), "one")
    rows(conn, "select taskboard.enqueue('k')")
    (owner,) = rows(conn, "select job_id, lease_token from taskboard.claim()")
    assert rows(conn, "select * from taskboard.complete(%s, %s)", owner)
    with pytest.raises(psycopg.Error, match="transaction blocks not allowed in statement pooling"):
        conn.execute("begin")


def test_a_driver_that_prepares_statements_gets_errors_and_moves_no_job_that_is_not_its_own(
    bouncer: Bouncer, client: Client, db: Connection
) -> None:
    pooled = bouncer(size=1)
    a, b = (client(pooled, name, prepare_threshold=0) for name in "AB")
    rows(a, "select taskboard.enqueue('k', to_jsonb(%s))", [1])
    with pytest.raises(psycopg.errors.DuplicatePreparedStatement):
        rows(b, "select taskboard.enqueue('k', to_jsonb(%s))", [2])
    assert rows(db, "select count(*) from taskboard.job_list") == [(1,)]
    plain = client(pooled, "plain")
    ((job_id, token),) = rows(plain, "select job_id, lease_token from taskboard.claim()")
    assert rows(plain, "select * from taskboard.complete(%s, %s)", [job_id, token])


def test_eight_clients_on_two_sessions_complete_each_job_once_and_none_waits_for_long(
    bouncer: Bouncer, client: Client, db: Connection
) -> None:
    pooled, jobs = bouncer(query_wait_timeout=10), 1500
    clients = [client(pooled, f"c{n}") for n in range(8)]
    completed = Counter[Any]()

    def produce(conn: Connection) -> int:
        for n in range(jobs // 2 // 25):
            rows(conn, "select taskboard.enqueue_many('k', %s::jsonb[])", [[str(n)] * 25])
        return 0

    def work(conn: Connection) -> list[Any]:
        done: list[Any] = []
        misses = 0
        while misses < 40:
            got = rows(conn, "select job_id, lease_token from taskboard.claim(max_jobs => 10)")
            misses = misses + 1 if not got else 0
            ids, tokens = [row[0] for row in got], [row[1] for row in got]
            if got:
                rows(conn, "select * from taskboard.renew_many(%s, %s)", [ids, tokens])
                said = rows(conn, "select job_id from taskboard.complete_many(%s, %s)",
                            [ids, tokens])  # fmt: skip
                assert {row[0] for row in said} == set(ids)
                done += ids
        return done

    with ThreadPoolExecutor(8) as pool:
        producers = [pool.submit(produce, conn) for conn in clients[:2]]
        workers = [pool.submit(work, conn) for conn in clients[2:]]
        for one in producers:
            one.result(40)
        for other in workers:
            completed.update(other.result(40))
    assert len(completed) == jobs and set(completed.values()) == {1}
    assert rows(db, "select count(*), max(attempt) from taskboard.history") == [(jobs, 1)]
    assert rows(db, "select count(*) from pg_stat_activity where datname = current_database()"
                    " and application_name ~ '^c'")[0][0] <= 2  # fmt: skip
