-- Waking sleepers. A commit that notifies takes a database-wide lock, so we notify only when
-- somebody sleeps. A sleeper holds a shared advisory lock for each queue it waits for (or one for
-- all); whoever makes a job claimable tries that lock exclusively and lets it go at once.
-- A producer may look before the mark is set and commit after the sleeper's last claim. It had its
-- transaction id before it looked; so a sleeper is not told to sleep soundly until all ids that
-- were running when it set its mark have ended.
create or replace function taskboard.wake(due_in interval default '0')
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  -- Sleepers look at least once a minute for what is due later.
  if wake.due_in <= '60 seconds' and pg_notification_queue_usage() < 0.5
    and (select s.notify from taskboard.settings as s)
  then
    notify taskboard;
  end if;
end
$$;

comment on function taskboard.wake(interval) is
$$Notify the channel taskboard of a job that is due in a while (internal).
Carries no data: a notification is a hint to claim again. Never waits, never fails.$$;

create or replace function taskboard.listen(queues text[] default null)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_keys integer[] := array[0];
  v_mark text; -- the locks that this session holds, and an id taken when it had got them
begin
  perform taskboard.check_names(listen.queues, null);
  -- Each key is a lock in memory that all sessions share; for very many, that of all queues does.
  if cardinality(listen.queues) <= 100 then
    v_keys := array(select distinct hashtext(q) from unnest(listen.queues) as q order by 1);
  end if;
  v_mark := current_setting('taskboard.asleep', true);
  if coalesce(split_part(v_mark, '/', 1), '') <> v_keys::text then
    perform taskboard.unlisten();
    listen taskboard;
    if not (select coalesce(bool_and(pg_try_advisory_lock_shared(1952539506, k)), true)
      from unnest(v_keys) as k)
    then
      return false; -- a producer was just looking; what we got is let go by the next call
    end if;
    -- An id of our own: pg_snapshot_xmax is the last one that has ended, plus one.
    v_mark := v_keys::text || '/' || pg_current_xact_id();
    perform set_config('taskboard.asleep', v_mark, false);
  end if;
  return pg_snapshot_xmin(pg_current_snapshot()) >= split_part(v_mark, '/', 2)::xid8;
end
$$;

comment on function taskboard.listen(text[]) is
$$Listen on this session, and mark it as a sleeper on these queues.
The channel is taskboard. Call it on a direct connection, outside a transaction, then claim once
more. True: then wait for a notification. False: a transaction that may enqueue is still running;
claim again and call again soon, a little later each time. Null means all queues; more than 100 are
marked like all. A notification is a hint without data.
Errors: 22004, 22023. Role: taskboard_worker.$$;

create or replace function taskboard.unlisten()
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_key integer;
begin
  unlisten taskboard;
  perform set_config('taskboard.asleep', '', false);
  for v_key in
    select l.objid::bigint::bit(32)::integer
    from pg_locks as l
    where l.locktype = 'advisory' and l.classid = 1952539506 and l.objsubid = 2
      and l.pid = pg_backend_pid() and l.mode = 'ShareLock'
      and l.database = (select d.oid from pg_database as d where d.datname = current_database())
  loop
    perform pg_advisory_unlock_shared(1952539506, v_key);
  end loop;
end
$$;

comment on function taskboard.unlisten() is
$$Leave the channel taskboard and drop the sleeper's mark of this session.
Role: taskboard_worker.$$;
