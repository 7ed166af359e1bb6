create or replace function taskboard.cancel(
  job_id uuid, reason text default null, force boolean default false)
returns setof taskboard.job_state
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
  v_row taskboard.job_state;
  v_job record;
  v_reason text := left(coalesce(cancel.reason, 'cancelled'), 1000);
  v_state text;
  v_now timestamptz := clock_timestamp();
begin
  if cancel.job_id is null or cancel.force is null then
    raise exception using errcode = '22004', message = 'job_id and force must not be null',
      hint = 'Name the job; force true fences a running one at once.';
  end if;
  if not taskboard.may_see(cancel.job_id) then
    perform taskboard.finished_state(null); -- looks unknown: TB002
  end if;
  loop
    -- A running job is asked in one statement that waits for no transaction of its worker.
    update taskboard.jobs as j
    set cancel_requested_at = coalesce(j.cancel_requested_at, clock_timestamp()),
      cancel_reason = coalesce(j.cancel_reason, v_reason)
    where j.id = cancel.job_id and j.lease_token is not null and not cancel.force
      and (j.claimable_at > v_now) is true
    returning j.lane_id, j.leased_by, j.cancel_requested_at < v_now as repeated into v_job;
    if found then
      v_state := 'running';
      exit;
    end if;
    -- The lane after the lock: a claim that we waited for has moved the job.
    perform from taskboard.jobs as j
    where j.id = cancel.job_id
      and (j.serial_key is null or taskboard.take_job_lock(j.serial_key, j.id))
    for update;
    if found then
      select j.lane_id, j.leased_by, false as repeated into v_job
      from taskboard.jobs as j
      where j.id = cancel.job_id;
      exit;
    end if;
    v_state := taskboard.finished_state(cancel.job_id);
    if v_state is not null then -- else it came back between our looks
      v_row := row(cancel.job_id, v_state);
      return next v_row;
      return;
    end if;
  end loop;
  if v_state is null then
    select j.state into v_state from taskboard.live_jobs as j where j.id = cancel.job_id;
    if v_state = 'running' and not cancel.force then
      update taskboard.jobs as j
      set cancel_requested_at = clock_timestamp(), cancel_reason = v_reason
      where j.id = cancel.job_id;
    else
      v_state := 'cancelled';
      perform taskboard.finish(
        cancel.job_id, 'cancelled', error => v_reason, finished_by => taskboard.caller());
    end if;
  end if;
  if not v_job.repeated then
    perform taskboard.note_incident(
      case when v_state = 'running' then 'cancel_requested' else 'job_cancelled' end,
      cancel.job_id, l.queue, l.kind, v_job.leased_by, v_reason)
    from taskboard.lanes as l
    where l.id = v_job.lane_id;
  end if;
  v_row := row(cancel.job_id, v_state);
  return next v_row;
end
$$;

comment on function taskboard.cancel(uuid, text, boolean) is
$$Cancel a job; state tells what it is now.
Waiting, blocked, held or expired: cancelled at once. Running: state running; the worker's next
renewal says so, its fail or release then ends the job as cancelled, its complete still completes
it. force: a running job is fenced and cancelled at once, its token is void.
reason: kept with the job. A job that has ended stays as it is, its state is returned; a repeat
changes nothing. A running job is asked without a wait; otherwise locks the row of the serial key,
then the job for update, at most 5 s each (55P03). Errors: 22004, TB002 no such job.
Roles: taskboard_operator, taskboard_producer.$$;

create or replace function taskboard.finished_state(job_id uuid)
returns text
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_state text;
begin
  select h.state into v_state
  from taskboard.history as h
  where h.id = finished_state.job_id
  order by h.finished_at desc
  limit 1;
  -- Stable, hence one snapshot for both looks: in one of them the job is, if it is anywhere.
  if not found and not exists (
    select from taskboard.jobs as j where j.id = finished_state.job_id)
  then
    raise exception using errcode = 'TB002', message = 'no such job',
      hint = 'The id is wrong, or its history has been pruned.';
  end if;
  return v_state;
end
$$;

comment on function taskboard.finished_state(uuid) is
$$Return how a job ended, null if it lives; raise TB002 when there is none (internal).$$;
