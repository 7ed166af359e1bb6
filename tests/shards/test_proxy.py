"""A proxy before two shards answers as one database does, where it can."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from catalog.matrix import ROOT, matrix
from docs.transcript import blocks
from shards.sharded import Sharded, bare, shard_in
from support import Connection, Databases, expire, rows, session
from taskboard.cli import main
from taskboard.console.proxied import OPEN
from taskboard.console.shards import LEFT_OUT

pytestmark = pytest.mark.wide

SIGNATURES = """
select p.proname, pg_get_function_arguments(p.oid), pg_get_function_result(p.oid)
from pg_proc as p
where p.pronamespace = 'taskboard'::regnamespace and p.proname = any (%s)
order by 1"""
COLUMNS = """
select c.relname, a.attnum, a.attname, format_type(a.atttypid, null)
from pg_class as c
join pg_attribute as a on a.attrelid = c.oid and a.attnum > 0
where c.relnamespace = 'taskboard'::regnamespace and c.relkind = 'v' and c.relname = any (%s)
order by 1, 2"""


def ask(conn: Connection, call: str, *args: Any) -> list[tuple[Any, ...]]:
    return rows(conn, f"select * from taskboard.{call}", args)


def keys(shard: int, count: int, proxy: Connection) -> list[str]:
    """Find keys that a shard has."""
    found = rows(
        proxy,
        "select 'key-' || n from generate_series(1, 4000) as n"
        " join taskboard_shards.slots as s on s.slot = taskboard_shards.slot_of('key-' || n)"
        " where s.shard = %s limit %s",
        [shard, count],
    )
    assert len(found) == count
    return [key for (key,) in found]


def test_proxy_has_each_function_and_view_of_a_shard_with_the_same_signature(
    proxy: Connection, shard: list[Connection]
) -> None:
    names = [name for name in matrix() if name not in LEFT_OUT] + ["allow_queue", "disallow_queue"]
    for shape in (SIGNATURES, COLUMNS):
        there, here = (rows(conn, shape, [names]) for conn in (shard[0], proxy))
        assert here == there and len(here) > 30
    found = {row[0] for shape in (SIGNATURES, COLUMNS) for row in rows(proxy, shape, [names])}
    assert found == set(names)
    rights = "select has_function_privilege(%s, p.oid, 'execute') from pg_proc as p"
    rights += " where p.pronamespace = 'taskboard'::regnamespace and p.proname = %s"
    for name, roles in matrix().items():
        for role in ("producer", "worker", "operator", "observer"):
            may = rows(proxy, rights, [f"taskboard_{role}", name])
            assert may in ([], [(role in roles,)]), (name, role)


def test_whole_life_goes_through_the_proxy(proxy: Connection, shard: list[Connection]) -> None:
    for number in (0, 1, 0, 1):
        (key,) = keys(number, 1, proxy)
        (job_id, created) = ask(proxy, "enqueue('mail', '{\"to\": 1}', unique_key => %s)", key)[0]
        assert created and shard_in(job_id) == number
        assert ask(proxy, "enqueue('mail', unique_key => %s)", key) == [(job_id, False)]
        # A worker of that shard, or one that goes through the proxy.
        ((claimed, a, *_),) = ask(shard[number] if number else proxy, "claim(worker => 'A')")
        assert claimed == job_id and not ask(proxy, "claim()")
        assert ask(proxy, "renew(%s, %s)", job_id, a)
        expire(shard[number], job_id)
        assert not ask(proxy, "renew(%s, %s)", job_id, a)
        ((_, b, *_),) = ask(proxy, "claim(worker => 'B')")
        assert not ask(proxy, "complete(%s, %s)", job_id, a)
        assert ask(proxy, "lease_status(%s, %s)", job_id, a) == [("not_current",)]
        assert ask(proxy, "require_lease(%s, %s)", job_id, b)[0][0] == job_id
        assert ask(proxy, "begin_effect(%s, %s)", job_id, b)[0][2] == f"{job_id}/main"
        assert ask(proxy, "end_effect(%s, %s)", job_id, b)[0][2] == "done"
        assert ask(proxy, "fail(%s, %s, 'no', '0 s')", job_id, b)[0][1] == "ready"
        ((_, c, *_),) = ask(proxy, "claim(worker => 'C')")
        assert ask(proxy, "release(%s, %s)", job_id, c)[0][1] == "ready"
        ((_, d, *_),) = ask(proxy, "claim(worker => 'D')")
        done = ask(proxy, "complete(%s, %s, '[1]')", job_id, d)
        assert done and ask(proxy, "complete(%s, %s)", job_id, d) == done
        assert ask(proxy, "job(%s)", job_id)[0][1] == "completed"
        assert ask(proxy, "job_documents(%s)", job_id) == [({"to": 1}, None, [1], None)]
        assert ask(proxy, "wait_for(%s, '1 s')", job_id) == [(job_id, "completed", [1], None)]
        assert ask(proxy, "retry(%s)", job_id) == [(job_id, "ready")]
        assert ask(proxy, "cancel(%s)", job_id) == [(job_id, "cancelled")]


def test_id_of_no_shard_is_answered_as_an_unknown_job(proxy: Connection) -> None:
    nobody = "01a22997-8342-7767-b59e-9368ba20beef"
    token = "01a22997-8342-4767-b59e-9368ba20beef"
    for verb in ("renew", "complete", "fail", "release", "begin_effect"):
        assert not ask(proxy, f"{verb}(%s, %s)", nobody, token)
    assert ask(proxy, "lease_status(%s, %s)", nobody, token) == [("unknown_job",)]
    with pytest.raises(psycopg.Error, match="no such job") as caught:
        ask(proxy, "cancel(%s)", nobody)
    assert caught.value.sqlstate == "TB002"
    with pytest.raises(psycopg.Error) as caught:
        ask(proxy, "renew(null, %s)", token)
    assert caught.value.sqlstate == "22004"


def test_jobs_without_a_key_go_to_all_shards_and_claims_find_them_everywhere(
    proxy: Connection
) -> None:
    ids = [ask(proxy, "enqueue('k')")[0][0] for _ in range(40)]
    assert set(map(shard_in, ids)) == {0, 1}
    many = ask(proxy, "enqueue_many('k', array(select '1'::jsonb from generate_series(1, 20)))")
    assert len(many) == 20 and len({shard_in(job_id) for job_id, _ in many}) == 1
    assert len(ask(proxy, "claim(max_jobs => 7)")) == 7
    owners = [row[:2] for row in ask(proxy, "claim(max_jobs => 100)")]
    assert len(owners) == 53 and {shard_in(job_id) for job_id, _ in owners} == {0, 1}
    assert rows(proxy, "select worker, holds from taskboard.worker_list") == [("proxy", 60)]
    job_ids, tokens = [list(each) for each in zip(*owners, strict=True)]
    renewed = ask(proxy, "renew_many(%s, %s)", job_ids, tokens)
    assert {row[0] for row in renewed} == set(job_ids)
    results = [str(n) for n in range(53)]
    done = ask(proxy, "complete_many(%s, %s, %s::jsonb[])", job_ids, tokens, results)
    assert {row[0] for row in done} == set(job_ids)
    for n in (0, 30, 52):
        assert ask(proxy, "job_documents(%s)", job_ids[n])[0][2] == n
    with pytest.raises(psycopg.Error) as caught:
        ask(proxy, "complete_many(%s, %s)", job_ids, tokens[:2])
    assert caught.value.sqlstate == "22023"


def test_batch_with_keys_is_split_and_answered_in_the_order_of_its_input(
    proxy: Connection
) -> None:
    some = [key for number in (0, 1) for key in keys(number, 3, proxy)]
    wanted = [some[n] for n in (0, 3, 1, 4, 3, 2, 5, 0)] + [None]
    call = "enqueue_many('k', array(select to_jsonb(n) from generate_series(1, 9) as n),"
    first = ask(proxy, call + " unique_keys => %s)", wanted)
    assert [created for _, created in first] == [
        True, True, True, True, False, True, True, False, True,
    ]  # fmt: skip
    assert first[4][0] == first[1][0] and first[7][0] == first[0][0]
    assert {shard_in(job_id) for job_id, _ in first} == {0, 1}
    again = ask(proxy, call + " unique_keys => %s)", wanted)
    assert [job_id for job_id, _ in again[:8]] == [job_id for job_id, _ in first[:8]]
    for n, (job_id, created) in enumerate(first, 1):
        if created:
            assert ask(proxy, "job_documents(%s)", job_id)[0][0] == n
    assert ask(proxy, "enqueue_many('k', '{}')") == []


def test_jobs_of_a_serial_key_run_one_by_one_in_the_order_of_their_batches(
    proxy: Connection
) -> None:
    both = [keys(number, 1, proxy)[0] for number in (0, 1)]
    for _ in range(2):
        ask(proxy, "enqueue_many('k', '{1,2,3,4}', serial_keys => %s)", both * 2)
    seen: dict[Any, list[Any]] = {0: [], 1: []}
    for _ in range(4):
        got = ask(proxy, "claim(max_jobs => 10)")
        assert len(got) == 2
        for job_id, token, *row in got:
            seen[shard_in(job_id)].append(row[5])
            assert ask(proxy, "complete(%s, %s)", job_id, token)
    assert seen == {0: [1, 3, 1, 3], 1: [2, 4, 2, 4]}


def test_operators_verbs_without_an_id_reach_every_shard(
    proxy: Connection, shard: list[Connection]
) -> None:
    for conn in shard:
        ask(conn, "enqueue_many('k', '{1,2}', max_attempts => 1)")
    assert len(ask(proxy, "pause('default', reason => 'test')")) == 1
    for conn in shard:
        assert rows(conn, "select name from taskboard.queues where paused_at is not null")
    assert not ask(proxy, "claim()") and len(ask(proxy, "resume('default')")) == 1
    for _ in range(4):
        ((job_id, token, *_),) = ask(proxy, "claim(worker => 'dead')")
        ask(proxy, "fail(%s, %s, 'no')", job_id, token)
    assert len(ask(proxy, "retry_failed(max_jobs => 3)")) == 3
    assert len(ask(proxy, "retry_failed()")) == 1
    assert len(ask(proxy, "claim(max_jobs => 9, worker => 'dead')")) == 4
    assert len(ask(proxy, "evict('dead')")) == 4
    ask(proxy, "limit_queue('default', max_running => 1)")
    ask(proxy, "configure('max_attempts', '3')")
    ask(proxy, "keep_history('default', completed => false)")
    for conn in shard:
        assert rows(conn, "select max_running, keep_completed from taskboard.queues") == [
            (1, False)
        ]
        assert rows(conn, "select max_attempts from taskboard.settings") == [(3,)]
    assert len(ask(proxy, "claim(max_jobs => 9)")) == 2, "a limit is that of a shard"
    assert ask(proxy, "prune()") and ask(proxy, "maintain()")
    stats = rows(proxy, "select queue, ready, running, expired from taskboard.queue_stats")
    assert stats == [("default", 0, 2, 2)]
    assert len(rows(proxy, "select * from taskboard.job_list where state = 'running'")) == 2
    paused = "select count(*) from taskboard.incident_list where what = 'queue_paused'"
    assert rows(proxy, paused) == [(2,)]
    with pytest.raises(psycopg.Error, match="each shard has a number"):
        ask(proxy, "configure('shard', '7')")


def test_schedule_lives_on_one_shard(proxy: Connection, shard: list[Connection]) -> None:
    for name in ("a", "b", "c", "d", "e", "f"):
        ask(proxy, "schedule(%s, '* * * * *', 'k')", name)
    there = Counter(name for conn in shard for (name,) in rows(
        conn, "select name from taskboard.schedule_list"))  # fmt: skip
    assert there == dict.fromkeys("abcdef", 1)
    assert rows(proxy, "select count(*) from taskboard.schedule_list") == [(6,)]
    assert len(ask(proxy, "due_schedules()")) == 6
    assert ask(proxy, "pause_schedule('a')") == [(True,)]
    assert ask(proxy, "unschedule('a')") == [(True,)]
    assert ask(proxy, "unschedule('a')") == [(False,)]


def test_login_has_through_the_proxy_the_rights_that_it_has_on_the_shard(
    sharded: Sharded, proxy: Connection, shard: list[Connection],
    connect: Callable[..., Connection],
) -> None:  # fmt: skip
    for conn in (proxy, shard[0]):
        conn.execute("create role shards_web login in role taskboard_producer")
    try:
        web = connect("web", make_conninfo(sharded.proxy, user="shards_web"))
        job_id = ask(web, "enqueue('k')")[0][0]
        assert ask(web, "cancel(%s)", job_id) == [(job_id, "cancelled")]
        for call in ("claim()", "pause()", "job_list"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                ask(web, call)
        by = "select by_role from taskboard.incident_list where what = 'job_cancelled'"
        assert rows(shard[shard_in(job_id)], by) == [("shards_web",)]
        web.close()
    finally:
        for conn in (proxy, shard[0]):
            conn.execute("drop role shards_web")


def test_what_the_caller_rolls_back_has_happened_on_the_shard(proxy: Connection) -> None:
    with pytest.raises(ZeroDivisionError), proxy.transaction():
        job_id = ask(proxy, "enqueue('k')")[0][0]
        raise ZeroDivisionError
    assert ask(proxy, "job(%s)", job_id)[0][1] == "ready"


def test_shard_is_not_taken_for_a_proxy(sharded: Sharded, shard: list[Connection]) -> None:
    ask(shard[0], "enqueue('k')")
    with pytest.raises(psycopg.Error, match="it is a shard, and no proxy"):
        shard[0].execute(OPEN.encode())
    shard[0].execute("rollback")
    assert rows(shard[0], "select count(*) from taskboard.job_list") == [(1,)]


def test_proxy_is_set_up_as_the_page_says_and_the_command_line_works_there(
    proxies: Databases, sharded: Sharded, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], connect: Callable[..., Connection],
) -> None:  # fmt: skip
    dsn = proxies.server.dsn(proxies.create())
    extension, rest = (
        block.text for block in blocks(ROOT / "sql/shards/README.md") if block.language == "sql"
    )
    conn = connect("setting up", dsn)
    conn.execute(extension)

    def command(*words: str) -> str:
        assert main(words) == 0
        return capsys.readouterr().out

    monkeypatch.setenv("TASKBOARD_DATABASE_URL", sharded.shards[0])
    conn.execute(command("shards").encode())
    conn.execute(command("shards").encode())  # as after an upgrade
    for number, shard in enumerate(sharded.shards):
        rest = re.sub(f"p{number} '.*'", f"p{number} '{bare(shard)}'", rest)
    conn.execute(rest)
    with session(dsn) as fresh:
        assert rows(fresh, "select count(*) from taskboard_shards.slots group by shard") == [
            (512,), (512,),
        ]  # fmt: skip

    conn.execute(command("shards").encode())
    monkeypatch.setenv("TASKBOARD_DATABASE_URL", dsn)
    job = command("enqueue", "mail", "--unique-key", "order 1").strip()
    assert job in command("jobs") and "ready" in command("job", job)
    assert command("queues").count("mail") == 1
    assert "paused" in command("pause", "mails") and "resumed" in command("resume", "mails")
    assert "cancelled" in command("cancel", job) and "ready" in command("retry", job)
