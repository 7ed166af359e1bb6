"""The life of a job as data: what leads from which state to which.

`test_life.py` plays every verb in every state, and each circumstance; what is not listed here
changes no state. `mermaid` draws the same list for `sql/README.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

NONE: Final = "(none)"
LIVE: Final = ("scheduled", "ready", "running", "expired", "blocked", "held")
ENDED: Final = ("completed", "failed", "cancelled")
VERBS: Final = (
    "claim", "renew", "complete", "fail", "fail for good", "release", "evict", "cancel",
    "cancel by force", "retry", "resolve",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """A job is in the state `before`; `how` says what happens; then it is in the state `after`."""

    before: str
    how: str
    after: str


def read(text: str) -> tuple[Step, ...]:
    """Read a table drawn with `|`."""
    lines = [[cell.strip() for cell in line.split("|")] for line in text.strip().splitlines()]
    return tuple(Step(*line) for line in lines)


# By whoever holds the token that the job had last; claim is another worker's.
BY_VERB: Final = read("""
scheduled | cancel          | cancelled
scheduled | cancel by force | cancelled
ready     | claim           | running
ready     | cancel          | cancelled
ready     | cancel by force | cancelled
running   | complete        | completed
running   | fail            | scheduled
running   | fail for good   | failed
running   | release         | ready
running   | evict           | expired
running   | cancel by force | cancelled
expired   | claim           | running
expired   | complete        | completed
expired   | fail            | scheduled
expired   | fail for good   | failed
expired   | release         | ready
expired   | cancel          | cancelled
expired   | cancel by force | cancelled
blocked   | cancel          | cancelled
blocked   | cancel by force | cancelled
held      | resolve         | ready
held      | cancel          | cancelled
held      | cancel by force | cancelled
completed | retry           | ready
failed    | retry           | ready
cancelled | retry           | ready
""")

BY_CIRCUMSTANCE: Final = read("""
(none)    | enqueue                            | ready
(none)    | enqueue, due later                 | scheduled
(none)    | enqueue, behind its serial key     | blocked
scheduled | its date comes                     | ready
blocked   | its turn comes                     | ready
running   | its lease runs out                 | expired
running   | fail, the last attempt             | failed
running   | fail or release, after a cancel    | cancelled
running   | fail, an outcome is unknown        | held
running   | begin_effect, unknown before       | held
expired   | claim, lost too often              | failed
held      | end_effect, late evidence          | ready
""")

STEPS: Final = BY_CIRCUMSTANCE + BY_VERB


def mermaid() -> str:
    """Draw the states and what leads from one to another; a pair of states has one arrow."""
    hows: dict[tuple[str, str], list[str]] = {}
    for step in STEPS:
        if step.how != "cancel by force" or step.before == "running":
            hows.setdefault((step.before, step.after), []).append(step.how)
    lines = ["stateDiagram-v2"]
    for (before, after), words in hows.items():
        start = "[*]" if before == NONE else before
        lines.append(f"    {start} --> {after}: {' / '.join(words)}")
    return "\n".join(lines)
