create or replace function taskboard.pick_jobs(
  queues text[], kinds text[], max_jobs integer, key bigint, first boolean)
returns tid[]
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  v_set record;
  v_open text[] := pick_jobs.queues; -- queues without limits, null: all
  v_from text[]; -- where a round takes from
  v_limited text[];
  v_caps integer[];
  v_known text[] := taskboard.read_plan(pick_jobs.key, clock_timestamp());
  v_look boolean;
  v_plan text[];
  v_left integer;
  v_half integer;
  v_more tid[];
  v_picked tid[] := array[]::tid[];
  v_now timestamptz;
begin
  select s.max_lost_leases, s.queue_rights or s.queue_limits or s.paused_at is not null as special
  into v_set
  from taskboard.settings as s
  where s.one_row;
  if v_set.special then
    select p.open, p.limited, p.caps into v_open, v_limited, v_caps
    from taskboard.plan_claim(pick_jobs.queues, pick_jobs.max_jobs) as p;
  end if;
  -- A look at the floors only if this transaction has changed nothing: what it changed may still
  -- be undone, by a rollback of a prepared transaction even when the session's notes stay.
  v_look := pick_jobs.first
    and coalesce(
      date_part('epoch', clock_timestamp()) - v_known[2]::float8 > v_known[13]::float8, true);
  if v_look then
    v_known := taskboard.plan_scan(
      case when v_set.special then v_open || v_limited else v_open end, pick_jobs.kinds,
      v_known, pick_jobs.key);
  end if;
  -- Limited queues first, as they are bounded; the last round takes from all others.
  for v_round in reverse coalesce(cardinality(v_limited), 0)..0 loop
    v_left := pick_jobs.max_jobs - cardinality(v_picked);
    v_from := v_open;
    if v_round > 0 then
      v_from := array[v_limited[v_round]];
      v_left := least(v_left, v_caps[v_round]);
    end if;
    for v_pass in 1..100 loop
      exit when v_left <= 0;
      v_half := greatest(v_left / 2, 1);
      v_plan := case when v_look and v_pass = 1 and not v_set.special then v_known
        else taskboard.plan_scan(v_from, pick_jobs.kinds, v_known) end;
      v_now := clock_timestamp();
      v_more := array(
        select due.ctid
        from (
          select unnest(v_plan[3]::integer[]) as id, unnest(v_plan[4]::float8[]) as floor,
            unnest(v_plan[5]::integer[]) as place, unnest(v_plan[6]::integer[]) as side,
            unnest(v_plan[7]::bigint[]) as many, unnest(v_plan[8]::bigint[]) as rest) as lane
        cross join lateral (
          select p.ctid
          from taskboard.jobs as p
          where p.lane_id = lane.id and p.claimable_at <= v_now
            and (p.claimable_at, p.place) >= (to_timestamp(lane.floor), lane.place)
            and p.ctid <> all (v_picked)
            and (p.lease_token is null or (p.cancel_requested_at is null
              and p.lost_leases + 1 < coalesce(p.max_lost_leases, v_set.max_lost_leases)))
          order by p.lane_id, p.claimable_at, p.place
          limit case lane.side when 1 then greatest((v_half + lane.rest) / lane.many, 1) end
          offset case lane.side when 3 then greatest((v_half + lane.rest) / lane.many, 1) end
          for update skip locked) as due
        limit v_left);
      v_picked := v_picked || v_more;
      v_left := v_left - cardinality(v_more);
      exit when v_left = 0;
      -- Exhausted jobs are passed over above and ended here; that may hand a turn on.
      exit when taskboard.sweep_exhausted(v_plan, v_now, 100) = 0;
    end loop;
  end loop;
  if v_look and v_left = 0 then
    perform taskboard.sweep_exhausted(v_known, v_now, 100);
  end if;
  return nullif(v_picked, '{}');
end
$$;

comment on function taskboard.pick_jobs(text[], text[], integer, bigint, boolean) is
$$Pick and lock what a claim is to lease, at leisure (internal).
With everything that may have to be heard: limits, rights, floors, new lanes, exhausted jobs.
key: queues and kinds, hashed. first: the transaction has changed nothing yet.$$;

create or replace function taskboard.sweep_exhausted(plan text[], now timestamptz, most integer)
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
begin
  return taskboard.finish_exhausted(array(
    select c.id
    from taskboard.settings as s
    cross join (
      select unnest(sweep_exhausted.plan[3]::integer[]) as id,
        unnest(sweep_exhausted.plan[4]::float8[]) as floor,
        unnest(sweep_exhausted.plan[6]::integer[]) as side) as lane
    cross join lateral (
      -- Only the first due rows: a look must not cost as much as the backlog is long.
      select p.id, p.lease_token, p.lost_leases, p.max_lost_leases, p.cancel_requested_at
      from taskboard.jobs as p
      where p.lane_id = lane.id
        and p.claimable_at between
          to_timestamp(lane.floor) and sweep_exhausted.now
      order by p.lane_id, p.claimable_at, p.place
      limit sweep_exhausted.most) as c
    where s.one_row and lane.side = 1 and c.lease_token is not null
      and (c.lost_leases + 1 >= coalesce(c.max_lost_leases, s.max_lost_leases)
        or c.cancel_requested_at is not null)
    limit sweep_exhausted.most));
end
$$;

comment on function taskboard.sweep_exhausted(text[], timestamptz, integer) is
$$End exhausted jobs among the first due of each lane (internal).
plan: what plan_scan returned. Returns how many it ended.$$;
