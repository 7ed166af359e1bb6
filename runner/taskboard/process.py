"""The runner as a process: its log, its signals, its exit code."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar

from taskboard.attempts import ENDS_WITHIN
from taskboard.handlers import Handler
from taskboard.preflight import find_handlers
from taskboard.settings import Settings, SettingsError
from taskboard.several import name_of
from taskboard.stopping import BROKEN, STUCK
from taskboard.worker import Worker

# Which database a line of the log is about, where there are several.
DATABASE = ContextVar("DATABASE", default="")

log = logging.getLogger(__name__)

LEAVES_WITHIN = 5.0  # seconds

Watch = Callable[[Worker], object]


def main(
    settings: Settings, modules: Sequence[str] = (), others: Sequence[Settings] = (),
    metrics: str | None = None,
) -> int:  # fmt: skip
    """Run a worker process with the handlers that are configured; return its exit code.

    `others` are the settings for further databases, each with a worker and a pool of its own.
    `metrics`: where to serve figures and health, PORT or HOST:PORT.

    When handlers do not end, the process is left within a second of the return; when what they
    left behind does not, tasks and threads of theirs, without a return. Raises SettingsError.
    """
    log_to_stderr(settings.log_json)
    found, off = find_handlers(settings, modules)
    with watching(metrics) as watch:
        runner = asyncio.Runner(loop_factory=asyncio.SelectorEventLoop)
        try:
            code = runner.run(run(settings, found, off, others, watch))
        except SettingsError as exc:
            with leaving(LEAVES_WITHIN, 2, str(exc)):
                runner.close()
            raise
    if code == STUCK:  # closing would wait for the tasks, and the interpreter for the threads
        leave(1, code).start()
    else:
        with leaving(LEAVES_WITHIN, code):
            runner.close()
    return code


@contextmanager
def leaving(seconds: float, code: int, why: str = "") -> Iterator[None]:
    """Leave the process when the block takes longer: it waits for what handlers left behind."""
    timer = leave(seconds, code, why or "stopping: what handlers left behind does not end")
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def leave(seconds: float, code: int, why: str = "") -> threading.Timer:
    """Make a timer that leaves the process, whatever it does then, and says why."""

    def now() -> None:
        if why:
            log.error("%s", why)
        os._exit(code)

    timer = threading.Timer(seconds, now)
    timer.daemon = True
    return timer


@contextmanager
def watching(metrics: str | None) -> Iterator[Watch]:
    """Let workers be seen from outside, where that was asked for."""
    if metrics is None:
        yield lambda worker: None
        return
    from taskboard.health import serving

    with serving(metrics) as health:
        yield health.watch


async def run(
    settings: Settings, handlers: Mapping[str, Handler], off: Mapping[str, str] | None = None,
    others: Sequence[Settings] = (), watch: Watch = lambda worker: None,
) -> int:  # fmt: skip
    """Run jobs until a signal, or until nothing is left; return the exit code.

    `handlers` maps kinds to handlers; `off` maps kinds that are not configured to the reason.
    `watch` is told of each worker.
    Raises SettingsError when the database cannot be used as configured.
    """
    off = dict(off or {})
    missing = [kind for kind in settings.kinds if kind not in handlers]
    if missing or not handlers:
        reasons = [f"{kind}: {off[kind]}" for kind in missing or off if kind in off]
        what = f"no handler for {', '.join(missing)}" if missing else "no handler is configured"
        raise SettingsError(what, "; ".join(reasons) or "name the module that has it")
    if settings.kinds:
        off |= {kind: "not asked for" for kind in handlers}
        handlers = {kind: handlers[kind] for kind in settings.kinds}
    workers = {
        name_of(one, at) if others else "": Worker(one, handlers)
        for at, one in enumerate((settings, *others), 1)
    }
    for worker in workers.values():
        watch(worker)
    try:
        return await _work(workers, off)
    finally:
        with suppress(TimeoutError):
            async with asyncio.timeout(ENDS_WITHIN):
                for handler in handlers.values():
                    if aclose := getattr(handler, "aclose", None):
                        await aclose()


async def _work(workers: Mapping[str, Worker], off: Mapping[str, str]) -> int:
    """Let all work until they are stopped, or one cannot go on; a database that is away can."""

    def stop() -> None:
        for worker in workers.values():
            worker.stop()

    async def work(name: str, worker: Worker) -> int:
        DATABASE.set(name)
        code = BROKEN
        try:
            code = await worker.run(off)
        finally:
            if code in (BROKEN, STUCK):
                stop()
        return code

    with stopped_by_signals(stop):
        tasks = [work(name, worker) for name, worker in workers.items()]
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    codes = [0]
    for end in ended:
        if isinstance(end, BaseException):
            raise end
        codes.append(end)
    return max(codes)


@contextmanager
def stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Stop at the first SIGTERM or SIGINT, end at once at the second, even with a blocked loop.

    SIGHUP stops, too, unless it is ignored (nohup), and never ends: a terminal that is closed may
    send two.
    """
    loop = asyncio.get_running_loop()
    seen: list[int] = []

    def on_signal(number: int, frame: object) -> None:
        if seen and number != signal.SIGHUP:
            os._exit(128 + number)
        seen.append(number)
        loop.call_soon_threadsafe(stop)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)
    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Make the line; a job's transition has its parts as fields."""
        line = {
            "at": self.formatTime(record),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if name := DATABASE.get():
            line["database"] = name
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class Lines(logging.Formatter):
    """Plain lines; with the database, where there are several."""

    def format(self, record: logging.LogRecord) -> str:
        name = DATABASE.get()
        record.database = f"{name}: " if name else ""
        return super().format(record)


def log_to_stderr(as_json: bool) -> None:
    """Set up logging for the process, plain or as JSON lines."""
    out = logging.StreamHandler()
    plain = Lines("%(asctime)s %(levelname)s %(database)s%(message)s")
    out.setFormatter(JsonLines() if as_json else plain)
    logging.basicConfig(level=logging.INFO, handlers=[out])
    logging.getLogger("psycopg.pool").setLevel(logging.ERROR)  # it reports each failed try
