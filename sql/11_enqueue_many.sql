create or replace function taskboard.check_keys(argument text, keys text[], wanted integer)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  if check_keys.keys is null then
    return;
  end if;
  if cardinality(check_keys.keys) <> check_keys.wanted
    or coalesce(array_ndims(check_keys.keys), 1) <> 1
  then
    raise exception using errcode = '22023',
      message = format('%s and payloads differ in length', check_keys.argument),
      hint = 'Give one key for each payload, null for none.';
  end if;
  perform taskboard.check_name(check_keys.argument, k)
  from unnest(check_keys.keys) as k
  where k is not null;
end
$$;

comment on function taskboard.check_keys(text, text[], integer) is
$$Refuse an array of keys that does not match the payloads (internal).
Errors: 22023. Null passes.$$;

create or replace function taskboard.enqueue_many(
  kind text, payloads jsonb[], queue text default 'default', priority integer default 5,
  run_at timestamptz default null, delay interval default null,
  unique_keys text[] default null, unique_for interval default null,
  serial_keys text[] default null,
  max_attempts integer default null, max_lost_leases integer default null,
  lease interval default null, timeout interval default null,
  on_unknown text default 'retry', headers jsonb default null, unique_until text default 'end')
returns setof taskboard.enqueued
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
as $$
declare
  v_set taskboard.settings;
  v_lane integer;
  v_now timestamptz;
  v_due timestamptz;
  v_head text;
  v_seed uuid := gen_random_uuid();
  v_lease interval;
  v_timeout interval;
begin
  perform taskboard.check_options(
    enqueue_many.run_at, enqueue_many.delay, enqueue_many.unique_for,
    coalesce(num_nonnulls(variadic enqueue_many.unique_keys), 0) > 0, enqueue_many.max_attempts,
    enqueue_many.max_lost_leases,
    enqueue_many.lease, enqueue_many.timeout, enqueue_many.on_unknown, enqueue_many.headers,
    enqueue_many.unique_until);
  select s.* into v_set from taskboard.settings as s;
  if enqueue_many.payloads is null then
    raise exception using errcode = '22004', message = 'payloads must not be null',
      hint = 'Give an array of JSON documents; an empty one is fine.';
  end if;
  if coalesce(array_ndims(enqueue_many.payloads), 1) <> 1
    or cardinality(enqueue_many.payloads) > v_set.bulk_jobs
  then
    raise exception using errcode = '22023',
      message = format('payloads is nested, or has more than %s documents', v_set.bulk_jobs),
      hint = 'Send smaller batches.';
  end if;
  if array_position(enqueue_many.payloads, null) is not null then
    raise exception using errcode = '22004', message = 'payloads holds nulls',
      hint = 'Give an array of JSON documents; the JSON null is one.';
  end if;
  perform taskboard.check_document('payload', p, v_set.payload_bytes)
  from unnest(enqueue_many.payloads) as p
  where taskboard.document_bytes(p) > v_set.payload_bytes;
  perform taskboard.check_keys(
    'unique_keys', enqueue_many.unique_keys, cardinality(enqueue_many.payloads));
  perform taskboard.check_keys(
    'serial_keys', enqueue_many.serial_keys, cardinality(enqueue_many.payloads));

  perform pg_current_xact_id();
  v_lane := taskboard.register_lane(enqueue_many.queue, enqueue_many.kind, enqueue_many.priority);
  v_now := clock_timestamp();
  v_due := coalesce(
    enqueue_many.run_at, v_now + taskboard.exact(enqueue_many.delay), v_now);
  if coalesce(num_nonnulls(variadic enqueue_many.unique_keys), 0) = 0
    and coalesce(num_nonnulls(variadic enqueue_many.serial_keys), 0) = 0
  then
    v_head := taskboard.job_id_head(v_now);
    v_lease := taskboard.exact(enqueue_many.lease);
    v_timeout := taskboard.exact(enqueue_many.timeout);
    return query
    insert into taskboard.jobs as j (
      id, lane_id, place, claimable_at, run_at, created_at, lease, timeout, max_attempts,
      max_lost_leases, on_unknown, headers, payload)
    select
      taskboard.new_job_id(v_head, v_seed, p.n, v_set.shard_id), v_lane, p.n,
      greatest(v_due, v_now), v_due, v_now, v_lease, v_timeout, enqueue_many.max_attempts,
      enqueue_many.max_lost_leases, enqueue_many.on_unknown, enqueue_many.headers, p.payload
    from unnest(enqueue_many.payloads) with ordinality as p (payload, n)
    returning j.id, true;
    if found and taskboard.somebody_sleeps(enqueue_many.queue) then
      perform taskboard.wake(v_due - v_now);
    end if;
  else
    return query
    select k.job_id, k.created
    from taskboard.enqueue_keyed(
      -- A slice begins at 1, whatever the array began at.
      enqueue_many.kind, enqueue_many.payloads[:], v_lane, v_due, enqueue_many.unique_keys[:],
      enqueue_many.unique_for, enqueue_many.serial_keys[:], enqueue_many.max_attempts,
      enqueue_many.max_lost_leases, enqueue_many.lease, enqueue_many.timeout,
      enqueue_many.on_unknown, enqueue_many.headers, enqueue_many.unique_until) as k;
  end if;
end
$$;

comment on function taskboard.enqueue_many(text, jsonb[], text, integer, timestamptz, interval,
  text[], interval, text[], integer, integer, interval, interval, text, jsonb, text) is
$$Add many jobs of one kind; return one row per payload, in input order.
unique_keys and serial_keys, if given, have one element for each of payloads, null for none; a key
that stands twice in one call is taken by the first. delay, lease, unique_for, unique_until and
all else as in enqueue, for every job.
Role: taskboard_producer.$$;

create or replace function taskboard.enqueue_keyed(
  kind text, payloads jsonb[], lane_id integer, due timestamptz, unique_keys text[],
  unique_for interval, serial_keys text[], max_attempts integer, max_lost_leases integer,
  lease interval, timeout interval, on_unknown text, headers jsonb, unique_until text)
returns setof taskboard.enqueued
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_ids uuid[];
  v_holders uuid[];
  v_serial_nos bigint[];
  v_turns boolean[];
  v_shard text;
  v_rights boolean;
  v_now timestamptz := clock_timestamp();
  v_head text := taskboard.job_id_head(v_now);
  v_seed uuid := gen_random_uuid();
  v_unique record;
begin
  select s.shard_id, s.queue_rights into v_shard, v_rights from taskboard.settings as s;
  v_ids := array(
    select taskboard.new_job_id(v_head, v_seed, k.n, v_shard)
    from generate_series(1, cardinality(enqueue_keyed.payloads)) as k (n));
  v_holders := v_ids;
  -- Keys in sorted order, so that two batches with the same keys cannot block each other;
  -- within a key in input order.
  for v_unique in
    select k.key, k.n::integer as n
    from unnest(enqueue_keyed.unique_keys) with ordinality as k (key, n)
    where k.key is not null
    order by k.key, k.n
  loop
    v_holders[v_unique.n] := taskboard.take_unique_key(
      enqueue_keyed.kind, v_unique.key, v_ids[v_unique.n],
      v_now + taskboard.exact(enqueue_keyed.unique_for));
    if v_rights and v_holders[v_unique.n] <> v_ids[v_unique.n] then
      perform taskboard.check_holder(v_holders[v_unique.n]);
    end if;
  end loop;
  if enqueue_keyed.serial_keys is not null then
    select s.serial_nos, s.turns into v_serial_nos, v_turns
    from taskboard.join_serial_keys(enqueue_keyed.serial_keys, array(
      select case when k.holder = k.id then k.id end
      from unnest(v_ids, v_holders) with ordinality as k (id, holder, n)
      order by k.n)) as s;
  end if;

  v_now := clock_timestamp(); -- we may have waited for a key
  insert into taskboard.jobs (
    id, lane_id, place, claimable_at, run_at, created_at, lease, timeout, max_attempts,
    max_lost_leases,
    serial_no, on_unknown, waits_for, unique_until_claim, unique_key, serial_key, headers, payload)
  select
    k.id, enqueue_keyed.lane_id, k.n,
    case when k.turn is false then 'infinity' else greatest(enqueue_keyed.due, v_now) end,
    enqueue_keyed.due, v_now, taskboard.exact(enqueue_keyed.lease),
    taskboard.exact(enqueue_keyed.timeout),
    enqueue_keyed.max_attempts, enqueue_keyed.max_lost_leases, k.serial_no,
    enqueue_keyed.on_unknown, case when k.turn is false then 'turn' end,
    case when enqueue_keyed.unique_until = 'claim' then true end, k.unique_key, k.serial_key,
    enqueue_keyed.headers, k.payload
  from unnest(
    v_ids, v_holders, v_serial_nos, v_turns, enqueue_keyed.unique_keys, enqueue_keyed.serial_keys,
    enqueue_keyed.payloads) with ordinality
    as k (id, holder, serial_no, turn, unique_key, serial_key, payload, n)
  where k.holder = k.id;
  -- A job that is blocked, or was there before, wakes nobody.
  perform taskboard.wake(enqueue_keyed.due - v_now)
  from taskboard.lanes as l
  where l.id = enqueue_keyed.lane_id
    and exists (
      select from unnest(v_ids, v_holders, v_turns) as k (id, holder, turn)
      where k.holder = k.id and k.turn is not false)
    and taskboard.somebody_sleeps(l.queue);

  return query
  select k.holder, k.holder = k.id
  from unnest(v_ids, v_holders) with ordinality as k (id, holder, n)
  order by k.n;
end
$$;

comment on function taskboard.enqueue_keyed(text, jsonb[], integer, timestamptz, text[], interval,
  text[], integer, integer, interval, interval, text, jsonb, text) is
$$Add many jobs of which some have a unique or a serial key (internal).$$;
