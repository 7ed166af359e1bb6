create or replace function taskboard.evict(worker text, reason text default null)
returns setof taskboard.job_state
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
as $$
#variable_conflict use_column
declare
  v_lapsed uuid[];
begin
  perform taskboard.check_name('worker', evict.worker);
  v_lapsed := array(
    select j.id
    from taskboard.jobs as j
    where j.leased_by = evict.worker and j.claimable_at > clock_timestamp()
    order by j.id
    for update);
  return query
  update taskboard.jobs as j
  set claimable_at = clock_timestamp()
  where j.id = any (v_lapsed)
  returning j.id, 'expired'::text;
  if cardinality(v_lapsed) > 0 then
    perform taskboard.note_incident(
      'worker_evicted', worker => evict.worker,
      detail => concat_ws('; ', format('%s leases lapse', cardinality(v_lapsed)),
        evict.reason));
    perform taskboard.wake();
  end if;
end
$$;

comment on function taskboard.evict(text, text) is
$$Let all leases of a worker lapse now: its host is known to be dead.
Returns the jobs; anybody may claim them at once. If the worker lives after all, its renewals are
refused, and its completions count only until somebody has claimed again. reason: kept with the
incident.
Locks the rows for update in id order; waits at most 5 s (55P03).
Errors: 22004, 22023. Role: taskboard_operator.$$;
