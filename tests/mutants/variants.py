"""Deliberately broken variants of the functions, and the tests that must notice.

Each breaks one promise of the design by a small, plausible change: a lock left out, a condition
forgotten, two statements made one. `test_mutants.py` loads each into a fresh database and runs the
named tests, which have to fail.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

SQL: Final = Path(__file__).parents[2] / "sql"

CLAIM: Final = "races/test_claim_races.py::"
PLAN: Final = "races/test_remembered_plan_races.py::"
RENEW: Final = "races/test_renew_races.py::"
COMPLETE: Final = "races/test_complete_races.py::"
FENCE: Final = "races/test_require_lease_races.py::"
EFFECT: Final = "races/test_effect_races.py::"
UNIQUE: Final = "races/test_unique_key_races.py::"
SERIAL: Final = "races/test_serial_key_races.py::"
OPERATOR: Final = "races/test_operator_races.py::"
LIMIT: Final = "races/test_limit_races.py::"
HISTORY: Final = "races/test_limit_history.py::"
BATCH: Final = "races/test_batches_do_not_deadlock.py::"
MODEL: Final = "sql/test_life_by_model.py::test_every_life_goes_as_the_model_says"
GATE: Final = (
    RENEW + "test_gate_that_was_reached_in_time_but_passed_too_late_is_refused[merely locks-"
)
SLOW: Final = (
    CLAIM + "test_job_made_claimable_in_a_slow_transaction_is_found"
    "_by_a_session_that_went_on_claiming["
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One broken variant.

    `changes` are pairs of exact text, each to be found once in `file`, and its replacement;
    `caught_by` are node ids below tests/, of which every one must fail.
    """

    name: str
    promise: str
    file: str
    changes: tuple[tuple[str, str], ...]
    caught_by: tuple[str, ...]

    def text(self) -> str:
        """The broken file; raises AssertionError when it has no place for the change."""
        text = (SQL / self.file).read_text(encoding="utf-8")
        for old, new in self.changes:
            found = text.count(old)
            assert found == 1, f"{self.name}: {self.file} has this text {found} times: {old}"
            text = text.replace(old, new)
        return text


# Floors that rise too early show where they are looked at often: a load need not last as long.
LOOK_OFTEN: Final = ("v_plan := v_plan || '0.1'::text;", "v_plan := v_plan || '0.02'::text;")

MUTANTS: Final = (
    Mutant(
        "claim in two steps, look then update",
        "S1",
        "27_pick_jobs.sql",
        (("      for update skip locked) as due", "      ) as due"),),
        (CLAIM + "test_second_claim_passes_over_a_job_that_is_just_being_claimed[commit]",),
    ),
    Mutant(
        "claim waits for a locked row",
        "S1",
        "27_pick_jobs.sql",
        (("for update skip locked) as due", "for update) as due"),),
        (CLAIM + "test_second_claim_takes_the_next_job_while_the_first_is_being_claimed",),
    ),
    Mutant(
        "claim by a remembered plan in two steps, look then update",
        "S1",
        "20_claim.sql",
        (("        for update skip locked) as due", "        ) as due"),),
        (PLAN + "test_remembered_second_claim_passes_over_a_job_just_being_claimed[commit]",),
    ),
    Mutant(
        "claim by a remembered plan waits for a locked row",
        "S1",
        "20_claim.sql",
        (("for update skip locked) as due", "for update) as due"),),
        (PLAN + "test_remembered_second_claim_takes_the_next_job_meanwhile",),
    ),
    Mutant(
        "reclaim by a remembered plan a minute early",
        "S3",
        "20_claim.sql",
        (
            (
                "where p.lane_id = lane.id and p.claimable_at <= v_now\n",
                "where p.lane_id = lane.id and p.claimable_at <= v_now"
                " + make_interval(mins => 2)\n",
            ),
        ),
        (PLAN + "test_remembered_claim_passes_over_a_lease_just_being_extended[commit]",),
    ),
    Mutant(
        "a remembered plan does not hear of a pause or a limit",
        "limits",
        "20_claim.sql",
        (
            (
                "v_plan[1] = v_key::text || '@' || s.xmin::text\n",
                "split_part(v_plan[1], '@', 1) = v_key::text\n",
            ),
        ),
        (PLAN + "test_remembered_plan_is_not_followed_into_a_queue_that_is_paused_or_limited",),
    ),
    Mutant(
        "a remembered plan forgets whose budget is used up",
        "L1",
        "20_claim.sql",
        (("p.lost_leases + 1 < coalesce(", "p.lost_leases < coalesce("),),
        (PLAN + "test_remembered_claim_passes_over_what_is_exhausted_or_to_be_cancelled",),
    ),
    Mutant(
        "token ignored in complete",
        "S2",
        "30_complete.sql",
        (
            (
                "j.id = complete.job_id and j.lease_token = complete.lease_token",
                "j.id = complete.job_id",
            ),
        ),
        (
            CLAIM + "test_expiry_claim_and_completion_in_every_order_complete_a_job_once"
            "[expire claim complete-B]",
            MODEL,
        ),
    ),
    Mutant(
        "look at the token, then complete by id",
        "S2",
        "30_complete.sql",
        (
            (
                "where j.id = complete.job_id and j.lease_token = complete.lease_token",
                "where j.id = complete.job_id and exists (select from taskboard.jobs as x"
                " where x.id = complete.job_id and x.lease_token = complete.lease_token)",
            ),
        ),
        (CLAIM + "test_completion_waits_for_a_reclaim_and_counts_only_if_that_rolls_back[commit]",),
    ),
    Mutant(
        "renew without a deadline",
        "S2",
        "21_renew.sql",
        (("not found or v_job.claimable_at <= v_now or", "not found or"),),
        (GATE + "renew]",),
    ),
    Mutant(
        "renew reads the clock before the lock",
        "S2",
        "21_renew.sql",
        (
            (
                "must not revive a lease that lapsed meanwhile.\n  v_now := clock_timestamp();",
                "\n  v_now := statement_timestamp();",
            ),
        ),
        (
            GATE + "renew]",
            RENEW + "test_gate_that_was_reached_in_time_but_passed_too_late_is_refused"
            "[rolls a change back-renew]",
            RENEW + "test_renewal_grants_its_length_from_after_the_wait",
        ),
    ),
    Mutant(
        "begin_effect reads the clock before the lock",
        "S2",
        "33_effects.sql",
        (
            (
                "A worker that slept stops here.\n  v_now := clock_timestamp();",
                "\n  v_now := statement_timestamp();",
            ),
        ),
        (GATE + "begin_effect]",),
    ),
    Mutant(
        "timeout of an attempt forgotten",
        "S2",
        "21_renew.sql",
        (("    and j.claimed_at + coalesce(j.timeout, v_set.timeout) > v_now\n", ""),),
        (
            RENEW + "test_renewal_after_the_timeout_of_the_attempt_is_refused"
            "_though_the_lease_is_current",
        ),
    ),
    Mutant(
        "reclaim a minute early",
        "S3",
        "27_pick_jobs.sql",
        (
            (
                "where p.lane_id = lane.id and p.claimable_at <= lock_due.now\n",
                "where p.lane_id = lane.id and p.claimable_at <= lock_due.now"
                " + make_interval(mins => 2)\n",
            ),
        ),
        (
            CLAIM + "test_second_claim_passes_over_a_job_that_is_just_being_claimed[commit]",
            CLAIM + "test_claim_passes_over_a_job_whose_lease_is_just_being_extended[commit]",
        ),
    ),
    Mutant(
        "deadline counted from the start of the transaction",
        "S3",
        "20_claim.sql",
        (
            (
                "claimable_at = (select clock_timestamp()) + coalesce(",
                "claimable_at = now() + coalesce(",
            ),
        ),
        (RENEW + "test_deadline_of_a_claim_late_in_a_transaction_lies_a_whole_lease_ahead",),
    ),
    Mutant(
        "eviction by a list that was read without a lock",
        "S3",
        "43_evict.sql",
        (("    order by j.id\n    for update skip locked);", "    order by j.id);"),),
        (OPERATOR + "test_eviction_beside_a_reclaim_leaves_the_new_lease_alone",),
    ),
    Mutant(
        "attempts counted only when a lease was lost",
        "S4",
        "20_claim.sql",
        (
            (
                "attempt = j.attempt + 1,",
                "attempt = j.attempt + (j.lease_token is not null)::integer,",
            ),
        ),
        (
            CLAIM + "test_expiry_claim_and_completion_in_every_order_complete_a_job_once"
            "[expire claim complete-B]",
            CLAIM + "test_eight_sessions_get_each_of_many_jobs_once_and_never_wait",
            MODEL,
        ),
    ),
    Mutant(
        "completion of a finished job by anybody",
        "S5",
        "30_complete.sql",
        (
            (
                "where h.id = complete.job_id and h.lease_token = complete.lease_token",
                "where h.id = complete.job_id",
            ),
        ),
        (COMPLETE + "test_completion_repeated_by_anybody_else_gets_nothing", MODEL),
    ),
    Mutant(
        "completion not repeatable",
        "S5",
        "30_complete.sql",
        (
            (
                "where h.id = complete.job_id and h.lease_token = complete.lease_token",
                "where false",
            ),
        ),
        (
            COMPLETE + "test_completion_repeated_while_the_first_is_committing_gets_the_same_row"
            "[complete-commit]",
            MODEL,
        ),
    ),
    Mutant(
        "finishing and the look for a repeat with one snapshot",
        "S7",
        "30_complete.sql",
        (
            (
                "  v_finished_at timestamptz;\nbegin",
                "  v_finished_at timestamptz := (select h.finished_at from taskboard.history as h"
                " where h.id = complete.job_id and h.lease_token = complete.lease_token);\nbegin",
            ),
            (
                "  select h.finished_at into v_finished_at\n  from taskboard.history as h\n"
                "  where h.id = complete.job_id and h.lease_token = complete.lease_token\n",
                "  perform where v_finished_at is not null;\n  --",
            ),
        ),
        (
            COMPLETE + "test_completion_repeated_while_the_first_is_committing_gets_the_same_row"
            "[complete-commit]",
        ),
    ),
    Mutant(
        "cancel looks, then acts",
        "S5",
        "40_cancel.sql",
        (("taskboard.take_job_lock(j.serial_key, j.id))\n    for update;", "true);"),),
        (OPERATOR + "test_cancel_behind_a_completion_reports_how_the_job_ended[commit]",),
    ),
    Mutant(
        "retry copies instead of moving",
        "S5",
        "41_retry.sql",
        (("    where h.id = retry.job_id\n    for update;", "    where h.id = retry.job_id;"),),
        (OPERATOR + "test_two_retries_at_once_bring_one_job_back[commit]",),
    ),
    Mutant(
        "failed jobs of one serial key come back in another order",
        "serial",
        "41_retry.sql",
        (("end nulls first, old.finished_at\n",
          "end nulls first, old.finished_at desc\n"),),
        (MODEL,),
    ),
    Mutant(
        "exhausted jobs ended without looking who holds them",
        "S5",
        "05_finish.sql",
        (("      for update skip locked) as j", "      ) as j"),),
        (CLAIM + "test_exhausted_job_that_is_just_being_completed_is_left_alone",),
    ),
    Mutant(
        "fence that locks nothing",
        "S2",
        "22_require_lease.sql",
        (("  for key share;", ";"),),
        (FENCE + "test_fence_holds_off_a_reclaim_until_its_transaction_ends[commit]",),
    ),
    Mutant(
        "fence that holds up renewals",
        "L1",
        "22_require_lease.sql",
        (("  for key share;", "  for update;"),),
        (FENCE + "test_fence_lets_renewals_pass[renew]",),
    ),
    Mutant(
        "renewals that wait for one locked row",
        "L1",
        "21_renew.sql",
        (("for no key update skip locked) as k", "for no key update) as k"),),
        (RENEW + "test_one_locked_row_is_busy_and_holds_up_no_other_renewal[commit]",),
    ),
    Mutant(
        "batches that lock rows as they find them",
        "L1",
        "30_complete.sql",
        (("      order by w.id) as w,\n", "      limit all) as w,\n"),),
        (BATCH + "test_batch_in_the_opposite_order_waits_for_the_first_row_and_holds_none",),
    ),
    Mutant(
        "scan floor adopted at once",
        "L1",
        "26_floor.sql",
        (("o.by <> 0 and pg_snapshot_xmin(pg_current_snapshot())::text::bigint >= o.by as adopt",
          "o.by <> 0 as adopt"), LOOK_OFTEN),
        (SLOW + "enqueue]",),
    ),
    Mutant(
        "scan floor by the newest transaction that has ended",
        "L1",
        "26_floor.sql",
        (("and pg_snapshot_xmin(", "and pg_snapshot_xmax("), LOOK_OFTEN),
        (SLOW + "release]",),
    ),
    Mutant(
        "serial hand-over without the key's lock",
        "L1",
        "04_keys.sql",
        (("where s.key = take_turn_lock.key for update;", "where s.key = take_turn_lock.key;"),),
        (SERIAL + "test_hand_over_waits_for_a_job_that_is_just_joining[commit]",),
    ),
    Mutant(
        "a serial key counts its jobs from one again",
        "L1",
        "04_keys.sql",
        (("last_no = s.last_no + excluded.last_no", "last_no = excluded.last_no"),),
        (SERIAL + "test_hand_over_waits_for_a_job_that_is_just_joining[commit]",),
    ),
    Mutant(
        "unique key by looking, then inserting",
        "unique",
        "04_keys.sql",
        (
            (
                "    values (\n      take_unique_key.kind, take_unique_key.key,"
                " take_unique_key.job_id, true,\n      take_unique_key.held_until)\n"
                "    on conflict do nothing;",
                "    select take_unique_key.kind, take_unique_key.key, take_unique_key.job_id,"
                " true,\n      take_unique_key.held_until\n    where not exists (select from"
                " taskboard.unique_keys as x where x.kind = take_unique_key.kind and x.key ="
                " take_unique_key.key);",
            ),
        ),
        (
            UNIQUE + "test_second_producer_waits_and_gets_the_first_ones_job_if_that_commits"
            "[enqueue-commit]",
        ),
    ),
    Mutant(
        "unique key never freed",
        "unique",
        "04_keys.sql",
        (("    and (u.held_until is null or u.held_until <= v_now);", "    and false;"),),
        (
            UNIQUE + "test_producer_waits_for_a_holder_that_is_just_finishing[commit-complete]",
            MODEL,
        ),
    ),
    Mutant(
        "an effect that is done looks done to its own attempt only",
        "E1",
        "33_effects.sql",
        (
            (
                "when bool_or(coalesce(e.happened, false)) then 'done'",
                "when bool_or(coalesce(e.happened, false)"
                " and e.lease_token = effect_state.lease_token) then 'done'",
            ),
        ),
        (EFFECT + "test_state_of_an_effect_is_never_fresh_again_after_done_whoever_says_what",),
    ),
    Mutant(
        "the last witness is right",
        "E1",
        "33_effects.sql",
        (("(e.ended_at is null or (not e.happened and end_effect.happened))", "true"),),
        (
            EFFECT + "test_state_of_an_effect_is_never_fresh_again_after_done_whoever_says_what",
            MODEL,
        ),
    ),
    Mutant(
        "effect key per attempt",
        "E1",
        "33_effects.sql",
        (
            (
                "begin_effect.job_id || '/' || begin_effect.step;",
                "begin_effect.job_id || '/' || begin_effect.lease_token;",
            ),
        ),
        (
            EFFECT + "test_state_of_an_effect_is_never_fresh_again_after_done_whoever_says_what",
            MODEL,
        ),
    ),
    Mutant(
        "evidence and a hold at the same time",
        "E1",
        "33_effects.sql",
        (("perform pg_advisory_xact_lock(1952539510, hashtext(begin_effect.job_id::text));", ""),),
        (
            EFFECT + "test_hold_waits_for_evidence_that_is_just_arriving_and_hears_it[commit]",
            EFFECT + "test_two_begins_of_one_token_hold_the_job_once_and_neither_is_a_deadlock",
        ),
    ),
    Mutant(
        "evidence that does not lock the job",
        "E1",
        "33_effects.sql",
        (
            (
                "    where j.id = lock_for_evidence.job_id\n    for key share;",
                "    where j.id = lock_for_evidence.job_id;",
            ),
        ),
        (EFFECT + "test_last_failure_waits_for_evidence_that_is_just_arriving[commit]",),
    ),
    Mutant(
        "claims from a limited queue at the same time",
        "limits",
        "25_limits.sql",
        (("      for update skip locked;\n", "      limit 1;\n"),),
        (
            HISTORY + "test_two_claims_at_once_start_no_more_than_the_limit[running]",
            HISTORY + "test_two_claims_at_once_start_no_more_than_the_limit[starts]",
        ),
    ),
    Mutant(
        "wait for a busy limits row",
        "limits",
        "25_limits.sql",
        (("      for update skip locked;\n", "      for update;\n"),),
        (LIMIT + "test_claim_from_a_limited_queue_is_passed_over_while_another_is_in_progress"
         "[commit]",),
    ),
    Mutant(
        "lapsed leases count as running",
        "limits",
        "25_limits.sql",
        ((" and j.claimable_at > v_now\n", "\n"),),
        (LIMIT + "test_lapsed_lease_frees_its_place_in_a_limited_queue",),
    ),
    Mutant(
        "starts count from the beginning of the transaction",
        "limits",
        "25_limits.sql",
        (("select q.name, clock_timestamp(), count(*)", "select q.name, now(), count(*)"),),
        (HISTORY + "test_a_start_counts_from_the_claim_however_old_its_transaction_is",),
    ),
    Mutant(
        "two runners take the same occurrence",
        "schedules",
        "45_schedules.sql",
        (("    and s.next_at is not distinct from advance_schedule.due_at\n", ""),),
        (LIMIT + "test_second_runner_waits_and_advances_a_schedule_only_if_the_first_rolls_back"
         "[commit]",),
    ),
)
