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

create or replace function taskboard.lock_history(names text[])
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  -- Not the other days: a vacuum of one of them, which takes long, is not in the way.
  v_tables text := 'only taskboard.history, only taskboard.history_default' || (
    select string_agg(format(', only taskboard.%I', n), '' order by n)
    from unnest(lock_history.names) as n);
begin
  -- Never queue for the lock: completions would queue behind us. They hold theirs for so short a
  -- time that a few tries find a gap, unless somebody reads history, or vacuums the day, for long.
  for v_try in 1..20 loop
    begin
      execute format('lock table %s in access exclusive mode nowait', v_tables);
      return;
    exception
      when lock_not_available then
        perform pg_sleep(0.001 + random() * 0.004);
    end;
  end loop;
  raise lock_not_available;
end
$$;

comment on function taskboard.lock_history(text[]) is
$$Lock history and days to be dropped until the transaction ends (internal).
Or until the exception block does. 55P03 when somebody reads them for long.$$;

create or replace function taskboard.forget_effects(name text, kept uuid[], most bigint)
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set enable_hashagg = off
set jit = off
as $$
declare
  v_first uuid;
  v_last uuid;
  v_count bigint;
begin
  execute format('select h.id from taskboard.%I as h order by h.id limit 1', forget_effects.name)
  into v_first;
  execute format(
    'select h.id from taskboard.%I as h order by h.id desc limit 1', forget_effects.name)
  into v_last;
  -- Ids begin with their date: between the first and the last stand this day's effects, and few
  -- others, so that each call begins where the last one ended. The jobs go with their effects: if
  -- one were retried without them, what is done would be done again.
  execute format(
    'with old as (
       select distinct p.job_id
       from taskboard.effects as p
       where p.job_id between $1 and $2 and p.job_id <> all ($3)
         and exists (select from taskboard.%1$I as h where h.id = p.job_id)
       limit $4
     ), gone as (
       delete from taskboard.%1$I as h using old as o where h.id = o.job_id returning h.id
     ), forgotten as (
       delete from taskboard.effects as e using gone as g where e.job_id = g.id
     )
     select count(*) from gone',
    forget_effects.name)
  into v_count
  using v_first, v_last, forget_effects.kept, forget_effects.most;
  return v_count;
end
$$;

comment on function taskboard.forget_effects(text, uuid[], bigint) is
$$Delete a day's jobs that have effects, with these, but for those kept (internal).
Returns how many jobs, at most so many: whoever gets as many calls again.$$;

create or replace function taskboard.drop_days(names text[], most_effects bigint)
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
  v_forgotten bigint;
  v_effects bigint := 0;
begin
  -- While somebody reads history for long, what comes next would be done in vain, at each call.
  begin
    perform taskboard.lock_history(names);
    raise exception using message = 'lets the lock go at once';
  exception
    when raise_exception then
      null;
  end;
  -- All that takes time comes before the lock, and is undone if there is no lock to be had.
  foreach v_name in array names loop
    if exists (select from taskboard.queues as q where q.keep_failed is not null) then
      for v_id in execute format(
        'select h.id from taskboard.%I as h join taskboard.queues as q on q.name = h.queue
         where h.state = ''failed'' and h.finished_at > clock_timestamp() - q.keep_failed', v_name)
      loop
        v_kept := v_kept || v_id;
      end loop;
    end if;
    -- They may be as many as jobs: some in each call, which must end in time.
    v_forgotten := taskboard.forget_effects(
      v_name, v_kept, drop_days.most_effects - v_effects);
    v_effects := v_effects + v_forgotten;
    if v_effects = drop_days.most_effects then
      v_row := row('days left, jobs with effects deleted', v_effects);
      return next v_row;
      return;
    end if;
    execute format('select count(*) from taskboard.%I', v_name) into v_count;
    v_counts := v_counts || v_count + v_forgotten;
  end loop;
  perform taskboard.lock_history(names);
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

comment on function taskboard.drop_days(text[], bigint) is
$$Drop days of history with their effects; 55P03 when somebody reads it (internal).
Holds its lock until the transaction ends: called last. A day with more effects than a call may
delete is left to the next ones.$$;

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
  v_dropped boolean := false;
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
  -- So many at a time, here and below, that a call ends; the next one goes on.
  with old as (
    select h.id, h.finished_at
    from taskboard.history_default as h
    where h.finished_at < v_before
      and not exists (
        select from taskboard.queues as q
        where q.name = h.queue and h.state = 'failed'
          and h.finished_at > clock_timestamp() - q.keep_failed)
    limit 100000
    for update skip locked
  ), stub as (
    select h.id, h.finished_at
    from taskboard.history as h
    where h.payload is null and h.finished_at < clock_timestamp() - make_interval(hours => 1)
    limit 100000
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

  with gone as (
    delete from taskboard.incidents as i
    where i.id in (select o.id from taskboard.incidents as o order by o.id limit 100000)
      and i.happened_at < v_before
    returning 1)
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
      for v_row in select d.* from taskboard.drop_days(v_days, 200000) as d loop
        v_dropped := v_dropped or v_row.step like 'dropped %';
        return next v_row;
      end loop;
    exception
      when lock_not_available then
        v_row := row('days left, history is being read', cardinality(v_days));
        return next v_row;
    end;
  end if;
  if v_dropped then
    return;
  end if;
  -- Not in a call that drops days: an enqueue with one of these keys waits until we commit, and
  -- completions would wait for us meanwhile.
  with free as (
    select u.kind, u.key from taskboard.unique_keys as u
    where not u.live and u.held_until <= clock_timestamp()
    limit 100000
    for update skip locked
  ), gone as (
    delete from taskboard.unique_keys as u
    using free as f
    where u.kind = f.kind and u.key = f.key and not u.live
    returning 1
  )
  select 'unique keys freed', count(*) into v_row from gone;
  return next v_row;
end
$$;

comment on function taskboard.prune(interval) is
$$Forget finished jobs, their effects, and incidents older than keep.
keep: by default settings.history (7 days), an hour at least. Whole days are dropped at once; while
somebody reads history for long, they are left to the next call. Never makes a completion wait.
Single rows are forgotten so many at a time, and unique keys past their time by a call that drops no
day: call again, as maintain() is.
Returns what was done. Errors: 22023. Role: taskboard_operator.$$;

create or replace function taskboard.maintain()
returns setof taskboard.maintained
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '100ms'
as $$
declare
  v_row taskboard.maintained;
  v_dropped boolean := false;
begin
  -- One at a time is enough; whoever comes second has nothing to do.
  if not taskboard.take_chores() then
    return;
  end if;
  for v_row in select p.* from taskboard.prune() as p loop
    v_dropped := v_dropped or v_row.step like 'dropped %';
    return next v_row;
  end loop;
  -- Locks of jobs and keys last until the end: not before retention, which may take seconds, nor
  -- after days were dropped, while history is locked. The next call does it.
  if not v_dropped then
    begin
      perform taskboard.take_exhausted_turns();
    exception
      when lock_not_available then
        null;
    end;
    return query select 'exhausted jobs ended'::text, taskboard.sweep_exhausted(
      taskboard.plan_scan(null, null, null), clock_timestamp(), 1000);
    -- A lane that was being registered while keep_history or limit_queue ran.
    update taskboard.lanes as l
    set keeps = q.keep_completed, lease = q.lease
    from taskboard.queues as q
    where q.name = l.queue and (q.keep_completed, q.lease) is distinct from (l.keeps, l.lease);
  end if;
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
