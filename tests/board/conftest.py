"""A board of this process, in a thread of its own, and a client that behaves like a browser."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from html import unescape
from typing import Any

import httpx
import pytest

from support import wait_for
from taskboard.console.board.access import Access
from taskboard.console.board.app import make_app
from taskboard.console.board.queries import Database
from taskboard.console.board.serve import OWN_NAMES, make_server


@dataclass(slots=True)
class Site:
    """A board that is served, and a browser's session with it."""

    address: str
    access: Access
    client: httpx.Client

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.client.get(path, **options)

    def form_token(self, path: str = "/jobs") -> str:
        """The token that the forms of a page carry: read from the page."""
        found = re.search(r'name="form_token" value="(\w+)"', self.get(path).text)
        return found[1] if found else ""

    def act(self, verb: str, on: str = "/held", **fields: str) -> httpx.Response:
        """Send a form of the page `on`, as its own."""
        data = {"form_token": self.form_token(on), "then": on} | fields
        return self.post(f"/do/{verb}", data)

    def post(self, path: str, data: dict[str, str], **headers: str) -> httpx.Response:
        headers = {"Origin": self.address.rstrip("/")} | headers
        return self.client.post(path, data=data, headers=headers)


@contextmanager
def serving(dsn: str, access: Access, operator: bool) -> Iterator[str]:
    """Serve a board; answer its address."""
    server = make_server(make_app(Database(dsn), access, operator=operator))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        try:
            wait_for(lambda: server.started, what="the board to be up")
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join(10)
            assert not thread.is_alive()


Open = Callable[..., Site]


@pytest.fixture
def board(request: pytest.FixtureRequest) -> Iterator[Open]:
    """Open boards: `board(dsn, operator=True, token=…)`; the options are those of Access."""
    with ExitStack() as stack:

        def open_site(dsn: str = "", *, operator: bool = False, **options: Any) -> Site:
            plain = not (options.get("token") or options.get("header"))
            options = {"hosts": OWN_NAMES, "name": "ann" if plain else ""} | options
            access = Access(**options)
            dsn = dsn or request.getfixturevalue("dsn")
            address = stack.enter_context(serving(dsn, access, operator))
            client = stack.enter_context(httpx.Client(base_url=address, timeout=20))
            return Site(address, access, client)

        yield open_site


def words(page: httpx.Response) -> str:
    """What a page says: without its tags."""
    text = re.sub(r"<(title|style).*?</\1>", " ", page.text, flags=re.S)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", text)).split())
