create or replace function taskboard.evict(worker text, reason text default null)
returns setof taskboard.job_state
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
#variable_conflict use_column
declare
  v_now timestamptz := clock_timestamp();
  v_held uuid[];
  v_lapsed uuid[];
  v_busy bigint;
begin
  perform taskboard.check_name('worker', evict.worker);
  -- Whatever is leased stands in a returning lane: the backlog is not read.
  v_held := array(
    select h.id
    from taskboard.lanes as l
    cross join lateral (
      select j.id, j.leased_by
      from taskboard.jobs as j
      where j.lane_id = l.id and j.claimable_at > v_now and j.claimable_at < 'infinity'
      order by j.lane_id, j.claimable_at
      offset 0) as h
    where l.returns_to = l.id and h.leased_by = evict.worker);
  -- A host that died in a fenced transaction may hold a row for hours: the others need not wait.
  v_lapsed := array(
    select j.id
    from taskboard.jobs as j
    where j.id = any (v_held)
      and j.leased_by = evict.worker and j.claimable_at > clock_timestamp()
    order by j.id
    for update skip locked);
  return query
  update taskboard.jobs as j
  set claimable_at = clock_timestamp()
  where j.id = any (v_lapsed)
  returning j.id, 'expired'::text;
  return query
  select j.id, 'busy'::text
  from taskboard.jobs as j
  where j.id = any (v_held) and j.id <> all (v_lapsed)
    and j.leased_by = evict.worker and j.claimable_at > clock_timestamp();
  get diagnostics v_busy = row_count;
  if cardinality(v_lapsed) + v_busy > 0 then
    perform taskboard.note_incident(
      'worker_evicted', worker => evict.worker,
      detail => concat_ws('; ', format('%s leases lapse', cardinality(v_lapsed)),
        case when v_busy > 0 then format('%s are left, locked', v_busy) end, evict.reason));
    perform taskboard.wake();
  end if;
end
$$;

comment on function taskboard.evict(text, text) is
$$Let all leases of a worker lapse now: its host is known to be dead.
Returns the jobs. expired: anybody may claim it at once. busy: left, somebody has its row locked,
perhaps a transaction that the host left open: end it, by pg_terminate_backend, and call again.
If the worker lives after all, its renewals are refused, and its completions count only until
somebody has claimed again. reason: kept with the incident.
Locks the rows for update in id order, and waits for none.
Errors: 22004, 22023. Role: taskboard_operator.$$;
