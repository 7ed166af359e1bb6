"""A shard that is down hurts only its jobs; one more is added without moving any."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from shards.sharded import Sharded, shard_in
from shards.test_proxy import ask, keys
from support import Connection, Server, rows, session, wait_for, wait_until_blocked
from taskboard.migrate import migrate

pytestmark = pytest.mark.wide

MakeSharded = Callable[[list[str]], Sharded]


def refused(conn: Connection, call: str, *args: Any) -> str:
    """The SQLSTATE of what is said about a shard that does not answer."""
    with pytest.raises(psycopg.OperationalError, match="shard 1 does not answer") as caught:
        ask(conn, call, *args)
    return str(caught.value.sqlstate)


def test_shard_that_is_down_hurts_only_its_jobs(
    make_sharded: MakeSharded, dsn: str, server_factory: Callable[..., Server],
    connect: Callable[..., Connection],
) -> None:  # fmt: skip
    other = server_factory(fsync="off")
    migrate(other.dsn())
    sharded = make_sharded([dsn, other.dsn()])
    proxy = connect("proxy", sharded.proxy)
    (near,), (far,) = keys(0, 1, proxy), keys(1, 1, proxy)
    there = [ask(proxy, "enqueue('k', unique_key => %s)", far)[0][0]]
    ((_, token, *_),) = ask(proxy, "claim()")
    here = ask(proxy, "enqueue('k', unique_key => %s)", near)[0][0]
    warned: list[str] = []
    proxy.add_notice_handler(lambda notice: warned.append(str(notice.message_primary)))

    other.stop()
    for fresh in (proxy, connect("late", sharded.proxy)):  # with a connection, and without
        for _ in range(8):
            assert shard_in(ask(fresh, "enqueue('k')")[0][0]) == 0
        many = ask(fresh, "enqueue_many('k', '{1,2,3}')")
        assert [shard_in(job_id) for job_id, _ in many] == [0, 0, 0]
        assert ask(fresh, "enqueue('k', unique_key => %s)", near) == [(here, False)]
        assert refused(fresh, "enqueue('k', unique_key => %s)", far) == "08001"
        assert refused(fresh, "enqueue_many('k', '{1}', serial_keys => %s)", [far]) == "08001"
        assert refused(fresh, "renew(%s, %s)", there[0], token) == "08001"
        assert refused(fresh, "cancel(%s)", there[0]) == "08001"
        assert refused(fresh, "complete_many(%s, %s)", there, [token]) == "08001"
    assert not warned
    ((job_id, own, *_),) = ask(proxy, "claim()")
    mixed = [job_id, there[0]], [own, token]
    assert refused(proxy, "complete_many(%s, %s)", *mixed) == "08001"
    assert ask(proxy, "job(%s)", job_id)[0][1] == "completed", "the others were completed"
    warned.clear()
    assert len(ask(proxy, "pause('default')")) == 1 and len(ask(proxy, "resume('default')")) == 1
    assert rows(proxy, "select sum(ready) from taskboard.queue_stats")[0][0] > 10
    assert len(warned) == 3 and all("shard 1 does not answer" in each for each in warned)

    other.start()
    assert len(ask(proxy, "complete_many(%s, %s)", *mixed)) == 2, "the repeat tells of both"
    assert ask(proxy, "enqueue('k', unique_key => %s)", far)[0][1] is True
    # Not sooner than the hint, which lasts for ten seconds, has been forgotten.
    fresh = connect("fresh", sharded.proxy)
    assert {shard_in(ask(fresh, "enqueue('k')")[0][0]) for _ in range(30)} == {0, 1}


def test_answer_that_is_lost_is_told_as_unknown_and_the_job_is_not_sent_elsewhere(
    make_sharded: MakeSharded, server_factory: Callable[..., Server],
    connect: Callable[..., Connection],
) -> None:  # fmt: skip
    other = server_factory(fsync="off")
    migrate(other.dsn())
    sharded = make_sharded([other.dsn()])
    proxy, lock = connect("proxy", sharded.proxy), psycopg.connect(other.dsn())
    lock.execute("lock taskboard.jobs in access exclusive mode")
    with ThreadPoolExecutor(1) as pool, session(other.dsn()) as observer:
        calling = pool.submit(ask, proxy, "enqueue('k')")
        blocked = "select pid from pg_stat_activity where wait_event_type = 'Lock'"
        wait_for(lambda: rows(observer, blocked))
        wait_until_blocked(observer, rows(observer, blocked)[0][0])
        other.crash()  # type: ignore[attr-defined]
        with pytest.raises(psycopg.OperationalError, match="does not answer") as caught:
            calling.result(10)
    assert caught.value.sqlstate == "08006"
    lock.close()


def test_host_that_is_gone_without_refusing_holds_a_call_for_its_time_out_and_is_asked_last_then(
    sharded: Sharded, proxy: Connection, connect: Callable[..., Connection]
) -> None:
    ((far,),) = [keys(1, 1, proxy)]
    with socket.socket() as gone, ExitStack() as stack:
        gone.bind(("127.0.0.1", 0))
        gone.listen(0)
        for _ in range(3):  # its queue is full: what more comes is dropped
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            with suppress(BlockingIOError):
                client.connect(gone.getsockname())
        sharded.shards[1] = f"host=127.0.0.1 port={gone.getsockname()[1]} dbname=x"
        sharded.configure(proxy)
        fresh = connect("fresh", sharded.proxy)
        # Without it each call would take two minutes, and end with the session's time-out.
        ids = [ask(fresh, "enqueue('k')")[0][0] for _ in range(20)]
        assert set(map(shard_in, ids)) == {0}
        assert len(ask(fresh, "claim(max_jobs => 30)")) == 20
        assert refused(fresh, "enqueue('k', unique_key => %s)", far) == "08001"


def test_failover_address_of_a_shard_leads_to_the_one_that_takes_writes(
    make_sharded: MakeSharded, sharded: Sharded, dsn: str, server_factory: Callable[..., Server],
    connect: Callable[..., Connection],
) -> None:  # fmt: skip
    standby = server_factory(fsync="off", default_transaction_read_only="on")
    primary, second = conninfo_to_dict(dsn), conninfo_to_dict(standby.dsn())
    with session(standby.dsn(), options="-c default_transaction_read_only=off") as conn:
        rows(conn, f"create database {primary['dbname']}")
    hosts = make_conninfo(
        dbname=primary["dbname"], target_session_attrs="read-write",
        host=f"127.0.0.1,{second['host']},{primary['host']}",
        port=f"1,{second['port']},{primary['port']}",
    )  # fmt: skip
    both = make_sharded([sharded.shards[0], dsn])
    both.shards[1] = hosts
    with session(both.proxy) as conn:
        both.configure(conn)
    proxy = connect("proxy", both.proxy)
    (key,) = keys(1, 1, proxy)
    job_id, created = ask(proxy, "enqueue('k', serial_key => %s)", key)[0]
    assert created and shard_in(job_id) == 1
    with session(dsn) as conn:
        assert ask(conn, "job(%s)", job_id)
        # The connection is lost, as in a failover: that is told once, then there is another one.
        rows(conn, "select pg_terminate_backend(pid) from pg_stat_activity"
                   " where datname = current_database() and pid <> pg_backend_pid()")  # fmt: skip
        assert refused(proxy, "job(%s)", job_id) == "08001"
        assert ask(proxy, "job(%s)", job_id)[0][0] == job_id


def test_shard_is_added_and_no_row_moves_and_every_key_finds_its_holder(
    sharded: Sharded, proxy: Connection, shard: list[Connection],
    new_database: Callable[..., str], template: str, connect: Callable[..., Connection],
) -> None:  # fmt: skip
    held = {key: ask(proxy, "enqueue('k', unique_key => %s)", key)[0][0]
            for key in [*keys(0, 40, proxy), *keys(1, 40, proxy)]}  # fmt: skip
    done = [key for number in (0, 1) for key in keys(number, 45, proxy)[40:]]
    for key in done:
        job_id = ask(proxy, "enqueue('done', unique_key => %s)", key)[0][0]
        ((_, token, *_),) = ask(proxy, "claim(kinds => '{done}')")
        assert ask(proxy, "complete(%s, %s)", job_id, token)
    ask(proxy, "schedule('nightly', '0 2 * * *', 'k')")
    home = rows(proxy, "select taskboard_shards.shard_of_key('nightly')")

    third = new_database(template)
    sharded.shards.append(third)
    sharded.configure(proxy)
    rows(proxy, "select taskboard_shards.add_shard(2)")
    ids = [ask(proxy, "enqueue('k')")[0][0] for _ in range(40)]
    assert Counter(map(shard_in, ids))[2] > 3, "without a key, at once"
    moved = rows(proxy, "select taskboard_shards.spread()")[0][0]
    assert moved == 340 and rows(
        proxy, "select count(*) from taskboard_shards.slots group by shard order by 1"
    ) == [(340,), (342,), (342,)]
    for key, job_id in held.items():
        assert ask(proxy, "enqueue('k', unique_key => %s)", key) == [(job_id, False)]
        assert ask(proxy, "job(%s)", job_id)
    for key in done:  # whoever brings the finished one back finds no second holder
        job_id, created = ask(proxy, "enqueue('done', unique_key => %s)", key)[0]
        assert created and shard_in(job_id) < 2
    assert rows(proxy, "select taskboard_shards.shard_of_key('nightly')") == home
    (key,) = keys(2, 1, proxy)
    assert shard_in(ask(proxy, "enqueue('k', serial_key => %s)", key)[0][0]) == 2
    assert rows(proxy, "select taskboard_shards.spread()") == [(0,)]
    with pytest.raises(psycopg.Error, match="holds jobs with the number of another shard"):
        sharded.shards.append(sharded.shards[0])
        sharded.configure(proxy)
        rows(proxy, "select taskboard_shards.add_shard(3)")


def test_no_slot_moves_while_something_is_put_into_it(
    sharded: Sharded, proxy: Connection, connect: Callable[..., Connection]
) -> None:
    producer = connect("producer", sharded.proxy)
    with ThreadPoolExecutor(1) as pool:
        with producer.transaction():
            ask(producer, "enqueue('k', serial_key => 'a')")
            moving = pool.submit(rows, proxy, "select taskboard_shards.spread()")
            assert wait_until_blocked(producer, proxy.info.backend_pid) == [
                producer.info.backend_pid
            ]
        assert moving.result(10)


def test_key_that_is_held_longer_than_its_job_is_known_keeps_all_slots_where_they_are(
    sharded: Sharded, proxy: Connection, shard: list[Connection],
    new_database: Callable[..., str], template: str,
) -> None:  # fmt: skip
    (key,) = keys(0, 1, proxy)
    job_id = ask(proxy, "enqueue('k', unique_key => %s, unique_for => '9 days')", key)[0][0]
    ask(proxy, "cancel(%s)", job_id)
    shard[0].execute("delete from taskboard.history")
    sharded.shards.append(new_database(template))
    sharded.configure(proxy)
    rows(proxy, "select taskboard_shards.add_shard(2)")
    assert rows(proxy, "select taskboard_shards.spread()")[0][0] < 200
    assert rows(proxy, "select count(*) from taskboard_shards.slots where shard = 0") == [(512,)]
    assert ask(proxy, "enqueue('k', unique_key => %s)", key) == [(job_id, False)]
