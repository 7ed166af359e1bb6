create or replace function taskboard.take_unique_key(
  kind text, key text, job_id uuid, held_until timestamptz)
returns uuid
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  v_holder taskboard.unique_keys;
  v_now timestamptz;
begin
  -- Insert, else look, else again: in one statement the look would miss a holder that committed
  -- in between, and a holder may finish between our insert and our look.
  loop
    insert into taskboard.unique_keys (kind, key, job_id, live, held_until)
    values (
      take_unique_key.kind, take_unique_key.key, take_unique_key.job_id, true,
      take_unique_key.held_until)
    on conflict do nothing;
    exit when found;
    v_now := clock_timestamp();
    select u.* into v_holder
    from taskboard.unique_keys as u
    where u.kind = take_unique_key.kind and u.key = take_unique_key.key;
    if found and (v_holder.live or v_holder.held_until > v_now) then
      if not exists (
        select from taskboard.jobs as j
        where j.id = v_holder.job_id and j.unique_until_claim and v_holder.live)
      then
        return v_holder.job_id;
      end if;
      -- It holds the key until it is claimed: nobody may claim it before our transaction, which
      -- relies on its running later, has committed.
      if not taskboard.is_starved(v_holder.job_id) then
        perform from taskboard.jobs as j
        where j.id = v_holder.job_id and j.unique_key is not null and j.lease_token is null
        for key share;
        if found then
          return v_holder.job_id;
        end if;
      end if;
      -- It has been claimed, or producers that come without a gap would keep it from that for ever.
      update taskboard.unique_keys as u
      set job_id = take_unique_key.job_id
      where u.kind = take_unique_key.kind and u.key = take_unique_key.key
        and u.job_id = v_holder.job_id and u.live;
      exit when found;
      continue;
    end if;
    update taskboard.unique_keys as u
    set job_id = take_unique_key.job_id, live = true, held_until = take_unique_key.held_until
    where u.kind = take_unique_key.kind and u.key = take_unique_key.key
      and not u.live and u.held_until <= v_now;
    exit when found;
  end loop;
  return take_unique_key.job_id;
end
$$;

comment on function taskboard.take_unique_key(text, text, uuid, timestamptz) is
$$Take a unique key for a job; return its holder, new or old (internal).
Waits for a transaction that is just taking or freeing the key; never for a holder's row.$$;

create or replace function taskboard.is_starved(job_id uuid)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  v_job record;
begin
  select j.lane_id, j.claimable_at, j.place into v_job
  from taskboard.jobs as j
  where j.id = is_starved.job_id
    and (j.claimable_at < clock_timestamp() - make_interval(secs => 1)) is true;
  if not found then
    return false;
  end if;
  begin
    perform from taskboard.jobs as j where j.id = is_starved.job_id for update nowait;
    raise exception using message = 'lets the lock go at once';
  exception
    when raise_exception then
      return false;
    when lock_not_available then
      -- Behind others it waits for its turn and not for us.
      return not exists (
        select from taskboard.jobs as j
        where j.lane_id = v_job.lane_id
          and (j.claimable_at, j.place) < (v_job.claimable_at, v_job.place)
        order by j.lane_id desc, j.claimable_at desc, j.place desc
        limit 1);
  end;
end
$$;

comment on function taskboard.is_starved(uuid) is
$$Tell whether a due job is kept from being claimed by its producers (internal).
It is the first of its lane, due for a second, and locked.$$;

create or replace function taskboard.free_unique_key(kind text, key text, job_id uuid)
returns text
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_now timestamptz := clock_timestamp();
begin
  delete from taskboard.unique_keys as u
  where u.kind = free_unique_key.kind and u.key = free_unique_key.key
    and u.job_id = free_unique_key.job_id
    and (u.held_until is null or u.held_until <= v_now);
  if not found then
    update taskboard.unique_keys as u
    set live = false
    where u.kind = free_unique_key.kind and u.key = free_unique_key.key
      and u.job_id = free_unique_key.job_id;
  end if;
  return null;
end
$$;

comment on function taskboard.free_unique_key(text, text, uuid) is
$$Free a job's unique key, or leave it held for the rest of unique_for (internal).
Returns null, the key that the job has from then on. No key is fine.$$;

create or replace function taskboard.free_claimed_key(kind text, key text, job_id uuid)
returns text
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform from taskboard.unique_keys as u
  where u.kind = free_claimed_key.kind and u.key = free_claimed_key.key
    and u.job_id = free_claimed_key.job_id
  for update skip locked;
  if not found and exists (
    select from taskboard.unique_keys as u
    where u.kind = free_claimed_key.kind and u.key = free_claimed_key.key
      and u.job_id = free_claimed_key.job_id)
  then
    return free_claimed_key.key;
  end if;
  return taskboard.free_unique_key(
    free_claimed_key.kind, free_claimed_key.key, free_claimed_key.job_id);
end
$$;

comment on function taskboard.free_claimed_key(text, text, uuid) is
$$Free a key that was held only until its job is claimed, without waiting (internal).
Returns what is left of it: null, or the key where a producer is just taking it over; should that
come to nothing, it is freed when the job ends, and taken over by whoever comes before.$$;

create or replace function taskboard.join_serial_keys(
  keys text[], job_ids uuid[], out serial_nos bigint[], out turns boolean[])
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_nestloop = off
set jit = off
as $$
begin
  with joining as (
    select m.key, m.job_id, m.n,
      row_number() over (partition by m.key order by m.n) as place,
      count(*) over (partition by m.key) as jobs
    from unnest(join_serial_keys.keys, join_serial_keys.job_ids) with ordinality
      as m (key, job_id, n)
    where m.key is not null and m.job_id is not null
  ), joined as (
    insert into taskboard.serial_keys as s (key, turn_of, turn_no, last_no)
    select j.key, j.job_id, 1, j.jobs
    from joining as j
    where j.place = 1
    -- Keys in sorted order, so that two batches with the same keys cannot block each other.
    order by j.key
    -- The numbers are counted on under the row's lock: their order is the order of the key.
    -- An update and not only a lock, so that a hand-over at repeatable read, whose snapshot does
    -- not show the jobs we are about to add, fails with 40001 and is repeated.
    on conflict (key) do update set last_no = s.last_no + excluded.last_no
    returning s.key, s.turn_of, s.last_no
  )
  select array_agg(k.last_no - j.jobs + j.place order by m.n),
    array_agg(k.key is null or k.turn_of = j.job_id order by m.n)
  into serial_nos, turns
  from unnest(join_serial_keys.keys) with ordinality as m (key, n)
  left join joining as j on j.n = m.n
  left join joined as k on k.key = j.key;
end
$$;

comment on function taskboard.join_serial_keys(text[], uuid[]) is
$$Queue jobs up behind their serial keys, in input order (internal).
For each job its number and whether it has the turn; without a key, or with no id: null and true.
Locks the keys' rows until the transaction ends. One statement, however many jobs a key has.$$;

create or replace function taskboard.take_turn_lock(key text)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform from taskboard.serial_keys as s where s.key = take_turn_lock.key for update;
  return true;
end
$$;

comment on function taskboard.take_turn_lock(text) is
$$Lock a serial key's row; always true (internal).$$;

create or replace function taskboard.take_job_lock(key text, job_id uuid)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  v_until timestamptz := clock_timestamp() + make_interval(secs => 5);
begin
  loop
    begin
      perform taskboard.take_turn_lock(take_job_lock.key);
      perform from taskboard.jobs as j where j.id = take_job_lock.job_id for update nowait;
      exit;
    exception
      when lock_not_available then
        -- Leaving the block has let the key go: whoever holds the job may want it to end the job.
        if clock_timestamp() > v_until then
          raise;
        end if;
    end;
    perform pg_sleep(0.01);
  end loop;
  return true;
end
$$;

comment on function taskboard.take_job_lock(text, uuid) is
$$Lock a serial key's row, then a job's; always true (internal).
Stands in the condition of the statement that ends the job, so that one without a key pays nothing.
Never waits for the job with the key in hand: a fenced transaction has them the other way round.$$;

create or replace function taskboard.take_turn_locks(job_ids uuid[], lease_tokens uuid[])
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
begin
  perform taskboard.take_turn_lock(k.serial_key)
  from (
    select distinct j.serial_key
    from unnest(take_turn_locks.job_ids, take_turn_locks.lease_tokens) as w (id, token)
    -- Lateral, so that each job is found by its id.
    cross join lateral (
      select j.serial_key
      from taskboard.jobs as j
      where j.id = w.id and j.lease_token = w.token and j.serial_key is not null
      limit 1) as j
    order by j.serial_key) as k;
end
$$;

comment on function taskboard.take_turn_locks(uuid[], uuid[]) is
$$Lock the serial keys of leased jobs, in their order (internal).
Before a batch locks the jobs. Only of jobs whose token is given.$$;

create or replace function taskboard.hand_over(key text, job_id uuid)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_turn_no bigint;
  v_next record;
begin
  select s.turn_no into v_turn_no
  from taskboard.serial_keys as s
  where s.key = hand_over.key and s.turn_of = hand_over.job_id;
  if not found then
    return; -- it was waiting itself: the turn stays where it is
  end if;
  select j.id, j.serial_no, l.queue into v_next
  from taskboard.jobs as j
  join taskboard.lanes as l on l.id = j.lane_id + 0
  where j.serial_key = hand_over.key and j.waits_for = 'turn' and j.serial_no > v_turn_no
  order by j.serial_no
  limit 1;
  if not found then
    delete from taskboard.serial_keys as s where s.key = hand_over.key;
    return;
  end if;
  update taskboard.serial_keys as s
  set turn_of = v_next.id, turn_no = v_next.serial_no
  where s.key = hand_over.key;
  update taskboard.jobs as j
  set waits_for = null, claimable_at = greatest(j.run_at, clock_timestamp())
  where j.id = v_next.id;
  if taskboard.somebody_sleeps(v_next.queue) then
    perform taskboard.wake();
  end if;
end
$$;

comment on function taskboard.hand_over(text, uuid) is
$$Give a finished job's turn to the next job of its serial key (internal).
The caller holds the key's row. The next is looked for after the last number that had the turn, so
the cost does not grow with how many had it before.$$;

create or replace function taskboard.let_keys_go(
  kind text, unique_key text, serial_key text, job_id uuid, at timestamptz)
returns timestamptz
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  if let_keys_go.unique_key is not null then
    perform taskboard.free_unique_key(
      let_keys_go.kind, let_keys_go.unique_key, let_keys_go.job_id);
  end if;
  if let_keys_go.serial_key is not null then
    perform taskboard.hand_over(let_keys_go.serial_key, let_keys_go.job_id);
  end if;
  return let_keys_go.at;
end
$$;

comment on function taskboard.let_keys_go(text, text, text, uuid, timestamptz) is
$$Free a finished job's unique key and hand its turn on; return the date (internal).
For the returning clause of what finishes it.$$;
