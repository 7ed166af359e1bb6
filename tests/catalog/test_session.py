"""What a call leaves in its session, which behind a pooler is the next client's: nothing."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import psycopg
import pytest

from catalog.calls import functions
from support import Connection, rows

# The floor's hint, and the limits that were seen: they only spare the next claim a look.
HINTS = "taskboard.%"
LEFT = {
    "settings": f"select name, setting from pg_settings where name not like '{HINTS}' order by 1",
    "advisory locks": "select objid from pg_locks where locktype = 'advisory'"
    " and pid = pg_backend_pid()",
    "channels": "select pg_listening_channels()",
    "statements": "select name from pg_prepared_statements",
    "cursors": "select name from pg_cursors where name <> ''",
    "temporary tables": "select oid from pg_class where relpersistence = 't'",
}


def left(conn: Connection) -> set[tuple[Any, ...]]:
    return {
        (what, *row) for what, sql in LEFT.items() for row in rows(conn, sql)
    }  # fmt: skip


@pytest.mark.parametrize("ended", ["commit", "rollback"])
def test_no_function_leaves_anything_in_a_session_but_those_that_listen(
    db: Connection, ended: str
) -> None:
    tried = [function for function in functions(db) if function.name != "listen"]
    assert len(tried) > 35
    rows(db, "select taskboard.claim()")  # loads the language, which has settings of its own
    before, kept = left(db), dict[str, set[tuple[Any, ...]]]()
    for function in tried:
        rows(db, "select taskboard.enqueue('k')")
        job_id, token = rows(db, "select job_id, lease_token from taskboard.claim()")[0]
        usual = function.usual(job_id, token)
        named = ", ".join(f"{name} => {value}" for name, value in usual.items())
        db.execute("begin")
        with suppress(psycopg.Error):
            db.execute(f"select * from taskboard.{function.name}({named})")
        db.execute(ended)  # after an error, a commit rolls back
        if (now := left(db)) != before:
            kept[function.name] = now ^ before
        db.execute("delete from taskboard.jobs; select taskboard.resume('default')")
    assert kept == {}
