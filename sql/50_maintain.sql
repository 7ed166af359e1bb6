set local search_path = pg_catalog, pg_temp;

create or replace function taskboard.make_partitions(days integer default 3)
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '100ms'
as $$
declare
  v_day date;
  v_name text;
  v_made bigint := 0;
begin
  for v_day in
    select (clock_timestamp() at time zone 'UTC')::date + n
    from generate_series(0, make_partitions.days) as n
  loop
    v_name := 'history_' || to_char(v_day, 'YYYYMMDD');
    continue when to_regclass('taskboard.' || v_name) is not null;
    begin
      -- Never queue for a lock: those who come after would queue behind us.
      lock table taskboard.history_default in access exclusive mode nowait;
      execute format(
        'create table taskboard.%I (like taskboard.history including all)', v_name);
      -- Or somebody's column of this type would keep the day from being dropped.
      execute format('revoke all on type taskboard.%I from public', v_name);
      execute format(
        'alter table taskboard.history attach partition taskboard.%I for values from (%L) to (%L)',
        v_name, (v_day::timestamp at time zone 'UTC')::text,
        ((v_day + 1)::timestamp at time zone 'UTC')::text);
      v_made := v_made + 1;
    exception
      -- Another maintenance made it, a long read holds the default partition, or it already holds
      -- rows of that day: they stay where they are, nothing depends on this partition.
      when lock_not_available or duplicate_table or check_violation then
        null;
    end;
  end loop;
  return v_made;
end
$$;

comment on function taskboard.make_partitions(integer) is
$$Make history's partitions for today and days ahead; return how many (internal).$$;

create or replace function taskboard.drop_partitions(names text[])
returns setof taskboard.maintained
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_row taskboard.maintained;
  v_name text;
  v_id uuid;
  v_kept uuid[] := array[]::uuid[];
  v_counts bigint[] := array[]::bigint[];
  v_count bigint;
  v_locked boolean := false;
begin
  -- All that takes time comes before the lock, and is undone if there is no lock to be had.
  foreach v_name in array names loop
    for v_id in execute format(
      'select h.id from taskboard.%I as h join taskboard.queues as q on q.name = h.queue
       where h.state = ''failed'' and h.finished_at > clock_timestamp() - q.keep_failed', v_name)
    loop
      v_kept := v_kept || v_id;
    end loop;
    execute format(
      'delete from taskboard.effects as e using taskboard.%I as h
       where e.job_id = h.id and h.id <> all ($1)', v_name) using v_kept;
    execute format('select count(*) from taskboard.%I', v_name) into v_count;
    v_counts := v_counts || v_count;
  end loop;
  -- Never queue for the lock: completions would queue behind us. They hold theirs for so short a
  -- time that a few tries find a gap, unless somebody reads history for long.
  for v_try in 1..20 loop
    begin
      lock table taskboard.history in access exclusive mode nowait;
      v_locked := true;
    exception
      when lock_not_available then
        perform pg_sleep(0.001 + random() * 0.004);
    end;
    exit when v_locked;
  end loop;
  if not v_locked then
    raise lock_not_available;
  end if;
  for v_n in 1..cardinality(names) loop
    execute format('alter table taskboard.history detach partition taskboard.%I', names[v_n]);
    execute format(
      'insert into taskboard.history select h.* from taskboard.%I as h where h.id = any ($1)',
      names[v_n]) using v_kept;
    execute format('drop table taskboard.%I', names[v_n]);
    v_row := row('dropped ' || names[v_n], v_counts[v_n]);
    return next v_row;
  end loop;
end
$$;

comment on function taskboard.drop_partitions(text[]) is
$$Drop days of history with their effects; 55P03 when somebody reads it (internal).
Holds its lock until the transaction ends: called last.$$;

create or replace function taskboard.take_chores()
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  -- A private row, and no advisory lock, which any login could keep for ever.
  perform from taskboard.migrations as m where m.name = '0001_tables' for update skip locked;
  return found;
end
$$;

comment on function taskboard.take_chores() is
$$Take the housekeeping for this transaction; false when it is taken (internal).$$;

create or replace function taskboard.prune(keep interval default null)
returns setof taskboard.maintained
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '100ms'
as $$
declare
  v_row taskboard.maintained;
  v_before timestamptz;
  v_days text[];
begin
  perform taskboard.check_span('keep', prune.keep, '0', '876000 hours');
  if not taskboard.take_chores() then
    v_row := row('somebody else is pruning', 0);
    return next v_row;
    return;
  end if;
  -- An hour at least: a repeated completion is still to be answered.
  v_before := clock_timestamp() - greatest(
    taskboard.exact(coalesce(prune.keep, s.history)), make_interval(hours => 1))
  from taskboard.settings as s;

  -- Single rows: what has no partition of its own day, and stubs of queues that keep nothing.
  with old as (
    select h.id, h.finished_at
    from taskboard.history_default as h
    where h.finished_at < v_before
      and not exists (
        select from taskboard.queues as q
        where q.name = h.queue and h.state = 'failed'
          and h.finished_at > clock_timestamp() - q.keep_failed)
    for update skip locked
  ), stub as (
    select h.id, h.finished_at
    from taskboard.history as h
    where h.payload is null and h.finished_at < clock_timestamp() - make_interval(hours => 1)
    for update skip locked
  ), gone as (
    delete from taskboard.history as h
    using (table old union table stub) as o
    where h.id = o.id and h.finished_at = o.finished_at
    returning h.id
  ), forgotten as (
    delete from taskboard.effects as e using gone as g where e.job_id = g.id
  )
  select 'single jobs deleted', count(*) into v_row from gone;
  return next v_row;

  with free as (
    select u.kind, u.key from taskboard.unique_keys as u
    where not u.live and u.held_until <= clock_timestamp()
    for update skip locked
  ), gone as (
    delete from taskboard.unique_keys as u
    using free as f
    where u.kind = f.kind and u.key = f.key and not u.live
    returning 1
  )
  select 'unique keys freed', count(*) into v_row from gone;
  return next v_row;

  with gone as (
    delete from taskboard.incidents as i where i.happened_at < v_before returning 1)
  select 'incidents deleted', count(*) into v_row from gone;
  return next v_row;

  v_days := array(
    select c.relname::text
    from pg_inherits as i
    join pg_class as c on c.oid = i.inhrelid
    where i.inhparent = 'taskboard.history'::regclass and c.relname ~ '^history_\d{8}$'
      and to_date(substr(c.relname, 9), 'YYYYMMDD') + 1 <= (v_before at time zone 'UTC')::date
    order by c.relname);
  if cardinality(v_days) > 0 then
    begin
      return query select d.step, d.touched from taskboard.drop_partitions(v_days) as d;
    exception
      when lock_not_available then
        v_row := row('days left, history is being read', cardinality(v_days));
        return next v_row;
    end;
  end if;
end
$$;

comment on function taskboard.prune(interval) is
$$Forget finished jobs, their effects, and incidents older than keep.
keep: by default settings.history (7 days), an hour at least. Whole days are dropped at once; while
somebody reads history for long, they are left to the next call. Never makes a completion wait.
Returns what was done. Errors: 22023. Role: taskboard_operator.$$;

create or replace function taskboard.maintain()
returns setof taskboard.maintained
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '100ms'
as $$
begin
  -- One at a time is enough; whoever comes second has nothing to do.
  if not taskboard.take_chores() then
    return;
  end if;
  return query select 'exhausted jobs ended'::text, taskboard.sweep_exhausted(
    null, null, clock_timestamp(), 1000);
  -- A lane that was being registered while keep_history ran.
  update taskboard.lanes as l
  set keeps = q.keep_completed
  from taskboard.queues as q
  where q.name = l.queue and q.keep_completed <> l.keeps;
  return query select p.step, p.touched from taskboard.prune() as p;
  -- Last, as both hold locks until the end.
  return query select 'partitions made'::text, taskboard.make_partitions();
end
$$;

comment on function taskboard.maintain() is
$$Do the housekeeping of the database.
Partitions ahead, retention, exhausted jobs of lanes nobody claims.
Every runner calls it now and then; psql or a cron job may call it at any moment, many at once.
Nothing depends on its having run in time. Returns what was done.
Roles: taskboard_worker, taskboard_operator.$$;

do $$ begin perform taskboard.make_partitions(); end $$;
