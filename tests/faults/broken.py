"""The broken variants that histories must show, and with which load each is looked for.

Some meet a fault only if two calls fall into one small window. There the variant sleeps within the
window: it is as wrong as without, for longer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from faults.load import Aim
from mutants.variants import MUTANTS, Mutant

NOT_DURABLE: Final = "synchronous_commit=off, with restarts"
BY_ATTEMPT: Final = "attempt number as fence, across a lossy failover"

# By the row's place, as the claim does it, a wait for a row that another claim has changed ends
# with nothing; by its id, with a second claim. The plan is believed for longer: more claims meet.
BY_ID: Final = Mutant(
    "claim in two steps, look then update by id", "S1", "20_claim.sql",
    (
        ("v_set.age > v_plan[13]::float8", "v_set.age > 60"),
        ("        for update skip locked) as due", "        ) as due"),
        ("j.ctid = any (case", "j.id = any (case"),
        ("then v_picked else array(", "then array(select x.id from taskboard.jobs as x"
         " where x.ctid = any (v_picked)) else array("),
        ("      select due.ctid\n", "      select due.id\n"),
        ("        select p.ctid\n", "        select p.id\n"),
    ),
    (),
)  # fmt: skip

# What a failover forgets is issued again: the token is worth no more than the number.
ATTEMPT_AS_FENCE: Final = Mutant(
    BY_ATTEMPT, "S2", "20_claim.sql",
    (("lease_token = gen_random_uuid(),",
      "lease_token = md5(j.id::text || (j.attempt + 1)::text)::uuid,"),),
    (),
)  # fmt: skip

BATCH_WITHOUT_TOKENS: Final = Mutant(
    "batch of completions that looks at no token", "S2", "30_complete.sql",
    (("    where j.id = any (array[w.id]) and j.lease_token = w.token and l.id",
      "    where j.id = any (array[w.id]) and l.id"),),
    (),
)  # fmt: skip

BATCH_REVIVES: Final = Mutant(
    "batch of renewals without a deadline", "S2", "21_renew.sql",
    (("    and (j.claimable_at > v_now) is true\n    and j.claimed_at", "    and j.claimed_at"),),
    (),
)  # fmt: skip

CANCEL_FORGOTTEN: Final = Mutant(
    "release forgets that a cancel was asked for", "cancel", "32_release.sql",
    (("if v_job.cancel_requested_at is not null then", "if false then"),),
    (),
)  # fmt: skip

PAUSE_IGNORED: Final = Mutant(
    "pause that claims do not hear of", "pause", "26_floor.sql",
    (("where plan_scan.key is null or q.paused_at is null)", "where true)"),),
    (),
)  # fmt: skip

LIMIT_IGNORED: Final = Mutant(
    "limit of running jobs that claims do not count", "limits", "25_limits.sql",
    (("    if v_queue.max_running is not null then\n      v_room",
      "    if v_queue.max_running < 0 then\n      v_room"),),
    (),
)  # fmt: skip

RETRY_COUNTS_ANEW: Final = Mutant(
    "retry counts attempts from the beginning", "S4", "41_retry.sql",
    (("v_old.id, v_lane, v_old.attempt, case", "v_old.id, v_lane, 0, case"),),
    (),
)  # fmt: skip

SLEEP: Final = "perform pg_sleep(0.03);"

# Variant: where it sleeps, in its file.
WINDOWS: Final = {
    "look at the token, then complete by id": (
        ("select from taskboard.jobs as x where x.id", "select from taskboard.jobs as x,"
         " pg_sleep(0.05) where x.id"),
    ),
    "serial hand-over without the key's lock": (
        ("    delete from taskboard.serial_keys as s where s.key = hand_over.key;",
         f"    {SLEEP} delete from taskboard.serial_keys as s where s.key = hand_over.key;"),
    ),
    "evidence and a hold at the same time": (
        ("  if v_state = 'unknown' and (v_job.on_unknown",
         f"  {SLEEP} if v_state = 'unknown' and (v_job.on_unknown"),
    ),
    "cancel looks, then acts": (
        ("  if v_state is null then\n", f"  if v_state is null then {SLEEP}\n"),
    ),
    "retry copies instead of moving": (
        ("  if v_old.payload is null then", f"  {SLEEP} if v_old.payload is null then"),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Broken:
    """A variant; `text` is None where it is the servers that are set up wrongly."""

    name: str
    aim: Aim = Aim.ALL
    text: str | None = None


def broken(name: str, aim: Aim = Aim.ALL) -> Broken:
    if name == NOT_DURABLE:
        return Broken(name, aim)
    found = next(mutant for mutant in MUTANTS + OWN if mutant.name == name)
    return Broken(
        name, aim, replace(found, changes=found.changes + WINDOWS.get(name, ())).text()
    )


OWN: Final = (
    BY_ID, ATTEMPT_AS_FENCE, BATCH_WITHOUT_TOKENS, BATCH_REVIVES, CANCEL_FORGOTTEN, PAUSE_IGNORED,
    LIMIT_IGNORED, RETRY_COUNTS_ANEW,
)  # fmt: skip

NOTICED: Final = {
    "token ignored in complete": Aim.ALL,
    "look at the token, then complete by id": Aim.LEASES,
    BATCH_WITHOUT_TOKENS.name: Aim.BATCHES,
    "renew without a deadline": Aim.LEASES,
    BATCH_REVIVES.name: Aim.BATCHES,
    "renew reads the clock before the lock": Aim.LEASES,
    "begin_effect reads the clock before the lock": Aim.EFFECTS,
    "reclaim a minute early": Aim.ALL,
    BY_ID.name: Aim.ALL,
    "attempts counted only when a lease was lost": Aim.ALL,
    RETRY_COUNTS_ANEW.name: Aim.OPERATORS,
    "completion of a finished job by anybody": Aim.LEASES,
    "completion not repeatable": Aim.LEASES,
    "finishing and the look for a repeat with one snapshot": Aim.LEASES,
    "an effect that is done looks done to its own attempt only": Aim.EFFECTS,
    "the last witness is right": Aim.EFFECTS,
    "effect key per attempt": Aim.HOLD,
    "evidence and a hold at the same time": Aim.HOLD,
    "serial hand-over without the key's lock": Aim.SERIAL,
    "unique key by looking, then inserting": Aim.UNIQUE,
    "cancel looks, then acts": Aim.OPERATORS,
    CANCEL_FORGOTTEN.name: Aim.OPERATORS,
    "retry copies instead of moving": Aim.OPERATORS,
    PAUSE_IGNORED.name: Aim.OPERATORS,
    LIMIT_IGNORED.name: Aim.OPERATORS,
    "scan floor adopted at once": Aim.QUIET,
    "scan floor by the newest transaction that has ended": Aim.QUIET,
    NOT_DURABLE: Aim.ALL,
    BY_ATTEMPT: Aim.ALL,
}
