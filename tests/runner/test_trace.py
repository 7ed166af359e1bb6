"""A trace goes along from enqueue to each attempt; one that is malformed is as none."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from harness import Context, drain, enqueue, state
from psycopg.types.json import Jsonb

from taskboard import trace
from taskboard.handlers import Retry

Connection = psycopg.Connection[Any]

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
STATE = "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"


def test_each_attempt_is_given_the_trace_of_the_one_who_enqueued(
    dsn: str, db: Connection
) -> None:
    seen: list[Any] = []

    async def mail(ctx: Context) -> None:
        seen.append((ctx.job.attempt, ctx.traceparent, ctx.trace_context))
        if ctx.job.attempt == 1:
            db.execute("update taskboard.jobs set max_attempts = 3")
            raise Retry("once more")

    headers = {"traceparent": PARENT, "tracestate": STATE, "other": [1]}
    job_id = enqueue(db, "mail", headers=Jsonb(headers))
    assert drain(dsn, {"mail": mail}) == 3
    db.execute("update taskboard.jobs set claimable_at = clock_timestamp()")
    assert drain(dsn, {"mail": mail}) == 0
    whole = {"traceparent": PARENT, "tracestate": STATE}
    assert seen == [(1, PARENT, whole), (2, PARENT, whole)]
    assert state(db, job_id)["state"] == "completed"


NO_TRACE = PARENT.replace("4bf92f3577b34da6a3ce929d0e0e4736", "0" * 32)
NO_PARENT = PARENT.replace("00f067aa0ba902b7", "0" * 16)
MALFORMED: list[Any] = [
    None, "", 7, [PARENT], {"a": PARENT}, PARENT.upper(), PARENT + "-00", PARENT + " ",
    " " + PARENT, PARENT[:-1], PARENT[3:], "ff" + PARENT[2:], NO_TRACE, NO_PARENT,
    PARENT.replace("-", "_"), PARENT.replace("4b", "4g"), "00-" * 100_000, PARENT + "\n",
]  # fmt: skip


def test_a_malformed_trace_fails_no_job_and_is_as_none(dsn: str, db: Connection) -> None:
    seen: list[Any] = []

    async def mail(ctx: Context) -> None:
        seen.append(ctx.trace_context or ctx.traceparent)

    for parent in MALFORMED:
        enqueue(db, "mail", headers=Jsonb({"traceparent": parent, "tracestate": STATE}))
    enqueue(db, "mail", headers=Jsonb({"Traceparent": PARENT}))
    enqueue(db, "mail")
    assert drain(dsn, {"mail": mail}) == 0
    assert seen == [None] * (len(MALFORMED) + 2)


def test_a_later_version_may_say_more() -> None:
    later = "01" + PARENT[2:] + "-what-comes.then"
    assert trace.context({"traceparent": later}) == {"traceparent": later}


@pytest.mark.parametrize(
    ("text", "good"),
    [
        (STATE, True), ("a=1", True), ("a=1, b=2", True), ("a@v=x y", True), ("a=1,,b=2", True),
        ("", False), ("a", False), ("A=1", False), ("a=1,a=2", False), ("a=\u00e9", False),
        ("a=b=c", False), (",", False), ("a=" + "x" * 600, False),
        (",".join(f"k{n}=1" for n in range(33)), False), (7, False), (None, False),
    ],
)  # fmt: skip
def test_a_state_that_is_malformed_is_left_out_and_the_trace_stays(text: Any, good: bool) -> None:
    found = trace.context({"traceparent": PARENT, "tracestate": text})
    assert found == {"traceparent": PARENT} | ({"tracestate": text} if good else {})
