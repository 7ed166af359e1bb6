"""The SQL verbs as Python calls, and looks behind them, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import psycopg
from psycopg import sql
from psycopg.abc import Buffer
from psycopg.rows import dict_row
from psycopg.types.datetime import TimestamptzLoader
from psycopg.types.json import Jsonb

from support import wait_until_blocked

Db = psycopg.Connection[Any]
Row = dict[str, Any]

# What a refused call must leave alone. Not the incidents: they are the record of the refusal.
TABLES = (
    "jobs", "history", "effects", "unique_keys", "serial_keys", "lanes", "queues", "settings",
)  # fmt: skip


class EndlessTimestamps(TimestamptzLoader):
    """Reads infinity, which a job has that waits for its turn or a person, as the last instant."""

    def load(self, data: Buffer) -> datetime:
        if bytes(data) == b"infinity":
            return datetime.max.replace(tzinfo=UTC)
        return super().load(data)


def query(conn: Db, statement: sql.SQL | sql.Composed | str, **arguments: Any) -> list[Row]:
    """Run any statement; its rows as dicts."""
    text = statement.encode() if isinstance(statement, str) else statement
    with conn.cursor(row_factory=dict_row) as cursor:
        cursor.adapters.register_loader("timestamptz", EndlessTimestamps)
        cursor.execute(text, arguments or None)
        return [] if cursor.description is None else cursor.fetchall()


def call(conn: Db, verb: str, **arguments: Any) -> list[Row]:
    """Call taskboard.<verb> with named arguments; its rows as dicts. A dict is sent as jsonb."""
    return query(
        conn,
        sql.SQL("select * from taskboard.{}({})").format(
            sql.Identifier(verb),
            sql.SQL(", ").join(
                sql.SQL("{} => {}").format(sql.Identifier(name), sql.Placeholder(name))
                for name in arguments
            ),
        ),
        **{name: _as_parameter(value) for name, value in arguments.items()},
    )


def _as_parameter(value: Any) -> Any:
    if isinstance(value, dict):
        return Jsonb(value)
    if isinstance(value, list) and any(isinstance(element, dict) for element in value):
        return [_as_parameter(element) for element in value]
    return value


def enqueue(conn: Db, kind: str = "mail", **options: Any) -> UUID:
    """Enqueue one job, which must be new; its id."""
    (row,) = call(conn, "enqueue", kind=kind, **options)
    assert row["created"], "another job holds the unique key"
    job_id: UUID = row["job_id"]
    return job_id


def claim(conn: Db, **options: Any) -> list[Row]:
    return call(conn, "claim", **options)


def claim_one(conn: Db, **options: Any) -> Row:
    """Claim exactly one job."""
    (row,) = claim(conn, **options)
    return row


def leased(conn: Db, kind: str = "mail", worker: str = "a", **options: Any) -> Row:
    """Enqueue a job and claim it; the row that claim returned."""
    job_id = enqueue(conn, kind, **options)
    job = claim_one(conn, worker=worker)
    assert job["job_id"] == job_id
    return job


def own(job: Row) -> Row:
    """The two arguments that prove a claim."""
    return {"job_id": job["job_id"], "lease_token": job["lease_token"]}


def pairs(*jobs: Row) -> Row:
    """The same for the calls that take many."""
    return {
        "job_ids": [job["job_id"] for job in jobs],
        "lease_tokens": [job["lease_token"] for job in jobs],
    }


def live(db: Db, job_id: UUID) -> Row | None:
    """The whole row of a live job."""
    found = query(db, "select * from taskboard.jobs where id = %(id)s", id=job_id)
    return found[0] if found else None


def row_of(db: Db, job_id: UUID) -> Row:
    """The whole row of a job that must be live."""
    found = live(db, job_id)
    assert found is not None, "the job is not live"
    return found


def ended(db: Db, job_id: UUID) -> Row:
    """The whole row of a job that must be in history, once, and not live."""
    assert live(db, job_id) is None, "the job is still live"
    (found,) = query(db, "select * from taskboard.history where id = %(id)s", id=job_id)
    return found


def state(db: Db, job_id: UUID) -> str:
    (row,) = call(db, "job", job_id=job_id)
    found: str = row["state"]
    return found


def states(db: Db, *job_ids: UUID) -> list[str]:
    return [state(db, job_id) for job_id in job_ids]


def lease_status(db: Db, job: Row) -> str:
    (row,) = call(db, "lease_status", **own(job))
    status: str = row["lease_status"]
    return status


def incidents(db: Db, job_id: UUID | None = None) -> list[str]:
    """What was recorded, in order; of one job, or of all."""
    found = query(
        db,
        "select what from taskboard.incident_list"
        " where %(id)s::uuid is null or job_id = %(id)s order by id",
        id=job_id,
    )
    return [row["what"] for row in found]


def clock(conn: Db) -> datetime:
    (row,) = query(conn, "select clock_timestamp() as at")
    at: datetime = row["at"]
    return at


def set_default(db: Db, name: str, value: Any) -> None:
    """Change one of the database's settings."""
    query(
        db,
        sql.SQL("update taskboard.settings set {} = %(value)s").format(sql.Identifier(name)),
        value=value,
    )


def change(db: Db, job_id: UUID, assignment: str) -> None:
    """Change a live job's row behind the functions' back: time, and counters that take long."""
    query(db, f"update taskboard.jobs set {assignment} where id = %(id)s", id=job_id)


def everything(db: Db) -> dict[str, list[str]]:
    """The content of every table but the incidents."""
    return {
        table: [
            row["content"]
            for row in query(
                db,
                sql.SQL("select t::text as content from taskboard.{} as t order by 1").format(
                    sql.Identifier(table)
                ),
            )
        ]
        for table in TABLES
    }


def gets_nothing(db: Db, verb: str, **arguments: Any) -> None:
    """Call a verb that must return zero rows and leave every row of everybody as it was."""
    before = everything(db)
    assert call(db, verb, **arguments) == []
    assert everything(db) == before


def raises(db: Db, sqlstate: str, verb: str, **arguments: Any) -> None:
    """Call a verb that must raise, say what to do, show no row, and change nothing."""
    before = everything(db)
    try:
        answer = call(db, verb, **arguments)
    except psycopg.Error as error:
        assert error.sqlstate == sqlstate, f"{arguments}: {error.sqlstate} {error}"
        assert error.diag.message_hint, f"{arguments}: no hint"
        assert error.diag.message_detail is None, f"{arguments}: {error.diag.message_detail}"
    else:
        raise AssertionError(f"{arguments}: accepted, {answer}")
    assert everything(db) == before, f"{arguments}: something changed"


def refuses(db: Db, verb: str, usual: Row, absurd: list[tuple[Row, str]]) -> None:
    """Try absurd arguments, each in place of a usual one, with the code it must raise."""
    wrong = []
    for arguments, sqlstate in absurd:
        try:
            raises(db, sqlstate, verb, **usual | arguments)
        except AssertionError as error:
            wrong.append(str(error)[:300])
    assert wrong == []


@contextmanager
def blocked(observer: Db, conn: Db, verb: str, **arguments: Any) -> Iterator[Future[list[Row]]]:
    """Make a call on conn in a thread; enter when the observer has seen it wait for a lock."""
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(call, conn, verb, **arguments)
        wait_until_blocked(observer, conn.info.backend_pid)
        yield answer


@contextmanager
def old_transaction(conn: Db) -> Iterator[datetime]:
    """A transaction that began a while ago; its now(), which no deadline may be counted from."""
    with conn.transaction():
        (row,) = query(conn, "select now() as at, pg_sleep(0.12)")
        yield row["at"]
