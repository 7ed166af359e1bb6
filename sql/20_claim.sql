create or replace function taskboard.claim(
  queues text[] default null, kinds text[] default null, max_jobs integer default 1,
  lease interval default null, worker text default null)
returns setof taskboard.claimed
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
-- The shape of the plans is a promise: lanes in order, in each the claim index in order. Planned
-- once, never by counting rows that were not there when the statistics were made.
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set enable_memoize = off
set jit = off
as $$
declare
  v_worker text := coalesce(claim.worker, nullif(current_setting('application_name'), ''),
    'pid-' || pg_backend_pid()::text);
  v_key bigint := hashtextextended(format('%s/%s', claim.queues, claim.kinds), 0);
  -- What this session planned for the same lanes a moment ago will do again. See 26_floor.sql.
  v_plan text[] := string_to_array(
    current_setting('taskboard.plan_' || (v_key & 7)::text, true), '/');
  v_first boolean := pg_current_xact_id_if_assigned() is null;
  -- The transaction id before the clock; a variable, because only that bounds an index scan.
  v_now timestamptz := case when pg_current_xact_id() is not null then clock_timestamp() end;
  v_half bigint := greatest(claim.max_jobs / 2, 1);
  v_lease interval := claim.lease;
  v_set record;
  v_quick boolean; -- by the plan; else at leisure, in pick_jobs
  v_picked tid[];
  v_ids uuid[];
  v_got bigint := 0;
begin
  -- Few statements and expressions: what runs cold in each transaction counts.
  select s.lease, s.timeout, s.max_attempts, s.max_lost_leases,
    s.queue_rights or s.queue_limits or s.paused_at is not null as special,
    coalesce(claim.max_jobs between 1 and s.claim_jobs, false)
      and coalesce(claim.lease between s.lease_least and s.lease_most, true)
      and char_length(v_worker) between 1 and 200
      and current_setting('transaction_isolation') = 'read committed' as is_fine,
    -- How old the plan is, in seconds; null if there is none, or one of other lanes.
    case when v_plan[1] = v_key::text then date_part('epoch', v_now) - v_plan[2]::float8 end as age
  into v_set
  from taskboard.settings as s
  where s.one_row;
  if v_set.special then
    -- The plan must be younger than the last change of a queue, and have no lane with a limit.
    v_set.age := (
      select date_part('epoch', v_now) - v_plan[2]::float8
      from taskboard.settings as s
      where s.one_row and v_plan[1] = v_key::text || '@' || s.xmin::text
        and v_plan[6] not like '%-%' and not s.queue_rights and s.paused_at is null);
  end if;
  v_quick := case when v_set.is_fine and v_set.age is not null
    then v_set.age between 0 and 30 * sign(v_plan[13]::float8) else false end;
  if v_lease is not null and v_set.is_fine then
    v_lease := taskboard.exact(v_lease);
  end if;
  loop
    if not v_quick then
      if not v_set.is_fine or v_set.age is null then
        perform taskboard.check_claim(
          claim.queues, claim.kinds, claim.max_jobs, claim.lease, v_worker);
      end if;
      v_picked := taskboard.pick_jobs(
        claim.queues, claim.kinds, claim.max_jobs - v_got::integer, v_key,
        v_first and v_got = 0);
      exit when v_picked is null;
      if v_set.special then
        v_ids := array(select j.id from taskboard.jobs as j where j.ctid = any (v_picked));
      end if;
    end if;
    -- The pick is an array, which is made once. Nobody can move the rows that it has locked: the
    -- place of each is the quickest way to it. The clock is read anew, once for all of them (hence
    -- the select): they are locked by now.
    -- "+ 0", so that no plan begins with the lanes and then reads all their jobs.
    return query
    update taskboard.jobs as j
    set lane_id = l.returns_to,
      attempt = j.attempt + 1,
      claimed_at = (select clock_timestamp()),
      claimable_at = (select clock_timestamp()) + coalesce(v_lease, j.lease, l.lease, v_set.lease),
      lease_granted = coalesce(v_lease, j.lease, l.lease, v_set.lease),
      lease_token = gen_random_uuid(),
      leased_by = v_worker,
      lost_leases = case when j.lease_token is null then j.lost_leases else j.lost_leases + 1 end,
      lapsed_by = case when j.lease_token is not null then
        taskboard.note_takeover(j.id, l.queue, l.kind, j.leased_by, j.lost_leases) end,
      unique_key = case when j.unique_until_claim is null then j.unique_key else
        taskboard.free_claimed_key(l.kind, j.unique_key, j.id) end
    from taskboard.lanes as l
    where l.id = j.lane_id + 0 and j.ctid = any (case when not v_quick then v_picked else array(
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
          and (p.lease_token is null or (p.cancel_requested_at is null
            and p.lost_leases + 1 < coalesce(p.max_lost_leases, v_set.max_lost_leases)))
        order by p.lane_id, p.claimable_at, p.place
        limit case lane.side when 1 then greatest((v_half + lane.rest) / lane.many, 1) end
        offset case lane.side when 3 then greatest((v_half + lane.rest) / lane.many, 1) end
        for update skip locked) as due
      limit claim.max_jobs) end)
    returning
      j.id, j.lease_token, j.claimable_at, j.lease_granted, coalesce(j.timeout, v_set.timeout),
      l.queue, l.kind, j.payload, j.attempt, coalesce(j.max_attempts, v_set.max_attempts),
      j.headers, j.failures, j.lost_leases, l.priority, j.run_at, j.created_at;
    get diagnostics v_got = row_count;
    exit when not v_quick or v_got = claim.max_jobs or (v_got > 0 and v_plan[14] is null);
    v_quick := false;
  end loop;
  if v_quick and v_set.age > v_plan[13]::float8 then
    -- Whoever has just been woken is not to wait for a new plan, even if this one may lack a lane
    -- that is new: the next claim makes it.
    perform set_config('taskboard.plan_' || (v_key & 7)::text,
      array_to_string(v_plan[:12] || '-1'::text, '/'), false);
  end if;
  if v_ids is not null then
    perform taskboard.count_starts(v_ids);
  end if;
end
$$;

comment on function taskboard.claim(text[], text[], integer, interval, text) is
$$Lease up to max_jobs jobs; each row carries a new random lease_token.
queues, kinds: null means all; a kind that is not named is never claimed and never scanned.
lease: 0.1 s to 24 h; by default the job's, else the queue's, else settings.lease. timeout: longest
run of this attempt; after it renewals are refused. worker: by default application_name.
Zero rows: nothing is ready that nobody else is just taking; fewer than max_jobs need not be all
that is ready. Raises attempt by one; a lapsed lease that is taken over counts as lost. Jobs that
lost their lease too often are ended on the way. Passes over rows that others have locked.
Needs read committed (0A000).
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

create or replace function taskboard.note_takeover(
  job_id uuid, queue text, kind text, worker text, lost_leases integer)
returns text
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform taskboard.note_incident(
    'lease_lapsed', note_takeover.job_id, note_takeover.queue, note_takeover.kind,
    note_takeover.worker, format('lost lease %s of this job', note_takeover.lost_leases + 1));
  return note_takeover.worker;
end
$$;

comment on function taskboard.note_takeover(uuid, text, text, text, integer) is
$$Record a lapsed lease that a claim takes over; return whose it was (internal).$$;
