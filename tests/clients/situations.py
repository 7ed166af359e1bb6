"""What a worker may meet with. It is judged by what it says and by what the database says.

A worker claims jobs of kind `kit` from the queue TASKBOARD_QUEUE. Its work is to wait for as many
`seconds` as the payload says; with `fail` in the payload, to fail with that text; the payload is
the result. It prints one line per job, what became of it by its own account: `completed JOB`,
`failed JOB`, `released JOB`, `cancelled JOB` or `lost JOB`.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from psycopg.types.json import Jsonb

from clients.client import environment, named, own_session

PATIENCE = 60.0  # seconds, for machines that have much else to do
SITUATIONS: dict[str, Callable[[Bench], None]] = {}


@dataclass(frozen=True, slots=True)
class Status:
    """What the database knows of a job."""

    state: str
    attempt: int
    failures: int
    lost_leases: int
    worker: str | None
    claimable_at: datetime | None


class Bench:
    """One situation: a queue, the kit's own session, and a worker once it is started."""

    def __init__(self, command: str, dsn: str, queue: str) -> None:
        self.queue, self._command, self._dsn = queue, command, dsn
        self.kit = own_session(dsn)
        self.said: list[str] = []
        self._worker: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._worker:
            with suppress(ProcessLookupError):
                os.killpg(self._worker.pid, signal.SIGKILL)
            self._worker.wait()
        self.kit.close()

    def enqueue(self, payload: dict[str, Any], lease: str = "60 s") -> str:
        ((job,),) = self.kit.execute(
            "select job_id::text from taskboard.enqueue('kit', %s, %s, lease => %s)",
            [Jsonb(payload), self.queue, lease],
        ).fetchall()
        return str(job)

    def start(self) -> None:
        env = environment(named(self._dsn, self.queue), TASKBOARD_QUEUE=self.queue)
        self._worker = subprocess.Popen(
            shlex.split(self._command), env=env, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        threading.Thread(target=self._listen, args=[self._worker.stdout], daemon=True).start()

    def _listen(self, lines: Any) -> None:
        self.said.extend(line.strip() for line in lines)

    def stop(self, everybody: bool = False) -> None:
        """Ask it to stop as a container does, or all its processes as systemd; it ends with 0."""
        assert self._worker
        (os.killpg if everybody else os.kill)(self._worker.pid, signal.SIGTERM)
        try:
            code = self._worker.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running {PATIENCE:g} s after SIGTERM") from None
        assert code == 0, f"exit code {code} after SIGTERM, expected 0"

    def says(self, word: str, job: str) -> None:
        """Wait for its account of a job, and for nothing else about it."""
        self.until(lambda: any(job in line for line in self.said), f"the worker to say {word}")
        found = [line for line in self.said if job in line]
        assert found == [f"{word} {job}"], f"expected the worker to say {word}, it said {found}"

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            ended = self._worker and self._worker.poll()
            assert ended is None, f"the worker ended with {ended} while the kit waited for {what}"
            assert time.monotonic() < deadline, f"waited {PATIENCE:g} s for {what}"
            time.sleep(0.05)

    def status(self, job: str) -> Status:
        ((*found,),) = self.kit.execute(
            "select state, attempt, failures, lost_leases, worker, claimable_at"
            " from taskboard.job(%s)",
            [job],
        ).fetchall()
        return Status(*found)

    def document(self, job: str, name: str) -> Any:
        found = self.kit.execute(f"select {name} from taskboard.job_documents(%s)", [job])
        ((document,),) = found.fetchall()
        return document

    def started(self, job: str) -> Status:
        """Wait until the worker has claimed the job."""
        self.until(lambda: self.status(job).attempt > 0, "the worker to claim the job")
        return self.status(job)

    def claim(self) -> list[tuple[str, str]]:
        return self.kit.execute(
            "select job_id::text, lease_token::text"
            " from taskboard.claim(array[%s], worker => 'other')",
            [self.queue],
        ).fetchall()

    def take_over(self, job: str) -> str:
        """Let the worker's lease lapse, and claim the job; answer the new token."""
        self.kit.execute("select taskboard.evict(%s)", [self.started(job).worker])
        ((_, token),) = self.claim()
        return token

    def ends_as(self, job: str, state: str, attempt: int = 1) -> None:
        found = self.status(job)
        assert (found.state, found.attempt) == (state, attempt), f"the job is {found}"


def situation(play: Callable[[Bench], None]) -> Callable[[Bench], None]:
    """Add a situation; its name is that of the function."""
    SITUATIONS[play.__name__.replace("_", " ")] = play
    return play


@situation
def jobs_are_completed_with_their_result_until_it_is_stopped(bench: Bench) -> None:
    payload = {"seconds": 0, "text": "Grüße 🎈 \"q\" \\ 'x' $1"}
    job = bench.enqueue(payload)
    bench.start()
    bench.says("completed", job)
    bench.ends_as(job, "completed")
    result = bench.document(job, "result")
    assert result == payload, f"expected the payload as the result, got {result}"
    later = bench.enqueue({"seconds": 0})
    bench.says("completed", later)
    bench.stop()


@situation
def it_ends_in_order_at_whatever_moment_it_is_stopped(bench: Bench) -> None:
    for seconds in (0.1, 0.4, 0.7):
        bench.start()
        bench.says("completed", bench.enqueue({"seconds": 0}))
        time.sleep(seconds)  # into its rest, or its next claim
        bench.stop()


@situation
def a_job_longer_than_its_lease_is_renewed(bench: Bench) -> None:
    job = bench.enqueue({"seconds": 4.5}, lease="3 s")
    bench.start()
    bench.started(job)
    bench.until(lambda: bench.claim() or bench.status(job).state == "completed", "the job to end")
    assert bench.status(job).lost_leases == 0, "its lease ran out while it was at work"
    bench.says("completed", job)
    bench.ends_as(job, "completed")


@situation
def a_job_that_was_taken_over_is_given_up_at_the_next_renewal(bench: Bench) -> None:
    job = bench.enqueue({"seconds": 8}, lease="3 s")
    bench.start()
    token = bench.take_over(job)
    began = time.monotonic()
    bench.says("lost", job)
    assert time.monotonic() - began < 6, "it noticed only at the end of its work"
    ((found,),) = bench.kit.execute(
        "select job_id::text from taskboard.complete(%s, %s)", [job, token]
    ).fetchall()
    assert found == job
    bench.ends_as(job, "completed", 2)


@situation
def a_completion_with_zero_rows_is_not_reported_as_one(bench: Bench) -> None:
    job = bench.enqueue({"seconds": 1})
    bench.start()
    bench.take_over(job)
    bench.says("lost", job)
    bench.ends_as(job, "running", 2)


@situation
def a_failure_with_zero_rows_is_not_reported_as_one(bench: Bench) -> None:
    job = bench.enqueue({"seconds": 1, "fail": "too late"})
    bench.start()
    bench.take_over(job)
    bench.says("lost", job)
    bench.ends_as(job, "running", 2)


@situation
def a_cancelled_job_is_stopped(bench: Bench) -> None:
    job = bench.enqueue({"seconds": 8}, lease="3 s")
    bench.start()
    bench.started(job)
    bench.kit.execute("select taskboard.cancel(%s, 'not wanted')", [job])
    bench.says("cancelled", job)
    bench.ends_as(job, "cancelled")


@situation
def a_failure_is_recorded_with_its_error(bench: Bench) -> None:
    error = "no route to \"host\", 'really' \\ é"
    job = bench.enqueue({"seconds": 0, "fail": error})
    bench.start()
    bench.says("failed", job)
    bench.ends_as(job, "scheduled")
    found = bench.document(job, "error")
    assert error in (found or ""), f"expected the error {error}, got {found}"
    assert bench.status(job).failures == 1, "no failure was counted"


@situation
def a_stop_gives_back_or_finishes_what_runs_and_claims_no_more(bench: Bench) -> None:
    job = bench.enqueue({"seconds": 3})
    bench.start()
    bench.started(job)
    waiting = bench.enqueue({"seconds": 0})
    bench.stop()
    found = bench.status(job)
    assert found.state in ("ready", "completed"), f"the job is {found}"
    assert found.attempt == 1 and found.failures == 0, f"the job is {found}"
    bench.ends_as(waiting, "ready", 0)


@situation
def a_stop_that_reaches_all_its_processes_does_the_same(bench: Bench) -> None:
    job = bench.enqueue({"seconds": 3})
    bench.start()
    bench.started(job)
    bench.stop(everybody=True)
    found = bench.status(job)
    assert found.state in ("ready", "completed") and found.failures == 0, f"the job is {found}"


@situation
def a_worker_whose_sessions_are_cut_finishes_its_job(bench: Bench) -> None:
    job = bench.enqueue({"seconds": 4.5}, lease="3 s")
    bench.start()
    lease = bench.started(job).claimable_at
    bench.until(lambda: bench.status(job).claimable_at != lease, "the first renewal")
    bench.kit.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity where application_name = %s",
        [bench.queue],
    )
    bench.says("completed", job)
    bench.ends_as(job, "completed")
