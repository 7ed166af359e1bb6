"""What a runner has claimed: jobs that run, and those that are next when one of them ends.

A batch is what there are free slots for. But while jobs end in less than 20 ms, asking for more of
them takes longer than they do: then as many are claimed ahead as will have begun 20 ms later, at
the pace of late, and fewer where payloads are large. What waits for a second all the same is given
back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from uuid import UUID

from taskboard.attempts import Attempt
from taskboard.leases import now

AHEAD = 0.02  # seconds that a job should wait for a slot at most: a fifth of the shortest lease
AHEAD_JOBS, AHEAD_BYTES = 500, 8_000_000  # at most; bytes of payloads
LINGER = 0.03  # seconds for which a runner that was busy looks again and again
WAITS_WITHIN = 1.0  # seconds, then others may have it
SLOW = 60.0  # seconds that jobs are taken to last while nothing is known; none is claimed ahead


class Slots:
    """Room for so many running jobs, and for a few that are next."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.running: dict[Attempt, None] = {}
        self.next: deque[Attempt] = deque()
        self._pace = SLOW  # seconds that a job took, on average; recent ones count most
        self._bytes = 1.0  # of a payload, on average
        self._streak, self._busy_until = 0, 0.0

    def free(self, unsettled: int) -> int:
        """How many more to claim, while so many that have ended are not settled."""
        ahead = int(min(self.size * AHEAD / self._pace, AHEAD_JOBS, AHEAD_BYTES / self._bytes))
        room = self.size + (ahead if self._pace < AHEAD else 0)
        return room - len(self.running) - len(self.next) - max(0, unsettled - room)

    def weigh(self, payload: int) -> None:
        """Learn how large payloads are: at once when they grow, slowly when they shrink."""
        self._bytes = max(payload, self._bytes + (payload - self._bytes) / 64, 1.0)

    def slow_down(self) -> None:
        """Claim none ahead until jobs have shown to be short again."""
        self._pace = SLOW

    def idles(self, got: int, free: int) -> bool:
        """Whether the runner is to be told of new jobs, after a claim that got so many.

        Not while claim after claim gets some, nor just afterwards: telling costs the producers.
        """
        self._streak = self._streak + 1 if got else 0
        if self._streak >= 3:
            self._busy_until = now() + LINGER
        return got < free and not self.linger

    @property
    def linger(self) -> float:
        """In how many seconds to look again, where more is likely to come at once; 0 elsewhere."""
        return LINGER / 6 if now() < self._busy_until else 0.0

    @property
    def alive(self) -> list[Attempt]:
        """Those that run, without those whose handlers do not end."""
        return [attempt for attempt in self.running if not attempt.hung]

    def job_ids(self) -> set[UUID]:
        """The jobs that are here."""
        return {attempt.job.id for attempt in (*self.running, *self.next)}

    def fill(self) -> Iterator[Attempt]:
        """Take what is next into the slots that are free."""
        while self.next and len(self.running) < self.size:
            attempt = self.next.popleft()
            self.running[attempt] = None
            attempt.started_at = now()
            yield attempt

    def end(self, attempt: Attempt) -> None:
        """Free the slot of a job."""
        del self.running[attempt]
        self._pace += (max(now() - attempt.started_at, 1e-5) - self._pace) / 8

    def drop(self, waited: float = WAITS_WITHIN) -> Iterator[Attempt]:
        """Give up those that have waited for a slot for so many seconds."""
        while self.next and now() - self.next[0].started_at >= waited:
            self.slow_down()
            yield self.next.popleft()
