create or replace function taskboard.retry(job_id uuid, reason text default null)
returns setof taskboard.job_state
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
as $$
#variable_conflict use_column
declare
  v_row taskboard.job_state;
  v_old taskboard.history;
  v_state text;
  v_blocked boolean := false;
  v_serial_no bigint;
  v_lane integer;
begin
  if retry.job_id is null then
    raise exception using errcode = '22004', message = 'job_id must not be null',
      hint = 'Name the job.';
  end if;
  loop
    select h.* into v_old
    from taskboard.history as h
    where h.id = retry.job_id
    for update;
    exit when found;
    select j.state into v_state from taskboard.live_jobs as j where j.id = retry.job_id;
    if v_state in ('running', 'expired') then
      raise exception using errcode = 'TB003', message = 'the job is running',
        hint = 'Cancel it first, or wait until it has ended.';
    end if;
    if v_state is not null then
      v_row := row(retry.job_id, v_state);
      return next v_row;
      return;
    end if;
    -- It has ended between our looks: again. TB002 when there is no such job.
    perform taskboard.finished_state(retry.job_id);
  end loop;

  if v_old.payload is null then
    raise exception using errcode = 'TB003', message = 'the queue keeps nothing of this job',
      hint = 'Enqueue it again.';
  end if;
  if v_old.unique_key is not null then
    perform taskboard.take_unique_key(v_old.kind, v_old.unique_key, v_old.id, null);
    update taskboard.unique_keys as u
    set live = true
    where u.kind = v_old.kind and u.key = v_old.unique_key and u.job_id = v_old.id;
    if not found then
      raise exception using errcode = 'TB003',
        message = 'another job holds the unique key of this one',
        hint = 'Wait until it has ended, or cancel it.';
    end if;
  end if;
  if v_old.serial_key is not null then
    select s.serial_nos[1], not s.turns[1] into v_serial_no, v_blocked
    from taskboard.join_serial_keys(array[v_old.serial_key], array[v_old.id]) as s;
  end if;
  v_lane := taskboard.register_lane(v_old.queue, v_old.kind, v_old.priority);
  select l.returns_to into v_lane from taskboard.lanes as l where l.id = v_lane;
  delete from taskboard.history as h where h.id = retry.job_id;
  insert into taskboard.jobs (
    id, lane_id, attempt, claimable_at, run_at, created_at, lease, timeout, max_attempts,
    max_lost_leases, serial_no, on_unknown, waits_for, unique_until_claim, unique_key, serial_key,
    last_error, headers, payload)
  values (
    v_old.id, v_lane, v_old.attempt, case when v_blocked then 'infinity' else clock_timestamp() end,
    v_old.run_at, v_old.created_at, v_old.lease, v_old.timeout, v_old.max_attempts,
    v_old.max_lost_leases, v_serial_no, v_old.on_unknown, case when v_blocked then 'turn' end,
    v_old.unique_until_claim, v_old.unique_key, v_old.serial_key, v_old.error, v_old.headers,
    v_old.payload);
  perform taskboard.note_incident(
    'job_retried', v_old.id, v_old.queue, v_old.kind,
    detail => concat_ws('; ', 'was ' || v_old.state, retry.reason));
  if not v_blocked then
    perform taskboard.wake();
  end if;
  v_row := row(v_old.id, case when v_blocked then 'blocked' else 'ready' end);
  return next v_row;
end
$$;

comment on function taskboard.retry(uuid, text) is
$$Put a finished job back with a new budget of attempts.
Same id, same idempotency keys. attempt goes on counting; effects that are done stay done.
A job that waits already is returned as it is, so that a repeat makes no second copy. With a serial
key it queues up again behind the rest. reason: kept with the incident.
Errors: 22004, TB002 no such job, TB003 it is running, or another job holds its unique key.
Role: taskboard_operator.$$;

create or replace function taskboard.retry_failed(
  queue text default null, kind text default null, max_jobs integer default 1000,
  reason text default null)
returns setof taskboard.job_state
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
as $$
#variable_conflict use_column
declare
  v_row taskboard.job_state;
  v_id uuid;
begin
  if retry_failed.max_jobs is null or retry_failed.max_jobs not between 1 and 100000 then
    raise exception using errcode = '22023', message = 'max_jobs is out of bounds',
      hint = 'Give 1 to 100000.';
  end if;
  for v_id in
    select old.id
    from (
      select h.id, h.serial_key, h.unique_key, h.finished_at
      from taskboard.history as h
      where h.state = 'failed'
        and (retry_failed.queue is null or h.queue = retry_failed.queue)
        and (retry_failed.kind is null or h.kind = retry_failed.kind)
        and not exists (
          select from taskboard.unique_keys as u
          where u.kind = h.kind and u.key = h.unique_key and u.job_id <> h.id
            and (u.live or u.held_until > statement_timestamp()))
      order by h.finished_at
      limit retry_failed.max_jobs) as old
    -- Keys in order, as in every batch; those of one serial key as they had been.
    order by old.serial_key nulls first,
      case when old.serial_key is null then old.unique_key end nulls first, old.finished_at
  loop
    begin
      select r.job_id, r.state into v_row from taskboard.retry(v_id, retry_failed.reason) as r;
      return next v_row;
    exception
      when sqlstate 'TB002' or sqlstate 'TB003' then
        null; -- pruned, its key is taken, or somebody was quicker
    end;
  end loop;
end
$$;

comment on function taskboard.retry_failed(text, text, integer, text) is
$$Put failed jobs back, oldest first, as retry does.
Of a queue, a kind, or all; at most max_jobs. Passes over a job whose unique key another job holds.
reason: kept with the incident of each.
Role: taskboard_operator.$$;
