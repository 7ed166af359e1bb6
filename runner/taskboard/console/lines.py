"""`taskboard enqueue KIND - --lines`: a job for each line of JSON on standard input."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import psycopg

from taskboard.cli import OK, PRODUCER, Refused, explain
from taskboard.connections import Connection, connect
from taskboard.console.output import print_json
from taskboard.console.verb import statement
from taskboard.console.verbs import Mistake

BATCH = 1000  # jobs in one call, which is one transaction
REDRAW_EVERY = 0.1  # seconds
BAR = 24


class Progress:
    """A line on stderr that says how far we are and how fast, if stderr is a terminal."""

    def __init__(self, source: BinaryIO) -> None:
        self._shown = sys.stderr.isatty()
        status = os.fstat(source.fileno())
        self._size = status.st_size if stat.S_ISREG(status.st_mode) else 0
        self._begun_at = time.monotonic()
        self._drawn_at = 0.0
        self.jobs = self._bytes = 0

    def add(self, jobs: int, size: int) -> None:
        self.jobs, self._bytes = self.jobs + jobs, self._bytes + size
        if self._shown and time.monotonic() - self._drawn_at > REDRAW_EVERY:
            self._drawn_at = time.monotonic()
            print(f"\r{self}\033[K", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._shown:
            print(f"\r{self}\033[K", file=sys.stderr, flush=True)

    def __str__(self) -> str:
        bar = ""
        if self._size:
            part = min(self._bytes / self._size, 1)
            bar = f"[{'#' * int(part * BAR):{BAR}}] {part:4.0%}  "
        seconds = max(time.monotonic() - self._begun_at, 0.001)
        return f"{bar}{self.jobs:,} jobs, {self.jobs / seconds:,.0f}/s"


def batches(
    source: BinaryIO, check: Callable[[str], None]
) -> Iterator[tuple[int, int, list[str]]]:
    """Yield the numbers of the first and the last line, and the documents, of each batch.

    Empty lines are passed over. Raises Mistake, once the lines before it have been yielded.
    """
    documents: list[str] = []
    first = 1
    number = 0
    for number, line in enumerate(source, 1):
        try:
            text = line.decode().strip()
            if text:
                check(text)
                documents.append(text)
        except (ValueError, RecursionError) as exc:
            if documents:
                yield first, number - 1, documents
            raise Mistake(
                f"line {number} is not JSON: {exc}",
                f"the lines before it are enqueued; correct it, then: tail -n +{number} FILE | …",
            ) from None
        if len(documents) == BATCH:
            yield first, number, documents
            documents, first = [], number + 1
    if documents:
        yield first, number, documents


def show_lines(kind: str, options: dict[str, Any], check: Callable[[str], None]) -> int:
    """Print a call for each batch that comes from standard input. Raises Mistake."""
    serial_key = _of_all(options)
    for _, _, documents in batches(sys.stdin.buffer, check):
        if serial_key is not None:
            options["serial_keys"] = [serial_key] * len(documents)
        given = {"kind": kind, "payloads": documents} | options
        call = statement("select * from taskboard.enqueue_many({call})", given)
        print(f"{call};")
    return OK


def _of_all(options: dict[str, Any]) -> str | None:
    """Take out what stands for each job; answer the serial key. Raises Mistake."""
    if "unique_key" in options:
        raise Mistake("--unique-key names one job", "leave it out: with --lines there are many")
    key: str | None = options.pop("serial_key", None)
    return key


def enqueue_lines(
    url: str, kind: str, options: dict[str, Any], check: Callable[[str], None], as_json: bool
) -> int:
    """Enqueue what comes from standard input; print an object for each job, or how many there are.

    `check` raises ValueError for what is no JSON. Raises Mistake and psycopg.Error.
    """
    serial_key = _of_all(options)
    source = sys.stdin.buffer
    progress = Progress(source)

    async def add_all() -> int:
        async with await connect(url, "taskboard enqueue") as conn:
            for first, last, documents in batches(source, check):
                if serial_key is not None:
                    options["serial_keys"] = [serial_key] * len(documents)
                try:
                    rows = await _enqueue_many(conn, kind, documents, options)
                except psycopg.Error as exc:
                    progress.close()
                    denied = isinstance(exc, psycopg.errors.InsufficientPrivilege)
                    code = explain(Refused(exc, PRODUCER, conn.info.user) if denied else exc)
                    print(_what_became(first, last, conn.closed), file=sys.stderr)
                    return code
                progress.add(len(rows), sum(map(len, documents)) + last - first + 1)
                for job_id, created in rows if as_json else ():
                    print_json({"job_id": job_id, "created": created})
        return OK

    try:
        code = asyncio.run(add_all())
    finally:
        progress.close()
    if not as_json:
        print(f"{progress.jobs} jobs enqueued")
    return code


async def _enqueue_many(
    conn: Connection, kind: str, documents: list[str], options: dict[str, Any]
) -> list[tuple[Any, ...]]:
    """Answer job_id and created for each document, in their order."""
    given = {"kind": kind, "payloads": documents} | options
    named = ", ".join(f"{name} => %({name})s" for name in given)
    named = named.replace("%(payloads)s", "%(payloads)s::jsonb[]")
    call = f"select job_id, created from taskboard.enqueue_many({named})"
    return await (await conn.execute(call, given)).fetchall()


def _what_became(first: int, last: int, lost: bool) -> str:
    if lost:
        return f"hint: nobody knows whether lines {first} to {last} are enqueued; those before are"
    return f"hint: of lines {first} to {last} none is enqueued; those before are"
