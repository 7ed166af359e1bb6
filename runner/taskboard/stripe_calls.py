"""What is asked of Stripe and what its answers mean: the allow-list, requests, errors.

Amounts are integers in the currency's smallest unit, sent as they are. A request is a pure
function of payload and job id, and so is its idempotency key: every attempt sends the same bytes.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Awaitable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import httpx
import stripe

from taskboard.handlers import Job, Outcome, Permanent, Release, Retry

log = logging.getLogger(__name__)

DIGITS = {"idr": 12, "cop": 10, "inr": 9}  # Stripe's longest amounts; elsewhere eight digits
KEPT = ("object", "id", "status", "amount", "currency", "livemode", "latest_charge", "request_id")
NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError)
AMOUNT = re.compile(r"(\w+_)?amount|amount_to_\w+|amount_gte|balance")
SECRET = re.compile(r"\b(?:[eprs]k|whsec)_[\w*]+|\w+_secret_\w+")


@dataclass(frozen=True, slots=True)
class StripeSettings:
    """How to reach Stripe. `base` replaces the API's URL; `timeout` (seconds) bounds an answer."""

    api_key: str = field(repr=False)
    base: str | None = None
    timeout: float = 30.0
    api_version: str = "2026-10-28.endive"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\x21-\x7e]+", self.api_key):
            raise ValueError("the Stripe API key is empty or holds blanks or line breaks")

    @property
    def mode(self) -> str:
        """`test`, `live` or `unknown`, by the prefix of the key."""
        found = re.match(r"[rs]k_(test|live)_", self.api_key)
        return found[1] if found else "unknown"


class Operation(NamedTuple):
    """How to call one allow-listed operation, and how to see that it took place.

    `mark` is the metadata key that carries the job's id. A change has a key of its own, as it
    would overwrite the mark of the object's creation; what takes no metadata ("") shows in the
    object's status, `settled`. `narrow` is what the list endpoint filters by.
    """

    method: str = "create_async"
    mark: str = "taskboard_job"
    settled: tuple[str, ...] = ()
    narrow: tuple[str, ...] = ("customer",)
    search: bool = False


UNPAID = ("requires_payment_method", "requires_confirmation")
PAID = ("succeeded", "processing", "requires_capture")
FINAL = ("open", "paid", "uncollectible", "void")
OPERATIONS = {
    "payment_intents.create": Operation(search=True),
    "payment_intents.confirm": Operation("confirm_async", "", PAID),
    "payment_intents.capture": Operation("capture_async", "taskboard_capture"),
    "payment_intents.cancel": Operation("cancel_async", "", ("canceled",)),
    "refunds.create": Operation(narrow=("payment_intent", "charge")),
    "customers.create": Operation(narrow=("email",), search=True),
    "invoice_items.create": Operation(),
    "invoices.create": Operation(search=True),
    "invoices.finalize": Operation("finalize_invoice_async", "", FINAL),
    "invoices.pay": Operation("pay_async", "", ("paid",)),
    "subscriptions.create": Operation(search=True),
    "subscriptions.update": Operation("update_async", "taskboard_update"),
    "subscriptions.cancel": Operation("cancel_async", "", ("canceled",)),
}


class Request(NamedTuple):
    """A checked payload. `name` is the operation and the effect's step; `body` is what is sent."""

    job: Job
    name: str
    target: str | None
    body: dict[str, Any]


def read_payload(job: Job) -> Request:
    """Make the request of a job's payload. Raises `Permanent` for what must not be sent."""
    payload = job.payload
    if not isinstance(payload, dict) or payload.keys() - {"operation", "params", "id"}:
        raise Permanent("a stripe payload is an object of operation, params and id, nothing else")
    name, params, target = payload.get("operation"), payload.get("params", {}), payload.get("id")
    if not isinstance(name, str) or name not in OPERATIONS:
        raise Permanent(f"unknown stripe operation; there are {', '.join(OPERATIONS)}")
    if not isinstance(params, dict) or not isinstance(params.get("metadata", {}), dict):
        raise Permanent(f"{name}: params and its metadata must be objects")
    if any(key.startswith("taskboard_") for key in params.get("metadata", {})):
        raise Permanent(f"{name}: metadata keys that begin with taskboard_ are the handler's own")
    if name.endswith(".create") != (target is None):
        raise Permanent(f"{name}: id must name an existing object; creations have none")
    if target is not None and not re.fullmatch(r"[a-z]+_[A-Za-z0-9_]{1,250}", str(target)):
        raise Permanent(f"{name}: id is not the id of an object")
    _check_amounts(name, params)
    if mark := OPERATIONS[name].mark:
        ours = {mark: str(job.id)} | ({} if target else {"taskboard_step": name})
        params = params | {"metadata": params.get("metadata", {}) | ours}
    return Request(job, name, target, params)


def _check_amounts(name: str, node: Any, currency: Any = None, depth: int = 0) -> None:
    if depth > 20:
        raise Permanent(f"{name}: params are nested too deep")
    for item in node if isinstance(node, list) else ():
        _check_amounts(name, item, currency, depth + 1)
    if not isinstance(node, dict):
        return
    currency = node.get("currency", currency)
    # Where no currency is named (a refund, a capture) the longest amount of any must pass.
    limit = 10 ** (DIGITS.get(currency.lower(), 8) if isinstance(currency, str) else 12)
    for key, value in node.items():
        if isinstance(value, dict | list):
            if key != "metadata":
                _check_amounts(name, value, currency, depth + 1)
        elif AMOUNT.fullmatch(key):
            credit = name == "invoice_items.create" or key == "balance"
            lowest = 1 - limit if credit else int(depth == 0 and key.startswith("amount"))
            if type(value) is not int or not lowest <= value < limit:
                rule = f"an integer in the currency's smallest unit, {lowest} to {limit - 1}"
                raise Permanent(f"{name}: {key} must be {rule}")
        elif key.endswith("_decimal") and not isinstance(value, str):
            raise Permanent(f"{name}: {key} must be a string of decimal digits")


class Account:
    """Stripe's API with one key.

    A client belongs to one event loop and takes 5 to 60 ms to make: once per loop, when needed.
    """

    def __init__(self, settings: StripeSettings) -> None:
        self.settings = settings
        self._clients: dict[object, tuple[stripe.StripeClient, stripe.HTTPXClient]] = {}
        stripe.enable_telemetry = False  # it leaves a file in the home folder
        for name in ("stripe", "httpx"):  # they log bodies, parts of the key and addresses
            logging.getLogger(name).setLevel(logging.WARNING)

    @property
    def client(self) -> stripe.StripeClient:
        """The client of the running loop."""
        settings, loop = self.settings, asyncio.get_running_loop()
        if loop not in self._clients:
            connect = min(settings.timeout / 2, 10)
            limits = httpx.Timeout(settings.timeout, connect=connect, pool=connect)
            http = stripe.HTTPXClient(timeout=limits)
            client = stripe.StripeClient(
                settings.api_key,
                stripe_version=settings.api_version,
                base_addresses={"api": settings.base.rstrip("/")} if settings.base else {},
                max_network_retries=0,  # the queue repeats, and counts
                http_client=http,
            )
            self._clients[loop] = client, http
        return self._clients[loop][0]

    async def aclose(self) -> None:
        """End the connections of the running loop."""
        if opened := self._clients.pop(asyncio.get_running_loop(), None):
            await opened[1].close_async()  # type: ignore[no-untyped-call]

    async def perform(self, request: Request, key: str) -> dict[str, Any]:
        """Send a request. Raises stripe.StripeError."""
        call = getattr(self._service(request), OPERATIONS[request.name].method)
        target = (request.target,) if request.target else ()
        return await self._answer(call(*target, request.body, {"idempotency_key": key}))

    async def look_up(self, request: Request) -> dict[str, Any] | None:
        """Find what an earlier attempt of this job did; None when nothing shows.

        A list is never stale but shows the newest hundred; the search index knows everything, but
        a minute late or more. What both miss is young, so the same key still protects it.
        """
        operation, job_id = OPERATIONS[request.name], str(request.job.id)
        service = self._service(request)
        calls: list[tuple[Any, Any]] = [(service.retrieve_async, request.target)]
        if request.target is None:
            query = {key: request.body.get(key) for key in operation.narrow} | {"limit": 100}
            if request.name == "subscriptions.create":
                query["status"] = "all"  # else cancelled ones are left out
            calls = [(service.list_async, query)]
            if operation.search:
                by_mark = f"metadata['{operation.mark}']:'{job_id}'"
                calls.append((service.search_async, {"query": by_mark}))
        for call, argument in calls:
            try:
                answer = await self._answer(call(argument))
            except stripe.InvalidRequestError:
                continue  # no such object, or no search in this account's country
            for seen in [answer] if request.target else answer.get("data", []):
                mark = (seen.get("metadata") or {}).get(operation.mark)
                took_place = mark == job_id or seen.get("status") in operation.settled
                # An intent to be confirmed that is not: only the same key can tell what it met.
                unpaid = request.body.get("confirm") and seen.get("status") in UNPAID
                if took_place and not unpaid:
                    return dict(seen)
        return None

    def _service(self, request: Request) -> Any:
        return getattr(self.client.v1, request.name.partition(".")[0])

    async def _answer(self, call: Awaitable[Any]) -> dict[str, Any]:
        """Wait for an answer, as a whole: the HTTP client's limits start anew with every byte."""
        try:
            async with asyncio.timeout(self.settings.timeout):
                answer = await call
            document: dict[str, Any] = answer.to_dict(for_json=True)
            if "object" not in document:
                raise ValueError("not an object of Stripe's")
            return document | {"request_id": answer.last_response.request_id}
        except (TimeoutError, AttributeError, TypeError, ValueError) as exc:
            # Late, or not Stripe's.
            raise stripe.APIConnectionError("no answer") from exc  # type: ignore[no-untyped-call]


def kept(seen: Any) -> dict[str, Any]:
    """Pick what is kept of an object: ids and states, no secrets."""
    seen = seen if isinstance(seen, dict) else {}
    return {key: seen[key] for key in KEPT if isinstance(seen.get(key), str | int)}


def judge(request: Request, exc: stripe.StripeError) -> tuple[Outcome, bool | None, Any]:
    """Sort an error: how the job ends, whether the effect happened (None: unknown), the record."""
    body: Any = exc.json_body if isinstance(exc.json_body, dict) else {}
    error: dict[str, Any] = body["error"] if isinstance(body.get("error"), dict) else {}
    codes = {key: str(error[key]) for key in ("code", "decline_code") if error.get(key)}
    status = exc.http_status or f"no usable answer ({type(exc.__cause__).__name__})"
    line = f"stripe {request.name}: {status} {'/'.join(codes.values())}".rstrip()
    if isinstance(exc, stripe.CardError | stripe.InvalidRequestError):  # a 401 quotes the key
        line += " " + SECRET.sub("[secret]", str(error.get("message", "")))[:300]
    line += f" (request {exc.request_id})" if exc.request_id else ""
    record = codes | {"operation": request.name, "error": line, "request_id": exc.request_id}
    match exc:
        case stripe.APIConnectionError() if isinstance(exc.__cause__, NOT_SENT):
            return Retry(line), False, record
        case stripe.RateLimitError():
            return Release(line, delay=_pause(exc)), False, record
        case stripe.AuthenticationError() | stripe.PermissionError():
            log.error("job=%s kind=%s API key refused: %s", request.job.id, request.job.kind, line)
            return Retry(line, retry_in=timedelta(minutes=15)), False, record
        case stripe.IdempotencyError():
            # Something was sent under this key with another body; what became of it only a person
            # can tell, so the effect stays open. A fresh key could do it twice.
            return Permanent(line), None, record
        case stripe.CardError() if error.get("payment_intent") or error.get("charge"):
            # The card was asked and declined, for good: recorded as done, so that no later attempt
            # of this job asks again, not even when Stripe has forgotten the key.
            return Permanent(line), True, kept(error.get("payment_intent")) | record
        case stripe.CardError() | stripe.InvalidRequestError():
            return Permanent(line), False, record
        case _ if status == 409:  # a call with this key is still under way
            return Release(line, delay=_pause(exc)), None, record
    return Retry(f"{line}: outcome unknown"), None, record


def _pause(exc: stripe.StripeError) -> timedelta:
    asked = str((exc.headers or {}).get("retry-after", ""))
    seconds = max(float(asked), 1) if asked.isdecimal() else 10
    return timedelta(seconds=min(seconds * random.uniform(1, 1.25), 3600))
