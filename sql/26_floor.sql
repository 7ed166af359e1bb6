-- The scan floor. Every claim leaves a dead index entry where the job stood, and vacuum cannot
-- remove it while anybody holds an old snapshot. So a session remembers, per lane, a place in the
-- claim index (date and place) before which no claimable row can appear, and starts there.
--
-- Why it is safe. Whoever writes a claimable_at takes its transaction id first, then reads the
-- clock, and writes no earlier date. A look takes its own id X, then finds the first visible row
-- of the lane; P is that row's place, or the start of our transaction if that is earlier. Whoever
-- has an id from X on reads its clock after our start, hence writes no place before P. Earlier
-- ids may: so P is only a candidate, until a later look, from a snapshot in which all ids before
-- X have ended (pg_snapshot_xmin >= X), shows what they left before P.
--
-- What a session remembers is a plan: an array of texts, each a field of the lanes that a claim
-- scans, in the order in which it scans them. Dates are seconds since 1970, and 0 is no floor.
--   1 a hash of queues and kinds, by which we know our own notes; where some queue is paused or
--     limited then "@" and the version of the settings, which each change of a queue makes anew
--   2 when it was written     3 lanes     4, 5 their floors: date and place
--   6 1 for half a batch of returning jobs, 2 for fresh ones, 3 for the rest of the returning
--     ones; -1, -2, -3 the same in a limited queue
--   7, 8 among how many lanes the half is divided, and what rounds it up
--   9 when each floor was last begun anew
--   10, 11, 12 candidates: date, transaction id (0 for none) and place
--   13 for how many seconds claims do with it: 0.1 s; of many lanes ten times what it took. After
--      that it serves one claim more, which leaves -1 here: the next one makes a new plan
--   14 there when the plan has only the first of many lanes

create or replace function taskboard.read_plan(key bigint, at timestamptz)
returns text[]
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
declare
  v_plan text[] := string_to_array(
    current_setting('taskboard.plan_' || (read_plan.key & 7)::text, true), '/');
begin
  if split_part(v_plan[1], '@', 1) = read_plan.key::text
    and date_part('epoch', read_plan.at) - v_plan[2]::float8 between 0 and 60
  then
    return v_plan;
  end if;
  return null;
end
$$;

comment on function taskboard.read_plan(bigint, timestamptz) is
$$Read what this session remembers for claims with these arguments (internal).
Null when there is nothing, or it is not ours, from the future, or over a minute old.$$;

create or replace function taskboard.lanes_of(queues text[], kinds text[], known integer[])
returns setof taskboard.lanes
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
begin
  if lanes_of.queues is not null then
    return query
    select l.*
    from taskboard.lanes as l
    where l.queue = any (lanes_of.queues)
      and (lanes_of.kinds is null or l.kind = any (lanes_of.kinds));
  elsif (select count(*) from (select from taskboard.lanes limit 257) as l) <= 256 then
    return query
    select l.*
    from taskboard.lanes as l
    where lanes_of.kinds is null or l.kind = any (lanes_of.kinds);
  else
    -- Thousands of lanes are mostly empty: from row to row, one step for each that is not.
    return query
    with recursive busy as (
      (select j.lane_id from taskboard.jobs as j order by j.lane_id limit 1)
      union all
      select (
        select j.lane_id
        from taskboard.jobs as j
        where j.lane_id > b.lane_id
        order by j.lane_id
        limit 1)
      from busy as b
      where b.lane_id is not null
    )
    select l.*
    from (select b.lane_id from busy as b union select k from unnest(lanes_of.known) as k) as b
    join taskboard.lanes as l on l.id = b.lane_id
    where lanes_of.kinds is null or l.kind = any (lanes_of.kinds);
  end if;
end
$$;

comment on function taskboard.lanes_of(text[], text[], integer[]) is
$$Return the lanes of some queues and kinds, null for all (internal).
Where there are very many, only those that have a job, and the known ones.$$;

create or replace function taskboard.plan_scan(
  queues text[], kinds text[], old text[], key bigint default null, looks boolean default true)
returns text[]
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  -- Read before the queues are: a plan may know more than its version says, never less.
  v_version text := (
    select case when s.queue_rights or s.queue_limits or s.paused_at is not null
      then '@' || s.xmin::text else '' end
    from taskboard.settings as s
    where s.one_row);
  v_raise boolean := plan_scan.key is not null and plan_scan.looks;
  v_mine bigint := pg_current_xact_id()::text::bigint;
  v_at numeric := extract(epoch from clock_timestamp());
  v_lanes integer[] := plan_scan.old[3]::integer[];
  v_floors numeric[] := plan_scan.old[4]::numeric[];
  v_places integer[] := plan_scan.old[5]::integer[];
  v_begun numeric[] := plan_scan.old[9]::numeric[];
  v_candidates numeric[] := plan_scan.old[10]::numeric[];
  v_ids bigint[] := plan_scan.old[11]::bigint[];
  v_candidate_places integer[] := plan_scan.old[12]::integer[];
  v_plan text[];
  v_kept text[];
  v_took numeric;
begin
  -- One statement, hence one snapshot, for the rows and for who is still running.
  with old as (
    -- In random order, so that no lane of one priority starves; half of a batch is divided. Lanes
    -- of a limited queue stand together, and so do those that have no limit.
    select l.id, l.priority, l.returning, l.nth, l.turn, l.limited,
      count(*) over (partition by l.priority, l.returning, l.limited) as many,
      coalesce(v_floors[l.n], 0) as floor, coalesce(v_places[l.n], 0) as place,
      coalesce(v_begun[l.n], 0) as begun, coalesce(v_ids[l.n], 0) as by,
      v_candidates[l.n] as candidate, v_candidate_places[l.n] as candidate_place,
      -- Twice a minute from the very beginning: a clock that stepped hides nothing for longer.
      v_at - coalesce(v_begun[l.n], 0) not between 0 and 30 as anew
    from (
      select l.*, array_position(v_lanes, l.id) as n,
        min(random()) over (partition by l.priority, l.limited) as turn,
        row_number() over (partition by l.priority, l.returning, l.limited order by random()) as nth
      from (
        select l.*, case when coalesce(q.max_running, q.max_starts) is not null
          then q.name end as limited
        from taskboard.lanes_of(plan_scan.queues, plan_scan.kinds, v_lanes) as l
        left join taskboard.queues as q on q.name = case when v_version <> '' then l.queue end
        where plan_scan.key is null or q.paused_at is null) as l) as l
  ), looked as (
    -- The first row of each lane that anybody could claim, or the start of our transaction.
    select o.*, coalesce(f.place, 0) as seen_place,
      extract(epoch from coalesce(f.claimable_at, now())) as seen,
      -- The candidate becomes the floor when all that ran before it was made has ended.
      o.by <> 0 and pg_snapshot_xmin(pg_current_snapshot())::text::bigint >= o.by as adopt
    from old as o
    left join lateral (
      select j.claimable_at, j.place
      from taskboard.jobs as j
      -- No further than now: where deadlines were, there are dead entries for a lease ahead.
      where v_raise and j.lane_id = o.id and j.claimable_at < now()
        and (j.claimable_at, j.place) >= (
          case when o.anew then '-infinity' else to_timestamp(o.floor) end, o.place)
      order by j.lane_id, j.claimable_at, j.place
      limit 1) as f on true
  ), risen as (
    select l.*, case when l.adopt then l.candidate else l.floor end as next,
      case when l.adopt then l.candidate_place else l.place end as next_place,
      l.adopt or l.by = 0 as again
    from looked as l
  ), noted as (
    -- What the look found before it keeps the floor down.
    select r.*, v_raise and (r.seen, r.seen_place) < (r.next, r.next_place) as lower
    from risen as r
  )
  select array[
    plan_scan.key::text || v_version, v_at::text, array_agg(p.id)::text,
    array_agg(case when not v_raise then p.floor when p.lower then p.seen else p.next end)::text,
    array_agg(case when not v_raise then p.place when p.lower then p.seen_place
      else p.next_place end)::text,
    array_agg(case when p.limited is null then p.side else -p.side end)::text,
    array_agg(p.many)::text, array_agg(p.many - p.nth)::text,
    array_agg(case when p.anew then v_at else p.begun end)::text,
    array_agg(case when p.again then p.seen else p.candidate end)::text,
    array_agg(case when p.again then v_mine else p.by end)::text,
    array_agg(case when p.again then p.seen_place else p.candidate_place end)::text]
  into v_plan
  from (
    -- Per priority: returning jobs up to half a batch, fresh ones, the rest of the returning ones.
    select n.*, s.side
    from noted as n
    join (values (true, 1), (false, 2), (true, 3)) as s (returning_lane, side)
      on s.returning_lane = n.returning
    order by n.priority, n.turn, s.side, n.nth) as p;
  v_took := extract(epoch from clock_timestamp()) - v_at;
  v_plan[2] := (v_at + v_took)::text;
  v_plan := v_plan || '0.1'::text;
  v_kept := v_plan;
  if cardinality(v_plan[3]::integer[]) > 96 then
    -- The first of many lanes will do; a batch that they do not fill is planned anew.
    v_kept := v_plan[:2] || array(
      select ((field.value::numeric[])[:96])::text
      from unnest(v_plan[3:12]) with ordinality as field (value, n)
      order by field.n) || array[least(greatest(0.1, 10 * v_took), 30)::text, 'cut'];
  end if;
  if v_raise and v_plan[3] is not null then
    perform set_config(
      'taskboard.plan_' || (plan_scan.key & 7)::text, array_to_string(v_kept, '/'), false);
  end if;
  return v_plan;
end
$$;

comment on function taskboard.plan_scan(text[], text[], text[], bigint, boolean) is
$$Plan in which order a claim scans lanes, and from which floors (internal).
old: what the session remembers. key: queues and kinds, hashed; without one it is for housekeeping,
and paused queues are in the plan, too. looks: with a key, look at the first row of each lane, raise
the floors and remember the plan; only where the transaction has changed nothing yet. Hints only: a
lost one costs one longer scan.$$;
