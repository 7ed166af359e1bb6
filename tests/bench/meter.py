"""What every no-op handler in Python calls: it counts, and says when its time is up.

BENCH_OUT is the file to say it in, BENCH_SECONDS how long to count (after a tenth to get warm),
BENCH_JOBS how many jobs there are. In BENCH_MODE=pickup each call says when it began.
"""

from __future__ import annotations

import os
from time import perf_counter, time

OUT = os.environ.get("BENCH_OUT", "")
MODE = os.environ.get("BENCH_MODE", "rate")
SECONDS = float(os.environ.get("BENCH_SECONDS", "5"))
JOBS = int(os.environ.get("BENCH_JOBS", "0"))


class Meter:
    def __init__(self) -> None:
        self.count, self.began, self.warm, self.warm_at = 0, 0.0, 0, 0.0
        self.out = open(OUT, "a", buffering=1) if OUT else None  # noqa: SIM115

    def hit(self, n: object = None) -> None:
        if MODE == "pickup":
            self.say(f"{n} {time()}")
            return
        now = perf_counter()
        self.count += 1
        if self.count == 1:
            self.began = now
        elif not self.warm and (now > self.began + SECONDS / 10 or self.count * 10 >= JOBS):
            self.warm, self.warm_at = self.count, now
        elif (
            self.warm
            and self.out
            and (now > max(self.began + SECONDS, self.warm_at + SECONDS / 2) or self.count >= JOBS)
        ):
            self.say(f"rate {(self.count - self.warm) / (now - self.warm_at)}")
            self.out.close()
            self.out = None

    def say(self, text: str) -> None:
        if self.out:
            self.out.write(text + "\n")


meter = Meter()
