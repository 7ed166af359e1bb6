"""Spin looks at every interleaving of the model of the lease protocol, and at broken variants.

Needs spin and gcc. `python -m faults.test_model [MACRO…]`, in tests/, checks one variant by hand.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

MODEL = Path(__file__).parent / "model" / "lease.pml"

HOLDS = {
    "the protocol, with a failover that loses commits": [],
    "completions that ask for the deadline, too: stricter than need be": [
        "COMPLETION_ASKS_FOR_DEADLINE"
    ],
    "a completion that was acknowledged stays, when commits wait for the standby": [
        "SYNCHRONOUS", "COMPLETION_STAYS",
    ],
    "attempts as the fence, while no failover loses one": ["ATTEMPT_IS_FENCE", "NO_FAILOVER"],
}  # fmt: skip

# Variant: the assertion that it violates.
BROKEN = {
    "TOKEN_IGNORED": "(db.holder==token)",
    "LOOK_THEN_COMPLETE": "(db.holder==token)",
    "ATTEMPT_IS_FENCE": "(db.holder==token)",
    "RENEW_REVIVES": "!(lapsed)",
    "CLOCK_BEFORE_LOCK": "!(lapsed)",
    "GATE_WITHOUT_DEADLINE": "((db.holder==token)&&(db.left>0))",
    "RECLAIM_EARLY": "((db.token==0)||(db.left<=0))",
    "CLAIM_IN_TWO_STEPS": "!(db.done)",
    "STATUS_INSTEAD_OF_LEASE": "(db.done||(tokens==3))",
    "COMPLETION_NOT_REPEATABLE": "(db.ended_by!=token)",
    "COMPLETION_STAYS": "( !(acknowledged)||db.done)",
    "KEY_PER_ATTEMPT": "((charged&(charged-1))==0)",
    "LEDGER_PER_ATTEMPT": "!(db.happened)",
}

@dataclass(frozen=True, slots=True)
class Search:
    """What Spin says: the assertion that was violated, if one was, steps never taken, the cost."""

    violated: str | None
    unreached: tuple[str, ...]
    states: int
    seconds: float


def search(macros: Sequence[str], optimize: str = "-O1") -> Search:
    """Look at all states of a variant. Raises CalledProcessError, AssertionError: unfinished."""
    defined = [f"-D{macro}" for macro in macros]
    with tempfile.TemporaryDirectory() as folder:

        def run(*words: str) -> str:
            done = subprocess.run(
                words, cwd=folder, check=True, capture_output=True, text=True, timeout=300
            )
            return done.stdout

        # -o3: every statement has a state of its own, so that none counts as reached by another.
        run("spin", "-a", "-o3", *defined, str(MODEL))
        run("gcc", optimize, "-w", "-DSAFETY", "-o", "pan", "pan.c")
        said = run("./pan", "-m100000")
    violated = re.search(r"^pan:1: (?:assertion violated )?(.*?) \(at depth", said, re.MULTILINE)
    assert violated or ("errors: 0" in said and "not completed" not in said), said
    assert "max search depth too small" not in said, said
    numbers = re.search(r"(\d+) states, stored[\s\S]*elapsed time ([\d.e+-]+)", said)
    assert numbers, said
    unreached = re.findall(r"^\t(lease.pml:\d+, state \d+, (?!\"-end-).*)", said, re.MULTILINE)
    assertion = violated[1].strip() if violated else None
    return Search(assertion, tuple(unreached), int(numbers[1]), float(numbers[2]))


@pytest.mark.wide
@pytest.mark.parametrize("what", HOLDS)
def test_no_interleaving_violates(what: str) -> None:
    found = search(HOLDS[what])
    assert found.violated is None
    assert found.states > 100_000
    if HOLDS[what] == []:  # or the assertions would hold for want of anything that happens
        assert found.unreached == ()


@pytest.mark.wide
@pytest.mark.parametrize("macro", BROKEN)
def test_model_notices_a_broken_rule(macro: str) -> None:
    assert search([macro], "-O0").violated == BROKEN[macro]


if __name__ == "__main__":
    print(search(sys.argv[1:]))
