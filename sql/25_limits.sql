create or replace function taskboard.room_in(queue text, most integer)
returns integer
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  v_queue taskboard.queues;
  v_room integer;
  v_now timestamptz;
begin
  -- Twice: who finds no room need not keep others from the queue until the claim commits.
  for v_look in 1..2 loop
    if v_look = 1 then
      select q.* into v_queue
      from taskboard.queues as q
      where q.name = room_in.queue;
    else
      -- Held until the claim commits, so that the next one counts what this one starts. A busy row
      -- means none of that queue now, never a wait.
      select q.* into v_queue
      from taskboard.queues as q
      where q.name = room_in.queue and q.paused_at is null
      for update skip locked;
      if not found then
        return 0;
      end if;
      if v_queue.max_running is not null then
        perform taskboard.part_waiting(room_in.queue); -- lanes that are new
      end if;
      -- Now and then: under an old snapshot each of these reads what all before it have deleted.
      if v_queue.max_starts is not null and random() < 0.01 then
        delete from taskboard.queue_starts as s
        where s.queue = room_in.queue
          and s.started_at <= clock_timestamp() - v_queue.starts_per;
      end if;
    end if;
    v_room := room_in.most;
    v_now := clock_timestamp();
    if v_queue.max_running is not null then
      v_room := least(v_room, v_queue.max_running - (
        select count(*)
        from taskboard.lanes as l
        join taskboard.jobs as j on j.lane_id = l.id
        where l.queue = room_in.queue and l.returns_to = l.id
          and j.claimable_at > v_now
          and j.claimable_at < 'infinity' and j.lease_token is not null));
    end if;
    if v_queue.max_starts is not null then
      v_room := least(v_room, v_queue.max_starts - (
        select coalesce(sum(s.jobs), 0)
        from taskboard.queue_starts as s
        where s.queue = room_in.queue and s.started_at > v_now - v_queue.starts_per));
    end if;
    exit when v_room <= 0;
  end loop;
  return v_room;
end
$$;

comment on function taskboard.room_in(text, integer) is
$$Tell how many jobs a claim may take from a limited queue now (internal).
At most so many. Where there is room the queue's row is locked until the transaction ends; 0 when
another has it. A job whose lease has lapsed does not count as running: a stalled worker may exceed
max_running.$$;

create or replace function taskboard.count_starts(job_ids uuid[])
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  -- Counted from after the claim: no interval, wherever it begins, holds more than max_starts.
  insert into taskboard.queue_starts as s (queue, started_at, jobs)
  select q.name, clock_timestamp(), count(*)
  from taskboard.jobs as j
  join taskboard.lanes as l on l.id = j.lane_id
  join taskboard.queues as q on q.name = l.queue
  where j.id = any (count_starts.job_ids) and q.max_starts is not null
  group by q.name
  on conflict on constraint queue_starts_key do update set jobs = s.jobs + excluded.jobs;
end
$$;

comment on function taskboard.count_starts(uuid[]) is
$$Count jobs that were claimed against the rates of their queues (internal).$$;

create or replace function taskboard.limit_queue(
  queue text, max_running integer default null, max_starts integer default null,
  starts_per interval default null, lease interval default null)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
as $$
declare
  v_lease interval := limit_queue.lease;
begin
  perform taskboard.check_name('queue', limit_queue.queue);
  if limit_queue.max_running < 0 or limit_queue.max_starts < 0 then
    raise exception using errcode = '22023', message = 'a limit is negative',
      hint = 'Give 0 or more, or null for no limit.';
  end if;
  if (limit_queue.max_starts is null) <> (limit_queue.starts_per is null) then
    raise exception using errcode = '22023',
      message = 'max_starts and starts_per go together',
      hint = 'For 100 starts a minute: max_starts => 100, starts_per => ''1 minute''.';
  end if;
  perform taskboard.check_span('starts_per', limit_queue.starts_per, '0.001 s', '24 hours');
  v_lease := taskboard.check_span('lease', v_lease, s.lease_least, s.lease_most)
  from taskboard.settings as s;
  insert into taskboard.queues as q (name, max_running, max_starts, starts_per, lease)
  values (
    limit_queue.queue, limit_queue.max_running, limit_queue.max_starts,
    taskboard.exact(limit_queue.starts_per), v_lease)
  on conflict (name) do update
  set max_running = excluded.max_running, max_starts = excluded.max_starts,
    starts_per = excluded.starts_per, lease = excluded.lease;
  update taskboard.lanes as l
  set lease = v_lease
  where l.queue = limit_queue.queue and l.lease is distinct from v_lease;
  if limit_queue.max_running is not null then
    perform taskboard.part_waiting(limit_queue.queue);
  end if;
  perform taskboard.note_queues();
  perform taskboard.note_incident(
    'queue_limited', queue => limit_queue.queue, detail => coalesce(nullif(concat_ws(', ',
      'running ' || limit_queue.max_running,
      'starts ' || limit_queue.max_starts || ' per ' || limit_queue.starts_per,
      'lease ' || v_lease), ''), 'no limits'));
  perform taskboard.wake();
end
$$;

comment on function taskboard.limit_queue(text, integer, integer, interval, interval) is
$$Set a queue's limits, over all workers; what is not given has no limit.
max_running: so many of its jobs hold an unexpired lease at once. max_starts, starts_per: so many
claims in any interval of that length. lease: default lease of its jobs. Exact under concurrency;
claims from a limited queue take turns, one that finds another in progress gets none of it.
Whoever works on with a lapsed lease is not counted, so stalled workers may exceed max_running; so
may a renewal that commits after the deadline it extends: renew in a transaction of its own.
Errors: 22004, 22023. Role: taskboard_operator.$$;
