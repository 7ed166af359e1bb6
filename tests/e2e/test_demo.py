"""What somebody sees who has just installed it: `taskboard demo`, and `taskboard run --dev`."""

from __future__ import annotations

import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO
from uuid import uuid4

from harness import enqueue, state

from e2e.outside import CHARGE, MAIL, PATIENCE, PYTHON
from support import Connection

HEADINGS = [
    "1. Enqueue a mail, a charge, and a notice that must not go out twice",
    "2. Worker A claims them, and is stopped in the middle",
    "3. The lease runs out, and worker B takes over",
    "4. A wakes up, and does not know that it slept",
    "5. A worker that does not look is refused: we ask, with A's token",
    "6. B completes",
    "7. The boundary: the database can refuse A's report, not undo its effects",
    "All of this was seen to happen. To try next, on a database that stays:",
]
SEEN = [
    "select * from taskboard.complete(:'mail', :'claim_a');",
    "→ zero rows: reclaimed by B",
    "→ not_current",
    "→ completed  B  2",
    "  charge   2 requests (to charge 1, to look 1), 1 key, 1 charge",
    "  mail     2 copies, 1 Message-ID, recorded: attempt 1 `unknown`, attempt 2 done",
    "  notice   1 copy, job held: with on_unknown => 'hold' a person decides",
]


@dataclass
class Demo:
    """A demo that runs, in a folder for temporary files of its own; `mark` is in the environment of
    the processes that it starts."""

    process: subprocess.Popen[str]
    out: IO[str]
    place: Path
    mark: str
    lines: list[str] = field(default_factory=list)
    longest_silence: float = 0.0

    def read(self, words: str | None = None) -> str:
        """Read up to a line with these words, or to the end; answer the last line."""
        while True:
            began_at, line = time.monotonic(), ""
            with suppress(OSError):  # how a terminal ends
                line = self.out.readline()
            if self.lines and line:
                silence = time.monotonic() - began_at
                self.longest_silence = max(self.longest_silence, silence)
            self.lines += [line.rstrip()] if line else []
            if not line or (words and words in line):
                return line

    def end(self, within: float) -> int:
        """Wait for the end; nothing that it started may be left, no process and no folder."""
        code = self.process.wait(within)
        assert list(self.place.iterdir()) == []
        assert self.left() == []
        return code

    def left(self) -> list[str]:
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc") if Path("/proc/self").exists() else ()):
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if (
                    self.mark.encode() in Path(f"/proc/{pid}/environ").read_bytes()
                    or str(self.place).encode() in command
                ):
                    found.append(command.replace(b"\0", b" ").decode())
        return found


@contextmanager
def demo(*arguments: str, on_terminal: bool = False, **environment: str) -> Iterator[Demo]:
    """Start it, with as many presses of Enter as anybody could want."""
    # Not below pytest's folder, which root's server may not enter.
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    place.chmod(0o711)
    mark = uuid4().hex
    reader, writer = pty.openpty() if on_terminal else os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "taskboard", "demo", *arguments],
        stdin=subprocess.PIPE, stdout=writer, stderr=subprocess.STDOUT, text=True,
        env=os.environ | PYTHON | {"TMPDIR": str(place), "MARK": mark} | environment,
        # These tests may run in the background of a shell, which ignores it there.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    os.close(writer)
    assert process.stdin is not None
    process.stdin.write("\n" * 20)
    process.stdin.flush()
    try:
        with open(reader, errors="replace") as out:
            yield Demo(process, out, place, mark)
    finally:
        process.stdin.close()
        process.kill()
        process.wait()
        shutil.rmtree(place, ignore_errors=True)


def test_demo_shows_each_step_without_a_long_silence_and_leaves_nothing_behind() -> None:
    # Neither a proxy nor what is said about other databases gets in the way.
    with demo(HTTP_PROXY="http://127.0.0.1:9", PGSERVICE="none", STRIPE_API_KEY="sk_live_x") as run:
        run.read()
        assert run.end(PATIENCE) == 0, run.lines
    text = "\n".join(run.lines)
    places = [text.find(heading) for heading in HEADINGS]
    assert -1 not in places and places == sorted(places)
    assert [words for words in SEEN if words not in text] == []
    assert "\033" not in text
    assert not re.search(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-", text)  # a whole token
    assert run.longest_silence < 4  # two seconds, on a machine that does nothing else


def test_demo_that_is_interrupted_in_the_middle_ends_what_it_started() -> None:
    with demo("--step", on_terminal=True) as run:
        assert "\033[33m" in run.read("kill -STOP")
        assert "\033[36m" in run.read("taskboard run --worker B")
        assert len(run.left()) > 3
        for _ in range(3):  # nobody has patience
            run.process.send_signal(signal.SIGINT)
            time.sleep(0.05)
        assert run.end(PATIENCE) == 128 + signal.SIGINT


def test_demo_that_is_interrupted_while_postgresql_starts_leaves_nothing_behind() -> None:
    with demo(NO_COLOR="1", on_terminal=True) as run:
        run.read("starting")
        time.sleep(0.2)
        run.process.terminate()
        run.read()
        assert run.end(PATIENCE) == 128 + signal.SIGTERM
        assert "\033" not in "".join(run.lines)


def test_demo_says_which_step_did_not_happen_and_fails() -> None:
    with demo("--step") as run:
        found = re.search(r"process (\d+)", run.read("taskboard run --worker A"))
        assert found
        os.kill(int(found[1]), signal.SIGKILL)
        run.read()
        assert run.end(PATIENCE) == 1
        assert "did not happen: worker A claims the jobs: worker A has ended" in "".join(run.lines)


def test_a_worker_with_servers_of_its_own_needs_no_configuration(dsn: str, db: Connection) -> None:
    jobs = [enqueue(db, "email", MAIL), enqueue(db, "stripe", CHARGE)]
    run = subprocess.run(
        [sys.executable, "-m", "taskboard", "run", "--dev", "--until-empty"],
        env=os.environ | PYTHON | {
            "TASKBOARD_DATABASE_URL": dsn,
            "HTTP_PROXY": "http://127.0.0.1:9",  # which could not find them
        },
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == [
        "mail to ann@example.com: Welcome",
        "stripe POST /v1/payment_intents: 200",
    ]
    assert [state(db, job)["state"] for job in jobs] == ["completed", "completed"]
