create or replace function taskboard.cancel(
  job_id uuid, reason text default null, force boolean default false)
returns setof taskboard.job_state
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
as $$
#variable_conflict use_column
declare
  v_row taskboard.job_state;
  v_job record;
  v_reason text := left(coalesce(cancel.reason, 'cancelled'), 1000);
  v_state text;
begin
  if cancel.job_id is null or cancel.force is null then
    raise exception using errcode = '22004', message = 'job_id and force must not be null',
      hint = 'Name the job; force true fences a running one at once.';
  end if;
  if not taskboard.may_see(cancel.job_id) then
    perform taskboard.finished_state(null); -- looks unknown: TB002
  end if;
  select j.lease_token, j.claimable_at, j.leased_by, j.cancel_requested_at, l.queue, l.kind
  into v_job
  from taskboard.jobs as j
  join taskboard.lanes as l on l.id = j.lane_id
  where j.id = cancel.job_id
    and (j.serial_key is null or taskboard.take_turn_lock(j.serial_key))
  for update of j;
  if not found then
    v_state := taskboard.finished_state(cancel.job_id);
    v_row := row(cancel.job_id, v_state);
    return next v_row;
    return;
  end if;
  if v_job.lease_token is not null and v_job.claimable_at > clock_timestamp()
    and not cancel.force
  then
    v_state := 'running';
    update taskboard.jobs as j
    set cancel_requested_at = clock_timestamp(), cancel_reason = v_reason
    where j.id = cancel.job_id and j.cancel_requested_at is null;
  else
    v_state := 'cancelled';
    perform taskboard.finish(
      cancel.job_id, 'cancelled', error => v_reason, finished_by => taskboard.caller());
  end if;
  if v_state = 'cancelled' or v_job.cancel_requested_at is null then
    perform taskboard.note_incident(
      case when v_state = 'running' then 'cancel_requested' else 'job_cancelled' end,
      cancel.job_id, v_job.queue, v_job.kind, v_job.leased_by, v_reason);
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
A job that has ended stays as it is, its state is returned; a repeat changes nothing.
Locks the row of the serial key, then the job for update; waits at most 5 s (55P03).
Errors: 22004, TB002 no such job. Roles: taskboard_operator, taskboard_producer.$$;

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
  if not found then
    raise exception using errcode = 'TB002', message = 'no such job',
      hint = 'The id is wrong, or its history has been pruned.';
  end if;
  return v_state;
end
$$;

comment on function taskboard.finished_state(uuid) is
$$Return how a job ended; raise TB002 when there is none (internal).$$;
