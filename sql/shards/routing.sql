-- What a proxy knows of its shards, and where a call goes. Loaded by what `taskboard shards` prints,
-- in front of the functions that are made from a shard's signatures. The tables stay when it is
-- loaded again.
create schema if not exists taskboard_shards;

create table if not exists taskboard_shards.shards (
  shard integer not null,
  keyless boolean not null default true,
  constraint shards_key primary key (shard),
  constraint shards_fit_ids check (shard between 0 and 65535)
);

comment on table taskboard_shards.shards is
$$The shards that are in use; the number is that of the server's option, p0, p1 …
keyless: takes jobs that have no key.$$;

create table if not exists taskboard_shards.slots (
  slot integer not null,
  shard integer not null,
  constraint slots_key primary key (slot),
  constraint slots_are_1024 check (slot between 0 and 1023),
  constraint slots_have_shards foreign key (shard) references taskboard_shards.shards (shard)
);

comment on table taskboard_shards.slots is
$$Which shard has the keys of a slot. There are always 1,024; spread() moves empty ones.$$;

-- The first ten bits of a hash that is the same everywhere and for ever.
create or replace function taskboard_shards.slot_of(key text)
returns integer
language sql
immutable
set search_path = pg_catalog, pg_temp
as $$
  select (get_byte(h.hash, 0) << 8 | get_byte(h.hash, 1)) >> 6
  from (select sha256(convert_to(slot_of.key, 'UTF8'))) as h (hash)
$$;

comment on function taskboard_shards.slot_of(text) is
$$Return the slot of a key, 0 to 1023.$$;

create or replace function taskboard_shards.shard_of(job_id uuid)
returns integer
language sql
stable
set search_path = pg_catalog, pg_temp
as $$
  select coalesce(
    (select s.shard
      from taskboard_shards.shards as s
      where s.shard = ('x' || right(shard_of.job_id::text, 4))::bit(16)::integer),
    (select min(s.shard) from taskboard_shards.shards as s))
$$;

comment on function taskboard_shards.shard_of(uuid) is
$$Return the shard whose number is in a job id.
Of an id that is nobody's, or null, the lowest: it answers what is answered about unknown jobs.$$;

create or replace function taskboard_shards.shard_of_key(key text)
returns integer
language plpgsql
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
as $$
begin
  if current_setting('transaction_isolation') <> 'read committed' then
    raise exception using errcode = '0A000',
      message = 'a key is routed at the isolation level read committed only',
      hint = 'A snapshot from before may not know where the keys have moved.';
  end if;
  -- Held until the caller's transaction ends: no slot is moved while something is put into it.
  perform pg_advisory_xact_lock_shared(1952539510, 0);
  return (
    select s.shard from taskboard_shards.slots as s
    where s.slot = taskboard_shards.slot_of(shard_of_key.key));
end
$$;

comment on function taskboard_shards.shard_of_key(text) is
$$Return the shard that has a key, and let nobody move it in this transaction.
Errors: 0A000 above read committed; 55P03 while spread() runs for long.$$;

create or replace function taskboard_shards.shards_up(keyless boolean default false)
returns setof integer
language sql
volatile
set search_path = pg_catalog, pg_temp
as $$
  select s.shard
  from taskboard_shards.shards as s
  cross join lateral (
    select coalesce(
      nullif(current_setting('taskboard.down_' || s.shard::text, true), '')::float8
        > extract(epoch from clock_timestamp()), false)) as d (down)
  where s.keyless or not shards_up.keyless
  order by d.down, random()
$$;

comment on function taskboard_shards.shards_up(boolean) is
$$List shards in random order; those that did not answer this session a moment ago come last.
keyless: only those that take jobs without a key.$$;

-- PL/Proxy reports troubles of its own as internal errors (XX000), what a shard says as it is.
create or replace function taskboard_shards.tell(shard integer, state text, trouble text)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  if tell.trouble ~ 'REMOTE ERROR' then
    return;
  end if;
  raise exception using
    errcode = case when taskboard_shards.not_begun(tell.state, tell.trouble)
      then '08001' else '08006' end,
    message = format('shard %s does not answer: %s', tell.shard, tell.trouble),
    hint = case when taskboard_shards.not_begun(tell.state, tell.trouble)
      then 'Nothing was done there. Other shards go on; ask again.'
      else 'Nobody knows whether it was done there: repeat the call.' end;
end
$$;

comment on function taskboard_shards.tell(integer, text, text) is
$$Raise a trouble with a shard as what it is: 08001, nothing was done; 08006, the answer is lost.
Returns when the shard itself raised the error.$$;

-- A server that is told to stop ends a session before or after a transaction, or undoes it.
create or replace function taskboard_shards.not_begun(state text, trouble text)
returns boolean
language sql
immutable
return state in ('57P01', '57P03') or trouble ~ 'PQconnect';

comment on function taskboard_shards.not_begun(text, text) is
$$Tell whether a call left nothing behind: another shard may be asked instead.$$;

create or replace function taskboard_shards.note_down(shard integer)
returns void
language sql
volatile
set search_path = pg_catalog, pg_temp
as $$
  select set_config('taskboard.down_' || note_down.shard::text,
    (extract(epoch from clock_timestamp()) + 10)::text, false)
$$;

comment on function taskboard_shards.note_down(integer) is
$$Remember for ten seconds, in this session, that a shard did not answer: a hint.$$;

-- What the owner of the shards asks of their tables.
create or replace function taskboard_shards.has_foreign_ids(shard integer)
returns boolean
language plproxy
as $$
  cluster 'taskboard';
  run on shard;
  select exists (
    select from taskboard.jobs as j where right(j.id::text, 4) <> lpad(to_hex($1), 4, '0'))
  or exists (
    select from taskboard.history as h where right(h.id::text, 4) <> lpad(to_hex($1), 4, '0'));
$$;

comment on function taskboard_shards.has_foreign_ids(integer) is
$$Tell whether a database has jobs with the number of another shard.
For the owner of the shards alone.$$;

-- -1: some key is held by a job of which no record is left, so that its slot is not known.
create or replace function taskboard_shards.used_slots(shard integer)
returns setof integer
language plproxy
as $$
  cluster 'taskboard';
  run on shard;
  select distinct coalesce(
    (get_byte(sha256(convert_to(k.key, 'UTF8')), 0) << 8
      | get_byte(sha256(convert_to(k.key, 'UTF8')), 1)) >> 6, -1)
  from (
    select coalesce(j.serial_key, j.unique_key) as key, j.serial_key is null
      and j.unique_key is null as none
    from taskboard.jobs as j
    union all
    select coalesce(h.serial_key, h.unique_key), h.serial_key is null and h.unique_key is null
    from taskboard.history as h
    union all
    select s.name, false from taskboard.schedules as s
    union all
    select null, false
    from taskboard.unique_keys as u
    where (u.live or u.held_until > clock_timestamp())
      and not exists (select from taskboard.jobs as j where j.id = u.job_id)
      and not exists (
        select from taskboard.history as h where h.id = u.job_id and h.payload is not null)) as k
  where not k.none;
$$;

comment on function taskboard_shards.used_slots(integer) is
$$List the slots that a shard has keys in; -1 when it has keys whose slot is not known.
For the owner of the shards alone.$$;

create or replace function taskboard_shards.add_shard(shard integer, keyless boolean default true)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  if taskboard_shards.has_foreign_ids(add_shard.shard) then
    raise exception using errcode = 'TB003',
      message = format('the database p%s holds jobs with the number of another shard',
        add_shard.shard),
      hint = 'A database keeps its number for ever. Only one that was alone before may be 0.';
  end if;
  perform taskboard_calls.configure(add_shard.shard, 'shard', add_shard.shard::text);
  insert into taskboard_shards.shards as s (shard, keyless)
  values (add_shard.shard, add_shard.keyless)
  on conflict on constraint shards_key do update set keyless = excluded.keyless;
  insert into taskboard_shards.slots (slot, shard)
  select n, add_shard.shard from generate_series(0, 1023) as n
  on conflict do nothing;
end
$$;

comment on function taskboard_shards.add_shard(integer, boolean) is
$$Take the database of the server's option p<shard> into use, and give it its number.
The first one gets all slots. A later one gets jobs without a key at once, and keys by spread().
For the owner of the shards alone.$$;

create or replace function taskboard_shards.spread()
returns integer
language plpgsql
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
as $$
declare
  v_fair numeric := 1024.0 / (select count(*) from taskboard_shards.shards);
  v_from record;
  v_to record;
  v_used integer[];
  v_count integer;
  v_moved integer := 0;
begin
  perform pg_advisory_xact_lock(1952539510, 0);
  for v_from in
    select s.shard, count(*) - ceil(v_fair) as spare
    from taskboard_shards.slots as s
    group by s.shard
    having count(*) > ceil(v_fair)
    order by s.shard
  loop
    v_used := array(select taskboard_shards.used_slots(v_from.shard));
    continue when -1 = any (v_used);
    for v_to in
      select h.shard, floor(v_fair) - count(s.slot) as room
      from taskboard_shards.shards as h
      left join taskboard_shards.slots as s on s.shard = h.shard
      group by h.shard
      having count(s.slot) < floor(v_fair)
      order by h.shard
    loop
      update taskboard_shards.slots as s
      set shard = v_to.shard
      where s.slot = any (array(
        select e.slot from taskboard_shards.slots as e
        where e.shard = v_from.shard and e.slot <> all (v_used)
        order by random()
        limit least(v_from.spare, v_to.room)));
      get diagnostics v_count = row_count;
      v_from.spare := v_from.spare - v_count;
      v_moved := v_moved + v_count;
    end loop;
  end loop;
  return v_moved;
end
$$;

comment on function taskboard_shards.spread() is
$$Move slots from shards that have more than their share to those that have fewer; say how many.
Only empty ones: no live job, no finished one that is still kept, and no schedule has a key in it.
So every key still finds its holder, and no row moves. Keyed producers wait meanwhile.
For the owner of the shards alone.$$;
