create or replace function taskboard.lease_status(job_id uuid, lease_token uuid)
returns text
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  v_job record;
begin
  if not taskboard.may_touch(lease_status.job_id, lease_status.lease_token) then
    return 'unknown_job';
  end if;
  select j.lease_token, j.last_token, j.claimable_at, j.waits_for into v_job
  from taskboard.jobs as j
  where j.id = lease_status.job_id;
  if found then
    return case
      when v_job.lease_token = lease_status.lease_token then
        case when v_job.claimable_at > clock_timestamp() then 'current' else 'expired' end
      when v_job.last_token = lease_status.lease_token then 'given_back'
      when v_job.waits_for = 'person' then 'held'
      else 'not_current'
    end;
  end if;
  select h.lease_token, h.state into v_job
  from taskboard.history as h
  where h.id = lease_status.job_id
  order by h.finished_at desc
  limit 1;
  if not found then
    return 'unknown_job';
  end if;
  return case
    when v_job.state = 'cancelled' then 'cancelled'
    when v_job.lease_token is distinct from lease_status.lease_token then 'finished_by_other'
    when v_job.state = 'completed' then 'completed_by_you'
    else 'given_back'
  end;
end
$$;

comment on function taskboard.lease_status(uuid, uuid) is
$$Tell why a token was refused, or that it is current.
current, expired (lapsed, but nobody has taken over), given_back (your own fail or release is
recorded), not_current (reclaimed, or never yours), completed_by_you, finished_by_other, cancelled,
held (waits for a person), unknown_job. For people and logs; it locks nothing and decides nothing.
Role: taskboard_worker.$$;
