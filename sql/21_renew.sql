create or replace function taskboard.renew(
  job_id uuid, lease_token uuid, lease interval default null, progress jsonb default null)
returns setof taskboard.renewed
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
  v_job record;
  v_now timestamptz;
begin
  if not taskboard.may_touch(renew.job_id, renew.lease_token) then
    return;
  end if;
  perform taskboard.check_span('lease', renew.lease, s.lease_least, s.lease_most)
  from taskboard.settings as s where renew.lease is not null;
  perform taskboard.check_document('progress', renew.progress, 8192)
  where renew.progress is not null;

  select j.claimable_at, j.claimed_at, j.lease_granted, j.cancel_requested_at,
    coalesce(j.timeout, s.timeout) as timeout
  into v_job
  from taskboard.jobs as j
  cross join taskboard.settings as s
  where j.id = renew.job_id and j.lease_token = renew.lease_token
  for no key update of j;
  -- The clock after the lock: a wait for the row must not revive a lease that lapsed meanwhile.
  v_now := clock_timestamp();
  if not found or v_job.claimable_at <= v_now or v_job.claimed_at + v_job.timeout <= v_now then
    perform taskboard.note_refusal('renew', renew.job_id, renew.lease_token);
    return;
  end if;
  return query
  update taskboard.jobs as j
  set claimable_at = v_now + coalesce(taskboard.exact(renew.lease), v_job.lease_granted),
    lease_granted = coalesce(taskboard.exact(renew.lease), v_job.lease_granted),
    progress = coalesce(renew.progress, j.progress)
  where j.id = renew.job_id
  returning j.id, j.claimable_at, v_job.cancel_requested_at is not null;
end
$$;

comment on function taskboard.renew(uuid, uuid, interval, jsonb) is
$$Extend an unexpired lease to lease from now.
lease: by default as long as it was granted.
Zero rows: you no longer own the job (reclaimed, lapsed, finished, past its timeout): stop working
and do not complete. cancel_requested: somebody asked to stop; end with fail or release.
progress: up to 8 kB for job_list, where observers see it.
Waits at most 5 s for the row (55P03). Errors: 22004, 22023. Role: taskboard_worker.$$;

create or replace function taskboard.renew_many(
  job_ids uuid[], lease_tokens uuid[], lease interval default null)
returns setof taskboard.renewed_many
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  v_set taskboard.settings;
  v_lease interval := renew_many.lease;
  v_tokens uuid[] := renew_many.lease_tokens;
  v_locked uuid[];
  v_renewed integer;
  v_now timestamptz;
begin
  select s.* into v_set from taskboard.settings as s;
  perform taskboard.check_pairs(renew_many.job_ids, renew_many.lease_tokens, v_set.claim_jobs);
  v_lease := taskboard.check_span('lease', v_lease, v_set.lease_least, v_set.lease_most);
  if v_set.queue_rights then
    v_tokens := taskboard.own_tokens(renew_many.job_ids, v_tokens);
  end if;

  v_locked := array(
    select k.id
    from (
      select w.id, w.token
      from unnest(renew_many.job_ids, v_tokens) as w (id, token)
      order by w.id) as w
    -- Lateral, so that each is found by its id, whatever the planner thinks of the table.
    cross join lateral (
      select j.id
      from taskboard.jobs as j
      where j.id = w.id and j.lease_token = w.token
      for no key update skip locked) as k);
  -- The clock after the locks, as in renew.
  v_now := clock_timestamp();
  return query
  update taskboard.jobs as j
  set claimable_at = v_now + coalesce(v_lease, j.lease_granted),
    lease_granted = coalesce(v_lease, j.lease_granted)
  where j.id = any (v_locked)
    and (j.claimable_at > v_now) is true
    and j.claimed_at + coalesce(j.timeout, v_set.timeout) > v_now
  returning j.id, j.claimable_at, j.cancel_requested_at is not null, 'renewed'::text;
  get diagnostics v_renewed = row_count;
  return query
  select k.id, null::timestamptz, k.cancel_requested, 'busy'::text
  from unnest(renew_many.job_ids, v_tokens) as w (id, token)
  cross join lateral (
    select j.id, j.cancel_requested_at is not null as cancel_requested
    from taskboard.jobs as j
    where j.id = w.id and j.lease_token = w.token
    limit 1) as k
  where w.id <> all (v_locked);
  if v_renewed < cardinality(renew_many.job_ids) then
    perform taskboard.note_refusal('renew', w.id, w.token)
    from unnest(renew_many.job_ids, v_tokens) as w (id, token)
    where not exists (
      select from taskboard.jobs as j
      where j.id = w.id and j.lease_token = w.token
        and (j.id <> all (v_locked) or j.claimable_at > v_now));
  end if;
end
$$;

comment on function taskboard.renew_many(uuid[], uuid[], interval) is
$$Extend many leases at once; a locked row does not hold up the others.
job_ids, lease_tokens: one token for each job, at the same place. outcome: 'renewed', or 'busy' when
the row is locked just now (ask again soon; not lost; no lease_expires_at). No row for a job: the
lease is lost, as in renew. Never waits for a row. Errors: 22004, 22023. Role: taskboard_worker.$$;
