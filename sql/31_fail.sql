create or replace function taskboard.fail(
  job_id uuid, lease_token uuid, error text default null, retry_in interval default null,
  permanent boolean default false)
returns setof taskboard.given_back
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
#variable_conflict use_column
declare
  v_row taskboard.given_back;
  v_set taskboard.settings;
  v_job record;
  v_error text;
  v_wait interval;
  v_state text;
  v_claimable_at timestamptz;
begin
  if not taskboard.may_touch(fail.job_id, fail.lease_token) then
    return;
  end if;
  if fail.permanent is null then
    raise exception using errcode = '22004', message = 'permanent must not be null',
      hint = 'true ends the job as failed, false lets it be tried again.';
  end if;
  select s.* into v_set from taskboard.settings as s;
  v_wait := taskboard.check_span('retry_in', fail.retry_in, '0', v_set.delay_most);
  v_error := taskboard.cut(fail.error, v_set.error_bytes);

  select j.failures, j.max_attempts, j.cancel_requested_at, j.cancel_reason, l.queue into v_job
  from taskboard.jobs as j
  join taskboard.lanes as l on l.id = j.lane_id + 0
  where j.id = fail.job_id and j.lease_token = fail.lease_token
    and (j.serial_key is null or taskboard.take_job_lock(j.serial_key, j.id))
  for update of j;
  if not found then
    perform taskboard.note_refusal('fail', fail.job_id, fail.lease_token);
    return;
  end if;

  update taskboard.jobs as j
  set failures = j.failures + 1, last_error = v_error
  where j.id = fail.job_id;
  if v_job.cancel_requested_at is not null then
    perform taskboard.finish(
      fail.job_id, 'cancelled', fail.lease_token,
      concat_ws('; ', v_job.cancel_reason, v_error));
    v_state := 'cancelled';
  elsif fail.permanent
    or v_job.failures + 1 >= coalesce(v_job.max_attempts, v_set.max_attempts)
  then
    v_state := taskboard.end_failed(fail.job_id, fail.lease_token, v_error);
  else
    -- The exponent is capped before the power is taken: 2^1000 has no interval.
    v_wait := coalesce(v_wait, (0.75 + random() * 0.5) * least(
      v_set.backoff * power(2, least(v_job.failures, 30)), v_set.backoff_max));
    select g.state, g.claimable_at into v_state, v_claimable_at
    from taskboard.give_back(fail.job_id, v_job.queue, v_wait) as g;
  end if;
  v_row := row(fail.job_id, v_state, v_claimable_at);
  return next v_row;
end
$$;

comment on function taskboard.fail(uuid, uuid, text, interval, boolean) is
$$Record that this attempt failed: the job is retried, or ends as failed.
state: scheduled or ready (tried again later, at claimable_at), failed (permanent, or the
max_attempts-th failure), cancelled (a cancel was asked for), held (it would end as failed, but
under on_unknown hold an effect's outcome is unknown). Zero rows: not yours, nothing changed.
retry_in: 0 to a year, by default min(5 s * 2^failures, 1 h) +- 25 %. error: cut at 8 kB.
An effect that was begun and not ended stays open, that is, unknown.
Locks the row of the serial key, then the job for update; waits at most 5 s (55P03).
Errors: 22004, 22023. Role: taskboard_worker.$$;

create or replace function taskboard.fail_many(
  job_ids uuid[], lease_tokens uuid[], errors text[] default null,
  retry_ins interval[] default null, permanents boolean[] default null)
returns setof taskboard.given_back
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
#variable_conflict use_column
begin
  perform taskboard.check_pairs(fail_many.job_ids, fail_many.lease_tokens, s.claim_jobs)
  from taskboard.settings as s;
  if cardinality(fail_many.errors) <> cardinality(fail_many.job_ids)
    or cardinality(fail_many.retry_ins) <> cardinality(fail_many.job_ids)
    or cardinality(fail_many.permanents) <> cardinality(fail_many.job_ids)
  then
    raise exception using errcode = '22023', message = 'the arrays differ in length',
      hint = 'Give one error, retry_in and permanent for each job, or null for all of them.';
  end if;
  -- As in complete_many: serial keys in order, then rows in id order.
  perform taskboard.take_turn_locks(fail_many.job_ids, fail_many.lease_tokens);
  return query
  select f.job_id, f.state, f.claimable_at
  from (
    select w.*
    from unnest(
      fail_many.job_ids, fail_many.lease_tokens, fail_many.errors, fail_many.retry_ins,
      fail_many.permanents) as w (id, token, error, retry_in, permanent)
    order by w.id) as w
  cross join lateral taskboard.fail(
    w.id, w.token, w.error, w.retry_in,
    case when fail_many.permanents is null then false else w.permanent end) as f;
end
$$;

comment on function taskboard.fail_many(uuid[], uuid[], text[], interval[], boolean[]) is
$$Fail many attempts in one call, each as in fail.
One row for each that is recorded, with its state and claimable_at as of fail; a job without a row
is not yours. lease_tokens and, if given, errors, retry_ins (null: the backoff) and permanents have
one element for each of job_ids.
Locks serial keys in order, then rows in id order; waits at most 5 s (55P03).
Errors: 22004, 22023. Role: taskboard_worker.$$;

create or replace function taskboard.give_back(job_id uuid, queue text, delay interval)
returns taskboard.given_back
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
#variable_conflict use_column
declare
  v_now timestamptz := clock_timestamp();
  v_at timestamptz;
begin
  v_at := v_now + give_back.delay;
  update taskboard.jobs as j
  set lane_id = (
      select coalesce(l.waits_in, l.id) from taskboard.lanes as l where l.id = j.lane_id),
    claimable_at = greatest(v_at, v_now), last_token = j.lease_token, lease_token = null,
    leased_by = null, lease_granted = null, claimed_at = null
  where j.id = give_back.job_id;
  if taskboard.somebody_sleeps(give_back.queue) then
    perform taskboard.wake(v_at - v_now);
  end if;
  return row(
    give_back.job_id, case when v_at > v_now then 'scheduled' else 'ready' end,
    greatest(v_at, v_now))::taskboard.given_back;
end
$$;

comment on function taskboard.give_back(uuid, text, interval) is
$$End a lease and let the job be claimed again after a delay (internal).
The caller holds the job's row for update, hence has a transaction id before we read the clock.$$;
