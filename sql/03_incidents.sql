create or replace function taskboard.note_incident(
  what text, job_id uuid default null, queue text default null, kind text default null,
  worker text default null, detail text default null)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  v_now timestamptz := clock_timestamp();
  v_cap integer;
  v_queue text := note_incident.queue;
  v_kind text := note_incident.kind;
begin
  select s.incidents_per_minute into v_cap from taskboard.settings as s;
  -- The cap looks at the cap-th newest row: one short index scan, however many there are.
  if v_cap = 0 or exists (
    select from (
      select i.happened_at from taskboard.incidents as i
      order by i.id desc limit 1 offset v_cap - 1) as oldest
    where oldest.happened_at > v_now - make_interval(secs => 60))
  then
    return;
  end if;
  if v_queue is null and note_incident.job_id is not null then
    select l.queue, l.kind into v_queue, v_kind
    from taskboard.jobs as j
    join taskboard.lanes as l on l.id = j.lane_id + 0
    where j.id = note_incident.job_id;
    if not found then
      select h.queue, h.kind into v_queue, v_kind
      from taskboard.history as h
      where h.id = note_incident.job_id
      limit 1;
    end if;
  end if;
  insert into taskboard.incidents (happened_at, what, job_id, queue, kind, worker, by_role, detail)
  values (
    v_now, note_incident.what, note_incident.job_id, v_queue, v_kind, note_incident.worker,
    taskboard.caller(), left(note_incident.detail, 1000));
end
$$;

comment on function taskboard.note_incident(text, uuid, text, text, text, text) is
$$Append one row of evidence, unless the last minute is full (internal).
queue and kind: those of the job, where they are not given.
At most settings.incidents_per_minute rows a minute, so that nobody fills the disk with refusals.$$;

create or replace function taskboard.caller()
returns text
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
begin
  -- In a definer function current_user is the owner; "role" is what the caller chose by set role.
  return coalesce(nullif(nullif(current_setting('role', true), 'none'), ''), session_user);
end
$$;

comment on function taskboard.caller() is
$$Return the role whose rights count: that of set role, else the login (internal).$$;

create or replace function taskboard.note_refusal(verb text, job_id uuid, lease_token uuid)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  -- A renewal that meets the worker's own completion is no incident.
  if note_refusal.verb = 'renew' and taskboard.lease_status(
    note_refusal.job_id, note_refusal.lease_token) in ('completed_by_you', 'given_back')
  then
    return;
  end if;
  perform taskboard.note_incident(
    'write_refused', note_refusal.job_id, detail => format('%s: %s', note_refusal.verb,
      taskboard.lease_status(note_refusal.job_id, note_refusal.lease_token)));
end
$$;

comment on function taskboard.note_refusal(text, uuid, uuid) is
$$Record a write that was refused, with the reason that lease_status gives (internal).$$;
