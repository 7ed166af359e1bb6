"""Who may come in: names of the host, sessions, the token, the header of a proxy, foreign forms.

Nothing here knows of jobs. A session is a signed cookie; its key lives as long as this process.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

SESSION_LASTS = 12 * 3600.0  # seconds
TOKEN_LEAST = 16  # characters
TRIES, TRIES_WITHIN = 10, 60.0  # wrong tokens, by anybody; seconds
NAME_MOST = 80
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; img-src 'self';"
    " form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # Not no-referrer: a form would then be sent with the origin "null".
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True, slots=True)
class Session:
    """A browser; `name` is the person's, empty before a login."""

    name: str
    cookie: str


@dataclass(slots=True)
class Access:
    """How people come in.

    `hosts`: the names that the board is reached by, without ports. `name`: of everybody, where
    neither a token nor a proxy says who it is. `token`: what a login has to know. `header`: in
    which a proxy at one of `proxies` names the person.
    """

    hosts: frozenset[str]
    name: str = ""
    token: str = field(default="", repr=False)
    header: str = ""
    proxies: Sequence[Network] = ()
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    wrong: list[float] = field(default_factory=list)

    def open(self, name: str) -> Session:
        """Begin a session."""
        facts = json.dumps([name, time.time(), secrets.token_urlsafe(16)])
        told = base64.urlsafe_b64encode(facts.encode()).decode().rstrip("=")
        return Session(name, f"{told}.{self._sign('session', told)}")

    def read(self, cookie: str) -> Session | None:
        """Answer the session that a cookie names, if it is ours and not too old."""
        told, _, signature = cookie.partition(".")
        if not same(signature, self._sign("session", told)):
            return None
        name, begun_at, _ = json.loads(base64.urlsafe_b64decode(told + "=" * (-len(told) % 4)))
        return Session(name, cookie) if time.time() - begun_at < SESSION_LASTS else None

    def form_token(self, session: Session) -> str:
        """Make what each form of a session carries, and no other site knows."""
        return self._sign("form", session.cookie)

    def knows(self, token: str) -> bool | None:
        """Compare a token with ours, in constant time; None when too many were wrong lately."""
        now = time.monotonic()
        self.wrong[:] = [at for at in self.wrong if now - at < TRIES_WITHIN]
        if len(self.wrong) >= TRIES:
            return None
        if self.token and same(token, self.token):
            return True
        self.wrong.append(now)
        return False

    def named_by_proxy(self, scope: Scope) -> str:
        """Answer whom the proxy names; nobody, unless it is the proxy that asks."""
        given = Headers(scope=scope).getlist(self.header)
        client = (scope.get("client") or ("",))[0]
        try:
            address = ipaddress.ip_address(client)
        except ValueError:
            return ""
        trusted = any(address in network for network in self.proxies)
        return clean_name(given[0]) if trusted and len(given) == 1 else ""

    def _sign(self, purpose: str, text: str) -> str:
        return hmac.new(self.key, f"{purpose}:{text}".encode(), hashlib.sha256).hexdigest()


def same(one: str, other: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(*(text.encode("utf-8", "surrogatepass") for text in (one, other)))


def clean_name(text: str) -> str:
    """Make a name that can be stored as a reason: one line, printable, not too long."""
    return " ".join("".join(c for c in text if c.isprintable()).split())[:NAME_MOST]


def host_of(netloc: str) -> str:
    """Answer the host of `host:port`, in lower case; empty when it is none."""
    try:
        return (urlsplit(f"//{netloc}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def is_foreign(headers: Headers) -> bool:
    """Tell whether another site sends this form; browsers say where it came from."""
    origin = headers.get("origin")
    if origin is not None:
        scheme, _, host = origin.partition("://")
        return scheme not in ("http", "https") or host.lower() != headers.get("host", "").lower()
    return headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none")


class Guard:
    """Stands before the application: what it lets through has a session in its state.

    Refuses unknown names of the host, whatever address they lead to: another site's name that was
    pointed at us would share its scripts' view. Every answer bears the headers of the page.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        access, headers = self._access, Headers(scope=scope)
        name_of_cookie = f"taskboard_board_{(scope.get('server') or ('', 0))[1]}"
        set_cookie: list[Session] = []

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                out = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    out.setdefault(name, value)
                for session in set_cookie[-1:]:
                    # A form that was sent from an https page says so: a proxy has ended TLS.
                    safe = headers.get("origin", "").startswith("https:")
                    safe = safe or scope.get("scheme") == "https"
                    out.append(
                        "Set-Cookie",
                        f"{name_of_cookie}={session.cookie}; Path=/; HttpOnly; SameSite=Strict"
                        f"; Max-Age={SESSION_LASTS:.0f}" + ("; Secure" if safe else ""),
                    )
            await send(message)

        async def refuse(code: int, text: str) -> None:
            await PlainTextResponse(text + "\n", code)(scope, receive, send_with_headers)

        if len(headers.getlist("host")) != 1 or host_of(headers["host"]) not in access.hosts:
            return await refuse(421, "this board is not reached by that name: see --host")
        if scope["method"] not in ("GET", "HEAD", "POST"):
            return await refuse(405, "only GET, HEAD and POST")
        if scope["method"] == "POST" and is_foreign(headers):
            return await refuse(403, "another site has sent this form")
        name = access.name
        if access.header:
            name = access.named_by_proxy(scope)
            if not name and scope["path"] != "/healthz":
                return await refuse(403, "come by way of the proxy, which says who you are")
        session = access.read(cookie_parser(headers.get("cookie", "")).get(name_of_cookie, ""))
        if session is None or (not access.token and session.name != name):
            session = access.open(name)
            set_cookie.append(session)
        state: dict[str, Any] = scope.setdefault("state", {})
        state |= {"session": session, "set_cookie": set_cookie.append}
        await self._app(scope, receive, send_with_headers)
