create or replace function taskboard.note_queues()
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  -- Lock, then look, in two statements: whoever changes a queue beside us waits here, and sees
  -- ours. Written even when nothing changes, so that a snapshot from before fails (40001).
  perform from taskboard.settings as s where s.one_row for update;
  update taskboard.settings as s
  set queue_limits = exists (
    select from taskboard.queues as q
    where q.paused_at is not null or q.max_running is not null or q.max_starts is not null)
  where s.one_row;
end
$$;

comment on function taskboard.note_queues() is
$$Note in the settings whether some queue is paused or limited (internal).
Called after each change of a queue, so that claims need not look at the queues.$$;

create or replace function taskboard.pause(queue text default null, reason text default null)
returns setof taskboard.queue_state
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
as $$
#variable_conflict use_column
begin
  if pause.queue is null then
    update taskboard.settings as s set paused_at = clock_timestamp() where s.paused_at is null;
    return query select null::text, s.paused_at from taskboard.settings as s;
  else
    perform taskboard.check_name('queue', pause.queue);
    return query
    insert into taskboard.queues as q (name, paused_at)
    values (pause.queue, clock_timestamp())
    on conflict (name) do update set paused_at = coalesce(q.paused_at, excluded.paused_at)
    returning q.name, q.paused_at;
    perform taskboard.note_queues();
  end if;
  perform taskboard.note_incident(
    'queue_paused', queue => coalesce(pause.queue, 'all'), detail => pause.reason);
end
$$;

comment on function taskboard.pause(text, text) is
$$Stop claims from a queue, or from all when none is named.
What runs goes on, enqueueing too. A repeat changes nothing. reason: kept with the incident.
Role: taskboard_operator.$$;

create or replace function taskboard.resume(queue text default null, reason text default null)
returns setof taskboard.queue_state
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
as $$
#variable_conflict use_column
begin
  if resume.queue is null then
    update taskboard.settings as s set paused_at = null;
    return query select null::text, null::timestamptz;
  else
    perform taskboard.check_name('queue', resume.queue);
    update taskboard.queues as q set paused_at = null where q.name = resume.queue;
    perform taskboard.note_queues();
    return query select resume.queue, null::timestamptz;
  end if;
  perform taskboard.note_incident(
    'queue_resumed', queue => coalesce(resume.queue, 'all'), detail => resume.reason);
  perform taskboard.wake();
end
$$;

comment on function taskboard.resume(text, text) is
$$Let a queue be claimed again, or end the pause of all if none is named.
A queue that was paused by its name stays paused until it is resumed by its name.
reason: kept with the incident.
Role: taskboard_operator.$$;
