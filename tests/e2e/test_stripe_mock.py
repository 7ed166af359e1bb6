"""The `stripe` handler and stripe-stateful-mock, which keeps objects and knows idempotency keys."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import httpx
import pytest
from harness import drain, enqueue, state
from tcp_proxy import TcpProxy

from e2e.outside import effects
from support import Connection, expire, rows, wait_for
from taskboard.handlers.stripe import stripe_handler
from taskboard.stripe_calls import StripeSettings

pytestmark = pytest.mark.wide

SECRET = "sk_test_mock"
SERVER = """
const server = require("stripe-stateful-mock").createExpressApp().listen(0, "127.0.0.1", () =>
  console.log(server.address().port))
"""


@pytest.fixture(scope="module")
def mock() -> Iterator[httpx.Client]:
    """A client of the server, as anybody might use it, with nothing of the handler's.

    The package is where Node looks for it: in NODE_PATH.
    """
    quiet = os.environ | {"LOG_LEVEL": "silent"}
    with subprocess.Popen(
        ["node", "-e", SERVER], stdout=subprocess.PIPE, text=True, env=quiet
    ) as process:
        assert process.stdout is not None
        try:
            port = process.stdout.readline().strip()
            assert port, "NODE_PATH names no folder with stripe-stateful-mock"
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", auth=(SECRET, "")) as client:
                yield client
        finally:
            process.terminate()


@pytest.fixture
def proxy(mock: httpx.Client) -> Iterator[TcpProxy]:
    with TcpProxy(f"host=127.0.0.1 port={urlsplit(str(mock.base_url)).port}") as proxy:
        yield proxy


def work(dsn: str, proxy: TcpProxy) -> int:
    """Let a runner of its own work until nothing is left."""
    account = StripeSettings(SECRET, f"http://127.0.0.1:{proxy.port}", timeout=5)
    return drain(dsn, {"stripe": stripe_handler(account)}, within=30)


def make(mock: httpx.Client, path: str, **form: Any) -> str:
    answer = mock.post(path, data=form)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def made(mock: httpx.Client, path: str, job: UUID, **query: int) -> list[Any]:
    """The objects that carry a job's mark."""
    every = mock.get(path, params=query).json()["data"]
    return [each for each in every if each["metadata"].get("taskboard_job") == str(job)]


def customer(db: Connection, **options: Any) -> UUID:
    params = {"email": "ann@example.com", "name": "Ann"}
    payload = {"operation": "customers.create", "params": params}
    return enqueue(db, "stripe", payload, **options)


def refund(db: Connection, charge: str, **params: Any) -> UUID:
    payload = {"operation": "refunds.create", "params": {"charge": charge} | params}
    return enqueue(db, "stripe", payload)


def result(db: Connection, job: UUID) -> Any:
    return rows(db, "select result from taskboard.job_documents(%s)", [job])[0][0]


def test_customers_and_refunds_are_made_once_each(
    dsn: str, db: Connection, mock: httpx.Client, proxy: TcpProxy
) -> None:
    charge = make(mock, "/v1/charges", amount=4200, currency="eur", source="tok_visa")
    jobs = {customer(db): "/v1/customers", refund(db, charge, amount=1000): "/v1/refunds"}
    assert work(dsn, proxy) == 0
    for job, path in jobs.items():
        [found] = made(mock, path, job)
        assert result(db, job)["id"] == found["id"]
    assert mock.get(f"/v1/charges/{charge}").json()["amount_refunded"] == 1000


@pytest.mark.parametrize("operation", ["customers", "refunds"])
def test_an_object_whose_answer_was_lost_is_found_by_the_next_attempt(
    dsn: str, db: Connection, mock: httpx.Client, proxy: TcpProxy, operation: str
) -> None:
    charge = make(mock, "/v1/charges", amount=4200, currency="eur", source="tok_visa")
    job = customer(db) if operation == "customers" else refund(db, charge, amount=1000)
    proxy.lose_reply_to, proxy.refuse_then = f"POST /v1/{operation}".encode(), True
    assert work(dsn, proxy) == 3
    assert proxy.replies_lost == 1 and state(db, job)["state"] == "scheduled"
    assert effects(db, job) == [(f"{operation}.create", 1, "open")]
    proxy.refusing = False
    expire(db, job)
    assert work(dsn, proxy) == 0
    [found] = made(mock, f"/v1/{operation}", job)
    assert result(db, job)["id"] == found["id"]


def test_an_object_that_is_not_in_the_list_is_asked_for_again_with_its_key_and_stays_one(
    dsn: str, db: Connection, mock: httpx.Client, proxy: TcpProxy
) -> None:
    job = customer(db)
    proxy.lose_reply_to, proxy.refuse_then = b"POST /v1/customers", True
    assert work(dsn, proxy) == 3
    [first] = made(mock, "/v1/customers", job)
    wait_for(lambda: time.time() > first["created"] + 1, what="another second: it orders by those")
    for _ in range(100):
        make(mock, "/v1/customers", email="ann@example.com")
    assert made(mock, "/v1/customers", job, limit=100) == []
    proxy.refusing = False
    expire(db, job)
    assert work(dsn, proxy) == 0
    assert made(mock, "/v1/customers", job) == [first]
    assert result(db, job)["id"] == first["id"]
    keys = rows(db, "select distinct idempotency_key from taskboard.effect_list")
    assert keys == [(f"{job}/customers.create",)]


def test_a_refusal_is_final_and_makes_nothing(
    dsn: str, db: Connection, mock: httpx.Client, proxy: TcpProxy
) -> None:
    charge = make(mock, "/v1/charges", amount=4200, currency="eur", source="tok_visa")
    job = refund(db, charge, amount=5000)
    assert work(dsn, proxy) == 3
    assert state(db, job)["state"] == "failed" and made(mock, "/v1/refunds", job) == []
    assert effects(db, job) == [("refunds.create", 1, "refused")]
