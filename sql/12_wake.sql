-- Waking sleepers. A commit that notifies takes a database-wide lock, so we notify only when
-- somebody sleeps. A sleeper holds a shared advisory lock for each queue it waits for (or one for
-- all); whoever makes a job claimable tries that lock exclusively and lets it go at once.
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
  v_class constant integer := 1952539506;
  v_key integer;
  v_marked boolean := true;
begin
  perform taskboard.unlisten();
  listen taskboard;
  if listen.queues is null then
    return pg_try_advisory_lock_shared(v_class, 0);
  end if;
  for v_key in select distinct hashtext(q) from unnest(listen.queues) as q loop
    if not pg_try_advisory_lock_shared(v_class, v_key) then
      v_marked := false;
    end if;
  end loop;
  return v_marked;
end
$$;

comment on function taskboard.listen(text[]) is
$$Take the channel taskboard on this session, and the mark of a sleeper on these queues.
Call it on a direct connection, outside a transaction, then claim once more, then wait. True when
the mark was set for all of them; if false, call again soon: a producer was just looking.
Null means all queues. The notification is a hint without data. Role: taskboard_worker.$$;

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
