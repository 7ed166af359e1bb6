"""What the demo is played on: a screen, a database, the world outside it, and worker processes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import psycopg

from taskboard import localpg
from taskboard.dev.smtp import DevSmtp, Envelope
from taskboard.dev.stripe import Call, DevStripe
from taskboard.migrate import migrate

T = TypeVar("T")
Row = tuple[Any, ...]

PATIENCE = 60.0  # seconds, for each thing that should be seen
HELD = 3600.0  # seconds; somebody may look at a step for long
REST = 1.8  # seconds, to read what was shown; nothing is silent for longer
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
BOLD, COLOURS = "1", {"A": "33", "B": "36"}
UUID = re.compile(r"\b([0-9a-f]{4})[0-9a-f]{4}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")


class Unseen(Exception):
    """Something that should have happened and was not seen; the text says what."""


def expect(seen: object, what: str) -> None:
    """Go on only when something is so. Raises Unseen."""
    if not seen:
        raise Unseen(what)


class Worker:
    """A process of `taskboard run`, and its log."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.log = name, folder / f"worker-{name}.log"
        with self.log.open("w") as out:
            # In a group of its own: Ctrl-C is for us to answer. Should we be killed while it is
            # stopped, the kernel ends it.
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "taskboard", "run", "--worker", name],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, process_group=0,
            )  # fmt: skip

    def lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()

    def stop(self) -> None:
        """Stop it, as a paused machine would."""
        self.process.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(self.process.pid, os.WUNTRACED)
        expect(os.WIFSTOPPED(status), f"worker {self.name} is stopped")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass(slots=True)
class Stage:
    """Where everything happens. `step` waits for Enter before each part of the story.

    `names` are variables as in psql: what `:'mail'` stands for. Whatever waits raises Unseen.
    """

    step: bool
    stack: ExitStack
    names: dict[str, str] = field(default_factory=dict)
    workers: list[Worker] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    b_may_go_on: threading.Event = field(default_factory=threading.Event)
    smtp: DevSmtp = field(init=False)
    stripe: DevStripe = field(init=False)
    conn: psycopg.Connection[Row] = field(init=False)
    folder: Path = field(init=False)
    began_at: float = field(default_factory=time.monotonic)
    spoke_at: float = field(default_factory=time.monotonic)

    def set_up(self) -> str:
        """Start database and servers, to end with the stack; return the version."""
        local = self.stack.enter_context(localpg.throwaway())
        self.folder, version = local.folder, migrate(local.dsn).version
        self.conn = psycopg.connect(local.dsn, autocommit=True, prepare_threshold=None)
        self.stack.enter_context(self.conn)
        self.smtp = DevSmtp(on_mail=self._hold, hold_seconds=HELD)
        self.stripe = DevStripe(on_charge=self.calls.append, hold_seconds=HELD)
        for server in (self.smtp, self.stripe):
            self.stack.enter_context(serving(server))
        self.stack.callback(self.b_may_go_on.set)
        os.environ |= {
            "TASKBOARD_DATABASE_URL": local.dsn,
            "TASKBOARD_SMTP_URL": f"{self.smtp.url}&data_timeout={HELD:g}",
            "TASKBOARD_MAIL_FROM": "Demo <demo@example.com>",
            "STRIPE_API_KEY": "sk_test_demo",
            "TASKBOARD_STRIPE_BASE": self.stripe.url,
            "no_proxy": "*",
        }
        return version

    def _hold(self, mail: Envelope) -> None:
        """First copies, A's, are answered after an hour; B's when we say so."""
        if self.smtp.copies(mail.message_id) > 1:
            self.smtp.hold_seconds = 0
            self.b_may_go_on.wait()

    def run(self, name: str) -> Worker:
        """Start a worker."""

        def begin() -> Worker:
            self.workers.append(worker := Worker(name, self.folder))
            self.stack.callback(worker.end)
            return worker

        worker = self.start(begin, f"worker {name} starts")
        self.say(f"taskboard run --worker {name}   (process {worker.process.pid})", name)
        return worker

    def start(self, begin: Callable[[], T], what: str) -> T:
        """Start something in a thread: no interrupt gets there, to leave it half started."""
        with ThreadPoolExecutor(1) as thread:
            begun = thread.submit(begin)
            self.wait(begun.done, what)
            return begun.result()

    def copies(self, name: str) -> list[Envelope]:
        """What the SMTP server took for a job."""
        return [mail for mail in list(self.smtp.mails) if self.names[name] in mail.message_id]

    # The screen.

    def write(self, text: str = "", colour: str = "", end: str = "\n") -> None:
        if colour and sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
            text = f"\033[{colour}m{text}\033[m"
        print(text, end=end, flush=True)
        self.spoke_at = time.monotonic()

    def say(self, text: str, who: str = "") -> None:
        """Tell something; with a worker's name, it is that worker's deed or word."""
        for number, line in enumerate(text.splitlines()):
            clock = "" if number else f"{time.monotonic() - self.began_at:.1f}"
            self.write(f"{clock:>5} {who:1} │ {line}", COLOURS.get(who, ""))

    def head(self, text: str, rest: float = REST) -> None:
        """Begin a part of the story, once the one before could be read."""
        if self.step:
            self.write("      press Enter: ", end="")
            sys.stdin.readline()
        else:
            time.sleep(rest)
        self.write()
        self.write(text, BOLD)

    def shorten(self, text: str) -> str:
        """Put jobs' names for their ids, and a few characters for a token."""
        for name, value in self.names.items():
            if not name.startswith("claim"):
                text = text.replace(value, name)
        return UUID.sub(r"\1…", text)

    # Looking.

    def rows(self, sql: str) -> list[Row]:
        """Run a statement with its variables."""
        text = re.sub(r":'(\w+)'", lambda found: f"'{self.names[found[1]]}'", sql)
        return self.conn.execute(text.encode()).fetchall()

    def ask(self, sql: str, who: str = "", nothing: str = "") -> list[Row]:
        """Run a statement for everybody to see; `nothing` explains zero rows."""
        self.say(sql + ";", who)
        answer = self.rows(sql)
        for row in answer:
            shown = "  ".join("-" if value is None else str(value) for value in row)
            self.say(self.shorten(f"→ {shown}"), who)
        if not answer:
            self.say(f"→ zero rows: {nothing}", who)
        return answer

    def wait(self, seen: Callable[[], T], what: str) -> T:
        """Wait until something is seen, and not in silence."""
        ends_at = time.monotonic() + PATIENCE
        while not (answer := seen()):
            for worker in self.workers:
                expect(worker.process.poll() is None, f"{what}: worker {worker.name} has ended")
            expect(time.monotonic() < ends_at, what)
            if time.monotonic() > self.spoke_at + REST:
                self.say("…")
            time.sleep(0.02)
        return answer

    def hear(self, worker: Worker, job: str, words: str) -> None:
        """Wait for a line about a job in a worker's log, and repeat it."""

        def heard() -> list[str]:
            return [line for line in worker.lines() if self.names[job] in line and words in line]

        line = self.wait(heard, f"worker {worker.name} says of the {job}: {words}")[0]
        self.say(self.shorten(line.split(maxsplit=3)[-1]), worker.name)


@contextmanager
def serving(server: DevSmtp | DevStripe) -> Iterator[None]:
    """Run a server in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(PATIENCE)
    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(server.__aexit__(None, None, None), loop).result(PATIENCE)
        loop.call_soon_threadsafe(loop.stop)


def leave_in_order() -> Callable[[], None]:
    """Make the first signal an exception, once and for all of them; return what ignores them.

    Cleaning up takes a moment, and must not be cut short by somebody who presses Ctrl-C twice.
    """
    heeded = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]

    def ignore() -> None:
        for number in heeded:
            signal.signal(number, signal.SIG_IGN)

    def leave(number: int, frame: object) -> NoReturn:
        ignore()
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    for number in heeded:
        signal.signal(number, leave)
    return ignore
