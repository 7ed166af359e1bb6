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
  v_queues text[] := pick_jobs.queues;
  v_known text[] := taskboard.read_plan(pick_jobs.key, clock_timestamp());
  v_age float8 := date_part('epoch', clock_timestamp()) - v_known[2]::float8;
  v_look boolean;
  v_again boolean; -- what the session remembers will do for the first pass
  v_plan text[];
  v_part record;
  v_limited text[] := array[]::text[]; -- limited queues with a due job,
  v_rooms integer[] := array[]::integer[]; -- and how many each may still give
  v_nth integer;
  v_left integer := pick_jobs.max_jobs;
  v_most integer;
  v_more tid[];
  v_picked tid[] := array[]::tid[];
  v_now timestamptz;
begin
  select s.queue_rights, s.paused_at,
    pick_jobs.key::text || '@' || s.xmin::text as version
  into v_set
  from taskboard.settings as s
  where s.one_row;
  if v_set.paused_at is not null then
    return null;
  end if;
  if v_set.queue_rights then
    v_queues := array(
      select distinct l.queue
      from taskboard.lanes as l
      where (pick_jobs.queues is null or l.queue = any (pick_jobs.queues))
        and taskboard.may_use(l.queue));
  end if;
  -- A look at the floors only if this transaction has changed nothing: what it changed may still
  -- be undone, by a rollback of a prepared transaction even when the session's notes stay.
  v_look := pick_jobs.first and coalesce(v_age > v_known[13]::float8, true);
  -- Where there are no limits, claim has tried that.
  v_again := not v_look and not v_set.queue_rights and v_known[1] = v_set.version
    and v_known[6] like '%-%' and v_age <= v_known[13]::float8;
  for v_pass in 1..100 loop
    if v_pass = 1 and v_again then
      v_plan := v_known;
    else
      v_plan := taskboard.plan_scan(
        v_queues, pick_jobs.kinds, v_known, pick_jobs.key, v_look and v_pass = 1);
    end if;
    if v_look and v_pass = 1 then
      v_known := v_plan;
    end if;
    v_now := clock_timestamp();
    -- By priority; in each, the lanes of each limited queue that has a due job, and the others.
    for v_part in
      select min(lane.n) as first, max(lane.n) as last,
        case when lane.side < 0 then l.queue end as queue
      from unnest(
        v_plan[3]::integer[], v_plan[4]::float8[], v_plan[5]::integer[], v_plan[6]::integer[])
        with ordinality as lane (id, floor, place, side, n)
      left join taskboard.lanes as l on l.id = case when v_plan[6] like '%-%' then lane.id end
      where lane.side > 0 or exists (
        select from taskboard.jobs as p
        where p.lane_id = lane.id
          and p.claimable_at <= v_now
          and (p.claimable_at, p.place) >= (to_timestamp(lane.floor), lane.place))
      group by l.priority, 3
      order by 1
    loop
      v_most := v_left;
      if v_part.queue is not null then
        v_nth := array_position(v_limited, v_part.queue);
        if v_nth is null then
          v_limited := v_limited || v_part.queue;
          v_nth := cardinality(v_limited);
          v_rooms[v_nth] := taskboard.room_in(v_part.queue, v_left);
        end if;
        v_most := least(v_left, v_rooms[v_nth]);
        continue when v_most <= 0;
      end if;
      v_more := taskboard.lock_due(
        v_plan[3:8], v_part.first, v_part.last, v_most, v_picked, v_now);
      v_picked := v_picked || v_more;
      v_left := v_left - cardinality(v_more);
      if v_part.queue is not null then
        v_rooms[v_nth] := v_rooms[v_nth] - cardinality(v_more);
      end if;
      exit when v_left = 0;
    end loop;
    exit when v_left = 0;
    continue when v_pass = 1 and v_again and (v_picked = '{}' or v_known[14] is not null);
    -- Exhausted jobs are passed over above and ended here; that may hand a turn on.
    exit when taskboard.sweep_exhausted(v_plan, v_now, 100) = 0;
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

create or replace function taskboard.lock_due(
  lanes text[], first bigint, last bigint, most integer, besides tid[], now timestamptz)
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
  v_half bigint := greatest(lock_due.most / 2, 1);
  v_lost integer;
begin
  select s.max_lost_leases into v_lost from taskboard.settings as s where s.one_row;
  return array(
    select due.ctid
    from (
      select unnest((lock_due.lanes[1]::integer[])[lock_due.first:lock_due.last]) as id,
        unnest((lock_due.lanes[2]::float8[])[lock_due.first:lock_due.last]) as floor,
        unnest((lock_due.lanes[3]::integer[])[lock_due.first:lock_due.last]) as place,
        abs(unnest((lock_due.lanes[4]::integer[])[lock_due.first:lock_due.last])) as side,
        unnest((lock_due.lanes[5]::bigint[])[lock_due.first:lock_due.last]) as many,
        unnest((lock_due.lanes[6]::bigint[])[lock_due.first:lock_due.last]) as rest) as lane
    cross join lateral (
      select p.ctid
      from taskboard.jobs as p
      where p.lane_id = lane.id and p.claimable_at <= lock_due.now
        and (p.claimable_at, p.place) >= (to_timestamp(lane.floor), lane.place)
        and p.ctid <> all (lock_due.besides)
        and (p.lease_token is null or (p.cancel_requested_at is null
          and p.lost_leases + 1 < coalesce(p.max_lost_leases, v_lost)))
      order by p.lane_id, p.claimable_at, p.place
      limit case lane.side when 1 then greatest((v_half + lane.rest) / lane.many, 1) end
      offset case lane.side when 3 then greatest((v_half + lane.rest) / lane.many, 1) end
      for update skip locked) as due
    limit lock_due.most);
end
$$;

comment on function taskboard.lock_due(text[], bigint, bigint, integer, tid[], timestamptz) is
$$Lock due jobs of some lanes of a plan, in its order (internal).
lanes: fields 3 to 8 of the plan, of which only those from first to last count. besides: those that
the caller has already. Passes over rows that others have locked.$$;

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
    where s.one_row and abs(lane.side) = 1 and c.lease_token is not null
      and (c.lost_leases + 1 >= coalesce(c.max_lost_leases, s.max_lost_leases)
        or c.cancel_requested_at is not null)
    limit sweep_exhausted.most));
end
$$;

comment on function taskboard.sweep_exhausted(text[], timestamptz, integer) is
$$End exhausted jobs among the first due of each lane (internal).
plan: what plan_scan returned. Returns how many it ended.$$;
