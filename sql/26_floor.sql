-- The scan floor. Every claim leaves a dead index entry where the job stood, and vacuum cannot
-- remove it while anybody holds an old snapshot. So a session remembers, per lane, a place in the
-- claim index (date and job id) before which no claimable row can appear, and starts there.
--
-- Why it is safe. Whoever writes a claimable_at takes its transaction id first, then reads the
-- clock, and writes no earlier date. A look takes its own id X, then finds the first visible row
-- of the lane; P is that row's place, or the start of our transaction if that is earlier. Whoever
-- has an id from X on reads its clock after our start, hence writes no place before P. Earlier
-- ids may: so P is only a candidate, until a later look, from a snapshot in which all ids before
-- X have ended (pg_snapshot_xmin >= X), shows what they left before P.
create or replace function taskboard.raise_floors(queues text[], kinds text[])
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  v_mine bigint := pg_current_xact_id()::text::bigint;
  v_now timestamptz := clock_timestamp();
  v_xmin bigint;
  v_lane record;
  v_nobody constant uuid := '00000000-0000-0000-0000-000000000000'::uuid;
  v_old text[];
  v_floor timestamptz;
  v_floor_id uuid;
  v_seen timestamptz;
  v_seen_id uuid;
begin
  perform set_config('taskboard.floors_at', taskboard.microseconds(v_now)::text, false);
  for v_lane in
    select l.id, current_setting('taskboard.lane_' || l.id, true) as hint
    from taskboard.lanes as l
    where (raise_floors.queues is null or l.queue = any (raise_floors.queues))
      and (raise_floors.kinds is null or l.kind = any (raise_floors.kinds))
    order by l.priority, l.id
    limit 64
  loop
    -- One statement, hence one snapshot, for the row and for who is still running.
    select pg_snapshot_xmin(pg_current_snapshot())::text::bigint, f.claimable_at, f.id
    into v_xmin, v_seen, v_seen_id
    from (values (1)) as one
    left join (
      select j.claimable_at, j.id
      from taskboard.jobs as j
      where j.lane_id = v_lane.id and (j.claimable_at, j.id) >= (
        taskboard.read_floor(v_lane.hint, v_now), taskboard.read_floor_id(v_lane.hint, v_now))
      order by j.lane_id, j.claimable_at, j.id
      limit 1) as f on true;
    if v_seen is null or v_seen >= now() then
      v_seen := now();
      v_seen_id := v_nobody;
    end if;
    v_floor := 'epoch';
    v_floor_id := v_nobody;
    if taskboard.is_hint(v_lane.hint, v_now) then
      v_old := string_to_array(v_lane.hint, '/');
      if v_xmin >= v_old[4]::bigint then
        select c.at, c.id into v_floor, v_floor_id
        from (values (taskboard.instant(v_old[3]::bigint), v_old[6]::uuid), (v_seen, v_seen_id))
          as c (at, id)
        order by c.at, c.id
        limit 1;
      else
        -- Somebody older still runs: floor and candidate stay.
        v_old[2] := taskboard.microseconds(v_now)::text;
        perform set_config('taskboard.lane_' || v_lane.id, array_to_string(v_old, '/'), false);
        continue;
      end if;
    end if;
    perform set_config('taskboard.lane_' || v_lane.id, concat_ws(
      '/', taskboard.microseconds(v_floor), taskboard.microseconds(v_now),
      taskboard.microseconds(v_seen), v_mine, v_floor_id, v_seen_id), false);
  end loop;
end
$$;

comment on function taskboard.raise_floors(text[], text[]) is
$$Look at the first row of each lane and raise this session's scan floors (internal).
At most 64 lanes, at most every few milliseconds. Hints only: a lost one costs one longer scan.$$;
