"""Failover under load: with a synchronous standby nothing that was acknowledged is lost.

The same load on an asynchronous standby that fell behind does lose some: the tests can see it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from uuid import UUID

import pytest

from faults import failover
from faults.calls import Client, Unanswered
from faults.failover import Claimed, Clients, Enqueued, Standby, issued_twice, lost
from runner.harness import enqueue, running, until
from support import OwnServer, make_server, rows, session, wait_for
from taskboard import db
from taskboard.connections import Link, Weather, connect
from taskboard.handlers import Context
from taskboard.migrate import migrate

Servers = Callable[..., tuple[OwnServer, Standby]]

QUICK = {"fsync": "off", "autovacuum": "off", "max_wal_size": "128MB"}


@pytest.fixture
def servers(programs: str) -> Iterator[Servers]:
    """Start a primary with Taskboard and a standby that follows it."""
    with ExitStack() as stack:

        def start(*, synchronous: bool) -> tuple[OwnServer, Standby]:
            primary = make_server(programs, QUICK)
            stack.callback(primary.close)
            assert isinstance(primary, OwnServer), "a standby needs a server of ours"
            migrate(primary.dsn())
            standby = Standby(primary.bin, QUICK, primary)
            stack.callback(standby.close)
            failover.wait_for_standby(primary, synchronous=synchronous)
            return primary, standby

        yield start


@contextmanager
def load(clients: Clients, before: float = 1.0, after: float = 0.5) -> Iterator[None]:
    """Run clients for a while before and after what happens in between."""
    with clients.at_work():
        time.sleep(before)
        yield
        time.sleep(after)


def test_primary_killed_under_load_and_its_synchronous_standby_has_all_that_was_acknowledged(
    servers: Servers,
) -> None:
    primary, standby = servers(synchronous=True)
    clients = Clients(failover.both(primary, standby))
    with load(clients):
        failover.kill(primary)
        before = len(clients.enqueued), len(clients.completed)
        failover.promote(standby)
    missing = lost(clients)
    print(clients.figures(), missing.figures())
    assert (missing.enqueues, missing.completions) == ([], [])
    assert issued_twice(clients) == []
    # The load was one: calls were in flight, and their repetitions had one effect.
    assert min(before) > 20 and len(clients.unanswered) >= 3
    assert len(clients.enqueued) > before[0] and len(clients.completed) > before[1]
    keys = [line.key for line in clients.enqueued]
    assert len(set(keys)) == len(keys) == len({line.job_id for line in clients.enqueued})
    assert len({line.job_id for line in clients.completed}) == len(keys)


def test_asynchronous_standby_that_fell_behind_loses_jobs_and_yet_no_id_or_key_comes_again(
    servers: Servers,
) -> None:
    primary, standby = servers(synchronous=False)
    clients = Clients(failover.both(primary, standby))
    with load(clients):
        failover.stop_receiving(standby)
        time.sleep(0.3)
        failover.kill(primary)
        failover.promote(standby)
    missing = lost(clients)
    print(clients.figures(), missing.figures())
    assert len(missing.enqueues) > 3 and len(missing.completions) > 3
    assert issued_twice(clients) == []


def test_runner_goes_on_at_the_standby_and_records_what_ended_in_between(
    servers: Servers,
) -> None:
    primary, standby = servers(synchronous=True)
    both, began, may_end = failover.both(primary, standby), Counter[str](), asyncio.Event()

    async def handler(ctx: Context) -> None:
        began[ctx.job.payload] += 1
        if ctx.job.payload == "before":
            await may_end.wait()

    def add(which: str) -> None:
        with session(both) as conn:
            enqueue(conn, "k", which)

    def states() -> list[tuple[str, int]]:
        with session(both) as conn:
            return rows(conn, "select state, attempt from taskboard.job_list")

    async def scenario() -> None:
        async with running(both, {"k": handler}) as runner:
            add("before")
            await until(lambda: began["before"])
            failover.kill(primary)
            may_end.set()
            await until(lambda: runner.control.lost_for, what="the runner to notice")
            await asyncio.to_thread(failover.promote, standby)
            add("after")
            await until(lambda: states() == [("completed", 1)] * 2, within=30)
            # It is told of new jobs there, too.
            await until(lambda: runner.wake.works, within=30)

    asyncio.run(scenario())
    assert began == {"before": 1, "after": 1}


WAITS = "select pid from pg_stat_activity where wait_event = 'SyncRep' and application_name = %s"


def end_the_wait(primary: OwnServer, name: str, how: str) -> None:
    """Have an administrator end the wait of a session for the standby."""
    with session(primary.dsn()) as conn:
        wait_for(lambda: rows(conn, WAITS, [name]), what=f"{name} to wait for the standby")
        conn.execute(f"select pg_{how}_backend(pid) from ({WAITS}) as w", [name])


@pytest.mark.parametrize("who", ["the runner", "a client"])
def test_commit_whose_wait_for_the_standby_is_ended_is_answered_and_counts_as_no_answer(
    servers: Servers, who: str
) -> None:
    primary, standby = servers(synchronous=True)
    client = Client(primary.dsn(), "client")
    ((job_id, _),) = client.call("enqueue", kind="k")
    owner = job_id, client.call("claim")[0].lease_token
    standby.stop()
    with ThreadPoolExecutor(1) as aside:
        ended = aside.submit(end_the_wait, primary, "client", "cancel")
        if who == "the runner":
            link = Link("test", lambda: connect(primary.dsn(), "client"), within=20, cap=1)
            with pytest.raises(Weather, match="not confirmed"):
                asyncio.run(link.call(db.complete, *owner, None))
        else:
            with pytest.raises(Unanswered, match="not confirmed"):
                client.call("complete", job_id=job_id, lease_token=owner[1])
        ended.result()
    # It is there, and nowhere else: only a repeat after the standby is back says that it stays.
    standby.start()
    failover.wait_for_standby(primary, synchronous=True)
    assert len(client.call("complete", job_id=job_id, lease_token=owner[1])) == 1
    client.close()


def test_old_primary_that_comes_back_acknowledges_nothing_while_it_has_no_standby(
    servers: Servers,
) -> None:
    primary, standby = servers(synchronous=True)
    failover.kill(primary)
    failover.promote(standby)
    primary.start()  # by mistake: it still takes itself for the primary
    client = Client(failover.both(primary, standby), "client")
    with ThreadPoolExecutor(1) as aside:
        ended = aside.submit(end_the_wait, primary, "client", "terminate")
        with pytest.raises(Unanswered):
            client.call("enqueue", kind="k", unique_key="u")
        ended.result()
    client.close()
    assert Client(standby.dsn(), "look").sql("select id from taskboard.jobs") == []


def test_old_asynchronous_primary_that_comes_back_acknowledges_what_the_new_one_never_gets(
    servers: Servers,
) -> None:
    primary, standby = servers(synchronous=False)
    failover.kill(primary)
    failover.promote(standby)
    primary.start()
    # target_session_attrs asks each server for itself: both say that they accept writes.
    client = Client(failover.both(primary, standby), "client")
    ((job_id, _),) = client.call("enqueue", kind="k")
    (claim,) = client.call("claim")
    client.close()
    new = Client(standby.dsn(), "new")
    assert new.sql("select id from taskboard.jobs") == []
    # What was granted there counts for nothing here.
    assert new.call("complete", job_id=job_id, lease_token=claim.lease_token) == []
    new.close()


def test_what_looks_for_a_second_issue_finds_ids_tokens_and_keys() -> None:
    clients = Clients("")
    one, other, token = UUID(int=1), UUID(int=2), UUID(int=3)
    clients.enqueued += [Enqueued("a", one), Enqueued("b", other)]
    clients.claimed += [Claimed(one, token, "a")]
    clients.effects += [("1/main", "a"), ("1/main", "a")]
    assert issued_twice(clients) == []
    clients.enqueued += [Enqueued("c", one)]
    clients.claimed += [Claimed(other, token, "b")]
    clients.effects += [("1/main", "b")]
    assert len(issued_twice(clients)) == 3


def test_owner_of_a_claim_that_a_failover_lost_is_fenced_off_though_the_attempt_comes_again(
    servers: Servers,
) -> None:
    primary, standby = servers(synchronous=False)
    client = Client(failover.both(primary, standby), "client")
    ((job_id, _),) = client.call("enqueue", kind="k")
    (caught_up,) = client.sql("select pg_current_wal_flush_lsn()")
    failover.wait_for_replay(standby, caught_up[0])
    failover.stop_receiving(standby)
    (lost_claim,) = client.call("claim")
    (effect,) = client.call("begin_effect", job_id=job_id, lease_token=lost_claim.lease_token)
    failover.kill(primary)
    failover.promote(standby)
    client = Client(client.dsn, "client")
    (claim,) = client.call("claim")
    assert (claim.job_id, claim.attempt) == (job_id, lost_claim.attempt)
    old = {"job_id": job_id, "lease_token": lost_claim.lease_token}
    for verb in ("renew", "complete", "fail", "release", "begin_effect"):
        assert client.call(verb, **old) == [], verb
    new = {"job_id": job_id, "lease_token": claim.lease_token}
    # The record of the effect is gone as well; its key is not.
    (again,) = client.call("begin_effect", **new)
    assert (again.idempotency_key, again.state) == (effect.idempotency_key, "fresh")
    assert len(client.call("complete", **new)) == 1
    client.close()
