"""A server whose clock can be set while it runs: Debian's faketime, preloaded into it.

Only the clock that tells the time of day: the one that measures how long something took goes on.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

LIBRARY = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"
SLACK = 0.02  # seconds after which every process has the new time


@dataclass(slots=True)
class Period:
    """While the server's clock was off by so many seconds."""

    since: float
    until: float
    offset: float


@dataclass(slots=True)
class Clock:
    """The server's clock, and how it was set. After a step it is for a moment either."""

    file: Path
    periods: list[Period] = field(default_factory=lambda: [Period(0.0, math.inf, 0.0)])

    def set(self, offset: float) -> None:
        self.periods.append(Period(time.time(), math.inf, offset))
        fresh = self.file.with_suffix(".new")
        fresh.write_text(f"{offset:+.3f}\n")
        fresh.chmod(0o644)
        fresh.rename(self.file)
        self.periods[-2].until = time.time() + SLACK

    def off(self, began: float, ended: float) -> tuple[float, float]:
        """The least and the most that it was off between two instants."""
        found = [p.offset for p in self.periods if p.since <= ended and began <= p.until]
        return min(found), max(found)


def programs(real: Path, folder: Path, file: Path) -> Path:
    """Make a folder of programs that stand for those in `real`; postgres has the file's clock."""
    folder.mkdir()
    for program in real.iterdir():
        (folder / program.name).symlink_to(program)
    (folder / "postgres").unlink()
    (folder / "postgres").write_text(
        "#!/bin/sh\n"
        f"export LD_PRELOAD={LIBRARY} FAKETIME_TIMESTAMP_FILE={file} FAKETIME_NO_CACHE=1\n"
        "export FAKETIME_DONT_FAKE_MONOTONIC=1 FAKETIME_DONT_RESET=1\n"
        f'exec {real / "postgres"} "$@"\n'
    )
    (folder / "initdb").unlink()
    (folder / "initdb").write_text(f'#!/bin/sh\nexec {real / "initdb"} "$@"\n')
    for name in ("postgres", "initdb"):
        os.chmod(folder / name, 0o755)
    return folder
