"""The handlers that runner/README.md shows run, and each kind bears its timeline as it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from docs.transcript import blocks
from support import Connection, expire, rows

PAGE = Path(__file__).parents[2] / "runner/README.md"


def test_the_handlers_that_are_shown_run(dsn: str, db: Connection, tmp_path: Path) -> None:
    (program,) = [block.text for block in blocks(PAGE) if block.language == "python"]
    (tmp_path / "parcels.py").write_text(program)
    for kind, payload in (("parcel", '{"weight": 2}'), ("parcel", "{}"), ("thumbnail", "{}")):
        rows(db, "select taskboard.enqueue(%s, %s)", [kind, payload])
    done = subprocess.run(
        [sys.executable, "-m", "taskboard", "run", "parcels", "--until-empty"], cwd=tmp_path,
        env=os.environ | {"TASKBOARD_DATABASE_URL": dsn}, text=True, capture_output=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr  # one failed for good
    found = rows(
        db,
        "select j.kind, j.state, d.result ? 'label', d.error from taskboard.job_list as j,"
        " taskboard.job_documents(j.job_id) as d order by j.kind, j.state",
    )
    assert [line[:3] for line in found] == [
        ("parcel", "completed", True), ("parcel", "failed", None), ("thumbnail", "completed", None)
    ]  # fmt: skip
    assert "no weight" in found[1][3]
    steps = rows(db, "select step, state from taskboard.effect_list order by step")
    assert steps == [("label", "done"), ("store", "done")]


def test_each_kind_bears_the_timeline_as_the_page_says(db: Connection) -> None:
    """A is frozen between the gate and the effect, B claims, A wakes up."""

    def claim() -> dict[str, object]:
        sql = "select job_id, lease_token from taskboard.claim(kinds => '{mail}')"
        ((job_id, token),) = rows(db, sql)
        return {"job": job_id, "token": token}

    def begin(owner: dict[str, object]) -> list[tuple[str, str]]:
        return rows(
            db, "select state, idempotency_key from taskboard.begin_effect(%(job)s, %(token)s)",
            owner,
        )  # fmt: skip

    cases = (("retry", "unknown", "running"), ("hold", "held", "ready"))
    for on_unknown, told, afterwards in cases:
        rows(db, "select taskboard.enqueue('mail', on_unknown => %s)", [on_unknown])
        a = claim()
        ((fresh, key),) = begin(a)
        expire(db, a["job"])  # type: ignore[arg-type]
        b = claim()
        # At least once: B repeats it with the same key. At most once: B does not send.
        assert (fresh, begin(b)) == ("fresh", [(told, key)])
        # In the database alone: A's transaction cannot go on.
        with pytest.raises(psycopg.Error) as error:
            rows(db, "select taskboard.require_lease(%(job)s, %(token)s)", a)
        assert error.value.sqlstate == "TB001"
        # What A says about its effect counts; that it is done does not.
        said = rows(db, "select state from taskboard.end_effect(%(job)s, %(token)s)", a)
        assert said == [("done",)]
        assert rows(db, "select 1 from taskboard.complete(%(job)s, %(token)s)", a) == []
        assert rows(db, "select state from taskboard.job(%(job)s)", a) == [(afterwards,)]
        db.execute("delete from taskboard.jobs")
