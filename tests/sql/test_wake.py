"""Notifications: only when somebody sleeps, and only ever a hint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from verbs import (
    Db,
    call,
    claim,
    claim_one,
    enqueue,
    gets_nothing,
    leased,
    own,
    query,
    refuses,
    set_default,
)

import support
from support import Server, expire
from taskboard.migrate import migrate

pytestmark = pytest.mark.rows_only

Ear = Callable[[], list[str]]


@pytest.fixture
def heard(db: Db, connect: Callable[..., Db]) -> Iterator[Ear]:
    """What was notified since the last look, by somebody who listens without a sleeper's mark."""
    observer, other = connect(), connect()
    observer.execute("listen taskboard")

    def listen() -> list[str]:
        # Notifications arrive in the order of their commits: read up to one of our own.
        other.execute("notify taskboard, 'that was all'")
        found: list[str] = []
        for notification in observer.notifies(timeout=5):
            if notification.payload == "that was all":
                return found
            found.append(notification.payload)
        raise AssertionError("our own notification did not arrive")

    yield listen


def sleeper(connect: Callable[..., Db], queues: list[str] | None = None) -> Db:
    session = connect()
    (row,) = call(session, "listen", queues=queues)
    assert row["listen"] is True
    return session


def marks(db: Db) -> int:
    (row,) = query(db, "select count(*) from pg_locks where locktype = 'advisory'")
    found: int = row["count"]
    return found


def test_a_sleeper_is_woken_by_a_job_without_any_data(db: Db, connect: Callable[..., Db]) -> None:
    session = sleeper(connect)
    enqueue(db, payload={"secret": 1})
    (notification,) = session.notifies(timeout=5, stop_after=1)
    assert (notification.channel, notification.payload) == ("taskboard", "")


# A client that sends parameters apart from the text uses more messages for one statement.
@pytest.mark.parametrize("protocol", [psycopg.ClientCursor, psycopg.Cursor])
def test_while_nobody_sleeps_nothing_is_notified(
    db: Db, connect: Callable[..., Db], heard: Ear, protocol: type[Any]
) -> None:
    producer = connect(cursor_factory=protocol)
    statement = "select job_id from taskboard.enqueue(%s)"
    producer.execute(statement, ["mail"])
    assert heard() == []
    session = sleeper(connect)
    producer.execute(statement, ["mail"])
    assert heard() == [""]
    call(session, "unlisten")
    producer.execute(statement, ["mail"])
    assert heard() == []


@pytest.mark.parametrize("protocol", [psycopg.ClientCursor, psycopg.Cursor])
def test_a_sleeper_on_some_queues_is_not_woken_for_others(
    db: Db, connect: Callable[..., Db], heard: Ear, protocol: type[Any]
) -> None:
    sleeper(connect, ["x", "y"])
    producer = connect(cursor_factory=protocol)
    statement = "select job_id from taskboard.enqueue(%s, queue => %s)"
    for queue, notified in (("z", []), ("y", [""]), ("x", [""]), ("default", [])):
        producer.execute(statement, ["mail", queue])
        assert heard() == notified, queue


def test_a_transaction_notifies_when_it_commits_and_not_before(
    db: Db, connect: Callable[..., Db], heard: Ear
) -> None:
    sleeper(connect)
    producer = connect()
    producer.execute("begin")
    enqueue(producer)
    assert heard() == []
    producer.execute("commit")
    assert heard() == [""]
    producer.execute("begin")
    enqueue(producer)
    producer.execute("rollback")
    assert heard() == []


def test_nobody_is_told_to_sleep_while_an_older_transaction_may_still_add_a_job(
    db: Db, connect: Callable[..., Db]
) -> None:
    producer, session = connect(), connect()
    producer.execute("begin")
    enqueue(producer)
    for _ in range(2):
        assert call(session, "listen") == [{"listen": False}]
        assert claim(session) == []
    producer.execute("commit")
    assert call(session, "listen") == [{"listen": True}]
    assert len(claim(session)) == 1


def test_a_transaction_that_began_after_the_mark_keeps_nobody_awake(
    connect: Callable[..., Db], heard: Ear
) -> None:
    session = sleeper(connect)
    producer = connect()
    producer.execute("begin")
    enqueue(producer)
    assert call(session, "listen") == [{"listen": True}]
    producer.execute("commit")
    assert heard() == [""]


def test_a_batch_notifies_once(db: Db, connect: Callable[..., Db], heard: Ear) -> None:
    sleeper(connect)
    call(db, "enqueue_many", kind="mail", payloads=[{}] * 20)
    call(db, "enqueue_many", kind="mail", payloads=[{}] * 3, serial_keys=["s", "s", "t"])
    assert heard() == ["", ""]


def test_what_is_due_soon_wakes_and_what_is_due_later_does_not(
    db: Db, connect: Callable[..., Db], heard: Ear
) -> None:
    sleeper(connect)
    enqueue(db, delay="1 hour")
    assert heard() == []
    enqueue(db, delay="30 s")
    assert heard() == [""]


def test_a_blocked_job_wakes_when_its_turn_comes(
    db: Db, connect: Callable[..., Db], heard: Ear
) -> None:
    job = leased(db, serial_key="s")
    heard()
    sleeper(connect)
    enqueue(db, serial_key="s")
    assert heard() == []
    call(db, "complete", **own(job))
    assert heard() == [""]


def release(db: Db) -> None:
    call(db, "release", **own(leased(db)))


def fail_for_now(db: Db) -> None:
    call(db, "fail", **own(leased(db)), retry_in="0")


def retry(db: Db) -> None:
    job = leased(db)
    call(db, "fail", **own(job), permanent=True)
    call(db, "retry", job_id=job["job_id"])


def resolve(db: Db) -> None:
    job = leased(db, on_unknown="hold")
    call(db, "begin_effect", **own(job))
    call(db, "fail", **own(job), permanent=True)
    call(db, "resolve", job_id=job["job_id"], step="main", happened=True)


def late_evidence(db: Db) -> None:
    job = leased(db, on_unknown="hold")
    call(db, "begin_effect", **own(job))
    call(db, "fail", **own(job), permanent=True)
    call(db, "end_effect", **own(job))


def evict(db: Db) -> None:
    leased(db, worker="dead")
    call(db, "evict", worker="dead")


def resume(db: Db) -> None:
    call(db, "pause", queue="default")
    claimable = enqueue(db)
    expire(db, claimable)
    call(db, "resume", queue="default")


@pytest.mark.parametrize(
    "act", [release, fail_for_now, retry, resolve, late_evidence, evict, resume]
)
def test_whatever_makes_a_job_claimable_wakes(
    db: Db, connect: Callable[..., Db], heard: Ear, act: Callable[[Db], None]
) -> None:
    # Of the notifications, the enqueue's is one; the act must add another.
    sleeper(connect)
    act(db)
    assert len(heard()) == 2


def test_with_notify_off_nobody_is_woken_and_nobody_waits(
    db: Db, connect: Callable[..., Db], heard: Ear
) -> None:
    set_default(db, "notify", False)
    sleeper(connect)
    enqueue(db)
    with db.transaction():
        enqueue(db)
    assert heard() == []
    assert claim_one(db)["attempt"] == 1


def test_a_listener_that_stays_in_a_transaction_makes_no_enqueue_fail(
    db: Db, server_factory: Callable[..., Server]
) -> None:
    # From PostgreSQL 17 on the queue can be so small that it is full in a moment.
    small = db.info.server_version >= 170000
    server = server_factory(**{"max_notify_queue_pages": "64"} if small else {})
    migrate(server.dsn())
    with (
        support.session(server.dsn(), "listener") as listener,
        support.session(server.dsn()) as producer,
    ):
        call(listener, "listen")
        listener.execute("begin")
        listener.execute("select 1")  # from here on it hears nothing, and nothing is cleared away
        fill = "select pg_notify('taskboard', n || repeat('x', 7000)) from generate_series(1, 2) n"
        full = not small
        for _ in range(50):
            try:
                producer.execute(fill)
            except psycopg.OperationalError as exc:
                full = "NOTIFY queue" in str(exc)
            for _ in range(2):
                enqueue(producer)
        assert full
        assert query(producer, "select count(*) from taskboard.jobs") == [{"count": 100}]


def test_a_taken_unique_key_wakes_nobody(db: Db, connect: Callable[..., Db], heard: Ear) -> None:
    enqueue(db, unique_key="u")
    heard()
    sleeper(connect)
    (row,) = call(db, "enqueue", kind="mail", unique_key="u")
    assert row["created"] is False
    assert heard() == []


def test_a_mark_is_taken_once_however_often_and_goes_with_unlisten(
    db: Db, connect: Callable[..., Db]
) -> None:
    session = connect()
    for queues, count in ((None, 1), (["x", "y", "x"], 2), (["x"], 1), (None, 1), (None, 1)):
        (row,) = call(session, "listen", queues=queues)
        assert row["listen"] is True and marks(db) == count
    for _ in range(2):
        call(session, "unlisten")
        assert marks(db) == 0
    assert query(session, "select pg_listening_channels() as channel") == []


def test_a_mark_goes_with_its_session(db: Db, connect: Callable[..., Db], heard: Ear) -> None:
    session = sleeper(connect)
    assert marks(db) == 1
    session.close()
    for _ in range(200):
        if marks(db) == 0:
            break
        query(db, "select pg_sleep(0.01)")
    assert marks(db) == 0


def test_many_sleep_at_once_and_all_are_woken(db: Db, connect: Callable[..., Db]) -> None:
    sessions = [sleeper(connect), sleeper(connect), sleeper(connect, ["default"])]
    enqueue(db)
    for session in sessions:
        assert len(list(session.notifies(timeout=5, stop_after=1))) == 1


def test_unlisten_leaves_the_locks_of_others_alone(db: Db) -> None:
    query(db, "select pg_advisory_lock_shared(1, 2), pg_advisory_lock(3)")
    call(db, "listen")
    call(db, "unlisten")
    assert marks(db) == 2


def test_listening_changes_no_job(db: Db) -> None:
    enqueue(db)
    gets_nothing(db, "claim", queues=["other"])
    call(db, "listen", queues=["default"])
    assert claim_one(db)["attempt"] == 1


def test_nulls_among_the_queues_are_refused_as_in_claim(db: Db) -> None:
    refuses(db, "listen", {}, [({"queues": [None]}, "22004"), ({"queues": ["x", None]}, "22004")])
    assert marks(db) == 0


@pytest.mark.parametrize(
    "queue", ["x" * 63, "x" * 64, "x" * 200, "MixedCase", "a b", "ü" * 40, "it's \"quoted\""]
)
def test_a_queue_of_any_name_wakes_its_sleepers(
    db: Db, connect: Callable[..., Db], heard: Ear, queue: str
) -> None:
    with sleeper(connect, [queue]):
        enqueue(db, queue=queue)
        assert heard() == [""]


def test_documents_and_batches_larger_than_a_notification_wake_all_the_same(
    db: Db, connect: Callable[..., Db], heard: Ear
) -> None:
    with sleeper(connect):
        for size in (9_000, 1_000_000):
            enqueue(db, payload={"text": "x" * size})
            assert heard() == [""]
        call(db, "enqueue_many", kind="mail", payloads=[{"text": "x" * 100}] * 2000)
        assert heard() == [""]


def test_who_will_notify_holds_up_no_other_producer_until_it_commits(
    db: Db, connect: Callable[..., Db], heard: Ear
) -> None:
    # Who notifies takes a lock of the whole cluster, at the commit and not before.
    sleeper(connect)
    first, second = connect(), connect(options="-c statement_timeout=4s")
    first.execute("begin")
    enqueue(first)
    query(first, "select 'long business'")
    second.execute("begin")
    enqueue(second)
    second.execute("commit")
    assert heard() == [""]
    cluster_wide = "select count(*) from pg_locks where locktype = 'object' and database = 0"
    assert query(db, cluster_wide) == [{"count": 0}]
    first.execute("commit")
    assert heard() == [""]
