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
      -- Like and attach: attaching takes no lock that a completion has to wait for, as the
      -- default partition, which is locked, takes no rows while a day has its own.
      execute format(
        'create table taskboard.%I (like taskboard.history including all)', v_name);
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
$$Make the partitions of history for today and some days ahead; return how many (internal).$$;

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
  v_day record;
  v_count bigint;
begin
  select clock_timestamp() - taskboard.exact(coalesce(prune.keep, s.history)) into v_before
  from taskboard.settings as s
  where prune.keep is null or taskboard.check_span('keep', prune.keep, '0', '876000 hours') >= '0';

  for v_day in
    select c.relname
    from pg_inherits as i
    join pg_class as c on c.oid = i.inhrelid
    where i.inhparent = 'taskboard.history'::regclass and c.relname ~ '^history_\d{8}$'
      and to_date(substr(c.relname, 9), 'YYYYMMDD') + 1 <= (v_before at time zone 'UTC')::date
    order by c.relname
  loop
    begin
      execute format('alter table taskboard.history detach partition taskboard.%I', v_day.relname);
      -- What a queue keeps longer goes to the default partition.
      execute format(
        'with kept as (
           delete from taskboard.%I as h using taskboard.queues as q
           where q.name = h.queue and h.state = ''failed''
             and h.finished_at > clock_timestamp() - q.keep_failed
           returning h.*)
         insert into taskboard.history select k.* from kept as k', v_day.relname);
      execute format(
        'delete from taskboard.effects as e using taskboard.%I as h where e.job_id = h.id',
        v_day.relname);
      execute format('select count(*) from taskboard.%I', v_day.relname) into v_count;
      execute format('drop table taskboard.%I', v_day.relname);
      v_row := row('dropped ' || v_day.relname, v_count);
      return next v_row;
    exception
      when lock_not_available then -- somebody reads it: the next call drops it
        v_row := row('busy ' || v_day.relname, 0);
        return next v_row;
    end;
  end loop;

  with gone as (
    delete from taskboard.history as h
    where h.payload is null and h.finished_at < clock_timestamp() - make_interval(hours => 1)
    returning h.id)
  delete from taskboard.effects as e using gone as g where e.job_id = g.id;
  with gone as (
    delete from taskboard.history_default as h
    where h.finished_at < v_before
      and not exists (
        select from taskboard.queues as q
        where q.name = h.queue and h.state = 'failed'
          and h.finished_at > clock_timestamp() - q.keep_failed)
    returning h.id)
  delete from taskboard.effects as e using gone as g where e.job_id = g.id;

  delete from taskboard.unique_keys as u
  where not u.live and u.held_until <= clock_timestamp();
  get diagnostics v_count = row_count;
  v_row := row('unique keys freed', v_count);
  return next v_row;

  delete from taskboard.incidents as i where i.happened_at < v_before;
  get diagnostics v_count = row_count;
  v_row := row('incidents deleted', v_count);
  return next v_row;
end
$$;

comment on function taskboard.prune(interval) is
$$Forget finished jobs, their effects, and incidents that are older than keep.
keep: by default settings.history (7 days). Whole days are dropped at once; a day that somebody
reads just now is left to the next call. Returns what was done. Role: taskboard_operator.$$;

create or replace function taskboard.maintain()
returns setof taskboard.maintained
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '100ms'
as $$
begin
  -- One at a time is enough; whoever comes second has nothing to do.
  if not pg_try_advisory_xact_lock(1952539507, 0) then
    return;
  end if;
  return query select 'partitions made'::text, taskboard.make_partitions();
  return query select 'exhausted jobs ended'::text, taskboard.sweep_exhausted(
    null, null, clock_timestamp(), 1000);
  return query select p.step, p.touched from taskboard.prune() as p;
end
$$;

comment on function taskboard.maintain() is
$$Do the housekeeping: partitions ahead, retention, exhausted jobs of lanes nobody claims.
Every runner calls it now and then; psql or a cron job may call it at any moment, many at once.
Nothing depends on its having run in time. Returns what was done.
Roles: taskboard_worker, taskboard_operator.$$;

do $$ begin perform taskboard.make_partitions(); end $$;
