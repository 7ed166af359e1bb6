"""A small Stripe of our own, for development and demos: HTTP on loopback, all in memory.

It answers the operations that the `stripe` handler allows, and look-ups by list and by metadata.
It keeps Stripe's word on `Idempotency-Key`: one key, one effect, one answer, errors included; 409
while the first call is under way; 400 when the params differ; a request that fails validation is
not remembered. The payment methods and card numbers in `DECLINES` are declined.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl

Doc = dict[str, Any]

KINDS: dict[str, tuple[str, str, str | None, tuple[str, ...]]] = {
    # collection: object, prefix of its ids, first status, required params
    "payment_intents": ("payment_intent", "pi", "requires_payment_method", ("amount", "currency")),
    "charges": ("charge", "ch", "succeeded", ()),
    "refunds": ("refund", "re", "succeeded", ()),
    "customers": ("customer", "cus", None, ()),
    "invoiceitems": ("invoiceitem", "ii", None, ("customer", "amount")),
    "invoices": ("invoice", "in", "draft", ("customer",)),
    "subscriptions": ("subscription", "sub", "active", ("customer", "items")),
}
UNPAID = ("requires_payment_method", "requires_confirmation", "requires_action")
CHANGES = {  # verb of a collection: from which status, to which
    ("payment_intents", "confirm"): (UNPAID, "succeeded"),
    ("payment_intents", "capture"): (("requires_capture",), "succeeded"),
    ("payment_intents", "cancel"): ((*UNPAID, "requires_capture"), "canceled"),
    ("invoices", "finalize"): (("draft",), "open"),
    ("invoices", "pay"): (("open",), "paid"),
}
DECLINES = {  # payment method or card number: decline code
    "pm_card_chargeDeclined": "generic_decline",
    "pm_card_visa_chargeDeclined": "generic_decline",
    "pm_card_chargeDeclinedInsufficientFunds": "insufficient_funds",
    "pm_card_visa_chargeDeclinedInsufficientFunds": "insufficient_funds",
    "4000000000000002": "generic_decline",
    "4000000000009995": "insufficient_funds",
}


@dataclass(frozen=True, slots=True)
class Call:
    """A writing request and its answer; `replayed`: a saved answer, and nothing was done."""

    method: str
    path: str
    key: str | None
    status: int
    body: Doc
    replayed: bool


class Refused(Exception):
    """An error answer; `begun` when the request had passed validation and its key is used up."""

    def __init__(self, status: int, message: str, *, begun: bool = False, **error: Any) -> None:
        super().__init__(message)
        kind = "card_error" if status == 402 else "invalid_request_error"
        self.status, self.begun = status, begun
        self.body = {"error": {"type": kind, "message": message} | error}


@dataclass(slots=True)
class DevStripe:
    """The server: `async with DevStripe(on_charge=show) as stripe:` runs it, `stripe.url` finds it.

    `on_charge` is called with each writing call when it is done, before it is answered.
    `hold_seconds`, which may be changed at any time, keeps answers back: a worker stopped in that
    window cannot know what it did. `port` 0 picks a free one. `requests`, `keys` and `objects`
    (by collection and id) are there to be counted.
    """

    on_charge: Callable[[Call], object] | None = None
    hold_seconds: float = 0.0
    port: int = 0
    requests: int = 0
    # What was asked under a key, and the answer once there is one.
    keys: dict[str, tuple[object, tuple[int, Doc] | None]] = field(default_factory=dict)
    objects: dict[str, dict[str, Doc]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    _server: asyncio.Server | None = field(default=None, repr=False)
    _clients: dict[asyncio.StreamWriter, asyncio.Task[None] | None] = field(
        default_factory=dict, repr=False
    )
    _closing: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    @property
    def url(self) -> str:
        """The value for TASKBOARD_STRIPE_BASE."""
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> DevStripe:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing.set()
        if self._server is not None:
            self._server.close()
        for writer in self._clients:
            writer.transport.abort()
        await asyncio.gather(*filter(None, self._clients.values()))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients[writer] = asyncio.current_task()
        try:
            while start := (await reader.readline()).decode("latin-1"):
                method, url = start.split()[:2]
                headers: dict[str, str] = {}
                while line := (await reader.readline()).decode("latin-1").strip():
                    name, _, value = line.partition(":")
                    headers[name.lower()] = value.strip()
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                status, document, replayed = await self._answer(method, url, headers, body)
                content = json.dumps(document)
                head = (
                    f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
                    "Content-Type: application/json",
                    f"Content-Length: {len(content)}",
                    f"Request-Id: req_{secrets.token_hex(7)}",
                    f"Idempotent-Replayed: {str(replayed).lower()}",
                )
                writer.write("\r\n".join((*head, "", content)).encode())
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the caller went away; what was done is done
        finally:
            del self._clients[writer]
            writer.close()

    async def _answer(
        self, method: str, url: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, Doc, bool]:
        self.requests += 1
        path, _, query = url.partition("?")
        key = headers.get("idempotency-key", "") if method == "POST" else ""
        asked = (path, body)
        known, saved = self.keys.get(key, (None, None))
        status, document = saved or (200, {})
        try:
            if not re.fullmatch(r"Bearer [rs]k_test_\w+", headers.get("authorization", "")):
                raise Refused(401, "a test key is needed: this is not Stripe")
            if known and known != asked:
                raise Refused(400, "the key had other params", type="idempotency_error")
            if known and not saved:
                raise Refused(409, "a call is under way", code="idempotency_key_in_use")
            if not known:
                if key:
                    self.keys[key] = asked, None
                document = self._perform(method, path.split("/")[2:], query or body.decode())
        except Refused as refusal:
            status, document, saved = refusal.status, refusal.body, None
            if not known and not refusal.begun:
                self.keys.pop(key, None)
        document = json.loads(json.dumps(document))  # as it is now, whatever becomes of it
        if method != "GET":
            if self.on_charge:
                self.on_charge(Call(method, path, key, status, document, bool(saved)))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), self.hold_seconds)
        if key in self.keys and not known:
            self.keys[key] = asked, (status, document)
        return status, document, bool(saved)

    def _perform(self, method: str, path: list[str], form: str) -> Doc:
        params = _params(form)
        match method, *path:
            case "GET", kind, "search" if kind in KINDS:
                key, value = re.findall(r"'(.*?)'", params["query"])  # metadata['key']:'value'
                every = self.objects[kind].values()
                data = [each for each in every if each["metadata"].get(key) == value]
                return {"object": "search_result", "data": data, "has_more": False}
            case "GET", kind if kind in KINDS:
                limit, status = int(params.pop("limit", 10)), params.pop("status", None)
                if kind == "subscriptions" and status is None:
                    params["status"] = "active"
                every = self.objects[kind].values()
                data = [each for each in every if params.items() <= each.items()]
                return {"object": "list", "data": data[::-1][:limit], "has_more": False}
            case "GET", kind, name:
                return self._find(kind, name)
            case "POST", kind if kind in KINDS and kind != "charges":
                return self._create(kind, params)
            case "POST" | "DELETE", "subscriptions", name:
                subscription = self._find("subscriptions", name)
                if subscription["status"] == "canceled":
                    raise Refused(404, f"No such subscription: {name}", code="resource_missing")
                return _merge(subscription, params, "canceled" if method == "DELETE" else "active")
            case "POST", kind, name, verb if (kind, verb) in CHANGES:
                return self._change(kind, self._find(kind, name), verb, params)
        raise Refused(404, f"Unrecognized request URL ({method} /v1/{'/'.join(path)})")

    def _find(self, kind: str, name: Any) -> Doc:
        if found := self.objects.get(kind, {}).get(name):
            return found
        raise Refused(404, f"No such object in {kind}: {name}", code="resource_missing")

    def _create(self, kind: str, params: Doc) -> Doc:
        noun, prefix, status, required = KINDS[kind]
        confirm = params.pop("confirm", None) == "true"
        for name in (*required, "payment_method") if confirm else required:
            if name not in params:
                raise Refused(400, f"Missing required param: {name}.", code="parameter_missing")
        if "customer" in params:
            self._find("customers", params["customer"])
        if kind == "payment_intents" and "payment_method" in params:
            status = "requires_confirmation"
        elif kind == "refunds":
            params = self._refund(params)
        name = f"{prefix}_{secrets.token_hex(8)}"
        fixed = {"id": name, "object": noun, "created": int(time.time()), "livemode": False}
        if kind == "payment_intents":
            fixed["client_secret"] = f"{name}_secret_{secrets.token_hex(8)}"
        made: Doc = {"metadata": {}, "status": status} | params | fixed
        self.objects[kind][name] = made
        return self._change(kind, made, "confirm", {}) if confirm else made

    def _change(self, kind: str, what: Doc, verb: str, params: Doc) -> Doc:
        before, after = CHANGES[kind, verb]
        if what["status"] not in before:
            code = "payment_intent_unexpected_state" if kind == "payment_intents" else None
            raise Refused(400, f"cannot {verb}: the status is {what['status']}", code=code)
        _merge(what, params, what["status"])
        if verb == "finalize":
            items = [
                item
                for item in self.objects["invoiceitems"].values()
                if item["customer"] == what["customer"]
                and item.setdefault("invoice", what["id"]) == what["id"]
            ]
            what["amount_due"] = sum(item["amount"] for item in items)
        elif verb == "confirm":
            after = self._pay(what, what["amount"], what.get("payment_method"), after)
        elif verb == "capture":
            self._pay(what, what.get("amount_to_capture") or what["amount"], "captured", after)
        elif verb == "pay":
            settings = self._find("customers", what["customer"]).get("invoice_settings", {})
            method = what.get("payment_method") or settings.get("default_payment_method")
            self._pay(what, what["amount_due"], method, after)
        return _merge(what, {}, after)

    def _pay(self, what: Doc, amount: int, method: str | None, after: str) -> str:
        """Charge a payment method for an intent or an invoice; return the status that follows."""
        if method is None:
            raise Refused(400, "Missing required param: payment_method.", code="parameter_missing")
        if method == "pm_card_authenticationRequired":
            return "requires_action"
        if method in DECLINES:
            error: Doc = {"code": "card_declined", "decline_code": DECLINES[method]}
            message = "Your card was declined."
            if what["object"] == "payment_intent":
                lasting = error | {"type": "card_error", "message": message}
                what |= {"status": "requires_payment_method", "last_payment_error": lasting}
                error["payment_intent"] = what
            raise Refused(402, message, begun=True, **error)
        if what.get("capture_method") == "manual" and method != "captured":
            return "requires_capture"
        charge = {"amount": amount, "currency": what.get("currency"), what["object"]: what["id"]}
        what["latest_charge"] = self._create("charges", charge)["id"]
        return after

    def _refund(self, params: Doc) -> Doc:
        intent = params.get("payment_intent")
        name = self._find("payment_intents", intent).get("latest_charge") if intent else None
        charge = self._find("charges", name or params.get("charge"))
        left = charge["amount"] - charge.get("refunded", 0)
        amount = params.get("amount", left)
        if not 0 < amount <= left:
            raise Refused(400, f"{left} is left to refund", code="charge_already_refunded")
        charge["refunded"] = charge.get("refunded", 0) + amount
        return params | {"amount": amount, "currency": charge["currency"], "charge": charge["id"]}


def _merge(what: Doc, changes: Doc, status: str) -> Doc:
    metadata = what["metadata"] | changes.get("metadata", {})
    what |= changes | {"metadata": metadata, "status": status}
    return what


def _params(form: str) -> Doc:
    """A form as a tree: `a[b][0]=c` becomes `{"a": {"b": {"0": "c"}}}`; amounts become integers."""
    root: Doc = {}
    for name, value in parse_qsl(form, keep_blank_values=True):
        *path, last = re.findall(r"[^\[\]]+", name)
        node = root
        for step in path:
            node = node.setdefault(step, {})
        node[last] = value
        if last.startswith("amount") and not path:
            if not re.fullmatch(r"-?\d+", value):
                raise Refused(400, f"Invalid integer: {value}", code="parameter_invalid_integer")
            node[last] = int(value)
    if card := root.get("payment_method_data", {}).get("card"):
        root["payment_method"] = card.get("number")
    return root
