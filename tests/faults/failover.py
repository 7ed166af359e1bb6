"""A primary and its standby, and clients that go on when the one is killed and the other promoted.

A client names both servers in its DSN, takes every call without an answer for unknown, and repeats
it: `enqueue` with its unique key, `complete` with its token. What was answered is written down.
"""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import UUID

from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.types.json import Jsonb

from faults.calls import Client, Unanswered
from support import OwnServer, rows, session, wait_for


@dataclass(slots=True)
class Standby(OwnServer):
    """A server that starts as a copy of a running one and follows it."""

    primary: OwnServer

    def start(self) -> None:
        if not self.cluster.data.is_dir():
            self._copy()
        OwnServer.start(self)

    def _copy(self) -> None:
        source = conninfo_to_dict(self.primary.dsn())
        owner = pwd.getpwuid(self.primary.cluster.data.stat().st_uid)
        demoted: dict[str, Any] = {}
        if os.geteuid() == 0:
            demoted = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
            self.cluster.data.mkdir(mode=0o700)
            os.chown(self.cluster.data, owner.pw_uid, owner.pw_gid)
        subprocess.run(
            [self.bin / "pg_basebackup", "-D", self.cluster.data, "-R", "-c", "fast", "--no-sync",
             "-h", str(source["host"]), "-p", str(source["port"]), "-U", "postgres"],
            check=True, cwd="/", env={"LC_ALL": "C", "PATH": os.defpath}, **demoted,
        )  # fmt: skip


def both(primary: OwnServer, standby: OwnServer) -> str:
    """The DSN of a client: both servers, whichever accepts writes."""
    first, second = (conninfo_to_dict(server.dsn()) for server in (primary, standby))
    return make_conninfo(
        host=f"{first['host']},{second['host']}", port=f"{first['port']},{second['port']}",
        user="postgres", dbname="postgres", target_session_attrs="read-write", connect_timeout=5,
    )  # fmt: skip


def wait_for_standby(primary: OwnServer, *, synchronous: bool) -> None:
    """Wait until the standby streams; with `synchronous` each commit waits for it from then on."""
    with session(primary.dsn()) as conn:
        if synchronous:
            conn.execute("alter system set synchronous_standby_names = '*'")
            conn.execute("select pg_reload_conf()")
        wanted = "sync" if synchronous else "async"
        wait_for(
            lambda: rows(conn, "select state, sync_state from pg_stat_replication")
            == [("streaming", wanted)],
            what=f"a standby that streams, {wanted}",
        )


def wait_for_replay(standby: OwnServer, position: str) -> None:
    """Wait until the standby has replayed the log up to a position."""
    with session(standby.dsn()) as conn:
        reached = "select pg_last_wal_replay_lsn() >= %s::pg_lsn"
        wait_for(lambda: rows(conn, reached, [position])[0][0], what="a standby that caught up")


def stop_receiving(standby: OwnServer) -> None:
    """Cut the standby off its primary, which does not care."""
    with session(standby.dsn()) as conn:
        conn.execute("alter system set primary_conninfo = ''")
        conn.execute("select pg_reload_conf()")
        wait_for(lambda: not rows(conn, "select from pg_stat_wal_receiver"))


def kill(primary: OwnServer) -> None:
    """End all processes of a server at once, as a power cut does for clients and standbys."""
    with session(primary.dsn()) as conn:
        others = rows(conn, "select pid from pg_stat_activity where pid <> pg_backend_pid()")
    for pid in [primary.pid] + [pid for (pid,) in others]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    primary.cluster.down()


def promote(standby: OwnServer) -> None:
    with session(standby.dsn()) as conn:
        assert rows(conn, "select pg_promote(true, 30)") == [(True,)]


class Enqueued(NamedTuple):
    key: str
    job_id: UUID


class Claimed(NamedTuple):
    job_id: UUID
    lease_token: UUID
    key: str  # of the job's enqueue, from its payload


class Completed(NamedTuple):
    job_id: UUID
    lease_token: UUID
    finished_at: Any


@dataclass(slots=True)
class Clients:
    """Producers and workers on one DSN, and what they were told. Appending needs no lock."""

    dsn: str
    enqueued: list[Enqueued] = field(default_factory=list)
    claimed: list[Claimed] = field(default_factory=list)
    effects: list[tuple[str, str]] = field(default_factory=list)  # idempotency key, enqueue's key
    completed: list[Completed] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def figures(self) -> str:
        return (
            f"{len(self.enqueued)} enqueues, {len(self.claimed)} claims, {len(self.completed)}"
            f" completions acknowledged; {len(self.unanswered)} calls unanswered and repeated;"
        )

    @contextmanager
    def at_work(self, producers: int = 3, workers: int = 3) -> Iterator[None]:
        """Run them. At the end producers stop, then workers, once nothing is left to do."""
        jobs = [(self._produce, n) for n in range(producers)]
        jobs += [(self._work, n) for n in range(workers)]
        with ThreadPoolExecutor(len(jobs)) as threads:
            try:
                running = [threads.submit(job, number) for job, number in jobs]
                yield
            finally:
                self.stop.set()
            for result in running:
                result.result(60)

    def until_answered(self, client: Client, verb: str, **arguments: Any) -> list[Any]:
        """Call and, while the outcome is unknown, call again with the same arguments."""
        while True:
            try:
                return client.call(verb, **arguments)
            except Unanswered:
                self.unanswered.append(verb)

    def _produce(self, number: int) -> None:
        client, made = Client(self.dsn, f"producer {number}"), 0
        while not self.stop.is_set():
            key, made = f"{number}/{made}", made + 1
            ((job_id, _),) = self.until_answered(
                client, "enqueue", kind="k", payload=Jsonb(key), unique_key=key, unique_for="1 h"
            )
            self.enqueued.append(Enqueued(key, job_id))
        client.close()

    def _work(self, number: int) -> None:
        client = Client(self.dsn, f"worker {number}")
        while True:
            jobs = self.until_answered(client, "claim", max_jobs=2, lease="1 s")
            for job in jobs:
                self.claimed.append(Claimed(job.job_id, job.lease_token, job.payload))
                owner = {"job_id": job.job_id, "lease_token": job.lease_token}
                for effect in self.until_answered(client, "begin_effect", **owner):
                    self.effects.append((effect.idempotency_key, job.payload))
                for done in self.until_answered(client, "complete", **owner):
                    self.completed.append(Completed(*owner.values(), done.finished_at))
            if not jobs and self.stop.is_set() and not client.sql(LEFT):
                client.close()
                return
            time.sleep(0 if jobs else 0.02)


LEFT = "select from taskboard.jobs limit 1"


@dataclass(frozen=True, slots=True)
class Lost:
    """What was acknowledged, and is not there."""

    enqueues: list[Enqueued]
    completions: list[Completed]

    def figures(self) -> str:
        return f"{len(self.enqueues)} enqueues and {len(self.completions)} completions lost"


def lost(clients: Clients) -> Lost:
    with session(clients.dsn) as conn:
        there = set(rows(conn, "select unique_key, job_id from taskboard.job_list"))
        ended = set(rows(conn, "select id, lease_token, finished_at from taskboard.history"))
    return Lost(
        [line for line in clients.enqueued if line not in there],
        [line for line in clients.completed if line not in ended],
    )


def issued_twice(clients: Clients) -> list[str]:
    """Say which job ids, lease tokens and idempotency keys stood for two different things."""
    found = []
    things: dict[Any, Any] = {}
    pairs: list[tuple[Any, Any]] = [(line.job_id, line.key) for line in clients.enqueued]
    pairs += [(line.job_id, line.key) for line in clients.claimed]
    pairs += clients.effects
    for name, thing in pairs:
        if things.setdefault(name, thing) != thing:
            found.append(f"{name} is {things[name]} and {thing}")
    tokens = Counter(line.lease_token for line in clients.claimed)
    return found + [f"{token} was given twice" for token, n in tokens.items() if n > 1]
