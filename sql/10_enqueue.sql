create or replace function taskboard.register_lane(queue text, kind text, priority integer)
returns integer
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_fresh integer;
  v_returning integer;
begin
  perform taskboard.check_name('kind', register_lane.kind);
  perform taskboard.check_name('queue', register_lane.queue);
  if register_lane.priority is null or register_lane.priority not between 0 and 9 then
    raise exception using errcode = '22023',
      message = 'priority is out of bounds',
      hint = 'Give priority between 0 (first) and 9 (last).';
  end if;
  if not taskboard.may_use(register_lane.queue) then
    raise exception using errcode = '42501', message = 'this role may not use the queue',
      hint = 'Ask the owner for taskboard.allow_queue, or name another queue.';
  end if;
  select l.id into v_fresh
  from taskboard.lanes as l
  where l.queue = register_lane.queue and l.kind = register_lane.kind
    and l.priority = register_lane.priority and not l.returning
  order by l.id
  limit 1;
  if not found then
    if (select count(*) from taskboard.lanes) >= (
      select s.lanes_most from taskboard.settings as s)
    then
      raise exception using errcode = '22023', message = 'too many queues and kinds',
        hint = 'Use the present ones, or raise the setting lanes_most: claims look at them all.';
    end if;
    -- No unique constraint: a second first registration must not wait for ours to commit.
    v_returning := nextval('taskboard.lane_ids');
    v_fresh := nextval('taskboard.lane_ids');
    insert into taskboard.lanes (id, queue, kind, priority, "returning", returns_to, keeps, lease)
    select n.id, register_lane.queue, register_lane.kind, register_lane.priority,
      n.id = v_returning, v_returning, coalesce(q.keep_completed, true), q.lease
    from unnest(array[v_returning, v_fresh]) as n (id)
    left join taskboard.queues as q on q.name = register_lane.queue;
  end if;
  return v_fresh;
end
$$;

comment on function taskboard.register_lane(text, text, integer) is
$$Find or make the lane for fresh jobs of a queue, kind and priority (internal).
Returns its id.
Raises 22004, 22023 for a bad name or priority.$$;

create or replace function taskboard.check_options(
  run_at timestamptz, delay interval, unique_for interval, has_key boolean,
  max_attempts integer, max_lost_leases integer, lease interval, timeout interval,
  on_unknown text, headers jsonb, unique_until text)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_set taskboard.settings;
begin
  select s.* into v_set from taskboard.settings as s;
  if check_options.run_at is not null and check_options.delay is not null then
    raise exception using errcode = '22023',
      message = 'run_at and delay are both given',
      hint = 'Give run_at for an instant, or delay for a time from now.';
  end if;
  if not isfinite(check_options.run_at)
    or check_options.run_at > clock_timestamp() + v_set.delay_most
  then
    raise exception using errcode = '22023',
      message = 'run_at is infinite or too far ahead',
      hint = format('Give run_at within %s from now.', v_set.delay_most);
  end if;
  perform taskboard.check_span('delay', check_options.delay, '0', v_set.delay_most);
  perform taskboard.check_span('unique_for', check_options.unique_for, '0', v_set.delay_most);
  perform taskboard.check_span('lease', check_options.lease, v_set.lease_least, v_set.lease_most);
  perform taskboard.check_span(
    'timeout', check_options.timeout, v_set.lease_least, v_set.delay_most);
  if check_options.unique_for is not null and not check_options.has_key then
    raise exception using errcode = '22023',
      message = 'unique_for is given without a unique key',
      hint = 'unique_for says how long unique_key is held.';
  end if;
  if check_options.max_attempts not between 1 and 1000000
    or check_options.max_lost_leases not between 1 and 1000000
  then
    raise exception using errcode = '22023',
      message = format('%s is out of bounds',
        case when check_options.max_attempts not between 1 and 1000000 then 'max_attempts'
          else 'max_lost_leases' end),
      hint = 'Give 1 to 1000000.';
  end if;
  if check_options.on_unknown is null or check_options.on_unknown not in ('retry', 'hold') then
    raise exception using errcode = '22023',
      message = 'on_unknown is neither retry nor hold',
      hint = 'retry repeats an effect whose outcome is unknown, hold asks a person.';
  end if;
  if check_options.unique_until is null or check_options.unique_until not in ('end', 'claim')
    or (check_options.unique_until = 'claim' and check_options.unique_for is not null)
  then
    raise exception using errcode = '22023',
      message = 'unique_until is neither end nor claim, or goes with unique_for',
      hint = 'end: until the job has ended. claim: until it is claimed; not with unique_for.';
  end if;
  if jsonb_typeof(check_options.headers) <> 'object' then
    raise exception using errcode = '22023',
      message = 'headers is not an object',
      hint = 'Give headers as a JSON object.';
  end if;
  perform taskboard.check_document('headers', check_options.headers, v_set.payload_bytes);
end
$$;

comment on function taskboard.check_options(timestamptz, interval, interval, boolean, integer,
  integer, interval, interval, text, jsonb, text) is
$$Refuse options of enqueue that are out of bounds or do not go together (internal).
Errors: 22023.$$;

create or replace function taskboard.enqueue(
  kind text, payload jsonb default '{}', queue text default 'default', priority integer default 5,
  run_at timestamptz default null, delay interval default null,
  unique_key text default null, unique_for interval default null, serial_key text default null,
  max_attempts integer default null, max_lost_leases integer default null,
  lease interval default null, timeout interval default null,
  on_unknown text default 'retry', headers jsonb default null, unique_until text default 'end')
returns taskboard.enqueued
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_row taskboard.enqueued;
  v_id uuid;
  v_sleeps boolean;
begin
  if enqueue.run_at is not null or enqueue.delay is not null or enqueue.unique_key is not null
    or enqueue.unique_for is not null or enqueue.serial_key is not null
    or enqueue.max_attempts is not null or enqueue.max_lost_leases is not null
    or enqueue.lease is not null or enqueue.timeout is not null
    or enqueue.on_unknown is distinct from 'retry' or enqueue.headers is not null
    or enqueue.unique_until is distinct from 'end'
  then
    select m.job_id, m.created into v_row
    from taskboard.enqueue_many(
      enqueue.kind, array[enqueue.payload], enqueue.queue, enqueue.priority, enqueue.run_at,
      enqueue.delay, array[enqueue.unique_key], enqueue.unique_for, array[enqueue.serial_key],
      enqueue.max_attempts, enqueue.max_lost_leases, enqueue.lease, enqueue.timeout,
      enqueue.on_unknown, enqueue.headers, enqueue.unique_until) as m;
    return v_row;
  end if;

  -- The plain job, in one statement. The transaction id before the clock: whoever sees a later
  -- id may trust the date below.
  loop
    insert into taskboard.jobs as j (id, lane_id, claimable_at, run_at, created_at, payload)
    select
      taskboard.new_job_id(taskboard.job_id_head(l.now), l.seed, 0, s.shard_id),
      l.id, l.now, l.now, l.now, enqueue.payload
    from taskboard.settings as s
    cross join lateral (
      -- A limit or a volatile function out there would hand the whole row on by a node more.
      select f.id, gen_random_uuid() as seed,
        case when pg_current_xact_id() is not null then clock_timestamp() end as now
      from taskboard.lanes as f
      where f.queue = enqueue.queue and f.kind = enqueue.kind and f.priority = enqueue.priority
        and not f.returning
      order by f.id
      limit 1) as l
    where taskboard.document_bytes(enqueue.payload) <= s.payload_bytes
      and (not s.queue_rights or taskboard.may_use(enqueue.queue))
    returning j.id, taskboard.somebody_sleeps(enqueue.queue) into v_id, v_sleeps;
    exit when found;
    -- The payload is null or too large, or this is the first job of its lane.
    if enqueue.payload is null then
      raise exception using errcode = '22004', message = 'payload must not be null',
        hint = 'Give a JSON document; the JSON null is one.';
    end if;
    perform taskboard.check_document('payload', enqueue.payload, s.payload_bytes)
    from taskboard.settings as s;
    perform taskboard.register_lane(enqueue.queue, enqueue.kind, enqueue.priority);
  end loop;
  if v_sleeps then
    perform taskboard.wake();
  end if;
  v_row := row(v_id, true);
  return v_row;
end
$$;

comment on function taskboard.enqueue(text, jsonb, text, integer, timestamptz, interval, text,
  interval, text, integer, integer, interval, interval, text, jsonb, text) is
$$Add one job; return its id, or that of the holder of the unique key.
created tells which. Part of the caller's transaction: nobody sees the job before it commits.
unique_key: one live job of a kind holds it; with unique_for it stays held that long from now, also
when the job has ended; unique_until 'claim' frees it already when the job is claimed, so that an
event that comes while the job runs leads to another run (with a serial_key: after this one); so
does one of events that have come without a gap for a second, which keep the job from being claimed.
serial_key: jobs with one key run one at a time, in the order enqueued.
run_at (an instant) or delay (from now), not both. lease, timeout: for this job's claims.
on_unknown: 'retry' repeats an effect whose outcome is unknown, 'hold' asks a person.
Waits for a transaction that is just enqueueing the same key, at most 5 s (55P03).
Errors: 22004, 22023; above read committed 40001 for a key that was taken meanwhile; 42501 for a
queue that this role may not use, or a unique key that is held in one.
Role: taskboard_producer.$$;
