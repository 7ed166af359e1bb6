"""The `stripe` handler: the real SDK over real sockets, to localstripe and to our own server."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs
from uuid import UUID, uuid4

import pytest
import stripe
from psycopg import AsyncConnection
from stripe_proxy import StripeProxy, localstripe, refused

from taskboard.dev.stripe import Call, DevStripe
from taskboard.handlers import (
    Context,
    Effect,
    Held,
    Job,
    LeaseLost,
    Outcome,
    Permanent,
    Release,
    Retry,
)
from taskboard.handlers.stripe import stripe_handler
from taskboard.stripe_calls import OPERATIONS, StripeSettings, read_payload

KEY = "sk_test_51secretsecret"
PAY: dict[str, Any] = {
    "amount": 1999,
    "currency": "usd",
    "payment_method": "pm_card_visa",
    "confirm": True,
}
CHARGE = {"operation": "payment_intents.create", "params": PAY}
STEP = "payment_intents.create"


# --- the ledger: begin_effect and end_effect as the database keeps them, over all attempts


@dataclass
class Record:
    """One attempt's beginning of a step; `happened` None while nobody has reported."""

    step: str
    token: UUID
    age: timedelta = timedelta()
    happened: bool | None = None
    result: Any = None


@dataclass
class Ledger:
    """One job over all its attempts, and what is known of its effects."""

    payload: Any = field(default_factory=lambda: CHARGE)
    on_unknown: str = "retry"
    id: UUID = field(default_factory=uuid4)
    attempts: int = 0
    failures: int = 0
    lease_lost: bool = False
    records: list[Record] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)

    def state(self) -> str:
        """What the next attempt will be told."""
        if any(record.happened for record in self.records):
            return "done"
        return "unknown" if any(r.happened is None for r in self.records) else "fresh"

    def attempt(self) -> Attempt:
        """Claim the job again, with a new token."""
        self.attempts += 1
        job = Job(
            id=self.id,
            queue="default",
            kind="stripe",
            payload=self.payload,
            attempt=self.attempts,
            max_attempts=20,
            failures=self.failures,
            lease=timedelta(minutes=1),
            timeout=timedelta(hours=1),
        )
        return Attempt(self, job)

    def wait(self, hours: float) -> None:
        for record in self.records:
            record.age += timedelta(hours=hours)


@dataclass
class Attempt:
    """A context that obeys the rules of effects, without a database."""

    ledger: Ledger
    job: Job
    token: UUID = field(default_factory=uuid4)

    async def begin_effect(
        self, step: str = "main", *, key_valid_for: timedelta | None = None
    ) -> Effect:
        self.ledger.trace.append(f"begin {step}")
        if self.ledger.lease_lost:
            raise LeaseLost("lease lost")
        records = [record for record in self.ledger.records if record.step == step]
        done = [record for record in records if record.happened]
        unknown = [r for r in records if r.happened is None and r.token != self.token]
        old = key_valid_for is not None and any(r.age >= key_valid_for for r in records)
        if unknown and not done and (old or self.ledger.on_unknown == "hold"):
            raise Held("held")
        if not done and not any(record.token == self.token for record in records):
            self.ledger.records.append(Record(step, self.token))
        state = "done" if done else "unknown" if unknown else "fresh"
        return Effect(step, f"{self.job.id}/{step}", state, done[0].result if done else None)

    async def end_effect(
        self, step: str = "main", *, happened: bool = True, result: Any = None
    ) -> None:
        self.ledger.trace.append(f"end {step} {happened}")
        mine = [r for r in self.ledger.records if r.step == step and r.token == self.token]
        assert mine, "only a token that began an effect can end it"
        mine[0].happened, mine[0].result = happened, json.loads(json.dumps(result))

    def connection(self) -> AbstractAsyncContextManager[AsyncConnection[Any]]:
        raise AssertionError("the handler needs no database")

    transaction = connection


# --- a bench: one proxy, one handler


@dataclass
class Bench:
    """Runs attempts of jobs against one server with one handler."""

    url: str
    proxy: StripeProxy = field(default_factory=lambda: StripeProxy("http://unused"))
    timeout: float = 5.0
    version: str = "2026-10-28.endive"

    def __post_init__(self) -> None:
        settings = StripeSettings(KEY, self.url, self.timeout, self.version)
        self.handler: Callable[[Context], Awaitable[Any]] = stripe_handler(settings)

    async def run(self, ledger: Ledger) -> Any:
        """Run one attempt; returns the handler's result, or the outcome that it raised."""
        try:
            result = await self.handler(ledger.attempt())
            json.dumps(result)
        except Retry as outcome:
            ledger.failures += 1
            return outcome
        except Outcome as outcome:
            return outcome
        return result


@pytest.fixture(scope="module")
def upstream() -> Iterator[str]:
    with localstripe() as url:
        yield url


Scene = Callable[[Bench], Coroutine[Any, Any, None]]


def scene(test: Scene) -> Callable[[str], None]:
    """Run an async test on a bench whose proxy stands before localstripe."""

    @functools.wraps(test)
    def run(upstream: str) -> None:
        async def play() -> None:
            async with StripeProxy(upstream) as proxy, asyncio.timeout(10):
                bench = Bench(proxy.url, proxy)
                await test(bench)
                await bench.handler.aclose()  # type: ignore[attr-defined]

        asyncio.run(play())

    del run.__wrapped__  # pytest would ask for `bench`
    return run


@asynccontextmanager
async def own_server(**options: Any) -> AsyncIterator[tuple[DevStripe, Bench]]:
    async with DevStripe(**options) as server, asyncio.timeout(10):
        bench = Bench(server.url)
        yield server, bench
        await bench.handler.aclose()  # type: ignore[attr-defined]


# --- the happy path


@scene
async def test_a_charge_is_made_once_and_its_ids_are_kept(bench: Bench) -> None:
    ledger = Ledger()
    result = await bench.run(ledger)
    (intent,) = await bench.proxy.objects("payment_intents")
    assert result == {
        "operation": STEP,
        "api_version": "2026-10-28.endive",
        "object": "payment_intent",
        "id": intent["id"],
        "status": "succeeded",
        "amount": 1999,
        "currency": "usd",
        "livemode": False,
        "request_id": "req_proxy",
    }
    assert ledger.trace == [f"begin {STEP}", f"end {STEP} True"]
    assert ledger.records[0].result == result
    assert intent["metadata"] == {"taskboard_job": str(ledger.id), "taskboard_step": STEP}


@scene
async def test_one_request_goes_out_with_key_version_and_no_telemetry(bench: Bench) -> None:
    ledger = Ledger()
    await bench.run(ledger)
    await bench.run(Ledger())
    first, second = bench.proxy.seen
    assert first.key == f"{ledger.id}/{STEP}"
    assert second.key != first.key
    assert first.headers["stripe-version"] == "2026-10-28.endive"
    assert "x-stripe-client-telemetry" not in second.headers
    assert b"amount=1999&" in first.body


@scene
async def test_the_version_that_was_set_is_sent_and_kept(bench: Bench) -> None:
    older = Bench(bench.url, bench.proxy, version="2025-03-31.basil")
    assert (await older.run(Ledger()))["api_version"] == "2025-03-31.basil"
    assert bench.proxy.seen[0].headers["stripe-version"] == "2025-03-31.basil"


@scene
async def test_a_step_that_is_done_is_told_without_a_call(bench: Bench) -> None:
    ledger = Ledger()
    result = await bench.run(ledger)
    ledger.wait(hours=100)
    assert await bench.run(ledger) == result
    assert len(bench.proxy.seen) == 1


@scene
async def test_yen_are_sent_as_they_are(bench: Bench) -> None:
    result = await bench.run(Ledger({**CHARGE, "params": PAY | {"amount": 80, "currency": "jpy"}}))
    assert (result["amount"], result["currency"]) == (80, "jpy")
    assert parse_qs(bench.proxy.seen[0].body.decode())["amount"] == ["80"]


@scene
async def test_twenty_jobs_at_once_share_a_client_and_each_has_its_own_key(bench: Bench) -> None:
    ledgers = [Ledger({"operation": "customers.create"}) for _ in range(20)]
    await asyncio.gather(*(bench.run(ledger) for ledger in ledgers))
    assert {ledger.state() for ledger in ledgers} == {"done"}
    assert len({seen.key for seen in bench.proxy.seen}) == 20


# --- outcomes that are not known


@scene
async def test_a_lost_answer_is_looked_up_at_once_and_the_job_is_done(bench: Bench) -> None:
    bench.proxy.fault(lost=True)
    ledger = Ledger()
    result = await bench.run(ledger)
    (intent,) = await bench.proxy.objects("payment_intents")
    assert (result["id"], result["status"]) == (intent["id"], "succeeded")
    assert "request_id" not in result
    assert ledger.state() == "done"
    assert len(bench.proxy.writes()) == 1


@scene
async def test_a_lost_answer_that_shows_nowhere_is_repeated_with_the_same_key_and_body(
    bench: Bench,
) -> None:
    bench.proxy.blind = True
    bench.proxy.fault(lost=True)
    ledger = Ledger()
    outcome = await bench.run(ledger)
    assert isinstance(outcome, Retry) and outcome.retry_in is None
    assert ledger.state() == "unknown"
    result = await bench.run(ledger)
    (intent,) = await bench.proxy.objects("payment_intents")
    assert result["id"] == intent["id"]
    first, second = bench.proxy.writes()
    assert (first.key, first.body) == (second.key, second.body)


@scene
async def test_a_lost_answer_whose_object_shows_later_is_not_sent_again(bench: Bench) -> None:
    bench.proxy.blind = True
    bench.proxy.fault(lost=True)
    ledger = Ledger()
    assert isinstance(await bench.run(ledger), Retry)
    bench.proxy.blind = False
    result = await bench.run(ledger)
    (intent,) = await bench.proxy.objects("payment_intents")
    assert (result["id"], result["status"]) == (intent["id"], "succeeded")
    assert len(bench.proxy.writes()) == 1


@scene
async def test_a_saved_500_after_a_charge_ends_as_done_by_look_up(bench: Bench) -> None:
    bench.proxy.fault(status=500)
    bench.proxy.fault(method="GET", **refused(500))
    ledger = Ledger()
    outcome = await bench.run(ledger)
    assert isinstance(outcome, Retry) and "500" in str(outcome)
    assert ledger.state() == "unknown"
    result = await bench.run(ledger)
    (intent,) = await bench.proxy.objects("payment_intents")
    assert result["id"] == intent["id"]
    assert len(bench.proxy.writes()) == 1


@scene
async def test_a_saved_500_without_a_charge_comes_back_until_the_budget_ends(bench: Bench) -> None:
    bench.proxy.fault(status=500, perform=False)
    ledger = Ledger()
    outcomes = [await bench.run(ledger) for _ in range(4)]
    assert all(isinstance(outcome, Retry) for outcome in outcomes)
    assert "outcome unknown" in str(outcomes[-1])
    assert ledger.state() == "unknown"  # for a person, who looks for the job's id in the metadata
    assert len({(seen.key, seen.body) for seen in bench.proxy.writes()}) == 1
    assert await bench.proxy.objects("payment_intents") == []


@scene
async def test_no_answer_in_time_is_unknown_and_looked_up(bench: Bench) -> None:
    slow = Bench(bench.url, bench.proxy, timeout=0.2)
    bench.proxy.fault(seconds=0.5, perform=False)
    ledger = Ledger()
    outcome = await slow.run(ledger)
    assert isinstance(outcome, Retry) and "outcome unknown" in str(outcome)
    assert ledger.state() == "unknown"
    bench.proxy.fault(seconds=0.5)
    assert (await slow.run(Ledger()))["status"] == "succeeded"


def test_an_answer_that_drips_is_bounded_as_a_whole() -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            while not writer.is_closing():
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.05)

    async def play() -> None:
        async with await asyncio.start_server(drip, "127.0.0.1", 0) as server, asyncio.timeout(2):
            port = server.sockets[0].getsockname()[1]
            ledger = Ledger()
            outcome = await Bench(f"http://127.0.0.1:{port}", timeout=0.3).run(ledger)
            assert isinstance(outcome, Retry) and "TimeoutError" in str(outcome)
            assert ledger.state() == "unknown"
            await asyncio.sleep(0.1)

    asyncio.run(play())


@scene
async def test_a_call_still_under_way_releases_the_job_and_stays_unknown(bench: Bench) -> None:
    bench.proxy.blind = True
    ledger = Ledger({"operation": "customers.create"})
    bench.proxy.fault(seconds=0.3)
    stale = asyncio.create_task(bench.run(ledger))
    await asyncio.sleep(0.1)
    outcome = await bench.run(ledger)
    assert isinstance(outcome, Release)
    assert outcome.delay is not None and timedelta(seconds=10) <= outcome.delay
    assert ledger.failures == 0
    assert ledger.records[1].happened is None
    assert [seen.method for seen in bench.proxy.seen] == ["POST", "GET", "GET", "POST"]
    await stale
    assert (await bench.run(ledger))["object"] == "customer"
    assert len(await bench.proxy.objects("customers")) == 1


@scene
async def test_a_cancelled_handler_stops_and_leaves_the_effect_unknown(bench: Bench) -> None:
    bench.proxy.fault(seconds=0.3)
    ledger = Ledger()
    task = asyncio.create_task(bench.run(ledger))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ledger.state() == "unknown"


@scene
async def test_after_twenty_three_hours_the_job_is_held_and_nothing_is_sent(bench: Bench) -> None:
    bench.proxy.blind = True
    bench.proxy.fault(lost=True)
    ledger = Ledger()
    await bench.run(ledger)
    ledger.wait(hours=23.5)
    bench.proxy.forget_keys()
    assert isinstance(await bench.run(ledger), Held)
    assert len(bench.proxy.writes()) == 1
    assert [record.happened for record in ledger.records] == [None, False]


@scene
async def test_after_twenty_three_hours_a_charge_that_shows_is_done_without_a_person(
    bench: Bench,
) -> None:
    bench.proxy.blind = True
    bench.proxy.fault(lost=True)
    ledger = Ledger()
    await bench.run(ledger)
    ledger.wait(hours=48)
    bench.proxy.forget_keys()
    bench.proxy.blind = False
    assert (await bench.run(ledger))["status"] == "succeeded"
    assert len(bench.proxy.writes()) == 1


@scene
async def test_a_job_that_holds_what_is_unknown_is_held_only_when_nothing_shows(
    bench: Bench,
) -> None:
    bench.proxy.fault(2, lost=True)
    assert (await bench.run(Ledger(on_unknown="hold")))["status"] == "succeeded"
    bench.proxy.blind = True
    ledger = Ledger(on_unknown="hold")
    assert isinstance(await bench.run(ledger), Retry)
    assert isinstance(await bench.run(ledger), Held)
    assert len(bench.proxy.writes()) == 2


@scene
async def test_a_lost_lease_stops_before_the_call(bench: Bench) -> None:
    assert isinstance(await bench.run(Ledger(lease_lost=True)), LeaseLost)
    assert bench.proxy.seen == []


@scene
async def test_a_lease_lost_during_the_look_up_stops_before_the_call(bench: Bench) -> None:
    bench.proxy.blind = True
    bench.proxy.fault(**refused(500))
    ledger = Ledger()
    await bench.run(ledger)
    bench.proxy.fault(method="GET", seconds=0.3)
    task = asyncio.create_task(bench.run(ledger))
    await asyncio.sleep(0.1)
    ledger.lease_lost = True
    assert isinstance(await task, LeaseLost)
    assert len(bench.proxy.writes()) == 1


# --- a record that was lost in a failover


@scene
async def test_a_later_attempt_without_a_record_finds_the_charge_by_its_mark(bench: Bench) -> None:
    ledger = Ledger()
    result = await bench.run(ledger)
    ledger.records.clear()
    bench.proxy.forget_keys()
    again = await bench.run(ledger)
    assert again["id"] == result["id"]
    assert len(bench.proxy.writes()) == 1


@scene
async def test_a_charge_that_left_the_list_is_found_by_search(bench: Bench) -> None:
    ledger = Ledger()
    result = await bench.run(ledger)
    ledger.records.clear()
    bench.proxy.forget_keys()
    bench.proxy.fault(method="GET", status=200, body={"object": "list", "data": []})
    again = await bench.run(ledger)
    assert again["id"] == result["id"]
    assert bench.proxy.seen[-1].query == {"query": f"metadata['taskboard_job']:'{ledger.id}'"}
    assert len(bench.proxy.writes()) == 1


@scene
async def test_the_list_is_narrowed_to_the_customer(bench: Bench) -> None:
    customer = (await bench.run(Ledger({"operation": "customers.create"})))["id"]
    ledger = Ledger({**CHARGE, "params": PAY | {"customer": customer}})
    await bench.run(ledger)
    ledger.records.clear()
    await bench.run(ledger)
    listed = next(seen for seen in bench.proxy.seen if seen.method == "GET")
    assert listed.query == {"customer": customer, "limit": "100"}


@scene
async def test_a_first_attempt_looks_nothing_up(bench: Bench) -> None:
    await bench.run(Ledger())
    assert [seen.method for seen in bench.proxy.seen] == ["POST"]


@scene
async def test_a_look_up_that_fails_sends_nothing_and_leaves_the_question_open(
    bench: Bench,
) -> None:
    bench.proxy.fault(lost=True)
    bench.proxy.fault(2, method="GET", **refused(503))
    ledger = Ledger()
    await bench.run(ledger)
    assert isinstance(await bench.run(ledger), Retry)
    assert ledger.state() == "unknown"
    assert ledger.records[1].happened is False  # this attempt did nothing
    assert len(bench.proxy.writes()) == 1


# --- refusals


@scene
async def test_a_rate_limit_releases_the_job_after_the_time_asked_for(bench: Bench) -> None:
    bench.proxy.fault(**refused(429) | {"headers": {"Retry-After": "30"}})
    ledger = Ledger()
    outcome = await bench.run(ledger)
    assert isinstance(outcome, Release)
    assert outcome.delay is not None
    assert timedelta(seconds=30) <= outcome.delay <= timedelta(seconds=37.5)
    assert ledger.state() == "fresh"
    assert len(bench.proxy.seen) == 1
    assert (await bench.run(ledger))["status"] == "succeeded"


@pytest.mark.parametrize("asked", ["86400", "9" * 400, "-5", "soon", "0", ""])
def test_retry_after_is_bounded_whatever_it_says(upstream: str, asked: str) -> None:
    @scene
    async def play(bench: Bench) -> None:
        bench.proxy.fault(**refused(429) | {"headers": {"Retry-After": asked}})
        outcome = await bench.run(Ledger())
        assert isinstance(outcome, Release) and outcome.delay is not None
        assert timedelta(seconds=1) <= outcome.delay <= timedelta(hours=1)

    play(upstream)


@scene
async def test_a_hundred_limited_jobs_make_one_call_each_and_come_back_spread(
    bench: Bench,
) -> None:
    bench.proxy.fault(100, **refused(429) | {"headers": {"Retry-After": "30"}})
    outcomes = await asyncio.gather(*(bench.run(Ledger()) for _ in range(100)))
    delays = {outcome.delay for outcome in outcomes}
    assert len(bench.proxy.seen) == 100
    assert len(delays) > 90


def test_a_refused_connection_did_not_happen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    ledger = Ledger()
    outcome = asyncio.run(Bench(f"http://127.0.0.1:{port}").run(ledger))
    assert isinstance(outcome, Retry) and "ConnectError" in str(outcome)
    assert ledger.state() == "fresh"


def test_a_connection_that_is_never_accepted_did_not_happen() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address = listener.getsockname()
        with socket.create_connection(address):  # the queue is full: further ones get no answer
            ledger = Ledger()
            outcome = asyncio.run(Bench(f"http://127.0.0.1:{address[1]}", timeout=0.4).run(ledger))
    assert isinstance(outcome, Retry) and "ConnectTimeout" in str(outcome)
    assert ledger.state() == "fresh"


def test_an_unknown_host_did_not_happen() -> None:
    ledger = Ledger()
    assert isinstance(asyncio.run(Bench("http://stripe.invalid").run(ledger)), Retry)
    assert ledger.state() == "fresh"


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_api_key_is_tried_slowly_with_an_alarm(
    upstream: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    @scene
    async def play(bench: Bench) -> None:
        said = f"Invalid API Key provided: {KEY[:12]}****cret and {KEY}"
        bench.proxy.fault(**refused(status, "invalid_request_error", message=said))
        ledger = Ledger()
        outcome = await bench.run(ledger)
        assert isinstance(outcome, Retry) and outcome.retry_in == timedelta(minutes=15)
        assert ledger.state() == "fresh"
        for text in (str(outcome), repr(ledger.records), caplog.text):
            assert "sk_test" not in text and "cret" not in text
        assert "req_proxy" in str(outcome)

    with caplog.at_level(logging.DEBUG):
        play(upstream)
    assert [record.levelname for record in caplog.records if "taskboard" in record.name] == [
        "ERROR"
    ]


@scene
async def test_an_invalid_request_is_final_and_did_not_happen(bench: Bench) -> None:
    ledger = Ledger({"operation": "payment_intents.confirm", "id": "pi_missing"})
    outcome = await bench.run(ledger)
    assert isinstance(outcome, Permanent) and "404" in str(outcome)
    assert ledger.state() == "fresh"
    assert ledger.records[0].result["error"] == str(outcome)


@scene
async def test_secrets_quoted_by_an_error_are_blotted_out(bench: Bench) -> None:
    said = f"no such key {KEY} or rk_live_abc***9 nor pi_3Nx_secret_9aB"
    bench.proxy.fault(**refused(400, "invalid_request_error", message=said, code="odd"))
    ledger = Ledger()
    outcome = await bench.run(ledger)
    kept = str(outcome) + json.dumps(ledger.records[0].result)
    assert "[secret]" in kept and "odd" in kept
    assert not any(part in kept for part in ("51secret", "abc", "9aB", "pi_3Nx"))


@scene
async def test_a_key_used_with_another_body_is_final_and_stays_open(bench: Bench) -> None:
    ledger = Ledger()
    bench.proxy.keys[f"{ledger.id}/{STEP}"] = "/v1/payment_intents", b"other", None
    outcome = await bench.run(ledger)
    assert isinstance(outcome, Permanent) and "400" in str(outcome)
    assert ledger.state() == "unknown"
    assert len(bench.proxy.writes()) == 1


@scene
async def test_a_key_used_with_another_body_is_done_when_the_object_shows(bench: Bench) -> None:
    ledger = Ledger()
    result = await bench.run(ledger)
    ledger.payload = {**CHARGE, "params": PAY | {"description": "changed"}}
    ledger.records.clear()
    ledger.attempts = 0  # so that nothing is looked up beforehand
    again = await bench.run(ledger)
    assert again["id"] == result["id"]


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, b"{}"),
        (200, b'"pi_1_secret_2"'),
        (200, b"pi_1_secret_2"),
        (502, b'{"error": "pi_1_secret_2"}'),
    ],
)
def test_an_answer_that_is_not_from_stripe_is_unknown_and_not_quoted(
    upstream: str, status: int, body: bytes
) -> None:
    @scene
    async def play(bench: Bench) -> None:
        bench.proxy.fault(status=status, body=body, perform=False)
        ledger = Ledger()
        outcome = await bench.run(ledger)
        assert isinstance(outcome, Retry) and "secret" not in str(outcome)
        assert ledger.state() == "unknown"

    play(upstream)


# --- declined cards


def own(test: Callable[[DevStripe, Bench], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run an async test against our own server."""

    @functools.wraps(test)
    def run() -> None:
        async def play() -> None:
            async with DevStripe() as server, asyncio.timeout(10):
                bench = Bench(server.url)
                await test(server, bench)
                await bench.handler.aclose()  # type: ignore[attr-defined]

        asyncio.run(play())

    del run.__wrapped__
    return run


def paying(method: str, **params: Any) -> dict[str, Any]:
    return {**CHARGE, "params": PAY | {"payment_method": method} | params}


DECLINED = paying("pm_card_chargeDeclinedInsufficientFunds")


@own
async def test_a_declined_card_is_final_and_its_codes_are_kept(
    server: DevStripe, bench: Bench
) -> None:
    ledger = Ledger(DECLINED)
    outcome = await bench.run(ledger)
    assert isinstance(outcome, Permanent)
    assert "402 card_declined/insufficient_funds Your card was declined" in str(outcome)
    (intent,) = server.objects["payment_intents"].values()
    kept = ledger.records[0].result
    assert (kept["id"], kept["status"]) == (intent["id"], "requires_payment_method")
    assert (kept["code"], kept["decline_code"]) == ("card_declined", "insufficient_funds")
    assert kept["request_id"].startswith("req_")
    assert "_secret_" not in json.dumps(kept)


@own
async def test_a_declined_job_that_is_retried_never_asks_the_card_again(
    server: DevStripe, bench: Bench
) -> None:
    ledger = Ledger(DECLINED)
    first = await bench.run(ledger)
    server.keys.clear()  # more than a day later
    again = await bench.run(ledger)
    assert isinstance(again, Permanent) and str(again) == str(first)
    assert server.requests == 1


@own
async def test_a_second_try_of_the_customer_is_a_new_job_with_a_new_key(
    server: DevStripe, bench: Bench
) -> None:
    await bench.run(Ledger(DECLINED))
    result = await bench.run(Ledger())
    assert result["status"] == "succeeded"
    assert len(server.objects["charges"]) == 1
    assert len(server.keys) == 2


@own
async def test_a_decline_whose_answer_was_lost_is_told_by_the_key_and_not_taken_for_success(
    server: DevStripe, bench: Bench
) -> None:
    ledger = Ledger(DECLINED)
    await bench.run(ledger)
    ledger.records[0].happened = None  # as if nobody had heard
    outcome = await bench.run(ledger)
    assert isinstance(outcome, Permanent) and "insufficient_funds" in str(outcome)
    assert len(server.objects["payment_intents"]) == 1


@own
async def test_a_confirmation_that_is_declined_is_not_repeated(
    server: DevStripe, bench: Bench
) -> None:
    unconfirmed = paying("pm_card_chargeDeclined", confirm=False)
    made = await bench.run(Ledger(unconfirmed))
    assert made["status"] == "requires_confirmation"
    ledger = Ledger({"operation": "payment_intents.confirm", "id": made["id"]})
    assert isinstance(await bench.run(ledger), Permanent)
    assert isinstance(await bench.run(ledger), Permanent)
    assert server.requests == 2
    assert server.objects["charges"] == {}


@own
async def test_a_card_that_must_be_authenticated_completes_with_that_status(
    server: DevStripe, bench: Bench
) -> None:
    result = await bench.run(Ledger(paying("pm_card_authenticationRequired")))
    assert result["status"] == "requires_action"
    assert server.objects["charges"] == {}


# --- payloads


@pytest.mark.parametrize(
    "payload",
    [
        None,
        [],
        "payment_intents.create",
        {},
        {"operation": "payment_intents.delete", "params": {}},
        {"operation": ["payment_intents.create"]},
        {**CHARGE, "idempotency_key": "mine"},
        {**CHARGE, "id": "pi_1"},
        {**CHARGE, "params": [PAY]},
        {**CHARGE, "params": PAY | {"metadata": "x"}},
        {**CHARGE, "params": PAY | {"metadata": {"taskboard_job": "x"}}},
        {"operation": "payment_intents.capture", "params": {}},
        {"operation": "payment_intents.capture", "id": ""},
        {"operation": "payment_intents.capture", "id": 7},
        {"operation": "payment_intents.capture", "id": "../customers/cus_1"},
    ],
)
def test_a_payload_that_names_no_allowed_call_is_final_before_any_effect(payload: Any) -> None:
    ledger = Ledger(payload)
    outcome = asyncio.run(Bench("http://127.0.0.1:9").run(ledger))
    assert isinstance(outcome, Permanent)
    assert ledger.trace == []


DEEP = json.loads('{"a":' * 900 + "1" + "}" * 900)
NO_AMOUNTS = (19.99, 20.0, "1999", "19.99", True, None, -1, 0, 10**12, 10**5000, "")


@pytest.mark.parametrize(
    "operation", ["payment_intents.create", "refunds.create", "payment_intents.capture"]
)
def test_an_amount_that_is_no_positive_integer_is_final(operation: str) -> None:
    capture = operation.endswith("capture")
    name, target = ("amount_to_capture", {"id": "pi_1"}) if capture else ("amount", {})
    for amount in NO_AMOUNTS:
        ledger = Ledger({"operation": operation, "params": {name: amount}} | target)
        with pytest.raises(Permanent, match="integer in the currency's smallest unit"):
            read_payload(ledger.attempt().job)


@pytest.mark.parametrize(
    ("operation", "params"),
    [
        ("payment_intents.create", {"amount": 100_000_000, "currency": "usd"}),
        ("invoice_items.create", {"price_data": {"unit_amount": 1.5}}),
        ("subscriptions.create", {"items": [{"price_data": {"unit_amount": "15"}}]}),
        ("subscriptions.create", {"items": [{"price_data": {"unit_amount_decimal": 1.5}}]}),
        ("payment_intents.create", PAY | {"application_fee_amount": -1}),
        ("payment_intents.create", PAY | {"transfer_data": {"amount": True}}),
        ("customers.create", {"balance": 1.5}),
        ("customers.create", DEEP),
        ("invoice_items.create", {"amount": -(10**9), "currency": "usd"}),
    ],
)
def test_an_amount_deep_in_the_params_is_checked_too(
    operation: str, params: dict[str, Any]
) -> None:
    with pytest.raises(Permanent):
        read_payload(Ledger({"operation": operation, "params": params}).attempt().job)


@pytest.mark.parametrize(
    ("operation", "params"),
    [
        ("payment_intents.create", {"amount": 80, "currency": "JPY"}),
        ("payment_intents.create", {"amount": 99_999_999, "currency": "usd"}),
        ("payment_intents.create", {"amount": 999_999_999_999, "currency": "idr"}),
        ("payment_intents.create", PAY | {"metadata": {"amount": "19.99 of it"}}),
        ("payment_intents.create", PAY | {"application_fee_amount": 0}),
        ("refunds.create", {"payment_intent": "pi_1", "amount": 9_999_999_999}),
        ("invoice_items.create", {"customer": "cus_1", "amount": -500, "currency": "usd"}),
        ("customers.create", {"balance": -500}),
        ("subscriptions.create", {"application_fee_percent": 2.5}),
        ("subscriptions.create", {"items": [{"price_data": {"unit_amount_decimal": "0.5"}}]}),
    ],
)
def test_amounts_that_stripe_takes_are_sent_unchanged(
    operation: str, params: dict[str, Any]
) -> None:
    request = read_payload(Ledger({"operation": operation, "params": params}).attempt().job)
    assert request.body.items() >= {k: v for k, v in params.items() if k != "metadata"}.items()


def test_the_request_is_the_same_on_every_attempt_and_the_payload_stays_as_it_was() -> None:
    ledger = Ledger({**CHARGE, "params": PAY | {"metadata": {"order": "7"}}})
    before = json.dumps(ledger.payload)
    bodies = [read_payload(ledger.attempt().job).body for _ in range(2)]
    assert bodies[0] == bodies[1]
    assert bodies[0]["metadata"] == {
        "order": "7",
        "taskboard_job": str(ledger.id),
        "taskboard_step": STEP,
    }
    assert json.dumps(ledger.payload) == before


def test_only_operations_that_take_metadata_are_marked() -> None:
    job = Ledger().attempt().job
    marked = set()
    for name in OPERATIONS:
        target = {} if name.endswith(".create") else {"id": "xx_1"}
        request = read_payload(replace(job, payload={"operation": name} | target))
        if "metadata" in request.body:
            marked.add(name)
    unmarked = {"confirm", "cancel", "finalize", "pay"}
    assert marked == {name for name in OPERATIONS if name.split(".")[1] not in unmarked}


# --- settings


@pytest.mark.parametrize(
    ("key", "mode"),
    [
        ("sk_test_1", "test"),
        ("rk_test_1", "test"),
        ("sk_live_1", "live"),
        ("rk_live_1", "live"),
        ("pk_test_1", "unknown"),
        ("x", "unknown"),
    ],
)
def test_the_mode_is_read_from_the_key_and_the_key_is_never_shown(key: str, mode: str) -> None:
    settings = StripeSettings(key)
    assert settings.mode == mode
    assert f"'{key}'" not in repr(settings)


@pytest.mark.parametrize("key", ["", " ", "sk_test_1\n", "sk test", "sk_tést"])
def test_a_key_that_cannot_be_a_header_is_refused_at_once(key: str) -> None:
    with pytest.raises(ValueError, match="API key"):
        StripeSettings(key)


def test_one_handler_serves_two_event_loops() -> None:
    async def play(bench: Bench, ledger: Ledger) -> Any:
        async with DevStripe(port=bench_port) as server:
            result = await bench.run(ledger)
            await bench.handler.aclose()  # type: ignore[attr-defined]
            assert server.requests == 1
            return result

    with socket.create_server(("127.0.0.1", 0)) as listener:
        bench_port = listener.getsockname()[1]
    bench = Bench(f"http://127.0.0.1:{bench_port}")
    for _ in range(2):
        assert asyncio.run(play(bench, Ledger()))["status"] == "succeeded"


# --- every operation, and what a later attempt sees of it


async def chain(server: DevStripe, bench: Bench) -> dict[str, Ledger]:
    """Run every allow-listed operation once; each in a job of its own."""
    ledgers: dict[str, Ledger] = {}

    async def do(operation: str, target: str = "", **params: Any) -> str:
        named = {"id": target} if target else {}
        ledger = Ledger({"operation": operation, "params": params} | named)
        result = await bench.run(ledger)
        assert isinstance(result, dict), f"{operation}: {result}"
        ledgers[operation] = ledger
        return str(result["id"])

    customer = await do(
        "customers.create",
        email="a@shop.example",
        invoice_settings={"default_payment_method": "pm_card_visa"},
    )
    await do("payment_intents.create", **PAY, customer=customer)
    held = PAY | {"confirm": False, "capture_method": "manual", "customer": customer}
    intent = (await bench.run(Ledger({**CHARGE, "params": held})))["id"]
    await do("payment_intents.confirm", intent)
    await do("payment_intents.capture", intent, amount_to_capture=1000)
    await do("refunds.create", payment_intent=intent, amount=400)
    other = (await bench.run(Ledger({**CHARGE, "params": held})))["id"]
    await do("payment_intents.cancel", other)
    await do("invoice_items.create", customer=customer, amount=700, currency="usd")
    invoice = await do("invoices.create", customer=customer)
    await do("invoices.finalize", invoice)
    await do("invoices.pay", invoice)
    subscription = await do("subscriptions.create", customer=customer, items=[{"price": "price_1"}])
    await do("subscriptions.update", subscription, description="new")
    await do("subscriptions.cancel", subscription)
    assert ledgers.keys() == OPERATIONS.keys()
    return ledgers


@own
async def test_every_operation_runs_and_is_done(server: DevStripe, bench: Bench) -> None:
    ledgers = await chain(server, bench)
    results = {name: ledger.records[0].result for name, ledger in ledgers.items()}
    assert {name: result.get("status") for name, result in results.items()} == {
        "customers.create": None,
        "payment_intents.create": "succeeded",
        "payment_intents.confirm": "requires_capture",
        "payment_intents.capture": "succeeded",
        "payment_intents.cancel": "canceled",
        "refunds.create": "succeeded",
        "invoice_items.create": None,
        "invoices.create": "draft",
        "invoices.finalize": "open",
        "invoices.pay": "paid",
        "subscriptions.create": "active",
        "subscriptions.update": "active",
        "subscriptions.cancel": "canceled",
    }
    assert all(result["request_id"].startswith("req_") for result in results.values())
    assert results["refunds.create"]["amount"] == 400
    assert sorted(c["amount"] for c in server.objects["charges"].values()) == [700, 1000, 1999]


@own
async def test_every_operation_of_an_earlier_attempt_is_found_without_a_second_call(
    server: DevStripe, bench: Bench
) -> None:
    ledgers = await chain(server, bench)
    server.keys.clear()
    writes: list[Call] = []
    server.on_charge = writes.append
    for name, ledger in ledgers.items():
        before = ledger.records[0].result
        ledger.records[0].happened = None
        result = await bench.run(ledger)
        assert isinstance(result, dict) and result["id"] == before["id"], name
    assert writes == []


# --- our own server


def sdk(server: DevStripe, key: str = KEY) -> Any:
    return stripe.StripeClient(
        key,
        base_addresses={"api": server.url},
        max_network_retries=0,
        http_client=stripe.HTTPXClient(timeout=5),
    ).v1


@own
async def test_the_server_repeats_its_answer_for_a_key(server: DevStripe, bench: Bench) -> None:
    calls: list[Call] = []
    server.on_charge = calls.append
    pay = functools.partial(sdk(server).payment_intents.create_async, PAY, {"idempotency_key": "k"})
    first, second = await pay(), await pay()
    assert first.to_dict() == second.to_dict()
    assert [call.replayed for call in calls] == [False, True]
    assert (calls[0].key, calls[0].status, calls[0].body["id"]) == ("k", 200, first.id)
    assert len(server.objects["charges"]) == 1


@own
async def test_the_server_saves_declines_but_not_invalid_requests(
    server: DevStripe, bench: Bench
) -> None:
    intents = sdk(server).payment_intents
    for _ in range(2):
        with pytest.raises(stripe.CardError):
            await intents.create_async(DECLINED["params"], {"idempotency_key": "declined"})
    assert len(server.objects["payment_intents"]) == 1
    with pytest.raises(stripe.InvalidRequestError):
        await intents.create_async(PAY | {"amount": 1.5}, {"idempotency_key": "fixed"})
    await intents.create_async(PAY, {"idempotency_key": "fixed"})


@own
async def test_the_server_refuses_a_key_with_other_params(server: DevStripe, bench: Bench) -> None:
    calls: list[Call] = []
    server.on_charge = calls.append
    intents = sdk(server).payment_intents
    await intents.create_async(PAY, {"idempotency_key": "k"})
    with pytest.raises(stripe.IdempotencyError):
        await intents.create_async(PAY | {"amount": 2}, {"idempotency_key": "k"})
    assert [(call.status, call.replayed) for call in calls] == [(200, False), (400, False)]


@own
async def test_the_server_answers_409_while_it_holds_an_answer_back(
    server: DevStripe, bench: Bench
) -> None:
    server.hold_seconds = 0.2
    pay = functools.partial(sdk(server).payment_intents.create_async, PAY, {"idempotency_key": "k"})
    first = asyncio.create_task(pay())
    await asyncio.sleep(0.1)
    assert len(server.objects["charges"]) == 1
    server.hold_seconds = 0
    with pytest.raises(stripe.APIError) as caught:
        await pay()
    assert caught.value.http_status == 409
    assert (await pay_when_done(first, pay)).id == first.result().id


async def pay_when_done(first: asyncio.Task[Any], pay: Callable[[], Awaitable[Any]]) -> Any:
    await first
    return await pay()


@own
async def test_the_server_performs_a_call_whose_caller_went_away(
    server: DevStripe, bench: Bench
) -> None:
    server.hold_seconds = 0.2
    pay = functools.partial(sdk(server).payment_intents.create_async, PAY, {"idempotency_key": "k"})
    first = asyncio.create_task(pay())
    await asyncio.sleep(0.1)
    first.cancel()
    await asyncio.sleep(0.2)
    server.hold_seconds = 0
    assert (await pay()).status == "succeeded"
    assert len(server.objects["charges"]) == 1


@own
async def test_the_server_finds_by_list_and_by_metadata(server: DevStripe, bench: Bench) -> None:
    intents = sdk(server).payment_intents
    made = [await intents.create_async(PAY | {"metadata": {"order": str(i)}}) for i in range(3)]
    listed = await intents.list_async({"limit": 2})
    assert [intent.id for intent in listed.data] == [made[2].id, made[1].id]
    found = await intents.search_async({"query": "metadata['order']:'1'"})
    assert [intent.id for intent in found.data] == [made[1].id]


@own
async def test_the_server_takes_test_keys_only(server: DevStripe, bench: Bench) -> None:
    with pytest.raises(stripe.AuthenticationError):
        await sdk(server, "sk_live_1").customers.create_async({})


@pytest.mark.parametrize("number", ["4000000000000002", "4000000000009995"])
def test_the_server_declines_test_cards_by_number(number: str) -> None:
    @own
    async def play(server: DevStripe, bench: Bench) -> None:
        data = {"type": "card", "card": {"number": number}}
        params = {"amount": 5, "currency": "usd", "confirm": True, "payment_method_data": data}
        with pytest.raises(stripe.CardError):
            await sdk(server).payment_intents.create_async(params)

    play()
