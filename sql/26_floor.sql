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
create or replace function taskboard.read_floor(
  hint text, at timestamptz, out floor timestamptz, out floor_place integer)
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $$
declare
  v_set bigint;
  v_at bigint := extract(epoch from read_floor.at) * 1000000;
  v_part text[];
begin
  -- A hint that is unreadable, from the future, or over a minute old is no hint. Its parts: the
  -- floor, when it was last begun anew, the candidate (microseconds), the candidate's transaction
  -- id, and the places of floor and candidate.
  if read_floor.hint
    ~ '^(\d{1,16}/){3}\d{1,18}/\d{1,9}/\d{1,9}$'
  then
    v_part := string_to_array(read_floor.hint, '/');
    v_set := v_part[2]::bigint;
    if v_set between v_at - 60000000 and v_at and v_part[1]::bigint <= v_at
      and v_part[3]::bigint <= v_at
    then
      floor := 'epoch'::timestamptz + v_part[1]::bigint * '1 microsecond'::interval;
      floor_place := v_part[5]::integer;
      return;
    end if;
  end if;
  floor := '-infinity';
  floor_place := 0;
end
$$;

comment on function taskboard.read_floor(text, timestamptz) is
$$Tell the place in a lane before which no claimable row is, by a hint (internal).
-infinity when the hint is none.$$;

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
  v_lane record;
  v_floor timestamptz;
  v_floor_place integer;
  v_note text[];
  v_anew boolean;
  v_xmin bigint;
  v_seen timestamptz;
  v_seen_place integer;
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
    select f.floor, f.floor_place into v_floor, v_floor_place
    from taskboard.read_floor(v_lane.hint, v_now) as f;
    v_note := case when v_floor > '-infinity' then string_to_array(v_lane.hint, '/')
      else array['0', '0', '0', '0', '0', '0'] end;
    -- Twice a minute from the very beginning: a clock that stepped hides nothing for longer.
    v_anew := v_now - taskboard.instant(v_note[2]::bigint) > make_interval(secs => 30);
    -- One statement, hence one snapshot, for the row and for who is still running.
    select pg_snapshot_xmin(pg_current_snapshot())::text::bigint, f.claimable_at, f.place
    into v_xmin, v_seen, v_seen_place
    from (values (1)) as one
    left join (
      select j.claimable_at, j.place
      from taskboard.jobs as j
      where j.lane_id = v_lane.id and (j.claimable_at, j.place) >= (
        case when v_anew then '-infinity' else v_floor end, v_floor_place)
      order by j.lane_id, j.claimable_at, j.place
      limit 1) as f on true;
    if v_seen is null or v_seen >= now() then
      v_seen := now();
      v_seen_place := 0;
    end if;
    -- The candidate becomes the floor when all that ran before it was made has ended.
    if v_note[4] <> '0' and v_xmin >= v_note[4]::bigint then
      v_floor := taskboard.instant(v_note[3]::bigint);
      v_floor_place := v_note[6]::integer;
      v_note[4] := '0';
    end if;
    if (v_seen, v_seen_place) < (v_floor, v_floor_place) then
      v_floor := v_seen;
      v_floor_place := v_seen_place;
    end if;
    if v_note[4] = '0' then
      v_note[3] := taskboard.microseconds(v_seen)::text;
      v_note[4] := v_mine::text;
      v_note[6] := v_seen_place::text;
    end if;
    v_note[1] := taskboard.microseconds(greatest(v_floor, 'epoch'))::text;
    v_note[2] := case when v_anew then taskboard.microseconds(v_now)::text else v_note[2] end;
    v_note[5] := v_floor_place::text;
    perform set_config('taskboard.lane_' || v_lane.id, array_to_string(v_note, '/'), false);
  end loop;
end
$$;

comment on function taskboard.raise_floors(text[], text[]) is
$$Look at the first row of each lane and raise this session's scan floors (internal).
At most 64 lanes, at most every few milliseconds. Hints only: a lost one costs one longer scan.$$;
