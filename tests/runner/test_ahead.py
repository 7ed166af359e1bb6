"""Claiming ahead: only while jobs are short, never more at once, and given back in time."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest
from harness import Context, ThreadContext, drain, enqueue, running, state, until
from tcp_proxy import TcpProxy

from support import expire
from taskboard import slots
from taskboard.leases import News
from taskboard.slots import AHEAD_JOBS, Slots

Connection = psycopg.Connection[Any]
SHORT = 120  # jobs after which a runner with two slots takes them to be short


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take jobs to be short also where the machine is slow."""
    monkeypatch.setattr(slots, "AHEAD", 2.0)


def leased(db: Connection) -> int:
    """How many jobs hold a lease."""
    ((found,),) = db.execute(
        "select count(*) from taskboard.jobs where lease_token is not null"
    ).fetchall()
    return int(found)


class Gate:
    """A handler: short jobs end at once, the others when the gate opens."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.at_once = self.most = self.short = 0
        self.began: list[Any] = []

    async def __call__(self, ctx: Context) -> None:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        self.began.append(ctx.job.id)
        try:
            if ctx.job.payload == "long":
                await self.opened.wait()
            else:
                self.short += 1
                await asyncio.sleep(0)
        finally:
            self.at_once -= 1


async def gated(db: Connection, gate: Gate) -> None:
    """Let the runner learn that jobs are short, and then find long ones with many behind them."""
    await until(lambda: gate.short == SHORT)
    db.execute(
        "select taskboard.enqueue_many('k',"
        " array_fill('\"long\"'::jsonb, array[2]) || array_fill('{}'::jsonb, array[30]))"
    )
    await until(lambda: gate.at_once == 2)


@pytest.mark.usefixtures("eager")
def test_short_jobs_are_claimed_ahead_and_no_more_run_at_once_than_there_are_slots(
    dsn: str, db: Connection
) -> None:
    async def scenario() -> None:
        gate = Gate()
        async with running(dsn, {"k": gate}, pool=4):
            await gated(db, gate)
            assert leased(db) > 2
            gate.opened.set()
            await until(lambda: gate.short == SHORT + 30)
        assert gate.most == 2
        assert len(set(gate.began)) == len(gate.began) == SHORT + 32

    jobs = [enqueue(db, "k") for _ in range(SHORT)]
    asyncio.run(scenario())
    assert {state(db, job)["state"] for job in jobs} == {"completed"}


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("poll", [0.2, 60])
def test_what_waits_a_second_for_a_slot_is_given_back_uncharged_and_left_to_others(
    dsn: str, db: Connection, poll: float
) -> None:
    async def scenario() -> None:
        gate = Gate()
        async with running(dsn, {"k": gate}, pool=4, poll=poll):
            await gated(db, gate)
            await until(lambda: leased(db) == 2, within=4)
            others = db.execute(
                "select attempt, failures, lost_leases from taskboard.claim(max_jobs => 100)"
            ).fetchall()
            gate.opened.set()
        assert len(others) == 30
        assert {row[1:] for row in others} == {(0, 0)}
        # Given back once, and not taken again while both slots are held.
        assert {row[0] for row in others} <= {1, 2}

    for _ in range(SHORT):
        enqueue(db, "k")
    asyncio.run(scenario())


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("how", ["stop", "cancel"])
def test_a_stop_gives_back_at_once_what_waits_for_a_slot(
    dsn: str, db: Connection, how: str
) -> None:
    async def scenario() -> None:
        gate = Gate()
        async with running(dsn, {"k": gate}, pool=4) as runner:
            await gated(db, gate)
            assert leased(db) > 2
            if how == "stop":
                runner.stop()
                await until(lambda: leased(db) == 2)
                gate.opened.set()
        assert gate.short == SHORT
        assert leased(db) == 0

    for _ in range(SHORT):
        enqueue(db, "k")
    asyncio.run(scenario())


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize(
    ("news", "options", "ends_as"),
    [
        (News.TIMED_OUT, {"timeout": "0.3s"}, "failed"),
        (News.CANCEL, {"lease": "0.6s"}, "cancelled"),
        (News.LOST, {"lease": "0.6s"}, "completed"),
    ],
)
def test_what_happens_to_a_job_that_waits_for_a_slot_counts_when_it_begins(
    dsn: str, db: Connection, monkeypatch: pytest.MonkeyPatch, threaded: bool, news: News,
    options: dict[str, str], ends_as: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(slots, "WAITS_WITHIN", 60)
    begun: list[int] = []

    def in_thread(ctx: ThreadContext) -> None:
        begun.append(ctx.job.attempt)

    async def late(ctx: Context) -> None:
        begun.append(ctx.job.attempt)

    async def scenario() -> None:
        gate = Gate()
        handlers = {"k": gate, "late": in_thread if threaded else late}
        async with running(dsn, handlers, pool=4) as runner:
            await until(lambda: gate.short == SHORT)
            for _ in range(2):
                enqueue(db, "k", "long", priority=1)
            await until(lambda: gate.at_once == 2)
            job = enqueue(db, "late", max_attempts=1, **options)
            await until(lambda: runner.slots.next)
            [waiting] = runner.slots.next
            if news == News.CANCEL:
                db.execute("select taskboard.cancel(%s)", [job])
            elif news == News.LOST:
                with db.transaction():
                    expire(db, job)
                    db.execute("select taskboard.claim(worker => 'thief')")
                    db.execute(
                        "select taskboard.complete(id, lease_token) from taskboard.jobs"
                        " where id = %s", [job],
                    )  # fmt: skip
            await until(lambda: news in waiting.lease.told)
            gate.opened.set()
            await until(lambda: state(db, job)["state"] == ends_as)

    for _ in range(SHORT):
        enqueue(db, "k")
    asyncio.run(scenario())
    assert begun == []


@pytest.mark.usefixtures("eager")
def test_large_payloads_are_hardly_claimed_ahead(dsn: str, db: Connection) -> None:
    async def scenario() -> None:
        gate = Gate()
        async with running(dsn, {"k": gate}, pool=4, listen=False) as runner:
            await until(lambda: gate.short == SHORT)
            large = "select taskboard.enqueue('k', to_jsonb(repeat('x', 900000)), priority => 1)"
            db.execute(large)
            await until(lambda: gate.short == SHORT + 1)
            assert runner.slots.free(0) <= 2 + 8_000_000 // 900_000

    for _ in range(SHORT):
        enqueue(db, "k")
    asyncio.run(scenario())


@pytest.mark.usefixtures("eager")
def test_after_a_claim_without_an_answer_none_is_claimed_ahead(dsn: str, db: Connection) -> None:
    async def scenario() -> None:
        gate = Gate()
        with TcpProxy(dsn) as proxy:
            async with running(proxy.dsn, {"k": gate}, pool=4, listen=False) as runner:
                await until(lambda: gate.short == SHORT)
                await until(lambda: runner.slots.free(0) > 2)
                proxy.lose_reply_to = b"taskboard.claim("
                await until(lambda: runner.slots.free(0) == 2)

    for _ in range(SHORT):
        enqueue(db, "k")
    asyncio.run(scenario())


@pytest.mark.usefixtures("eager")
def test_a_stop_gives_back_what_was_claimed_ahead_in_time_also_where_calls_are_slow(
    dsn: str, db: Connection
) -> None:
    async def scenario() -> None:
        gate = Gate()
        with TcpProxy(dsn) as proxy:
            async with running(proxy.dsn, {"k": gate}, pool=4, listen=False) as runner:
                await gated(db, gate)
                assert leased(db) > 20
                proxy.delay = 0.3
                runner.stop()
                gate.opened.set()
        assert gate.short == SHORT
        assert leased(db) == 0

    for _ in range(SHORT):
        enqueue(db, "k")
    asyncio.run(scenario())


def test_how_many_are_claimed_ahead_follows_the_pace() -> None:
    class Job:
        started_at = 0.0

    def after(*seconds: float) -> Slots:
        ten, job = Slots(10), Job()
        for took in seconds:
            ten.next.append(job)  # type: ignore[arg-type]
            for begun in ten.fill():
                begun.started_at -= took
            ten.end(job)  # type: ignore[arg-type]
        return ten

    assert Slots(10).free(0) == 10
    assert after(*[0.0001] * 200).free(0) == 10 + AHEAD_JOBS
    assert after(*[0.002] * 200).free(0) == pytest.approx(10 + 100, abs=2)
    assert after(*[0.019] * 200).free(0) == 10 + 10
    assert after(*[0.021] * 200).free(0) == 10
    assert after(*[0.001] * 200, 10.0).free(0) == 10
    quick = after(*[0.0001] * 200)
    quick.weigh(1_000_000)
    assert quick.free(0) == 10 + 8
    for _ in range(64):
        quick.weigh(100)
    assert 10 + 8 < quick.free(0) < 10 + 40
    for _ in range(400):
        quick.weigh(100)
    assert quick.free(0) == 10 + AHEAD_JOBS
    # What has ended and is not settled counts when it is more than all that there is room for.
    assert Slots(10).free(10) == 10 and Slots(10).free(15) == 5


def test_a_runner_with_more_slots_than_one_claim_may_have_asks_for_less(
    dsn: str, db: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    db.execute("update taskboard.settings set claim_jobs = 3")
    jobs = [enqueue(db, "k") for _ in range(40)]
    assert drain(dsn, {"k": Gate()}, pool=22) == 0
    assert {state(db, job)["state"] for job in jobs} == {"completed"}
    assert [record for record in caplog.records if record.levelname != "INFO"] == []


def test_a_runner_is_told_of_jobs_only_while_claims_come_back_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two = Slots(2)
    assert two.idles(0, 2) and two.linger == 0
    assert not two.idles(2, 2)  # there is no room for more
    assert two.idles(0, 2)
    assert [two.idles(1, 2) for _ in range(4)] == [True, True, False, False]
    assert not two.idles(0, 2) and 0 < two.linger < 0.01
    monkeypatch.setattr(slots, "now", lambda: later)
    later = slots.LINGER + 1e9
    assert two.idles(0, 2) and two.linger == 0
