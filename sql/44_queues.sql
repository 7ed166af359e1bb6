create or replace function taskboard.pause(queue text default null)
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
  end if;
  perform taskboard.note_incident('queue_paused', queue => coalesce(pause.queue, 'all'));
end
$$;

comment on function taskboard.pause(text) is
$$Stop claims from a queue, or from all when none is named.
What runs goes on, enqueueing too. A repeat changes nothing. Role: taskboard_operator.$$;

create or replace function taskboard.resume(queue text default null)
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
    return query select resume.queue, null::timestamptz;
  end if;
  perform taskboard.note_incident('queue_resumed', queue => coalesce(resume.queue, 'all'));
  perform taskboard.wake();
end
$$;

comment on function taskboard.resume(text) is
$$Let a queue be claimed again, or end the pause of all if none is named.
A queue that was paused by its name stays paused until it is resumed by its name.
Role: taskboard_operator.$$;
