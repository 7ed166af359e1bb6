"""A complete Taskboard worker with psycopg. Copy it, and put your own work into `work`.

TASKBOARD_DATABASE_URL=postgresql://… TASKBOARD_QUEUE=default python worker.py
"""

import json
import os
import signal
import threading
import time

import psycopg
from psycopg.rows import namedtuple_row

URL, QUEUE = os.environ["TASKBOARD_DATABASE_URL"], os.environ.get("TASKBOARD_QUEUE", "default")
KINDS = ["kit"]  # what `work` knows to do; other kinds are left to others
stopping = threading.Event()
at_work = []  # the Halt of the job in hand


class Halt(threading.Event):
    """Tells the work to stop, and why: lost, cancelled or stopping."""

    why = ""

    def say(self, why):
        self.why = self.why or why
        self.set()


def work(payload, halt):
    """Your work. Look at `halt` now and then, and return when it is set. The result is kept."""
    halt.wait(payload.get("seconds", 0))
    if "fail" in payload:
        raise RuntimeError(payload["fail"])
    return payload


class Session:
    """A connection that is made again when it breaks. A call without an answer is sent again: that
    is safe, since a claim whose answer was lost lapses, and everything else carries its token."""

    conn = None

    def call(self, sql, *args, patience=60.0):
        give_up = time.monotonic() + patience
        while True:
            try:
                if self.conn is None or self.conn.closed:
                    self.conn = psycopg.connect(
                        URL, autocommit=True, prepare_threshold=None, row_factory=namedtuple_row,
                        connect_timeout=10, tcp_user_timeout=10_000,  # a dead peer does not say so
                    )  # fmt: skip
                return self.conn.execute(sql, args).fetchall()
            except psycopg.OperationalError:  # the connection; or 40001, 40P01, 55P03: repeat
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.2)


def keep(job, halt, done):
    """Renew every third of the lease, in a thread and a session of its own: the work may block."""
    session, third = Session(), job.lease_seconds / 3
    while not done.wait(third):
        try:
            renewed = session.call(
                "select cancel_requested from taskboard.renew(%s, %s)",
                job.job_id, job.lease_token, patience=third,
            )  # fmt: skip
        except psycopg.Error:
            renewed = []  # we may not hear of it before the lease runs out
        if not renewed:  # zero rows: somebody else may be at it by now
            return halt.say("lost")
        if renewed[0].cancel_requested:
            halt.say("cancelled")


def attempt(session, job):
    """Do one job; answer what became of it. Zero rows from any call: it was no longer ours."""
    halt, done = Halt(), threading.Event()
    at_work[:] = [halt]
    if stopping.is_set():
        halt.say("stopping")
    keeper = threading.Thread(target=keep, args=(job, halt, done))
    keeper.start()
    try:
        result, error = work(json.loads(job.payload), halt), None
    except Exception as exc:
        error = f"{type(exc).__name__}: {exc}"
    done.set()
    keeper.join()
    ours = job.job_id, job.lease_token
    if halt.why == "lost":
        return "lost"  # record nothing: that is for the new owner to do
    if halt.why:  # given back; after a cancel that ends the job
        rows = session.call("select state from taskboard.release(%s, %s)", *ours)
        word = "cancelled" if rows and rows[0].state == "cancelled" else "released"
    elif error:
        rows = session.call("select state from taskboard.fail(%s, %s, %s)", *ours, error)
        word = "failed"
    else:
        rows = session.call(
            "select job_id from taskboard.complete(%s, %s, %s)", *ours, json.dumps(result)
        )
        word = "completed"
    return word if rows else "lost"


def stop(*_):
    stopping.set()
    for halt in at_work:
        halt.say("stopping")


signal.signal(signal.SIGTERM, stop)
session = Session()
while not stopping.is_set():
    jobs = session.call(
        "select job_id, lease_token, payload::text, extract(epoch from lease)::float8"
        " as lease_seconds from taskboard.claim(array[%s], %s::text[])", QUEUE, KINDS,
    )  # fmt: skip
    for job in jobs:
        print(attempt(session, job), job.job_id, flush=True)
    if not jobs:
        stopping.wait(1)
