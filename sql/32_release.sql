create or replace function taskboard.release(
  job_id uuid, lease_token uuid, delay interval default null)
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
  v_delay interval := release.delay;
  v_job record;
begin
  if not taskboard.may_touch(release.job_id, release.lease_token) then
    return;
  end if;
  v_delay := coalesce(taskboard.check_span('delay', v_delay, '0', s.delay_most), '0')
  from taskboard.settings as s;

  select j.cancel_requested_at, j.cancel_reason, l.queue into v_job
  from taskboard.jobs as j
  join taskboard.lanes as l on l.id = j.lane_id + 0
  where j.id = release.job_id and j.lease_token = release.lease_token
    and (j.serial_key is null or taskboard.take_job_lock(j.serial_key, j.id))
  for update of j;
  if not found then
    perform taskboard.note_refusal('release', release.job_id, release.lease_token);
    return;
  end if;
  if v_job.cancel_requested_at is not null then
    perform taskboard.finish(
      release.job_id, 'cancelled', release.lease_token, v_job.cancel_reason);
    v_row := row(release.job_id, 'cancelled', null);
    return next v_row;
    return;
  end if;
  v_row := taskboard.give_back(release.job_id, v_job.queue, v_delay);
  return next v_row;
end
$$;

comment on function taskboard.release(uuid, uuid, interval) is
$$Give a job back without charging anything.
For a shutdown, a not yet, a rate limit.
Claimable again after delay (0 to a year, by default at once); neither failures nor lost_leases
rise. state: ready, scheduled, or cancelled when a cancel was asked for. Zero rows: not yours.
Locks the row of the serial key, then the job for update; waits at most 5 s (55P03).
Errors: 22004, 22023. Role: taskboard_worker.$$;

create or replace function taskboard.release_many(
  job_ids uuid[], lease_tokens uuid[], delays interval[] default null)
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
  perform taskboard.check_pairs(release_many.job_ids, release_many.lease_tokens, s.claim_jobs)
  from taskboard.settings as s;
  if cardinality(release_many.delays) <> cardinality(release_many.job_ids) then
    raise exception using errcode = '22023', message = 'the arrays differ in length',
      hint = 'Give one delay for each job, or null for all of them.';
  end if;
  -- As in complete_many: serial keys in order, then rows in id order.
  perform taskboard.take_turn_locks(release_many.job_ids, release_many.lease_tokens);
  return query
  select r.job_id, r.state, r.claimable_at
  from (
    select w.*
    from unnest(release_many.job_ids, release_many.lease_tokens, release_many.delays)
      as w (id, token, delay)
    order by w.id) as w
  cross join lateral taskboard.release(w.id, w.token, w.delay) as r;
end
$$;

comment on function taskboard.release_many(uuid[], uuid[], interval[]) is
$$Give many jobs back in one call, each as in release.
One row for each that is given back, with its state and claimable_at as of release; a job without a
row is not yours. lease_tokens and, if given, delays (null: at once) have one element for each of
job_ids.
Locks serial keys in order, then rows in id order; waits at most 5 s (55P03).
Errors: 22004, 22023. Role: taskboard_worker.$$;
