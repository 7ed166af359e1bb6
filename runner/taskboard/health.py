"""Seeing a runner from outside: figures for Prometheus, and whether each of its parts works.

Served by threads of its own, so that a runner whose loop is held up can be seen to be. It looks at
the worker and listens to its log, and the worker knows nothing of it. No label holds what a job
carries: kinds are those with a handler, outcomes and parts are named here.

`/healthz` is for who restarts a process: red when a part has stopped that only a restart brings
back. `/readyz` is for who sends alarms: red as well while a part does not do its work, whatever the
reason, and before the first claim and after the stop.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from taskboard import wake
from taskboard.leases import News, now
from taskboard.settings import SettingsError
from taskboard.worker import POLL_WOKEN, Worker

try:
    from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ModuleNotFoundError:
    raise SettingsError(
        "--metrics needs prometheus_client", "pip install 'PATH[metrics]', PATH being the checkout"
    ) from None

log = logging.getLogger(__name__)

# Seconds.
LATE = 30.0  # a part is then said not to work
STUCK_AFTER = 120.0  # a loop that was held up for that long comes back by a restart, if at all
BEAT_EVERY = 1.0
SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 300, 900, 3600)

CLAIMS, RENEWER, LISTENER = PARTS = ("claims", "renewer", "listener")


class Watched:
    """A worker, and the beat of its loop."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._loop = asyncio.get_running_loop()
        self.beat_at = now()
        self._beat()

    def _beat(self) -> None:
        self.beat_at = now()
        self._loop.call_later(BEAT_EVERY, self._beat)

    def stuck(self) -> Iterator[str]:
        """Say what has stopped for good."""
        if now() - self.beat_at > STUCK_AFTER:
            yield f"{CLAIMS}: the loop has been held up for {now() - self.beat_at:.0f} s"
        renewer, stopping = self.worker.renewer, self.worker.stopping.is_set()
        if renewer.ident is not None and not renewer.is_alive() and not stopping:
            yield f"{RENEWER}: its thread is gone"
        elif now() - renewer.turned_at > STUCK_AFTER and renewer.is_alive():
            yield f"{RENEWER}: it has stood still for {now() - renewer.turned_at:.0f} s"

    def faults(self) -> dict[str, str]:
        """Say of each part what is wrong with it; nothing where it works."""
        return {CLAIMS: self._claims(), RENEWER: self._renewer(), LISTENER: self._listener()}

    def _claims(self) -> str:
        worker = self.worker
        late = LATE + (worker.settings.poll or POLL_WOKEN)
        if worker.stopping.is_set():
            return "stopping"
        if not worker.well_at:
            return "no claim yet"
        if now() - self.beat_at > LATE:
            return f"the loop has been held up for {now() - self.beat_at:.0f} s"
        if now() - worker.well_at > late:
            away = worker.control.lost_for
            why = f": the database has been away for {away:.0f} s" if away else ""
            return f"none was answered for {now() - worker.well_at:.0f} s{why}"
        return ""

    def _renewer(self) -> str:
        renewer = self.worker.renewer
        if not renewer.is_alive():
            return "its thread is gone" if renewer.ident is not None else "not started"
        if now() - renewer.turned_at > LATE:
            return f"it has stood still for {now() - renewer.turned_at:.0f} s"
        # At a third of its length each is due; at two thirds it has been missed.
        late = [
            lease for lease in list(renewer.leases.values())
            if lease.told <= {News.CANCEL} and now() > lease.deadline - lease.length / 3
        ]  # fmt: skip
        return f"{len(late)} leases are not renewed" if late else ""

    def _listener(self) -> str:
        link = self.worker.wake.link
        if away := link.lost_for:
            return f"its connection has been lost for {away:.0f} s"
        quiet = time.monotonic() - link.answered_at
        probed = wake.PROBE_EVERY + 2 * wake.ANSWER_WITHIN + LATE
        if link.conn is not None and self.worker.wake.asleep and quiet > probed:
            return f"it has not looked for {quiet:.0f} s"
        return ""  # also where it polls only, as behind a pooler


class Health(Collector):
    """The workers of a process, as they are seen from outside."""

    def __init__(self) -> None:
        self.watched: list[Watched] = []
        self.registry = CollectorRegistry()
        self.jobs = Counter(
            "taskboard_jobs", "Attempts that were settled, by how.", ["kind", "outcome"],
            registry=self.registry,
        )  # fmt: skip
        self.seconds = Histogram(
            "taskboard_job_seconds", "From the start of an attempt until it was settled.", ["kind"],
            buckets=SECONDS, registry=self.registry,
        )  # fmt: skip
        self.registry.register(self)

    def watch(self, worker: Worker) -> None:
        """Look at a worker from now on; called in its loop."""
        self.watched.append(Watched(worker))

    def stuck(self) -> list[str]:
        return [text for one in self.watched for text in one.stuck()]

    def faults(self) -> list[str]:
        """Say what does not work; nothing: all of it does."""
        found = [
            f"{part}: {text}"
            for one in self.watched
            for part, text in one.faults().items()
            if text
        ]
        return found if self.watched else ["not started"]

    def settled(self, fields: dict[str, Any]) -> None:
        """Count an attempt that the log tells of."""
        self.jobs.labels(fields["kind"], outcome_of(fields["outcome"])).inc()
        self.seconds.labels(fields["kind"]).observe(fields["seconds"])

    def collect(self) -> Iterable[Metric]:
        """Make the figures that are read off the workers."""
        up = GaugeMetricFamily("taskboard_part_up", "Whether a part works.", labels=["part"])
        slots = GaugeMetricFamily("taskboard_slots", "How many handlers may run at once.")
        used = GaugeMetricFamily("taskboard_slots_used", "How many handlers run.")
        quiet = GaugeMetricFamily(
            "taskboard_last_claim_seconds", "Since a claim was answered, or needed none."
        )
        lost = CounterMetricFamily(
            "taskboard_database_lost", "How often a connection was lost.", labels=["part"]
        )
        workers = [one.worker for one in self.watched]
        for part in PARTS:
            up.add_metric([part], all(not one.faults()[part] for one in self.watched))
        slots.add_metric([], sum(worker.settings.slots for worker in workers))
        used.add_metric([], sum(len(worker.slots.running) for worker in workers))
        quiet.add_metric([], max((now() - worker.well_at for worker in workers), default=0))
        for part, losses in (
            (CLAIMS, [worker.control.losses for worker in workers]),
            (LISTENER, [worker.wake.link.losses for worker in workers]),
        ):
            lost.add_metric([part], sum(losses))
        return up, slots, used, quiet, lost


def outcome_of(said: str) -> str:
    """Name an outcome with one of few words."""
    if said.startswith("failed, again"):
        return "retried"
    if said.startswith("lease lost"):
        return "lease_lost"
    return said if said in ("completed", "released", "failed", "cancelled", "held") else "other"


class Listener(logging.Handler):
    """Counts what the log of the settler says."""

    def __init__(self, health: Health) -> None:
        super().__init__(logging.INFO)
        self._health = health

    def emit(self, record: logging.LogRecord) -> None:
        if fields := getattr(record, "fields", None):
            self._health.settled(fields)


class Answers(BaseHTTPRequestHandler):
    """Answers for the three paths."""

    timeout = 5  # seconds, for a request to come
    health: Health

    def do_GET(self) -> None:
        match self.path.partition("?")[0]:
            case "/metrics":
                kind = "text/plain; version=0.0.4; charset=utf-8"
                self._answer(200, generate_latest(self.health.registry), kind)
            case "/healthz":
                self._tell(self.health.stuck())
            case "/readyz":
                self._tell(self.health.faults())
            case _:
                self._answer(404, b"/metrics, /healthz, /readyz\n")

    do_HEAD = do_GET

    def _tell(self, faults: list[str]) -> None:
        text = "\n".join(faults or ["ok"]) + "\n"
        self._answer(503 if faults else 200, text.encode())

    def _answer(self, code: int, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def version_string(self) -> str:
        return "taskboard"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a scrape is no transition."""


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: whoever asked has gone away."""


@contextmanager
def serving(where: str) -> Iterator[Health]:
    """Serve figures and health at PORT or HOST:PORT. Raises SettingsError."""
    health = Health()
    host, port = address(where)
    server_class = type("Server6", (Server,), {"address_family": socket.AF_INET6})
    handler = type("Bound", (Answers,), {"health": health})
    try:
        server = (server_class if ":" in host else Server)((host, port), handler)
    except OSError as exc:
        raise SettingsError(f"--metrics {where}: {exc}", "give a port that is free") from None
    thread = threading.Thread(target=server.serve_forever, name="taskboard-metrics", daemon=True)
    thread.start()
    listener = Listener(health)
    logging.getLogger("taskboard.settle").addHandler(listener)
    log.info("metrics: at http://%s:%d/metrics", f"[{host}]" if ":" in host else host,
             server.server_address[1])  # fmt: skip
    try:
        yield health
    finally:
        logging.getLogger("taskboard.settle").removeHandler(listener)
        server.shutdown()
        server.server_close()


def address(where: str) -> tuple[str, int]:
    """Read PORT or HOST:PORT; the host is this machine alone unless another one is named."""
    host, _, port = where.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise SettingsError(f"--metrics {where} is no port", "write 9090, or 0.0.0.0:9090")
    return host.strip("[]") or "127.0.0.1", int(port)
