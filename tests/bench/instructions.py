"""Count the instructions that each verb takes in the server: a figure that no noise touches.

    apt-get install --no-install-recommends valgrind
    python tests/bench/instructions.py [--postgres BIN] [--keep FOLDER] [verb …]

PostgreSQL in single-user mode under `valgrind --tool=callgrind` runs a loop of so many calls, each
in a transaction of its own, and a longer one; the difference, by call, is what is printed, in
thousands for each job. What a new session does once cancels out, and so does the parsing of the
statement: it is the function alone, as PL/pgSQL calls it. Without the disk: there is no wait in it.
`--keep` leaves callgrind's files, for `callgrind_annotate FILE | head -60`.

A call takes some fifty times as long here, so what claim remembers for 20 ms would have lapsed;
in this program's own database that is lengthened.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from machine import Db, Rig
from rows_claim import add
from sides import FLOOR_PICK, FLOOR_TABLE, PAYLOAD

from support import OwnServer
from taskboard.migrate import migrate

WARM, MORE = 20, 40  # calls of the shorter loop, and how many more the longer one makes
FILL = 8_000


@dataclass(frozen=True, slots=True)
class Body:
    """PL/pgSQL for one turn, with `r record`; `less` names what is done besides."""

    text: str
    jobs: int = 1
    less: str = ""


CLAIM = "select * into r from taskboard.claim('{default}', '{email}', 1);"
CLAIM_MANY = (
    "select array_agg(job_id) as ids, array_agg(lease_token) as tokens into r"
    " from taskboard.claim('{default}', '{email}', 100);"
)
PICK = FLOOR_PICK.format(n=1).replace("returning id, payload", "returning id, payload into r") + ";"
PICK_MANY = (
    f"with picked as ({FLOOR_PICK.format(n=100)})"
    " select array_agg(id) as ids, count(payload) into r from picked;"
)
BODIES = {
    "enqueue": Body(f"select * into r from taskboard.enqueue('email', '{PAYLOAD}');"),
    "enqueue_many of 1,000": Body(
        "select count(*) into r from taskboard.enqueue_many('email',"
        f" array_fill('{PAYLOAD}'::jsonb, array[1000]));",
        1000,
    ),
    "claim": Body(CLAIM),
    "claim of 100": Body(CLAIM_MANY, 100),
    "renew": Body(CLAIM + "perform taskboard.renew(r.job_id, r.lease_token);", less="claim"),
    "complete": Body(CLAIM + "perform taskboard.complete(r.job_id, r.lease_token);", less="claim"),
    "complete_many of 100": Body(
        CLAIM_MANY + "perform taskboard.complete_many(r.ids, r.tokens);", 100, "claim of 100"
    ),
    "fail": Body(CLAIM + "perform taskboard.fail(r.job_id, r.lease_token, 'no');", less="claim"),
    "release": Body(
        CLAIM + "perform taskboard.release(r.job_id, r.lease_token, '1 hour');", less="claim"
    ),
    "floor: insert": Body(f"insert into floor (kind, payload) values ('email', '{PAYLOAD}');"),
    "floor: insert 1,000": Body(
        "insert into floor (kind, payload) select 'email', p from"
        f" unnest(array_fill('{PAYLOAD}'::jsonb, array[1000])) as p;",
        1000,
    ),
    "floor: pick": Body(PICK),
    "floor: pick 100": Body(PICK_MANY, 100),
    "floor: delete": Body(PICK + "delete from floor where id = r.id;", less="floor: pick"),
    "floor: delete 100": Body(
        PICK_MANY + "delete from floor where id = any (r.ids);", 100, "floor: pick 100"
    ),
}


def patient(db: Db) -> int:
    """Let what is remembered for 0.1 s be remembered for long; how many functions that changed."""
    changed = 0
    for (text,) in db.execute(
        "select pg_get_functiondef(p.oid) from pg_proc as p where p.prokind = 'f'"
        " and p.pronamespace = 'taskboard'::regnamespace and p.prosrc like '%%''0.1''::text%%'"
    ).fetchall():
        db.execute(text.replace("'0.1'::text", "'60'::text").encode())
        changed += 1
    return changed


class Counter:
    """A cluster that is filled once; each count runs on a copy of it."""

    def __init__(self, postgres: str, keep: Path | None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="instructions-"))
        self.folder.chmod(0o777)
        self.keep = keep
        self.rig = Rig(postgres, self.folder)
        server = self.rig.server
        assert isinstance(server, OwnServer)
        self.server = server
        dsn = self.rig.server.dsn()
        migrate(dsn)
        with self.rig.connect() as db:
            db.execute(FLOOR_TABLE)
            db.execute(
                f"insert into floor (kind, payload) select 'email', '{PAYLOAD}'"
                f" from generate_series(1, {FILL})".encode()
            )
            add(db, FILL)
            self.changed = patient(db)
            db.execute("vacuum analyze")
            (self.version,) = db.execute("show server_version").fetchone() or ("?",)
        server.stop()

    def count(self, body: str, turns: int) -> int:
        """All instructions of a server that does so many turns and ends."""
        place = Path(tempfile.mkdtemp(dir=self.folder))
        data = place / "data"
        found = self.server.cluster.data.stat()
        shutil.copytree(self.server.cluster.data, data, symlinks=True)
        (data / "postmaster.pid").unlink(missing_ok=True)
        who = {}
        if os.geteuid() == 0:
            for path in (place, *place.rglob("*")):
                os.chown(path, found.st_uid, found.st_gid)
            who = {"user": found.st_uid, "group": found.st_gid, "extra_groups": []}
        out = place / "callgrind.out"
        loop = (
            f"do $x$ declare r record; begin for i in 1..{turns} loop {body} commit; end loop;"
            " end $x$;\n"
        ).replace("\n", " ")
        done = subprocess.run(
            [
                "valgrind",
                "--tool=callgrind",
                f"--callgrind-out-file={out}",
                str(self.server.bin / "postgres"),
                "--single",
                "-D",
                str(data),
                "-c",
                "fsync=off",
                "-c",
                "autovacuum=off",
                "-c",
                "shared_buffers=128MB",
                "postgres",
            ],
            input=loop + "\n",
            capture_output=True,
            text=True,
            timeout=600,
            cwd="/",
            env={"LC_ALL": "C", "PATH": os.defpath},
            **who,
        )
        said = done.stdout + done.stderr
        refs = re.findall(r"refs: *([0-9,]+)", said)
        if wrong := re.findall(r".*(?:ERROR|FATAL).*", said):
            raise RuntimeError(wrong[0])
        if not refs:
            raise RuntimeError(said[-500:])
        if self.keep:
            self.keep.mkdir(parents=True, exist_ok=True)
            name = re.sub(r"\W+", "-", body[:40])
            shutil.copy(out, self.keep / f"{name}.{turns}.callgrind")
        shutil.rmtree(place, ignore_errors=True)
        return int(refs[-1].replace(",", ""))

    def each(self, body: Body) -> float:
        with ThreadPoolExecutor(2) as pool:
            short, long = pool.map(lambda turns: self.count(body.text, turns), (WARM, WARM + MORE))
        return (long - short) / MORE / body.jobs

    def close(self) -> None:
        with suppress(Exception):
            self.rig.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def counts(counter: Counter, wanted: list[str]) -> Iterator[tuple[str, float]]:
    found: dict[str, float] = {}
    for name, body in BODIES.items():
        if wanted and not any(word in name for word in wanted):
            continue
        for one in filter(None, (body.less, name)):
            if one not in found:
                found[one] = counter.each(BODIES[one])
        yield name, found[name] - (found[body.less] if body.less else 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("verbs", nargs="*", help="parts of their names; all by default")
    parser.add_argument("--postgres", default="auto")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="for callgrind's own files")
    given = parser.parse_args()
    if not shutil.which("valgrind"):
        sys.exit("valgrind is missing: apt-get install --no-install-recommends valgrind")
    counter = Counter(given.postgres, given.keep)
    try:
        print(f"PostgreSQL {counter.version}; {counter.changed} functions made patient\n")
        print("| verb | thousands of instructions a job |\n|---|---|")
        for name, instructions in counts(counter, given.verbs):
            print(f"| {name} | {instructions / 1000:,.0f} |", flush=True)
    finally:
        counter.close()


if __name__ == "__main__":
    main()
