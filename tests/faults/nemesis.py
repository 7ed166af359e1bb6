"""What goes wrong: sessions, servers, connections, processes and the clock."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from faults import process
from faults.clock import Clock
from runner.tcp_proxy import TcpProxy
from support import rows, session

TESTS = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Faults:
    """What may go wrong beside sessions that are ended."""

    restart: Callable[[], None] | None = None  # ends the server and starts it again
    proxies: int = 0  # connections are cut, frozen and delayed
    processes: int = 0  # workers of their own, stopped and killed
    clock: Clock | None = None  # the server's, which is set


@dataclass(slots=True)
class Nemesis:
    dsn: str
    seed: int
    faults: Faults
    calm: threading.Event
    proxies: list[TcpProxy] = field(default_factory=list)
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)
    journals: list[Path] = field(default_factory=list)
    folder: Path = field(init=False)
    done: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.proxies += [TcpProxy(self.dsn) for _ in range(self.faults.proxies)]
        self.folder = Path(tempfile.mkdtemp(prefix="taskboard-journals-"))
        self.running += [self._process() for _ in range(self.faults.processes)]

    def way(self, dsn: str, number: int) -> tuple[str, bool]:
        """A DSN for the number-th client, and whether a proxy stands in between."""
        if number % 2 == 0 or not self.proxies:
            return dsn, False
        return self.proxies[number // 2 % len(self.proxies)].dsn, True

    def clock_off(self, began: float, ended: float) -> tuple[float, float]:
        return self.faults.clock.off(began, ended) if self.faults.clock else (0.0, 0.0)

    def run(self) -> None:
        """One fault after the other, until it is time to be calm."""
        dice = random.Random(f"{self.seed}/nemesis")
        kinds = ["end a session"] * 6
        kinds += ["restart"] * 2 if self.faults.restart else []
        kinds += ["cut", "freeze", "freeze", "delay"] if self.proxies else []
        kinds += ["stop", "stop", "kill"] if self.running else []
        kinds += ["set the clock"] * 4 if self.faults.clock else []
        while not self.calm.wait(dice.random() * 0.25):
            kind = dice.choice(kinds)
            if self._do(kind, dice):
                self.done[kind] = self.done.get(kind, 0) + 1

    def _do(self, kind: str, dice: random.Random) -> bool:
        match kind:
            case "end a session":
                return self._end_session()
            case "restart" if self.faults.restart is not None:
                self.faults.restart()
            case "cut":
                dice.choice(self.proxies).cut()
            case "freeze":  # what was under way arrives later, or its answer does
                proxy = dice.choice(self.proxies)
                proxy.freeze()
                self.calm.wait(dice.random() * 1.2)
                proxy.thaw()
            case "delay":
                proxy = dice.choice(self.proxies)
                proxy.delay = dice.random() * 0.1
                self.calm.wait(dice.random())
                proxy.delay = 0.0
            case "stop":
                stopped = dice.choice(self.running)
                stopped.send_signal(signal.SIGSTOP)
                self.calm.wait(dice.random() * 0.6)
                stopped.send_signal(signal.SIGCONT)
            case "kill":
                number = dice.randrange(len(self.running))
                end(self.running[number])
                self.running[number] = self._process()
            case "set the clock" if self.faults.clock is not None:
                self.faults.clock.set(dice.choice((-90.0, -5.0, -0.2, 0.0, 0.2, 3.0, 60.0)))
        return True

    def _end_session(self) -> bool:
        with suppress(psycopg.OperationalError), session(self.dsn, "nemesis") as conn:
            return bool(rows(
                conn, "select pg_terminate_backend(pid) from pg_stat_activity where pid ="
                " (select pid from pg_stat_activity where datname = current_database() and"
                " application_name in ('worker', 'producer', 'operator', 'process')"
                " order by random() limit 1)",
            ))  # fmt: skip
        return False

    def _process(self) -> subprocess.Popen[bytes]:
        name = f"p{len(self.journals)}"
        self.journals.append(self.folder / name)
        return subprocess.Popen(
            [sys.executable, "-m", "faults.process", self.dsn, name, str(self.seed),
             self.journals[-1]],
            cwd=TESTS, stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(TESTS), "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip

    def stop(self) -> None:
        """No more faults: links are cut for the last time, processes ended, the clock goes on."""
        for each in self.running:
            end(each)
        for proxy in self.proxies:
            proxy.delay = 0.0
            proxy.thaw()
        if self.faults.clock is not None:  # a last step back
            self.faults.clock.set(max(p.offset for p in self.faults.clock.periods) - 5.0)

    def noted(self) -> Iterator[process.Noted]:
        for journal in self.journals:
            yield from process.read(journal)
            journal.unlink(missing_ok=True)
        self.folder.rmdir()
        for proxy in self.proxies:
            proxy.__exit__(None, None, None)


def end(running: subprocess.Popen[bytes]) -> None:
    running.kill()
    running.wait()
