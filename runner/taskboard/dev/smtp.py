"""A small SMTP server for trying things out: it keeps the mails it takes and delivers nothing.

Loopback only and without TLS, for `taskboard run --dev` and the demo.
"""

from __future__ import annotations

import asyncio
import re
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from email import message_from_bytes, policy
from email.message import EmailMessage
from typing import Any
from urllib.parse import quote

PATH = re.compile(r"(?:FROM|TO):\s*<([^<>\s]*)>", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Envelope:
    """A mail that was taken: who sent it, to whom, and its bytes as they arrived."""

    sender: str
    recipients: tuple[str, ...]
    content: bytes

    @property
    def message(self) -> EmailMessage:
        """The parsed message, with line ends as Python has them."""
        return message_from_bytes(self.content.replace(b"\r\n", b"\n"), policy=policy.default)

    @property
    def message_id(self) -> str:
        """The Message-ID header, by which copies of one mail are recognised."""
        return str(self.message["Message-ID"] or "").strip()


@dataclass(slots=True)
class DevSmtp:
    """The server: `async with DevSmtp(on_mail=show) as smtp:` runs it, `smtp.url` finds it.

    `on_mail` is called with each mail as soon as it is taken. `hold_seconds`, which may be changed
    at any time, delays the reply after the final dot: a worker stopped in that window cannot know
    that its mail was taken. `login` (user, password), when set, is demanded by AUTH PLAIN.
    `port` 0 picks a free one.
    """

    on_mail: Callable[[Envelope], object] | None = None
    hold_seconds: float = 0.0
    login: tuple[str, str] | None = None
    port: int = 0
    mails: list[Envelope] = field(default_factory=list)
    _server: asyncio.Server | None = field(default=None, repr=False)
    _clients: dict[Any, asyncio.StreamWriter] = field(default_factory=dict, repr=False)

    @property
    def url(self) -> str:
        """The value for TASKBOARD_SMTP_URL."""
        user = "{}:{}@".format(*(quote(part, safe="") for part in self.login)) if self.login else ""
        return f"smtp://{user}127.0.0.1:{self.port}?starttls=off"

    def copies(self, message_id: str) -> int:
        """How many mails with this Message-ID were taken."""
        return sum(mail.message_id == message_id for mail in self.mails)

    async def __aenter__(self) -> DevSmtp:
        self._server = await asyncio.start_server(self._client, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._clients.values():
            writer.transport.abort()
        if self._clients:
            await asyncio.wait(self._clients)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._clients[task] = writer
        try:
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                await self._talk(reader, writer)
        finally:
            del self._clients[task]
            writer.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def reply(text: str) -> None:
            writer.write(text.encode() + b"\r\n")
            await writer.drain()

        trusted, sender, recipients = self.login is None, "", list[str]()
        await reply("220 taskboard-dev ESMTP keeps mail and delivers nothing")
        while True:
            line = (await reader.readuntil(b"\n")).decode("utf-8", "replace").strip()
            verb, _, rest = line.partition(" ")
            path = match[1] if (match := PATH.match(rest)) else ""
            match verb.upper():
                case "EHLO" | "HELO" | "RSET" as greeting:
                    sender, recipients = "", []
                    auth = "250-AUTH PLAIN\r\n" if self.login else ""
                    extensions = f"250-taskboard-dev\r\n{auth}250-8BITMIME\r\n250 SMTPUTF8"
                    await reply(extensions if greeting == "EHLO" else "250 ok")
                case "AUTH" if self.login:
                    secret = b64encode("\0{}\0{}".format(*self.login).encode()).decode()
                    trusted = rest.upper().startswith("PLAIN ") and rest[6:] == secret
                    await reply("235 welcome" if trusted else "535 wrong user or password")
                case "MAIL" | "RCPT" | "DATA" if not trusted:
                    await reply("530 log in first")
                case "MAIL" if path and not sender:
                    sender = path
                    await reply("250 ok")
                case "RCPT" if path and sender:
                    recipients.append(path)
                    await reply("250 ok")
                case "DATA" if recipients:
                    await reply("354 end with a dot on a line of its own")
                    mail = Envelope(sender, tuple(recipients), await _content(reader))
                    sender, recipients = "", []
                    self.mails.append(mail)
                    if self.on_mail is not None:
                        self.on_mail(mail)
                    if self.hold_seconds:
                        with suppress(TimeoutError):
                            async with asyncio.timeout(self.hold_seconds):
                                await reader.read(1)
                                return  # the client left before it had its answer
                    await reply("250 kept")
                case "NOOP":
                    await reply("250 ok")
                case "QUIT":
                    return await reply("221 bye")
                case _:
                    await reply("503 not here, or not now")


async def _content(reader: asyncio.StreamReader) -> bytes:
    lines = []
    while (line := await reader.readuntil(b"\r\n")) != b".\r\n":
        lines.append(line.removeprefix(b"."))
    return b"".join(lines)
