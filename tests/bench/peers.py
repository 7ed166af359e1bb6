"""Other queues beside ours: each installed by its name into an environment that goes with the run.

What their clients send is read from the installed packages by the programs in peer_programs/; for
the rows of the runner their own worker runs a handler that does nothing. What cannot run here is
named with the reason. pgmq and PgQue come as SQL in a file that the user names.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from machine import Rig
from rows_sql import say
from sides import HERE, PAYLOAD, Side

PROGRAMS = HERE / "peer_programs"
INSTALL_WITHIN = 300


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    program: str
    packages: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()


PEERS = [
    Peer("procrastinate", "procrastinate_peer.py", ("procrastinate", "psycopg[binary]")),
    Peer("pgqueuer", "pgqueuer_peer.py", ("pgqueuer[asyncpg]",)),
    Peer("absurd", "absurd_peer.py", ("absurd-sdk", "absurdctl")),
    Peer("awa", "awa_peer.py", ("awa-pg",)),
    Peer("pgtask", "pgtask_peer.py", ("pgtask",)),
    Peer("graphile-worker", "graphile_worker_peer.js", ("graphile-worker",)),
    Peer(
        "graphile-worker, local queue",
        "graphile_worker_peer.js",
        ("graphile-worker",),
        (("BENCH_LOCAL_QUEUE", "1"),),
    ),
    Peer("pg-boss", "pg_boss_peer.js", ("pg-boss",)),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peers",
        nargs="?",
        const="all",
        metavar="NAMES",
        help="install and measure these: "
        + ", ".join(peer.name for peer in PEERS if not peer.variables)
        + " (all)",
    )
    parser.add_argument(
        "--peers-folder",
        type=Path,
        metavar="FOLDER",
        help="keep what is installed there, for the next run",
    )
    parser.add_argument("--pgmq-sql", type=Path, metavar="FILE", help="pgmq's SQL, to measure it")
    parser.add_argument("--pgque-sql", type=Path, metavar="FILE", help="PgQue's SQL, likewise")


def ready(given: argparse.Namespace, rig: Rig, folder: Path) -> tuple[list[Side], dict[str, str]]:
    """The peers that were asked for and can run, installed; and why the others cannot."""
    sides: list[Side] = []
    absent: dict[str, str] = {}
    kept = given.peers_folder or folder / "peers"
    asked = (given.peers or "").split(",")
    makers: list[tuple[str, Callable[[], Side]]] = [
        (peer.name, lambda peer=peer: prepare(peer, rig, kept))
        for peer in PEERS
        if given.peers == "all" or peer.name.split(",")[0] in asked
    ]
    if given.pgmq_sql:
        makers.append(("pgmq", lambda: from_file(rig, pgmq(given.pgmq_sql))))
    if given.pgque_sql:
        makers.append(("PgQue", lambda: from_file(rig, pgque(given.pgque_sql))))
    for name, make in makers:
        say(f"installing {name} …")
        try:
            sides.append(make())
        except Exception as exc:
            said = exc.stderr if isinstance(exc, subprocess.CalledProcessError) else str(exc)
            absent[name] = " ".join(str(said or exc).split())[-160:]
            say(f"{name} is left out: {absent[name]}")
    return sides, absent


def prepare(peer: Peer, rig: Rig, folder: Path) -> Side:
    """Install a peer and its schema. Raises CalledProcessError, OSError, KeyError."""
    home = folder / ("node" if peer.program.endswith(".js") else peer.program.removesuffix(".py"))
    command = environment(peer, home)
    env = (
        clean()
        | dict(peer.variables)
        | {
            "PYTHONPATH": f"{PROGRAMS}:{HERE}",
            "NODE_PATH": str(home / "node_modules"),
        }
    )

    def call(what: str, dsn: str = "") -> str:
        return subprocess.run(
            [*command, what],
            env=env | {"BENCH_DSN": dsn},
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
            stdin=subprocess.DEVNULL,
        ).stdout

    told = json.loads(call("sql"))
    scripts = {
        name: told[name] + ";\n" for name in ("enqueue", "bulk", "one", "many") if name in told
    }
    if peer.variables:  # the same statements: only its worker differs
        scripts.pop("many", None)
        scripts.pop("one", None)
    one, many = scripts.get("one"), scripts.get("many")

    def drain(n: int) -> str:
        text = one if n == 1 else many
        assert text is not None
        return text.replace("@N@", str(n))

    side = Side(
        peer.name,
        lambda rig, dsn: call("install", rig.tcp(dsn)) and None,
        enqueue=scripts["enqueue"],
        bulk=lambda n: scripts["bulk"].replace("@N@", str(n)),
        drain=drain if one else None,
        waiting=told["waiting"],
        tables=told["tables"],
        worker=lambda dsn, slots, what: [
            "env",
            *(
                f"{name}={value}"
                for name, value in env.items()
                if name in ("PYTHONPATH", "NODE_PATH", *dict(peer.variables))
            ),
            *command,
            "work",
        ],
        guarantees=told["guarantees"],
        most=1000 if many else 1,
    )
    side.set_up(rig)
    return side


def environment(peer: Peer, home: Path) -> list[str]:
    """Install the packages, unless they are there; how to run the program."""
    program = str(PROGRAMS / peer.program)
    if peer.program.endswith(".js"):
        packages = [name for name in peer.packages if not (home / "node_modules" / name).exists()]
        if packages:
            home.mkdir(parents=True, exist_ok=True)
            run(["npm", "install", "--prefix", str(home), "--no-audit", "--no-fund", *packages])
        return ["node", program]
    python = home / "bin" / "python"
    if not (home / "installed").exists():
        venv.create(home, with_pip=True, clear=True)
        run(
            [
                str(python),
                "-m",
                "pip",
                "install",
                "-q",
                "--disable-pip-version-check",
                *peer.packages,
            ]
        )
        (home / "installed").touch()
    return [str(python), program]


def run(words: list[str]) -> None:
    subprocess.run(
        words,
        check=True,
        capture_output=True,
        text=True,
        timeout=INSTALL_WITHIN,
        stdin=subprocess.DEVNULL,
    )


def clean() -> dict[str, str]:
    """The environment, without what is meant for our own database and Python."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PG", "TASKBOARD_", "PYTHON", "VIRTUAL_ENV", "STRIPE_"))
    }


def from_file(rig: Rig, side: Side) -> Side:
    side.set_up(rig)
    return side


def load(file: Path, then: str) -> Callable[[Rig, str], None]:
    def install(rig: Rig, dsn: str) -> None:
        with rig.connect(dsn) as db:
            db.execute(file.read_bytes())
            db.execute(then.encode())

    return install


def pgmq(file: Path) -> Side:
    def drain(n: int) -> str:
        if n == 1:
            return (
                "select msg_id, message from pgmq.read('email', 60, 1) \\gset\n"
                "select pgmq.archive('email', :msg_id);\n"
            )
        return (
            f"select array_agg(msg_id) as ids, count(message) from pgmq.read('email', 60, {n})"
            " \\gset\nselect count(*) from pgmq.archive('email', ':ids'::bigint[]);\n"
        )

    return Side(
        "pgmq",
        load(file, "select pgmq.create('email')"),
        enqueue=f"select * from pgmq.send('email', '{PAYLOAD}'::jsonb);\n",
        bulk=lambda n: (
            "select count(*) from pgmq.send_batch('email',"
            f" array_fill('{PAYLOAD}'::jsonb, array[{n}]));\n"
        ),
        drain=drain,
        waiting="select count(*) from pgmq.q_email",
        tables=["pgmq.q_email", "pgmq.a_email"],
        guarantees={
            "token checked": "no: by id",
            "history": "an archive table",
            "dead worker's job": "seen again when its visibility time has passed",
            "seen in": "the file that was named",
        },
    )


def pgque(file: Path) -> Side:
    """Batches of events for each consumer; a tick makes what was sent visible."""
    return Side(
        "PgQue",
        load(file, "select pgque.create_queue('email'); select pgque.subscribe('email', 'bench')"),
        enqueue=f"select pgque.send('email', '{PAYLOAD}'::jsonb);\n",
        bulk=lambda n: (
            "select count(*) from pgque.send_batch('email', 'default',"
            f" array_fill('{PAYLOAD}'::jsonb, array[{n}]));\n"
        ),
        drain=None,
        waiting="select 0",
        tables=[],
        guarantees={
            "token checked": "no: by batch",
            "history": "no: segments are truncated",
            "dead worker's job": "its batch stays open",
            "seen in": "the file that was named",
        },
    )


def guarantees(facts: list[dict[str, str]]) -> str:
    """What stands behind the figures, as a table."""
    names = ("token checked", "dead worker's job", "history", "seen in")
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for fact in facts:
        cells = [fact.get(name, "-") for name in names]
        if "not measured" in fact:
            cells[0] = f"not measured: {fact['not measured']}"
        lines.append(f"| {fact['side']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
