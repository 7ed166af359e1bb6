-- The scan floor. Every claim leaves a dead index entry where the job stood, and vacuum cannot
-- remove it while anybody holds an old snapshot. So a session remembers, per lane, an instant
-- before which no claimable row can appear, and starts its scans there.
--
-- Why it is safe. Whoever writes a claimable_at takes its transaction id first, then reads the
-- clock, and writes no earlier date. A look takes its own id X, then finds the first visible row
-- of the lane; P is that row's date, or the start of our transaction if that is earlier. Whoever
-- has an id from X on reads its clock after our start, hence writes no date before P. Earlier ids
-- may: so P is only a candidate, until a later look, from a snapshot in which all ids before X
-- have ended (pg_snapshot_xmin >= X), shows what they left before P.
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
  v_old bigint[];
  v_hint bigint[];
  v_seen bigint;
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
    select pg_snapshot_xmin(pg_current_snapshot())::text::bigint,
      taskboard.microseconds(least(now(), (
        select j.claimable_at
        from taskboard.jobs as j
        where j.lane_id = v_lane.id
          and j.claimable_at >= taskboard.read_floor(v_lane.hint, v_now)
        order by j.lane_id, j.claimable_at, j.id
        limit 1)))
    into v_xmin, v_seen;
    v_hint := array[0, 0, v_seen, v_mine];
    if taskboard.read_floor(v_lane.hint, v_now) > '-infinity' then
      v_old := string_to_array(v_lane.hint, '/')::bigint[];
      if v_xmin >= v_old[4] then
        v_hint[1] := least(v_old[3], v_seen);
      else
        v_hint := v_old; -- somebody older still runs: floor and candidate stay
      end if;
    end if;
    v_hint[2] := taskboard.microseconds(v_now);
    perform set_config('taskboard.lane_' || v_lane.id, array_to_string(v_hint, '/'), false);
  end loop;
end
$$;

comment on function taskboard.raise_floors(text[], text[]) is
$$Look at the first row of each lane and raise this session's scan floors (internal).
At most 64 lanes, at most every few milliseconds. Hints only: a lost one costs one longer scan.$$;
