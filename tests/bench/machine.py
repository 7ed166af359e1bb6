"""A server of the benchmark's own, its databases, pgbench, and what kind of machine this is."""

from __future__ import annotations

import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import CARELESS, OwnServer, make_server

Db = psycopg.Connection[Any]

# Durable: fsync, full_page_writes and synchronous_commit stay as PostgreSQL ships them.
SETTINGS = {
    "shared_buffers": "512MB",
    "max_wal_size": "4GB",
    "checkpoint_timeout": "30min",
    "max_connections": "200",
}
TPS = re.compile(r"^tps = ([0-9.]+)", re.MULTILINE)
DONE = re.compile(r"number of transactions actually processed: (\d+)")
PROGRESS = re.compile(r"^progress: ([0-9.]+) s, ([0-9.]+) tps", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Run:
    """What pgbench said: transactions a second, how many there were, and each second's rate."""

    tps: float
    transactions: int
    seconds: list[float] = field(default_factory=list)


class Rig:
    """A durable server on loopback, and pgbench: scripts in a file, no Python in the loop."""

    def __init__(self, choice: str, folder: Path, careless: bool = False, **settings: str) -> None:
        """`careless`: nothing is made durable, for a run that measures nothing."""
        self.server = make_server(choice, (CARELESS if careless else SETTINGS) | settings)
        self.folder = folder
        self.pgbench = Path(self.server.name) / "pgbench"
        if not self.pgbench.exists():
            self.close()
            raise RuntimeError("no pgbench beside the server: name a folder with --postgres=BIN")
        self.protocol = "simple"

    def close(self) -> None:
        self.server.close()

    def create(self, name: str) -> str:
        """Make a database; answer its DSN."""
        with self.connect() as db:
            db.execute(f"create database {name}".encode())
        return self.server.dsn(name)

    def tcp(self, dsn: str) -> str:
        """The same database by loopback: not every driver can name a socket."""
        if not isinstance(self.server, OwnServer):
            return dsn
        found = conninfo_to_dict(dsn)
        secret = (self.server.folder / "pgpass").read_text().strip().rsplit(":", 1)[1]
        return f"postgresql://postgres:{secret}@127.0.0.1:{found['port']}/{found['dbname']}"

    def connect(self, dsn: str | None = None) -> Db:
        return psycopg.connect(
            dsn or self.server.dsn(),
            autocommit=True,
            prepare_threshold=None,
            options="-c statement_timeout=600s",
        )

    def start(
        self, dsn: str, script: str, clients: int, seconds: float, each_second: bool = False
    ) -> subprocess.Popen[str]:
        """Begin to run a script; below a second, by a number of transactions."""
        number, path = tempfile.mkstemp(".sql", dir=self.folder)
        with open(number, "w") as file:
            file.write(script)
        span = ["-T", str(round(seconds))] if seconds >= 1 else ["-t", str(int(seconds * 100) + 2)]
        words = [
            str(self.pgbench),
            "-n",
            "-M",
            self.protocol,
            "-c",
            str(clients),
            "-j",
            str(max(1, min(clients // 16, os.cpu_count() or 1))),
            *span,
            *(["-P", "1"] if each_second else []),
            "-f",
            path,
            dsn,
        ]
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(
        self, dsn: str, script: str, clients: int, seconds: float, each_second: bool = False
    ) -> Run:
        """Run a script. Raises RuntimeError when a statement failed, or came back empty."""
        process = self.start(dsn, script, clients, seconds, each_second)
        return self.result(process, timeout=seconds * 10 + 120)

    @staticmethod
    def result(process: subprocess.Popen[str], timeout: float) -> Run:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            process.wait()
            raise
        tps, done = TPS.search(out), DONE.search(out)
        if process.returncode or "aborted" in err or not tps or not done:
            raise RuntimeError(f"pgbench: {err[-600:] or out[-600:]}")
        each = [float(rate) for _, rate in PROGRESS.findall(err)]
        return Run(float(tps[1]), int(done[1]), each)

    @contextmanager
    def held(self, dsn: str, statement: str) -> Iterator[None]:
        """Hold a transaction open that began with this statement."""
        with self.connect(dsn) as db:
            db.execute("begin isolation level repeatable read")
            db.execute(statement.encode())
            try:
                yield
            finally:
                db.execute("rollback")


def describe(rig: Rig, disk: Path) -> dict[str, str]:
    """What a reader needs to know of this machine to compare his own with it."""
    with rig.connect() as db:
        (version,) = db.execute("show server_version").fetchone() or ("?",)
        kept = {
            name: str((db.execute(f"show {name}".encode()).fetchone() or "?")[0])
            for name in (
                "fsync",
                "synchronous_commit",
                "full_page_writes",
                "wal_sync_method",
                "shared_buffers",
            )
        }
    return {
        "machine": f"{os.cpu_count()} cores, {processor()}, {platform.system()}",
        "PostgreSQL": str(version).split()[0],
        "a write made durable": f"{sync_milliseconds(disk):.2f} ms (8 kB and fdatasync, median)",
        "settings": ", ".join(f"{name} {value}" for name, value in kept.items()),
        "load at the start": f"{os.getloadavg()[0]:.1f}",
        "Python": platform.python_version(),
    }


def processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()


def sync_milliseconds(folder: Path) -> float:
    """How long it takes here until 8 kB are on the disk; the median of a hundred."""
    took = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(100):
            began = perf_counter()
            os.pwrite(file.fileno(), b"x" * 8192, 0)
            os.fdatasync(file.fileno())
            took.append(perf_counter() - began)
    return statistics.median(took) * 1000
