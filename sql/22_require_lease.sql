create or replace function taskboard.require_lease(job_id uuid, lease_token uuid)
returns setof taskboard.leased
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
#variable_conflict use_column
declare
  v_row taskboard.leased;
  v_allowed boolean := taskboard.may_touch(require_lease.job_id, require_lease.lease_token);
  v_expires_at timestamptz;
begin
  select j.claimable_at into v_expires_at
  from taskboard.jobs as j
  where j.id = require_lease.job_id and j.lease_token = require_lease.lease_token and v_allowed
  for key share;
  if not found then
    raise exception using errcode = 'TB001',
      message = 'lease lost: the token is not the current one of this job',
      hint = 'Roll back and stop: somebody else owns the job, or it has ended.';
  end if;
  v_row := row(require_lease.job_id, v_expires_at);
  return next v_row;
end
$$;

comment on function taskboard.require_lease(uuid, uuid) is
$$Fence the caller's transaction: raise TB001 unless the token is current.
Until the transaction ends nobody can claim the job again, renewals pass. Call it first, write,
then complete in the same transaction: all of it or none. The refusal itself leaves no incident, as
the transaction rolls back; a renewal afterwards, refused as well, does.
Locks the row for key share; waits at most 5 s (55P03). Role: taskboard_worker.$$;
