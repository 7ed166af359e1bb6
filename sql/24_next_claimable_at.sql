create or replace function taskboard.next_claimable_at(
  queues text[] default null, kinds text[] default null)
returns timestamptz
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  v_plan text[] := taskboard.read_plan(
    hashtextextended(format('%s/%s', next_claimable_at.queues, next_claimable_at.kinds), 0),
    clock_timestamp());
  v_lanes integer[] := v_plan[3]::integer[];
  v_floors float8[] := v_plan[4]::float8[];
begin
  perform taskboard.check_names(next_claimable_at.queues, next_claimable_at.kinds);
  return (
    select min(c.claimable_at)
    from taskboard.lanes as l
    cross join lateral (
      select j.claimable_at
      from taskboard.jobs as j
      where j.lane_id = l.id and j.claimable_at < 'infinity'
        and j.claimable_at >= coalesce(
          to_timestamp(v_floors[array_position(v_lanes, l.id)]), '-infinity')
      order by j.lane_id, j.claimable_at, j.place
      limit 1) as c
    where (next_claimable_at.queues is null or l.queue = any (next_claimable_at.queues))
      and (next_claimable_at.kinds is null or l.kind = any (next_claimable_at.kinds))
      and not exists (
        select from taskboard.queues as q where q.name = l.queue and q.paused_at is not null)
      and not exists (
        select from taskboard.settings as s
        where s.paused_at is not null or (s.queue_rights and not taskboard.may_use(l.queue))));
end
$$;

comment on function taskboard.next_claimable_at(text[], text[]) is
$$Tell when the next job becomes claimable.
Of queues and kinds, null means all. The earliest due time or deadline; null when there is none. In
the past when something is ready now, or is just being claimed. A worker sleeps no longer than until
then.
Errors: 22004, 22023. Role: taskboard_worker.$$;
