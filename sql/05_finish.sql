create or replace function taskboard.finish(
  job_id uuid, state text, lease_token uuid default null, error text default null,
  finished_by text default null)
returns timestamptz
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  v_done record;
begin
  with gone as (
    delete from taskboard.jobs as j
    using taskboard.lanes as l
    where j.id = finish.job_id and l.id = j.lane_id + 0
    returning j.*, l.queue, l.kind, l.priority, l.keeps
  )
  insert into taskboard.history as h (
    id, finished_at, attempt, priority, failures, lost_leases, max_attempts, max_lost_leases,
    lease_token, run_at, created_at, claimed_at, lease, timeout, unique_until_claim, state, queue,
    kind, on_unknown, finished_by, unique_key, serial_key, error, headers, payload)
  select
    g.id, clock_timestamp(), g.attempt, g.priority, g.failures, g.lost_leases, g.max_attempts,
    g.max_lost_leases, finish.lease_token, g.run_at, g.created_at, g.claimed_at, g.lease, g.timeout,
    g.unique_until_claim, finish.state, g.queue, g.kind, g.on_unknown,
    coalesce(finish.finished_by, g.leased_by),
    g.unique_key, g.serial_key, coalesce(finish.error, g.last_error), g.headers, g.payload
  from gone as g
  returning h.finished_at, h.kind, h.unique_key, h.serial_key into v_done;

  return taskboard.let_keys_go(
    v_done.kind, v_done.unique_key, v_done.serial_key, finish.job_id, v_done.finished_at);
end
$$;

comment on function taskboard.finish(uuid, text, uuid, text, text) is
$$Move a live job to history, free its unique key and hand its turn on (internal).
The caller holds the job's row for update, and before it the row of its serial key.
lease_token: the token of the worker that finished it, null when somebody else did.$$;

create or replace function taskboard.open_step(job_id uuid)
returns text
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $$
  select e.step
  from taskboard.effects as e
  where e.job_id = open_step.job_id
    and e.ended_at is null
    and not exists (
      select from taskboard.effects as d
      where d.job_id = e.job_id and d.step = e.step and d.happened)
  order by e.begun_at
  limit 1
$$;

comment on function taskboard.open_step(uuid) is
$$Return the first step of a job that began and never ended, or null (internal).$$;

create or replace function taskboard.hold(job_id uuid, step text, why text)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  update taskboard.jobs as j
  set claimable_at = 'infinity', waits_for = 'person', held_step = hold.step, lease_token = null,
    leased_by = null, lease_granted = null, claimed_at = null
  where j.id = hold.job_id;
  perform taskboard.note_incident(
    'job_held', hold.job_id, l.queue, l.kind, detail => format('%s: %s', hold.step, hold.why))
  from taskboard.jobs as j
  join taskboard.lanes as l on l.id = j.lane_id + 0
  where j.id = hold.job_id;
end
$$;

comment on function taskboard.hold(uuid, text, text) is
$$Let a job wait for a person; its lease token is void (internal).
The caller holds the job's row for update.$$;

create or replace function taskboard.free_held(job_id uuid)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  update taskboard.jobs as j
  set claimable_at = clock_timestamp(), waits_for = null, held_step = null
  where j.id = free_held.job_id;
  perform taskboard.wake();
end
$$;

comment on function taskboard.free_held(uuid) is
$$Make a held job ready (internal).
The caller holds the job's row for update.$$;

create or replace function taskboard.end_failed(
  job_id uuid, lease_token uuid, error text, finished_by text default null)
returns text
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_step text;
begin
  select taskboard.open_step(j.id) into v_step
  from taskboard.jobs as j
  where j.id = end_failed.job_id and j.on_unknown = 'hold';
  if v_step is not null then
    update taskboard.jobs as j set last_error = end_failed.error where j.id = end_failed.job_id;
    perform taskboard.hold(end_failed.job_id, v_step, 'out of attempts with an unknown outcome');
    return 'held';
  end if;
  perform taskboard.finish(
    end_failed.job_id, 'failed', end_failed.lease_token, end_failed.error, end_failed.finished_by);
  return 'failed';
end
$$;

comment on function taskboard.end_failed(uuid, uuid, text, text) is
$$End a job as failed, or hold it when an effect's outcome is unknown (internal).
Held only under on_unknown hold.
The caller holds the job's row for update, and before it the row of its serial key.$$;

create or replace function taskboard.finish_exhausted(job_ids uuid[])
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_job record;
  v_most integer;
  v_state text;
  v_finished bigint := 0;
begin
  if cardinality(finish_exhausted.job_ids) = 0 then
    return 0;
  end if;
  select s.max_lost_leases into v_most from taskboard.settings as s;
  for v_job in
    select j.id, j.leased_by, j.lost_leases, j.cancel_requested_at, j.cancel_reason, j.serial_key,
      l.queue, l.kind
    from (
      select w.id from unnest(finish_exhausted.job_ids) as w (id) order by w.id) as w
    cross join lateral (
      select p.*
      from taskboard.jobs as p
      where p.id = w.id and p.lease_token is not null and p.claimable_at <= clock_timestamp()
        and (p.lost_leases + 1 >= coalesce(p.max_lost_leases, v_most)
          or p.cancel_requested_at is not null)
      for update skip locked) as j
    join taskboard.lanes as l on l.id = j.lane_id + 0
  loop
    if v_job.serial_key is not null then
      -- The key comes before the job; here the job is locked already, so never wait.
      perform from taskboard.serial_keys as s
      where s.key = v_job.serial_key
      for update skip locked;
      continue when not found;
    end if;
    update taskboard.jobs as j set lost_leases = j.lost_leases + 1 where j.id = v_job.id;
    if v_job.cancel_requested_at is not null then
      perform taskboard.finish(v_job.id, 'cancelled', error => v_job.cancel_reason);
    else
      v_state := taskboard.end_failed(
        v_job.id, null, format('lease lost %s times without an outcome', v_job.lost_leases + 1));
      perform taskboard.note_incident(
        'job_exhausted', v_job.id, v_job.queue, v_job.kind, v_job.leased_by,
        format('lease lost %s times; the job is %s', v_job.lost_leases + 1, v_state));
    end if;
    v_finished := v_finished + 1;
  end loop;
  return v_finished;
end
$$;

comment on function taskboard.finish_exhausted(uuid[]) is
$$End jobs that lost their lease once too often; return how many (internal).
Also those whose lease lapsed after a cancel was asked for.
Skips a job whose row or serial key somebody else holds just now.$$;

create or replace function taskboard.take_exhausted_turns()
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
declare
  v_now timestamptz := clock_timestamp();
begin
  perform taskboard.take_turn_lock(k.serial_key)
  from (
    select distinct j.serial_key
    from taskboard.settings as s
    cross join taskboard.lanes as l
    cross join lateral (
      select p.*
      from taskboard.jobs as p
      where p.lane_id = l.id and p.claimable_at <= v_now
      order by p.lane_id, p.claimable_at, p.place
      limit 1000) as j
    where s.one_row and l.returns_to = l.id
      and j.lease_token is not null and j.serial_key is not null
      and (j.lost_leases + 1 >= coalesce(j.max_lost_leases, s.max_lost_leases)
        or j.cancel_requested_at is not null)
    order by j.serial_key
    limit 10) as k;
end
$$;

comment on function taskboard.take_exhausted_turns() is
$$Lock the serial keys of some exhausted jobs, in line with producers (internal).
Who come without a gap would keep finish_exhausted, which passes over busy keys, from them for ever.
Waits as long as the caller's lock_timeout says (55P03).$$;
