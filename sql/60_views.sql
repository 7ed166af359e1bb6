set local search_path = pg_catalog, pg_temp;

create or replace view taskboard.live_jobs as
select l.queue, l.kind, l.priority::integer as priority,
  case
    when j.waits_for = 'turn' then 'blocked'
    when j.waits_for = 'person' then 'held'
    when j.lease_token is not null
      then case when j.claimable_at > clock_timestamp() then 'running' else 'expired' end
    when j.claimable_at > clock_timestamp() then 'scheduled'
    else 'ready'
  end as state,
  j.* -- last, so that a new column of jobs can be added
from taskboard.jobs as j
join taskboard.lanes as l on l.id = j.lane_id + 0;

comment on view taskboard.live_jobs is
$$Live jobs with their state, derived from their dates, their token and the clock (internal).
Has tokens and payloads: for nobody but the owner.$$;

-- One table in each half, and no clock that moves: the planner then merges the live jobs and the
-- days of history by their ids, so that the newest come without a sort, however many there are.
create or replace view taskboard.job_list as
select j.id as job_id,
  case
    when j.waits_for = 'turn' then 'blocked'
    when j.waits_for = 'person' then 'held'
    when j.lease_token is not null
      then case when j.claimable_at > statement_timestamp() then 'running' else 'expired' end
    when j.claimable_at > statement_timestamp() then 'scheduled'
    else 'ready'
  end as state,
  (select l.queue from taskboard.lanes as l where l.id = j.lane_id) as queue,
  (select l.kind from taskboard.lanes as l where l.id = j.lane_id) as kind,
  (select l.priority::integer from taskboard.lanes as l where l.id = j.lane_id) as priority,
  j.attempt, j.failures,
  coalesce(j.max_attempts, (select s.max_attempts from taskboard.settings as s)) as max_attempts,
  j.lost_leases,
  coalesce(j.max_lost_leases, (select s.max_lost_leases from taskboard.settings as s))
    as max_lost_leases,
  j.leased_by as worker, j.run_at, nullif(j.claimable_at, 'infinity') as claimable_at,
  j.claimed_at, null::timestamptz as finished_at, j.created_at, j.unique_key, j.serial_key,
  j.held_step, j.cancel_requested_at, j.lapsed_by, j.progress
from taskboard.jobs as j
union all
select h.id, h.state::text, h.queue, h.kind, h.priority::integer, h.attempt, h.failures,
  coalesce(h.max_attempts, (select s.max_attempts from taskboard.settings as s)),
  h.lost_leases,
  coalesce(h.max_lost_leases, (select s.max_lost_leases from taskboard.settings as s)),
  h.finished_by, h.run_at, null, h.claimed_at, h.finished_at, h.created_at, h.unique_key,
  h.serial_key, null, null, null, null
from taskboard.history as h;

comment on view taskboard.job_list is
$$All jobs, live and finished, without documents and without tokens.
Newest first: order by job_id desc, as ids begin with the date; that needs no sort.
Role: taskboard_observer.$$;
comment on column taskboard.job_list.state is
$$scheduled, ready, running, expired, blocked or held; completed, failed or cancelled.$$;
comment on column taskboard.job_list.worker is $$Who holds the lease, or who finished the job.$$;
comment on column taskboard.job_list.finished_at is $$When it ended; null while it lives.$$;
comment on column taskboard.job_list.claimable_at is
$$From when a worker may claim; while leased the deadline; null while it waits, and at the end.$$;
comment on column taskboard.job_list.lapsed_by is
$$From whom the present owner took over a lapsed lease.$$;
comment on column taskboard.job_list.progress is $$What the worker reported last.$$;

-- Each count stops at 10,000 a lane and walks the claim index, so that the figures cost the same
-- at ten thousand jobs and at ten million.
create or replace view taskboard.queue_stats as
select l.queue, l.kind, l.priority::integer as priority,
  exists (
    select from taskboard.queues as q where q.name = l.queue and q.paused_at is not null)
    or exists (select from taskboard.settings as p where p.paused_at is not null) as paused,
  sum(due.free)::bigint as ready, sum(later.free)::bigint as scheduled,
  sum(later.leased)::bigint as running, sum(due.leased)::bigint as expired,
  sum(waiting.blocked)::bigint as blocked, sum(waiting.held)::bigint as held,
  min(due.oldest) as oldest_ready_at
from taskboard.lanes as l
cross join lateral (
  select count(*) filter (where d.lease_token is null) as free,
    count(*) filter (where d.lease_token is not null) as leased,
    min(d.claimable_at) filter (where d.lease_token is null) as oldest
  from (
    select j.lease_token, j.claimable_at
    from taskboard.jobs as j
    where j.lane_id = l.id and j.claimable_at <= statement_timestamp()
    order by j.lane_id, j.claimable_at
    limit 10000) as d) as due
cross join lateral (
  select count(*) filter (where d.lease_token is null) as free,
    count(*) filter (where d.lease_token is not null) as leased
  from (
    select j.lease_token
    from taskboard.jobs as j
    where j.lane_id = l.id and j.claimable_at > statement_timestamp()
      and j.claimable_at < 'infinity'
    order by j.lane_id, j.claimable_at
    limit 10000) as d) as later
cross join lateral (
  select count(*) filter (where d.waits_for = 'turn') as blocked,
    count(*) filter (where d.waits_for = 'person') as held
  from (
    select j.waits_for
    from taskboard.jobs as j
    where j.lane_id = l.id and j.claimable_at = 'infinity'
    order by j.lane_id, j.claimable_at
    limit 10000) as d) as waiting
where not exists (select from taskboard.settings as s where s.queue_rights)
  or taskboard.may_use(l.queue)
group by l.queue, l.kind, l.priority;

comment on view taskboard.queue_stats is
$$How many live jobs of each queue, kind and priority are in which state.
A count ends at 10,000 in each lane, of which a kind and priority has two: from 10000 on it means
that many or more. An exact one is a count over job_list, which reads all jobs. oldest_ready_at:
since when the oldest ready job waits; with strict priority, the figure to watch.
Roles: taskboard_observer, taskboard_worker.$$;
comment on column taskboard.queue_stats.paused is $$Whether the queue, or all, is paused.$$;
comment on column taskboard.queue_stats.ready is $$Claimable now.$$;
comment on column taskboard.queue_stats.scheduled is $$Due later, or waiting for a retry.$$;
comment on column taskboard.queue_stats.running is $$Leased.$$;
comment on column taskboard.queue_stats.expired is $$Their lease has run out; claimable.$$;
comment on column taskboard.queue_stats.blocked is $$Wait for the turn of their serial key.$$;
comment on column taskboard.queue_stats.held is $$Wait for a person; see taskboard.resolve.$$;

create or replace view taskboard.queue_list as
select q.name as queue, q.paused_at, i.by_role as paused_by, i.detail as pause_reason,
  q.max_running, q.max_starts, q.starts_per, q.lease
from (
  select o.name, o.name as noted_as, o.paused_at, o.max_running, o.max_starts, o.starts_per, o.lease
  from taskboard.queues as o
  where num_nonnulls(o.paused_at, o.max_running, o.max_starts, o.lease) > 0
  union all
  select null, 'all', s.paused_at, null, null, null, null
  from taskboard.settings as s
  where s.paused_at is not null) as q
left join lateral (
  select n.by_role, n.detail
  from taskboard.incidents as n
  where n.what = 'queue_paused' and n.queue = q.noted_as and n.happened_at >= q.paused_at
  order by n.id desc
  limit 1) as i on true
where q.name is null or not exists (select from taskboard.settings as s where s.queue_rights)
  or taskboard.may_use(q.name);

comment on view taskboard.queue_list is
$$The queues that are paused or have limits, with jobs or without.
A row without a queue: all are paused. Roles: taskboard_operator, taskboard_observer,
taskboard_worker.$$;
comment on column taskboard.queue_list.queue is $$Null: all queues.$$;
comment on column taskboard.queue_list.paused_at is $$Since when; null: it is not paused.$$;
comment on column taskboard.queue_list.paused_by is
$$The role that paused it last; null: its incident is gone.$$;
comment on column taskboard.queue_list.lease is $$Of its jobs, if not the default.$$;
comment on column taskboard.queue_list.pause_reason is $$As it was given with the pause.$$;

create or replace view taskboard.queue_rates as
select h.queue, h.kind, count(*) filter (where h.state = 'completed') / 5.0 as completed_per_minute,
  count(*) filter (where h.state = 'failed') / 5.0 as failed_per_minute,
  count(*) filter (where h.state = 'cancelled') / 5.0 as cancelled_per_minute,
  percentile_cont(0.5) within group (
    order by extract(epoch from h.finished_at - h.claimed_at)) as median_seconds
from taskboard.history as h
where h.finished_at > statement_timestamp() - make_interval(mins => 5)
group by h.queue, h.kind;

comment on view taskboard.queue_rates is
$$What ended in the last five minutes, per minute, and how long the median last attempt took.
Role: taskboard_observer.$$;
comment on column taskboard.queue_rates.completed_per_minute is $$Of those that were kept.$$;
comment on column taskboard.queue_rates.failed_per_minute is $$For good: no attempt is left.$$;
comment on column taskboard.queue_rates.cancelled_per_minute is $$Cancelled ones.$$;
comment on column taskboard.queue_rates.median_seconds is
$$Half of them took no longer from the last claim to the end.$$;

create or replace view taskboard.worker_list as
select j.leased_by as worker, count(*) as holds,
  count(*) filter (where j.claimable_at <= clock_timestamp()) as expired,
  min(j.claimed_at) as oldest_claim_at, max(j.claimable_at - j.lease_granted) as last_seen_at,
  max(j.claimable_at) as leased_until
-- Whatever is leased stands in a returning lane: the backlog is not read.
from taskboard.lanes as l
cross join lateral (
  select c.*
  from taskboard.jobs as c
  where c.lane_id = l.id and c.claimable_at < 'infinity'
  order by c.lane_id, c.claimable_at
  limit 100000) as j
where l.returning and j.lease_token is not null
group by j.leased_by;

comment on view taskboard.worker_list is
$$Who holds leases: how many, how many of them expired, since when, and until when.
oldest_claim_at: of the one held longest. leased_until: the latest deadline. last_seen_at: the last
claim or renewal. Looks at the first 100,000 jobs of each lane that were claimed before. Role:
taskboard_observer.$$;
comment on column taskboard.worker_list.worker is $$By the name it gave to claim.$$;

create or replace view taskboard.schedule_list as
select s.name, s.cron, s.time_zone, s.queue, s.kind, s.priority::integer as priority, s.misfire,
  s.next_at, s.last_at, s.last_job_id, s.paused_at
from taskboard.schedules as s;

comment on view taskboard.schedule_list is
$$The schedules: when each is due next and what it enqueued last.
Role: taskboard_observer.$$;
comment on column taskboard.schedule_list.paused_at is $$Since when; null: it is not paused.$$;

create or replace view taskboard.setting_list as
select o.key as setting, o.value
from taskboard.settings as s
cross join lateral jsonb_each_text(
  to_jsonb(s) - '{one_row,queue_rights,queue_limits,paused_at,shard_id}'::text[]) as o;

comment on view taskboard.setting_list is
$$What configure can change, and what it is now.
Roles: taskboard_operator, taskboard_observer.$$;
comment on column taskboard.setting_list.setting is $$As configure is told.$$;
comment on column taskboard.setting_list.value is $$As text.$$;

create or replace view taskboard.incident_list as
select i.id, i.happened_at, i.what, i.job_id, i.queue, i.kind, i.worker, i.by_role, i.detail
from taskboard.incidents as i;

comment on view taskboard.incident_list is
$$What went wrong, and what people did: refused writes, lapsed leases, holds, operator acts.
Append-only; the oldest go with the history. Role: taskboard_observer.$$;
comment on column taskboard.incident_list.id is $$Rises; has gaps.$$;
comment on column taskboard.incident_list.worker is $$The worker it is about; null: none.$$;

create or replace view taskboard.effect_list as
select e.job_id, e.step, e.attempt, e.idempotency_key, e.begun_at, e.ended_at,
  case when e.happened then 'done' when e.ended_at is null then 'open' else 'refused' end as state
from taskboard.effects as e;

comment on view taskboard.effect_list is
$$What handlers began outside the database: one row per step and attempt, without results.
state: done, refused (did not happen), open (nobody has reported; once the attempt is over,
its outcome is unknown). Role: taskboard_observer.$$;

create or replace function taskboard.job(job_id uuid)
returns setof taskboard.job_list
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
#variable_conflict use_column
begin
  if job.job_id is null then
    raise exception using errcode = '22004', message = 'job_id must not be null',
      hint = 'Name the job.';
  end if;
  return query
  select v.* from taskboard.job_list as v
  where v.job_id = job.job_id and taskboard.may_see(job.job_id);
end
$$;

comment on function taskboard.job(uuid) is
$$Tell where a job is: one row of job_list, or none when nobody knows it.
Roles: taskboard_producer, taskboard_worker, taskboard_operator, taskboard_observer.$$;

create or replace function taskboard.job_documents(
  job_id uuid, out payload jsonb, out headers jsonb, out result jsonb, out error text)
returns setof record
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  if job_documents.job_id is null then
    raise exception using errcode = '22004', message = 'job_id must not be null',
      hint = 'Name the job.';
  end if;
  return query
  select j.payload, j.headers, null::jsonb, j.last_error
  from taskboard.jobs as j
  where j.id = job_documents.job_id
  union all
  select h.payload, h.headers, h.result, h.error
  from taskboard.history as h
  where h.id = job_documents.job_id;
end
$$;

comment on function taskboard.job_documents(uuid) is
$$Show what a job carries and what came of it.
Payload, headers, result, last error.
Apart from job(), because it may show customers' data. Role: taskboard_operator.$$;
