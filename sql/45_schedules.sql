create or replace function taskboard.schedule(
  name text, cron text, kind text, payload jsonb default '{}', time_zone text default 'UTC',
  queue text default 'default', priority integer default 5, misfire text default 'one')
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
as $$
#variable_conflict use_column
begin
  perform taskboard.check_name('name', schedule.name);
  perform taskboard.check_name('cron', schedule.cron);
  if not exists (
    select from pg_timezone_names as z where z.name = schedule.time_zone)
  then
    raise exception using errcode = '22023', message = 'no such time zone',
      hint = 'Give a name of the time zone database, for example Europe/Berlin.';
  end if;
  if schedule.misfire is null or schedule.misfire not in ('skip', 'one', 'all') then
    raise exception using errcode = '22023', message = 'misfire is none of skip, one, all',
      hint = 'What to do about occurrences that nobody was there for.';
  end if;
  if schedule.payload is null then
    raise exception using errcode = '22004', message = 'payload must not be null',
      hint = 'Give a JSON document; the JSON null is one.';
  end if;
  perform taskboard.check_document('payload', schedule.payload, s.payload_bytes)
  from taskboard.settings as s;
  perform taskboard.register_lane(schedule.queue, schedule.kind, schedule.priority);
  insert into taskboard.schedules as s (
    name, cron, time_zone, kind, payload, queue, priority, misfire, created_at)
  values (
    schedule.name, schedule.cron, schedule.time_zone, schedule.kind, schedule.payload,
    schedule.queue, schedule.priority, schedule.misfire, clock_timestamp())
  on conflict (name) do update
  set cron = excluded.cron, time_zone = excluded.time_zone, kind = excluded.kind,
    payload = excluded.payload, queue = excluded.queue, priority = excluded.priority,
    misfire = excluded.misfire,
    -- The next date stays while the rule does: a deployment that repeats it loses nothing.
    next_at = case when s.cron = excluded.cron and s.time_zone = excluded.time_zone
      then s.next_at end;
end
$$;

comment on function taskboard.schedule(text, text, text, jsonb, text, text, integer, text) is
$$Make or change a schedule: enqueue a job at each occurrence of cron.
cron: five fields, read by the runner in time_zone. Each occurrence is enqueued once, however many
runners there are. misfire, for occurrences that passed while no runner ran: skip them, enqueue one
(the default), or all of them (up to 100). Takes effect when a runner next looks.
Errors: 22004, 22023. Role: taskboard_operator.$$;

create or replace function taskboard.unschedule(name text)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
as $$
begin
  if unschedule.name is null then
    raise exception using errcode = '22004', message = 'name must not be null',
      hint = 'Name the schedule.';
  end if;
  delete from taskboard.schedules as s where s.name = unschedule.name;
  return found;
end
$$;

comment on function taskboard.unschedule(text) is
$$Remove a schedule; true when there was one.
Its jobs stay. Role: taskboard_operator.$$;

create or replace function taskboard.pause_schedule(name text, paused boolean default true)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
as $$
begin
  if pause_schedule.name is null or pause_schedule.paused is null then
    raise exception using errcode = '22004', message = 'name and paused must not be null',
      hint = 'true pauses the schedule, false ends its pause.';
  end if;
  update taskboard.schedules as s
  set paused_at = case when pause_schedule.paused then coalesce(s.paused_at, clock_timestamp()) end,
    -- After a pause a runner works out the next date anew.
    next_at = case when pause_schedule.paused or s.paused_at is null then s.next_at end
  where s.name = pause_schedule.name;
  return found;
end
$$;

comment on function taskboard.pause_schedule(text, boolean) is
$$Pause a schedule, or end its pause; true when there is one.
paused: false ends it. What falls due during a pause is not made up for. Errors: 22004. Role:
taskboard_operator.$$;

create or replace function taskboard.due_schedules()
returns setof taskboard.due_schedule
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  return query
  select s.name, s.cron, s.time_zone, s.misfire, s.next_at, clock_timestamp()
  from taskboard.schedules as s
  where s.paused_at is null and (s.next_at is null or s.next_at <= clock_timestamp())
    and (taskboard.may_use(s.queue)
      or not exists (select from taskboard.settings as t where t.queue_rights))
  order by s.next_at, s.name;
end
$$;

comment on function taskboard.due_schedules() is
$$List schedules that a runner should advance.
Those that are due, or without a next date yet (due_at null).
now: the database's clock, from which the runner counts. Role: taskboard_worker.$$;

create or replace function taskboard.advance_schedule(
  name text, due_at timestamptz, next_at timestamptz, enqueue boolean default true,
  cron text default null, time_zone text default null)
returns uuid
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
as $$
declare
  v_schedule taskboard.schedules;
  v_job_id uuid;
begin
  if advance_schedule.name is null then
    raise exception using errcode = '22004', message = 'name must not be null',
      hint = 'Pass it as due_schedules returned it.';
  end if;
  if not isfinite(advance_schedule.next_at) or advance_schedule.next_at is null
    or advance_schedule.enqueue is null or advance_schedule.next_at <= advance_schedule.due_at
  then
    raise exception using errcode = '22023', message = 'next_at does not follow due_at',
      hint = 'Give the occurrence that comes after due_at.';
  end if;
  if advance_schedule.enqueue and advance_schedule.due_at > clock_timestamp() then
    raise exception using errcode = '22023', message = 'due_at has not come yet',
      hint = 'Enqueue an occurrence when it is due, by the date that due_schedules shows as now.';
  end if;
  -- Compare and set: of many runners that saw the same date, one moves it and enqueues.
  update taskboard.schedules as s
  set next_at = advance_schedule.next_at,
    last_at = case when advance_schedule.enqueue
      then coalesce(advance_schedule.due_at, s.last_at) else s.last_at end
  where s.name = advance_schedule.name
    and s.next_at is not distinct from advance_schedule.due_at
    and (advance_schedule.cron is null or s.cron = advance_schedule.cron)
    and (advance_schedule.time_zone is null or s.time_zone = advance_schedule.time_zone)
    and s.paused_at is null
    and (taskboard.may_use(s.queue)
      or not exists (select from taskboard.settings as t where t.queue_rights))
  returning s.* into v_schedule;
  if not found or advance_schedule.due_at is null or not advance_schedule.enqueue then
    return null;
  end if;
  select e.job_id into v_job_id
  from taskboard.enqueue(
    v_schedule.kind, v_schedule.payload, v_schedule.queue, v_schedule.priority,
    headers => jsonb_build_object(
      'schedule', v_schedule.name, 'occurrence', advance_schedule.due_at)) as e;
  update taskboard.schedules as s
  set last_job_id = v_job_id
  where s.name = advance_schedule.name;
  return v_job_id;
end
$$;

comment on function taskboard.advance_schedule(
  text, timestamptz, timestamptz, boolean, text, text) is
$$Move a schedule to its next occurrence; enqueue the job of this one.
due_at: the date that due_schedules showed; if somebody else has moved it, nothing happens and the
result is null. cron, time_zone: what next_at was worked out by; if that has changed since, nothing
happens. enqueue false passes over the occurrence. Returns the id of the job.
Errors: 22004, 22023. Role: taskboard_worker.$$;
