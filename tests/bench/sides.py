"""What is compared: the floor of plain SQL, and Taskboard; each in a database of its own.

The floor is what a person would write by hand: one table, `skip locked` pick and update, delete by
id; no token, no history, no functions. Each side says what a client sends for a job, as pgbench
scripts; a claim and the completion after it are two transactions, as in life.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from machine import Db, Rig

from taskboard.migrate import migrate

HERE = Path(__file__).parent
PAYLOAD = '{"to": "ada@example.com", "subject": "Hello", "text": "about a hundred bytes of text"}'
BULK = 100_000  # jobs in a statement, at most


@dataclass(slots=True)
class Side:
    """A queue, and how its clients use it. None: it has no such thing."""

    name: str
    install: Callable[[Rig, str], None]
    enqueue: str
    bulk: Callable[[int], str]
    drain: Callable[[int], str] | None
    waiting: str  # counts the jobs that have not ended
    tables: Sequence[str]  # to be emptied, and vacuumed
    worker: Callable[[str, int, str], list[str]] | None = None  # DSN, concurrency, what for
    guarantees: dict[str, str] = field(default_factory=dict)
    most: int = 1000  # jobs in a batch, at most
    fills: Callable[[int], str] | None = None  # a quicker way to many jobs than `bulk`
    dsn: str = ""
    made: int = 0

    def set_up(self, rig: Rig) -> None:
        """Make its database."""
        self.made += 1
        name = "".join(c if c.isalnum() else "_" for c in self.name.lower())
        self.dsn = rig.create(f"bench_{name}_{self.made}")
        self.install(rig, self.dsn)

    def left(self, db: Db) -> int:
        """How many jobs have not ended."""
        (found,) = db.execute(self.waiting.encode()).fetchone() or (0,)
        return int(found)

    def start_anew(self, rig: Rig) -> None:
        """Be without jobs: emptied, or in a new database where no table may be emptied."""
        if not self.tables:
            return self.set_up(rig)
        with rig.connect(self.dsn) as db:
            self.empty(db)

    def empty(self, db: Db) -> None:
        if self.tables:
            db.execute(f"truncate {', '.join(self.tables)} cascade".encode())

    def fill(self, db: Db, jobs: int) -> None:
        """Let so many jobs wait that at least these have not ended; then as after a quiet time."""
        missing = jobs - self.left(db)
        while missing > 0:
            count = min(missing, BULK)
            script = (self.fills or self.bulk)(count)
            for statement in script.split(";\n"):
                if statement.strip():
                    db.execute(statement.encode())
            missing -= count
        for table in self.tables:
            db.execute(f"vacuum analyze {table}".encode())
        db.execute("checkpoint")


FLOOR_TABLE = """
create table floor (
  id bigserial primary key, kind text not null, payload jsonb not null,
  run_at timestamptz not null default now(), locked_until timestamptz);
create index on floor (run_at, id) where locked_until is null;
"""
FLOOR_PICK = """update floor set locked_until = now() + interval '60 s'
  where id = any (array(
    select id from floor where locked_until is null and run_at <= now()
    order by run_at, id limit {n} for update skip locked))
  returning id, payload"""


def floor_drain(n: int) -> str:
    if n == 1:
        return FLOOR_PICK.format(n=1) + " \\gset\ndelete from floor where id = :id;\n"
    return (
        f"with picked as ({FLOOR_PICK.format(n=n)})"
        " select array_agg(id) as ids, count(payload) from picked \\gset\n"
        "delete from floor where id = any (':ids');\n"
    )


def our_drain(n: int) -> str:
    if n == 1:
        return (
            "select * from taskboard.claim('{default}', '{email}', 1) \\gset\n"
            "select * from taskboard.complete(':job_id', ':lease_token');\n"
        )
    return (
        "select array_agg(job_id) as ids, array_agg(lease_token) as tokens, count(payload)"
        f" from taskboard.claim('{{default}}', '{{email}}', {n}) \\gset\n"
        "select count(*) from taskboard.complete_many(':ids', ':tokens');\n"
    )


def make_floor(rig: Rig, dsn: str) -> None:
    with rig.connect(dsn) as db:
        db.execute(FLOOR_TABLE)


def our_worker(dsn: str, slots: int, what: str) -> list[str]:
    import sys

    return [sys.executable, "-m", "taskboard", "run", "noop_taskboard", "--pool", str(slots + 2)]


def floor() -> Side:
    return Side(
        "floor",
        make_floor,
        enqueue=f"insert into floor (kind, payload) values ('email', '{PAYLOAD}') returning id;\n",
        bulk=lambda n: (
            "insert into floor (kind, payload) select 'email', p"
            f" from unnest(array_fill('{PAYLOAD}'::jsonb, array[{n}])) as p;\n"
        ),
        drain=floor_drain,
        waiting="select count(*) from floor",
        tables=["floor"],
        guarantees={
            "token checked": "no",
            "dead worker's job": "lost until somebody looks",
            "history": "no",
            "seen in": "tests/bench/sides.py",
        },
    )


def taskboard() -> Side:
    return Side(
        "Taskboard",
        lambda rig, dsn: migrate(dsn) and None,
        enqueue=f"select * from taskboard.enqueue('email', '{PAYLOAD}');\n",
        bulk=lambda n: (
            "select count(*) from taskboard.enqueue_many('email',"
            f" array_fill('{PAYLOAD}'::jsonb, array[{n}]));\n"
        ),
        drain=our_drain,
        waiting="select count(*) from taskboard.jobs",
        tables=["taskboard.jobs", "taskboard.history"],
        worker=our_worker,
        guarantees={
            "token checked": "yes, random, on every write",
            "dead worker's job": "claimed again when its lease has lapsed (60 s)",
            "history": "yes, by day, with the finishing token",
            "seen in": "sql/30_complete.sql, sql/20_claim.sql",
        },
    )
