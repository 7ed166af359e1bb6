"""A TCP proxy for tests: it can cut, freeze, refuse, delay, and lose a reply."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from types import TracebackType
from typing import Self

from psycopg.conninfo import conninfo_to_dict, make_conninfo

RESET = struct.pack("ii", 1, 0)  # linger 0: close with RST


class Link:
    """One client's connection and its counterpart to the server."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.ends = (client, server)
        self.open = threading.Event()  # clear: frozen
        self.open.set()

    def cut(self) -> None:
        for end in self.ends:
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self.open.set()


class TcpProxy:
    """Stands before the server of a DSN. All switches work at any time, from any thread."""

    def __init__(self, dsn: str) -> None:
        self._to = conninfo_to_dict(dsn)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self._listener.getsockname()[1]
        self.dsn = make_conninfo(dsn, host="127.0.0.1", port=self.port)
        self.delay = 0.0  # seconds, on every piece from the server
        self.refusing = False  # new connections are closed at once
        self.lose_reply_to = b""  # a request with these bytes is served, its reply is not
        self.refuse_then = False  # … and from then on new connections are
        self.replies_lost = 0
        self.accepted: list[float] = []  # when, on time.monotonic
        self._links: list[Link] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """End every connection, with a reset on both sides."""
        links, self._links = self._links, []
        for link in links:
            link.cut()

    def freeze(self) -> None:
        """Forward nothing more on the present connections, and leave them open."""
        for link in self._links:
            link.open.clear()

    def thaw(self) -> None:
        for link in self._links:
            link.open.set()

    def _dial(self) -> socket.socket:
        host, port = str(self._to.get("host") or "127.0.0.1"), self._to.get("port") or 5432
        if not host.startswith("/"):
            return socket.create_connection((host, int(port)))
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(f"{host}/.s.PGSQL.{port}")
        return sock

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.accepted.append(time.monotonic())
            if self.refusing:
                client.close()
                continue
            try:
                link = Link(client, self._dial())
            except OSError:
                client.close()
                continue
            self._links.append(link)
            asked = threading.Event()  # the request whose reply is to be lost has passed
            for sides in (link.ends, link.ends[::-1]):
                threading.Thread(target=self._pump, args=(link, *sides, asked), daemon=True).start()

    def _pump(
        self, link: Link, source: socket.socket, sink: socket.socket, asked: threading.Event
    ) -> None:
        from_server = source is link.ends[1]
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if from_server:
                    if asked.is_set():
                        self.replies_lost += 1
                        self.refusing |= self.refuse_then
                        break
                    time.sleep(self.delay)
                elif self.lose_reply_to and self.lose_reply_to in data:
                    self.lose_reply_to = b""
                    asked.set()
                link.open.wait()
                sink.sendall(data)
        link.cut()
