"""Plain `taskboard run` processes, and the world outside the database that they act on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import httpx
from aiohttp import web
from aiosmtpd.smtp import SMTP, Envelope
from stripe_proxy import StripeProxy

from support import Connection, rows, wait_for

T = TypeVar("T")

PATIENCE = 40.0  # seconds, on a machine that has much else to do

MAIL = {"to": "ann@example.com", "subject": "Welcome"}
CHARGE = {
    "operation": "payment_intents.create",
    "params": {
        "amount": 4200,
        "currency": "eur",
        "payment_method": "pm_card_visa",
        "confirm": True,
    },
}
PYTHON = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@contextmanager
def serving(manager: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """Run a server in a thread of its own, beside the test."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(manager.__aenter__(), loop).result(PATIENCE)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(manager.__aexit__(None, None, None), loop).result(PATIENCE)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


@dataclass(eq=False)
class Mailbox:
    """An SMTP server that keeps what it takes.

    `answers` maps an address to the reply to RCPT. `at_rcpt` and `at_dot` are called, in a thread,
    before the reply to RCPT and between taking a mail and saying so: what takes long there keeps
    the client waiting.
    """

    answers: dict[str, str] = field(default_factory=dict)
    at_rcpt: Callable[[str], object] = lambda address: None
    at_dot: Callable[[Envelope], object] = lambda mail: None
    mails: list[Envelope] = field(default_factory=list)
    url: str = ""

    async def handle_RCPT(
        self, server: SMTP, session: Any, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        await asyncio.to_thread(self.at_rcpt, address)
        answer = self.answers.get(address, "250 ok")
        if answer.startswith("2"):
            envelope.rcpt_tos.append(address)
        return answer

    async def handle_DATA(self, server: SMTP, session: Any, envelope: Envelope) -> str:
        self.mails.append(envelope)
        await asyncio.to_thread(self.at_dot, envelope)
        return "250 kept"

    def recipients(self, job_id: UUID) -> list[list[str]]:
        """To whom the mail of a job was taken, copy by copy."""
        name = f"Message-ID: <{job_id}@example.com>\r\n".encode()
        return [mail.rcpt_tos for mail in self.mails if name in (mail.original_content or b"")]

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Mailbox]:
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(lambda: SMTP(self, loop=loop), "127.0.0.1", 0)
        self.url = f"smtp://127.0.0.1:{listener.sockets[0].getsockname()[1]}?starttls=off"
        try:
            yield self
        finally:
            listener.close()


class Gate:
    """Holds whoever comes first for each name, until it is opened; others pass."""

    def __init__(self) -> None:
        self.held: set[object] = set()
        self.opened = threading.Event()

    def __call__(self, name: object) -> None:
        if name not in self.held and not self.opened.is_set():
            self.held.add(name)
            assert self.opened.wait(2 * PATIENCE)


class SlowStripe(StripeProxy):
    """The proxy behind a network that may keep a request, or in front of one that keeps answers."""

    def __init__(
        self, upstream: str, *, before: Gate | None = None, after: Gate | None = None
    ) -> None:
        super().__init__(upstream)
        self.before, self.after = before, after
        self.under_way = 0

    async def __aenter__(self) -> SlowStripe:
        await super().__aenter__()
        return self

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            return await super()._handle(request)
        self.under_way += 1
        try:
            await request.read()
            if self.before:
                await asyncio.to_thread(self.before, "charge")
            answer = await super()._handle(request)
            if self.after:
                await asyncio.to_thread(self.after, "charge")
            return answer
        finally:
            self.under_way -= 1

    def charges(self) -> list[Any]:
        """What was charged, whoever asked for it and however often."""
        header = {"authorization": "Bearer sk_test_proxy"}
        answer = httpx.get(f"{self.upstream}/v1/charges", headers=header, params={"limit": 100})
        return list(answer.json()["data"])


class Worker:
    """A process of `taskboard run`."""

    def __init__(self, name: str, dsn: str, folder: Path, *arguments: str, **more: str) -> None:
        self.file = folder / f"worker-{name}.log"
        with self.file.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "taskboard", "run", "--worker", name, *arguments],
                stdout=out, stderr=out,
                env=os.environ | PYTHON | {"TASKBOARD_DATABASE_URL": dsn} | more,
            )  # fmt: skip

    @property
    def log(self) -> str:
        return self.file.read_text()

    def said(self, job_id: UUID, words: str) -> bool:
        return any(str(job_id) in line and words in line for line in self.log.splitlines())

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(self.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        assert self.process.wait(PATIENCE) == -signal.SIGKILL

    def leave(self) -> None:
        """Ask it to end, which it does in order."""
        self.process.terminate()
        assert self.process.wait(PATIENCE) == 0, self.log


@contextmanager
def worker(
    name: str, dsn: str, folder: Path, *arguments: str, **environment: str
) -> Iterator[Worker]:
    """Start a worker; kill it at the end, whatever state it is in."""
    started = Worker(name, dsn, folder, *arguments, **environment)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.wait()


def keys(mailbox: Mailbox, stripe: StripeProxy) -> dict[str, str]:
    """The environment of a worker that mails and charges there."""
    return {
        "TASKBOARD_SMTP_URL": mailbox.url,
        "TASKBOARD_MAIL_FROM": "shop@example.com",
        "STRIPE_API_KEY": "sk_test_end_to_end",
        "TASKBOARD_STRIPE_BASE": stripe.url,
    }


def effects(db: Connection, job_id: UUID) -> list[tuple[Any, ...]]:
    """Step, attempt and state of what a job's handlers began."""
    return rows(
        db,
        "select step, attempt, state from taskboard.effect_list where job_id = %s"
        " order by step, attempt",
        [job_id],
    )


def wait_until(condition: Callable[[], object], what: str) -> None:
    wait_for(condition, seconds=PATIENCE, what=what)
