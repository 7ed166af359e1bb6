"""The `stripe` handler: one billing operation per job.

Payload: `{"operation": "payment_intents.create", "params": {…}, "id": "pi_…"}`; `id` names the
object to work on and is absent when the operation creates one. Amounts are integers in the
currency's smallest unit, sent as they are. The request is a pure function of payload and job id,
and so is its idempotency key: every attempt sends the same bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
from collections.abc import Awaitable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import httpx
import stripe

from taskboard.handlers import (
    Context,
    Effect,
    Handler,
    Held,
    Job,
    Outcome,
    Permanent,
    Release,
    Retry,
    handler,
)

log = logging.getLogger(__name__)

KEY_VALID_FOR = timedelta(hours=23)  # Stripe may forget a key from 24 hours on
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


async def _answer(call: Awaitable[Any], seconds: float) -> dict[str, Any]:
    """Wait for an answer, as a whole: the HTTP client's limits start anew with every byte."""
    try:
        async with asyncio.timeout(seconds):
            answer = await call
        document: dict[str, Any] = answer.to_dict(for_json=True)
        if "object" not in document:
            raise ValueError("not an object of Stripe's")
        return document | {"request_id": answer.last_response.request_id}
    except (TimeoutError, AttributeError, TypeError, ValueError) as exc:  # late, or not Stripe's
        raise stripe.APIConnectionError("no answer") from exc  # type: ignore[no-untyped-call]


async def _look_up(service: Any, request: Request, seconds: float) -> dict[str, Any] | None:
    """Find what an earlier attempt of this job did; None when nothing shows.

    A list is never stale but shows the newest hundred; the search index knows everything, but a
    minute late or more. What both miss is young, so the same key still protects it.
    """
    operation, job_id = OPERATIONS[request.name], str(request.job.id)
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
            answer = await _answer(call(argument), seconds)
        except stripe.InvalidRequestError:
            continue  # no such object, or no search in this account's country
        for seen in [answer] if request.target else answer.get("data", []):
            mark = (seen.get("metadata") or {}).get(operation.mark)
            took_place = mark == job_id or seen.get("status") in operation.settled
            # An intent to be confirmed that is not: only the same key can tell what it met with.
            if took_place and not (request.body.get("confirm") and seen.get("status") in UNPAID):
                return dict(seen)
    return None


def _kept(seen: Any) -> dict[str, Any]:
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
            return Permanent(line), True, _kept(error.get("payment_intent")) | record
        case stripe.CardError() | stripe.InvalidRequestError():
            return Permanent(line), False, record
        case _ if status == 409:  # a call with this key is still under way
            return Release(line, delay=_pause(exc)), None, record
    return Retry(f"{line}: outcome unknown"), None, record


def _pause(exc: stripe.StripeError) -> timedelta:
    asked = str((exc.headers or {}).get("retry-after", ""))
    seconds = max(float(asked), 1) if asked.isdecimal() else 10
    return timedelta(seconds=min(seconds * random.uniform(1, 1.25), 3600))


async def run_operation(ctx: Context, settings: StripeSettings, client: stripe.StripeClient) -> Any:
    """Perform the job's operation, or learn that an earlier attempt did; tell what came of it.

    Raises `Permanent`, `Retry` or `Release`; `LeaseLost` and `Held` come through from the context.
    """
    request, seconds, sent, seen = read_payload(ctx.job), settings.timeout, False, None
    name = request.name
    service: Any = getattr(client.v1, name.partition(".")[0])
    effect = await ctx.begin_effect(name)
    # A later attempt that finds no record at all may have lost it in a failover.
    lost = ctx.job.attempt > 1 and effect.state == "fresh" and effect.result is None
    try:
        if lost or effect.state == "unknown":
            seen = await _look_up(service, request, seconds)
            if seen is None:
                effect = await _pass_again(ctx, name)
        if effect.state == "done":
            return _told(effect.result)
        if seen is None:
            sent = True
            call = getattr(service, OPERATIONS[name].method)
            target = (request.target,) if request.target else ()
            options = {"idempotency_key": effect.idempotency_key}
            seen = await _answer(call(*target, request.body, options), seconds)
    except stripe.StripeError as exc:
        outcome, happened, record = judge(request, exc)
        if not sent:  # whatever earlier attempts did, this one did nothing
            happened, record = False, None
    if seen is None and happened is None and not isinstance(outcome, Release):
        # Look before calling it unknown: that may be the last attempt, or leave it to a person.
        with contextlib.suppress(stripe.StripeError):
            seen = await _look_up(service, request, seconds)
    if seen is not None:
        happened = True
        record = {"operation": name, "api_version": settings.api_version} | _kept(seen)
    if happened is not None:
        await ctx.end_effect(name, happened=happened, result=record)
    if seen is not None:
        return record
    raise outcome


async def _pass_again(ctx: Context, step: str) -> Effect:
    """Pass the gate after a vain look, which took time; from here on the key has to be valid."""
    try:
        return await ctx.begin_effect(step, key_valid_for=KEY_VALID_FOR)
    except Held:
        await ctx.end_effect(step, happened=False)  # by this attempt; the question is an older one
        raise


def _told(result: Any) -> Any:
    """Repeat what an earlier attempt recorded: a result, or a decline."""
    if isinstance(result, dict) and "error" in result:
        raise Permanent(result["error"])
    return result


def stripe_handler(settings: StripeSettings) -> Handler:
    """Make the handler of kind `stripe`; await its attribute `aclose` to end the connections.

    A client belongs to one event loop and takes 5 to 60 ms to make: once per loop, by a job.
    """
    stripe.enable_telemetry = False  # it leaves a file in the home folder
    for name in ("stripe", "httpx"):  # they log bodies, parts of the key and addresses
        logging.getLogger(name).setLevel(logging.WARNING)
    connect = min(settings.timeout / 2, 10)
    limits = httpx.Timeout(settings.timeout, connect=connect, pool=connect)
    clients: dict[asyncio.AbstractEventLoop, tuple[stripe.StripeClient, stripe.HTTPXClient]] = {}

    @handler("stripe")
    async def run(ctx: Context) -> Any:
        if (loop := asyncio.get_running_loop()) not in clients:
            http = stripe.HTTPXClient(timeout=limits)
            client = stripe.StripeClient(
                settings.api_key,
                stripe_version=settings.api_version,
                base_addresses={"api": settings.base.rstrip("/")} if settings.base else {},
                max_network_retries=0,  # the queue repeats, and counts
                http_client=http,
            )
            clients[loop] = client, http
        return await run_operation(ctx, settings, clients[loop][0])

    async def aclose() -> None:
        if opened := clients.pop(asyncio.get_running_loop(), None):
            await opened[1].close_async()  # type: ignore[no-untyped-call]

    run.aclose = aclose  # type: ignore[attr-defined]
    return run
