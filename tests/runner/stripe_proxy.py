"""`localstripe` as its own process, and a proxy in front of it that behaves badly on demand.

localstripe knows Stripe's objects but nothing of idempotency. The proxy adds what Stripe promises
about keys, and the weather: lost answers, errors saved under a key, calls still under way, rate
limits, forgotten keys. It records every request it sees.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from aiohttp import web

# `localstripe --from-scratch` listens on every interface and keeps a file under /tmp; this is the
# same application on loopback, with its memory in memory.
LOCALSTRIPE = """
import socket
from aiohttp import web
from localstripe import resources, server
resources.Store.dump_to_disk = lambda store: None
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
web.run_app(server.app, sock=listener, print=None, access_log=None)
"""


@contextlib.contextmanager
def localstripe() -> Iterator[str]:
    """Run localstripe until the block ends; yields its base URL."""
    command = [sys.executable, "-c", LOCALSTRIPE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = f"http://127.0.0.1:{int(process.stdout.readline())}"
            for _ in range(100):
                with contextlib.suppress(httpx.TransportError):
                    httpx.get(url)
                    break
            yield url
        finally:
            process.terminate()


@dataclass(frozen=True, slots=True)
class Seen:
    """One request as it came over the wire."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes

    @property
    def key(self) -> str | None:
        return self.headers.get("idempotency-key")


@dataclass(slots=True)
class Fault:
    """What happens to one request instead of the usual.

    `perform`: whether it reaches localstripe. `status`, `body` and `headers` replace the answer
    (None: as it came). `save`: the answer is kept under the key. `lost`: the connection is cut
    instead of answering. `seconds`: how long the call stays under way.
    """

    method: str = "POST"
    perform: bool = True
    status: int | None = None
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    save: bool = True
    lost: bool = False
    seconds: float = 0.0


Answer = tuple[int, bytes, dict[str, str]]


def refused(status: int, kind: str = "api_error", /, **error: Any) -> dict[str, Any]:
    """A fault: answered with an error before anything is done, and not kept."""
    body = {"error": {"type": kind, "message": "refused"} | error}
    return {"status": status, "perform": False, "save": False, "body": body}


class StripeProxy:
    """The proxy. Each `fault` meets one request; `forget_keys` is what Stripe does after a day.

    While `blind`, lists and searches show nothing.
    """

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.url = ""
        self.seen: list[Seen] = []
        self.keys: dict[str, tuple[str, bytes, Answer | None]] = {}
        self.faults: list[Fault] = []
        self.blind = False

    def fault(self, times: int = 1, **what: Any) -> None:
        self.faults.extend(Fault(**what) for _ in range(times))

    def forget_keys(self) -> None:
        self.keys.clear()

    def writes(self) -> list[Seen]:
        """The requests that could change something."""
        return [seen for seen in self.seen if seen.method != "GET"]

    async def objects(self, collection: str) -> list[dict[str, Any]]:
        """What exists at localstripe, whoever made it."""
        answer = await self._upstream.get(f"/v1/{collection}", params={"limit": 100})
        return list(answer.json()["data"])

    async def __aenter__(self) -> StripeProxy:
        self._upstream = httpx.AsyncClient(
            base_url=self.upstream,
            headers={"authorization": "Bearer sk_test_proxy"},
            verify=False,  # http only, and certificates take long to load
        )
        await self._upstream.delete("/_config/data")
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        await self._upstream.aclose()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        seen = Seen(
            request.method,
            request.path,
            dict(request.query),
            {name.lower(): value for name, value in request.headers.items()},
            await request.read(),
        )
        self.seen.append(seen)
        key = seen.key if seen.method == "POST" else None
        if key and (known := self.keys.get(key)):
            *asked, saved = known
            if asked != [seen.path, seen.body]:
                return _respond(_error(400, "idempotency_error", None))
            return _respond(saved or _error(409, "invalid_request_error", "idempotency_key_in_use"))
        fault = next((each for each in self.faults if each.method == seen.method), None)
        if fault:
            self.faults.remove(fault)
        else:
            fault = Fault()
        if key:
            self.keys[key] = seen.path, seen.body, None
        answer = await self._forward(seen) if fault.perform else _error(500, "api_error", None)
        if fault.status is not None:
            body = fault.body if isinstance(fault.body, bytes) else json.dumps(fault.body).encode()
            answer = fault.status, body, fault.headers
        await asyncio.sleep(fault.seconds)
        if key and fault.save and answer[0] not in (400, 401, 404):
            self.keys[key] = seen.path, seen.body, answer
        elif key:
            self.keys.pop(key, None)
        if fault.lost and request.transport is not None:
            request.transport.abort()
        return _respond(answer)

    async def _forward(self, seen: Seen) -> Answer:
        if self.blind and seen.method == "GET":
            return 200, b'{"object": "list", "data": []}', {}
        if seen.path.endswith("/search"):  # which localstripe has not
            found = re.fullmatch(r"metadata\['(\w+)'\]:'(.*)'", seen.query["query"])
            assert found is not None
            every = await self.objects(seen.path.split("/")[2])
            data = [each for each in every if each["metadata"].get(found[1]) == found[2]]
            return 200, json.dumps({"object": "search_result", "data": data}).encode(), {}
        answer = await self._upstream.request(
            seen.method,
            seen.path,
            params=seen.query,
            content=seen.body,
            headers={"content-type": seen.headers.get("content-type", "")},
        )
        return answer.status_code, answer.content, {}


def _error(status: int, kind: str, code: str | None) -> Answer:
    error = {"error": {"type": kind, "code": code, "message": kind}}
    return status, json.dumps(error).encode(), {}


def _respond(answer: Answer) -> web.Response:
    status, body, headers = answer
    headers = {"Request-Id": "req_proxy", "Content-Type": "application/json"} | headers
    return web.Response(status=status, body=body, headers=headers)
