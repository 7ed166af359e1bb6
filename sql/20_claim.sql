create or replace function taskboard.claim(
  queues text[] default null, kinds text[] default null, max_jobs integer default 1,
  lease interval default null, worker text default null)
returns setof taskboard.claimed
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
-- The shape of the plan is a promise: lanes in order, in each the claim index in order. Planned
-- once, never by counting rows that were not there when the statistics were made.
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  v_worker text := coalesce(
    claim.worker, nullif(current_setting('application_name'), ''), 'pid-' || pg_backend_pid());
  v_set record; -- the settings, and whether some queue is special
  v_lease interval := claim.lease;
  v_open text[] := claim.queues; -- queues without limits, null: all
  v_from text[]; -- where a round takes from
  v_limited text[];
  v_caps integer[];
  v_left integer;
  v_half integer;
  v_got integer;
  v_ended bigint;
  v_total integer := 0;
  v_look boolean;
  v_looked text;
  v_now timestamptz;
begin
  -- A look at the floors only before this transaction has changed anything: what it changed may
  -- still be undone, by a rollback of a prepared transaction even when the session's notes stay.
  -- At most every 20 ms; what is unreadable counts as long ago.
  v_looked := current_setting('taskboard.floors_at', true);
  v_look := pg_current_xact_id_if_assigned() is null
    and (case when v_looked ~ '^\d{1,16}$' then
      extract(epoch from clock_timestamp()) * 1000000 - v_looked::bigint not between 0 and 20000
      else true end);
  -- One statement for all that has to be known, because what runs cold in each transaction counts.
  select s.lease as lease_default, s.timeout, s.max_attempts, s.max_lost_leases,
    s.queue_rights or s.paused_at is not null or exists (
      select from taskboard.queues as q
      where q.paused_at is not null or q.max_running is not null or q.max_starts is not null)
      as special,
    exists (select from taskboard.queues as q where q.lease is not null) as queue_leases,
    current_setting('transaction_isolation') = 'read committed'
      and coalesce(claim.max_jobs between 1 and s.claim_jobs, false)
      and coalesce(array_ndims(claim.queues), 1) = 1
      and array_position(claim.queues, null) is null
      and coalesce(array_ndims(claim.kinds), 1) = 1
      and array_position(claim.kinds, null) is null
      and coalesce(claim.lease between s.lease_least and s.lease_most, true)
      and char_length(v_worker) between 1 and 200 as is_fine
  into v_set
  from taskboard.settings as s
  where s.one_row;
  if not v_set.is_fine then
    perform taskboard.check_claim(
      claim.queues, claim.kinds, claim.max_jobs, claim.lease, v_worker);
  end if;
  if v_set.special then
    select p.open, p.limited, p.caps into v_open, v_limited, v_caps
    from taskboard.plan_claim(claim.queues, claim.max_jobs) as p;
  end if;
  if v_lease is not null then
    v_lease := taskboard.exact(v_lease);
  end if;
  -- The transaction id, which is taken here, before any clock is read.
  v_look := pg_current_xact_id() is not null and v_look;
  if v_look then
    perform taskboard.raise_floors(
      case when v_set.special then v_open || v_limited else v_open end, claim.kinds);
  end if;
  -- Limited queues first, as they are bounded; the last round takes from all others.
  for v_round in reverse coalesce(cardinality(v_limited), 0)..0 loop
    v_left := claim.max_jobs - v_total;
    v_from := v_open;
    if v_round > 0 then
      v_from := array[v_limited[v_round]];
      v_left := least(v_left, v_caps[v_round]);
    end if;
    for v_pass in 1..100 loop
      exit when v_left = 0;
      -- A variable, because only that can be a bound of the index scan.
      v_now := clock_timestamp();
      -- Per priority: returning jobs up to half a batch, fresh ones, then the rest of the
      -- returning ones. Should their lanes overlap, a second pass fills the batch.
      v_half := case when v_pass = 1 then greatest(v_left / 2, 1) else v_left end;
      return query
      with leased as (
        update taskboard.jobs as j
        set lane_id = (select l.returns_to from taskboard.lanes as l where l.id = j.lane_id),
          attempt = j.attempt + 1,
          -- Read again here: the rows are locked by now, and we may have waited.
          claimed_at = clock_timestamp(),
          claimable_at = clock_timestamp() + coalesce(
            v_lease, j.lease, case when v_set.queue_leases then taskboard.lane_lease(j.lane_id) end,
            v_set.lease_default),
          lease_granted = coalesce(
            v_lease, j.lease, case when v_set.queue_leases then taskboard.lane_lease(j.lane_id) end,
            v_set.lease_default),
          lease_token = gen_random_uuid(),
          leased_by = v_worker,
          lost_leases = j.lost_leases + (j.lease_token is not null)::integer,
          lapsed_by = case when j.lease_token is not null
            then taskboard.note_lapse(j.id, j.lane_id, j.leased_by, j.lost_leases + 1) end,
          unique_key = case when j.unique_until_claim and j.unique_key is not null
            then taskboard.free_claimed_key(j.lane_id, j.unique_key, j.id) else j.unique_key end
        -- An array, because it is evaluated exactly once: a sub-select may be run again per row.
        where j.id = any (array(
            select picked.id
            from (
              select distinct r.priority
              from taskboard.lanes as r
              where (v_from is null or r.queue = any (v_from))
                and (claim.kinds is null or r.kind = any (claim.kinds))
              order by r.priority) as level
            cross join lateral (
              (select due.id
              from (values (true, v_half, 0), (false, v_left, 0), (true, v_left, v_half))
                as side (returning_lane, take, skip)
              cross join lateral (
                select c.id
                from (
                  -- In random order, so that no lane of one priority starves.
                  select r.id, f.floor, f.floor_place
                  from taskboard.lanes as r
                  cross join lateral taskboard.read_floor(
                    current_setting('taskboard.lane_' || r.id, true), v_now) as f
                  where r.priority = level.priority and r.returning = side.returning_lane
                    and (v_from is null or r.queue = any (v_from))
                    and (claim.kinds is null or r.kind = any (claim.kinds))
                  order by random()) as lane
                cross join lateral (
                  select p.id
                  from taskboard.jobs as p
                  where p.lane_id = lane.id and p.claimable_at <= v_now
                    and (p.claimable_at, p.place) >= (lane.floor, lane.floor_place)
                    and not (p.lease_token is not null
                      and (p.cancel_requested_at is not null
                        or p.lost_leases + 1 >= coalesce(
                          p.max_lost_leases, v_set.max_lost_leases)))
                  order by p.lane_id, p.claimable_at, p.place
                  limit side.take + side.skip
                  for update skip locked) as c
                limit side.take offset side.skip) as due)) as picked
            limit v_left))
        returning j.*
      )
      -- The lanes only here: next to the update the planner may begin with them, and then reads
      -- all jobs when it made its plan for a few.
      select
        j.id, j.lease_token, j.claimable_at, j.lease_granted,
        coalesce(j.timeout, v_set.timeout), l.queue, l.kind, j.payload, j.attempt,
        coalesce(j.max_attempts, v_set.max_attempts), j.headers, j.failures, j.lost_leases,
        l.priority::integer, j.run_at, j.created_at
      from leased as j
      join taskboard.lanes as l on l.id = j.lane_id;
      get diagnostics v_got = row_count;
      v_left := v_left - v_got;
      v_total := v_total + v_got;
      if v_round > 0 and v_got > 0 then
        perform taskboard.count_starts(v_limited[v_round], v_got);
      end if;
      exit when v_left = 0;
      -- Exhausted jobs are passed over above and ended here; that may hand a turn on.
      v_ended := taskboard.sweep_exhausted(v_from, claim.kinds, v_now, 100);
      exit when v_pass > 1 and v_ended = 0;
    end loop;
  end loop;
  if v_look and v_left = 0 then
    perform taskboard.sweep_exhausted(claim.queues, claim.kinds, v_now, 100);
  end if;
end
$$;

comment on function taskboard.claim(text[], text[], integer, interval, text) is
$$Lease up to max_jobs jobs; each row carries a new random lease_token.
queues, kinds: null means all; a kind that is not named is never claimed and never scanned.
lease: 0.1 s to 24 h; by default the job's, else the queue's, else settings.lease. timeout: longest
run of this attempt; after it renewals are refused. worker: by default application_name.
Zero rows: nothing is ready that nobody else is just taking. Raises attempt by one; a lapsed lease
that is taken over counts as lost. Jobs that lost their lease too often are ended on the way.
Locks the rows for update, never waits for one. Needs read committed (0A000).
Errors: 22004, 22023. Role: taskboard_worker.$$;

create or replace function taskboard.check_claim(
  queues text[], kinds text[], max_jobs integer, lease interval, worker text)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_set taskboard.settings;
begin
  if current_setting('transaction_isolation') <> 'read committed' then
    raise exception using errcode = '0A000',
      message = 'claim needs the isolation level read committed',
      hint = 'Claim outside the transaction, or begin it at read committed.';
  end if;
  select s.* into v_set from taskboard.settings as s;
  if check_claim.max_jobs is null then
    raise exception using errcode = '22004', message = 'max_jobs must not be null',
      hint = format('Give 1 to %s.', v_set.claim_jobs);
  end if;
  if check_claim.max_jobs not between 1 and v_set.claim_jobs then
    raise exception using errcode = '22023', message = 'max_jobs is out of bounds',
      hint = format('Give 1 to %s.', v_set.claim_jobs);
  end if;
  perform taskboard.check_names(check_claim.queues, check_claim.kinds);
  perform taskboard.check_span('lease', check_claim.lease, v_set.lease_least, v_set.lease_most);
  if char_length(check_claim.worker) not between 1 and 200 then
    raise exception using errcode = '22023', message = 'worker is empty or too long',
      hint = 'Name the worker in 1 to 200 characters.';
  end if;
end
$$;

comment on function taskboard.check_claim(text[], text[], integer, interval, text) is
$$Say what is wrong with the arguments of claim (internal).
Called when claim has found that something is. Errors: 22004, 22023, 0A000.$$;

create or replace function taskboard.lane_lease(lane_id integer)
returns interval
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $$
  select q.lease
  from taskboard.lanes as l
  join taskboard.queues as q on q.name = l.queue
  where l.id = lane_lease.lane_id
$$;

comment on function taskboard.lane_lease(integer) is
$$Return the default lease of a lane's queue, if it has one (internal).$$;

create or replace function taskboard.sweep_exhausted(
  queues text[], kinds text[], now timestamptz, most integer)
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
    cross join taskboard.lanes as l
    cross join lateral taskboard.read_floor(
      current_setting('taskboard.lane_' || l.id, true), sweep_exhausted.now) as f
    cross join lateral (
      -- Only the first due rows: a look must not cost as much as the backlog is long.
      select p.id, p.lease_token, p.lost_leases, p.max_lost_leases, p.cancel_requested_at
      from taskboard.jobs as p
      where p.lane_id = l.id
        and p.claimable_at between f.floor and sweep_exhausted.now
      order by p.lane_id, p.claimable_at, p.place
      limit sweep_exhausted.most) as c
    where s.one_row and l.returning
      and (sweep_exhausted.queues is null or l.queue = any (sweep_exhausted.queues))
      and (sweep_exhausted.kinds is null or l.kind = any (sweep_exhausted.kinds))
      and c.lease_token is not null
      and (c.lost_leases + 1 >= coalesce(c.max_lost_leases, s.max_lost_leases)
        or c.cancel_requested_at is not null)
    limit sweep_exhausted.most));
end
$$;

comment on function taskboard.sweep_exhausted(text[], text[], timestamptz, integer) is
$$End exhausted jobs among the first due of each lane; return how many (internal).$$;
