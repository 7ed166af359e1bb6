create or replace function taskboard.complete(
  job_id uuid, lease_token uuid, result jsonb default null)
returns setof taskboard.completed
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  v_finished_at timestamptz;
begin
  if complete.job_id is null or complete.lease_token is null or complete.result is not null then
    perform taskboard.may_touch(complete.job_id, complete.lease_token);
    perform taskboard.check_document('result', complete.result, s.payload_bytes)
    from taskboard.settings as s;
  end if;

  return query
  with gone as (
    delete from taskboard.jobs as j
    using taskboard.lanes as l, taskboard.settings as s
    -- The fence: only the current token may write. No clock: a late completion that nobody has
    -- overtaken is accepted, because the work is done.
    -- "+ 0", here and wherever a job is found by its id: where the table looks empty the planner
    -- would begin with its lane, and go on reading the whole claim index when there are a million.
    where j.id = complete.job_id and j.lease_token = complete.lease_token
      and l.id = j.lane_id + 0
      and (not s.queue_rights or taskboard.may_use(l.queue))
      and (j.serial_key is null or taskboard.take_job_lock(j.serial_key, j.id))
    returning j.id, j.attempt, l.priority, j.failures, j.lost_leases, j.max_attempts,
      j.max_lost_leases, j.lease_token, j.run_at, j.created_at, j.claimed_at, j.lease, j.timeout,
      l.queue, l.kind, j.on_unknown, j.leased_by, j.unique_key, j.serial_key, j.headers, j.payload,
      l.keeps,
      -- Read here: a volatile function below would hand the whole row on by one plan node more.
      clock_timestamp() as now
  )
  insert into taskboard.history as h (
    id, finished_at, attempt, priority, failures, lost_leases, max_attempts, max_lost_leases,
    lease_token, run_at, created_at, claimed_at, lease, timeout, state, queue, kind, on_unknown,
    finished_by, unique_key, serial_key, headers, payload, result)
  select
    g.id, g.now, g.attempt, g.priority, g.failures, g.lost_leases, g.max_attempts,
    g.max_lost_leases, g.lease_token, g.run_at, g.created_at, g.claimed_at, g.lease, g.timeout,
    'completed', g.queue, g.kind, g.on_unknown, g.leased_by, g.unique_key, g.serial_key,
    case when g.keeps then g.headers end, case when g.keeps then g.payload end,
    case when g.keeps then complete.result end
  from gone as g
  returning h.id, case when h.unique_key is null and h.serial_key is null then h.finished_at
    else taskboard.let_keys_go(h.kind, h.unique_key, h.serial_key, h.id, h.finished_at) end;

  if found then
    -- A statement of its own: a begin_effect of ours may have held the row until now.
    update taskboard.effects as e
    set ended_at = clock_timestamp(), happened = true
    where e.job_id = complete.job_id and e.lease_token = complete.lease_token
      and e.ended_at is null;
    return;
  end if;
  if not taskboard.may_touch(complete.job_id, complete.lease_token) then
    return;
  end if;
  -- Again a statement of its own, hence a snapshot of its own: the first call may have committed
  -- while this one waited for the row.
  select h.finished_at into v_finished_at
  from taskboard.history as h
  where h.id = complete.job_id and h.lease_token = complete.lease_token
    and h.state = 'completed';
  if not found then
    perform taskboard.note_refusal('complete', complete.job_id, complete.lease_token);
    return;
  end if;
  return query select complete.job_id, v_finished_at;
end
$$;

comment on function taskboard.complete(uuid, uuid, jsonb) is
$$Record that the owner of the current token has done the job.
One row when recorded; the same token again (a lost reply) gives the same row again. Zero rows:
somebody else owns the job, or it has ended; nothing was changed, and you must not report that you
completed it. Ends the effects that this token began. result: kept with the job, for wait_for. May
run in the caller's transaction, at any isolation level.
Locks the row of the serial key, then the job for update; waits at most 5 s (55P03).
Errors: 22004, 22023; above read committed 40001. Role: taskboard_worker.$$;

create or replace function taskboard.complete_many(
  job_ids uuid[], lease_tokens uuid[], results jsonb[] default null)
returns setof taskboard.completed
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
declare
  v_set record;
  v_tokens uuid[] := complete_many.lease_tokens;
  v_kept uuid[];
  v_kept_tokens uuid[];
  v_finished_at timestamptz[];
begin
  select s.claim_jobs, s.payload_bytes, s.queue_rights,
    -- By the size, since nobody may read all keys that are gone: a table without a row has none
    -- (a vacuum saw to that), and a job that has a key was committed together with it.
    pg_relation_size('taskboard.serial_keys') > 0 as serial
  into v_set
  from taskboard.settings as s
  where s.one_row;
  perform taskboard.check_pairs(
    complete_many.job_ids, complete_many.lease_tokens, v_set.claim_jobs);
  if complete_many.results is not null then
    if cardinality(complete_many.results) <> cardinality(complete_many.job_ids) then
      raise exception using errcode = '22023', message = 'results and job_ids differ in length',
        hint = 'Give one result for each job, null for none.';
    end if;
    perform taskboard.check_document('result', r, v_set.payload_bytes)
    from unnest(complete_many.results) as r;
  end if;

  if v_set.queue_rights then
    v_tokens := taskboard.own_tokens(complete_many.job_ids, v_tokens);
  end if;

  -- Serial keys in order, then rows in id order: two batches cannot block each other. No other way
  -- to join, and an array of one, so that each job is found by its id, whatever the planner thinks.
  if v_set.serial then
    perform taskboard.take_turn_locks(complete_many.job_ids, v_tokens);
  end if;
  with gone as (
    delete from taskboard.jobs as j
    using (
      select w.id, w.token, w.result
      from unnest(complete_many.job_ids, v_tokens, complete_many.results) as w (id, token, result)
      order by w.id) as w,
      taskboard.lanes as l
    where j.id = any (array[w.id]) and j.lease_token = w.token and l.id = j.lane_id + 0
    returning j.id, j.attempt, l.priority, j.failures, j.lost_leases, j.max_attempts,
      j.max_lost_leases, j.lease_token, j.run_at, j.created_at, j.claimed_at, j.lease, j.timeout,
      l.queue, l.kind, j.on_unknown, j.leased_by, j.unique_key, j.serial_key, j.headers, j.payload,
      w.result, l.keeps, clock_timestamp() as now
  ), kept as (
    insert into taskboard.history as h (
      id, finished_at, attempt, priority, failures, lost_leases, max_attempts, max_lost_leases,
      lease_token, run_at, created_at, claimed_at, lease, timeout, state, queue, kind, on_unknown,
      finished_by, unique_key, serial_key, headers, payload, result)
    select
      g.id, g.now, g.attempt, g.priority, g.failures, g.lost_leases, g.max_attempts,
      g.max_lost_leases, g.lease_token, g.run_at, g.created_at, g.claimed_at, g.lease, g.timeout,
      'completed', g.queue, g.kind, g.on_unknown, g.leased_by, g.unique_key, g.serial_key,
      case when g.keeps then g.headers end, case when g.keeps then g.payload end,
      case when g.keeps then g.result end
    from gone as g
    returning h.id, h.lease_token,
      case when h.unique_key is null and h.serial_key is null then h.finished_at
        else taskboard.let_keys_go(h.kind, h.unique_key, h.serial_key, h.id, h.finished_at) end
        as finished_at
  )
  select array_agg(k.id), array_agg(k.finished_at), array_agg(k.lease_token)
  into v_kept, v_finished_at, v_kept_tokens
  from kept as k;

  -- "is true", so that the index is not searched for each pair of a job and a token.
  update taskboard.effects as e
  set ended_at = clock_timestamp(), happened = true
  where e.job_id = any (v_kept) and (e.lease_token = any (v_kept_tokens)) is true
    and e.ended_at is null;
  return query select w.id, w.at from unnest(v_kept, v_finished_at) as w (id, at);

  if cardinality(complete_many.job_ids) > coalesce(cardinality(v_kept), 0) then
    return query
    select distinct h.id, h.finished_at
    from unnest(complete_many.job_ids, v_tokens) as w (id, token)
    join taskboard.history as h
      on h.id = w.id and h.lease_token = w.token and h.state = 'completed'
    where w.id <> all (coalesce(v_kept, '{}'));
    perform taskboard.note_refusal('complete', w.id, w.token)
    from unnest(complete_many.job_ids, v_tokens) as w (id, token)
    where not exists (
      select from taskboard.history as h
      where h.id = w.id and h.lease_token = w.token and h.state = 'completed');
  end if;
end
$$;

comment on function taskboard.complete_many(uuid[], uuid[], jsonb[]) is
$$Complete many jobs in one call, each as in complete.
One row for each that is recorded; a job without a row is not yours. lease_tokens and, if given,
results (null for none) have one element for each of job_ids.
Locks serial keys in order, then rows in id order; waits at most 5 s (55P03).
Errors: 22004, 22023; above read committed 40001. Role: taskboard_worker.$$;
