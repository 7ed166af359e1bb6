"""What the functions of a proxy are made of: texts that `shards.py` fills in.

Of a body, {call} is the call on the shard v_shard, and {one} what is done with its answer.
"""

from __future__ import annotations

OPEN = """\
begin;
set local search_path = pg_catalog, pg_temp;
set local client_min_messages = warning;
do $$
begin
  if to_regclass('taskboard.jobs') is not null then
    raise exception 'this database holds jobs: it is a shard, and no proxy';
  end if;
end
$$;
drop schema if exists taskboard cascade;
drop schema if exists taskboard_calls cascade;
create schema taskboard;
create schema taskboard_calls;
do $$
declare
  v_role text;
begin
  foreach v_role in array array['producer', 'worker', 'operator', 'observer'] loop
    if to_regrole('taskboard_' || v_role) is null then
      execute format('create role %I nologin', 'taskboard_' || v_role);
    end if;
  end loop;
end
$$;
"""

CLOSE = """
grant usage on schema taskboard, taskboard_calls, taskboard_shards
  to taskboard_producer, taskboard_worker, taskboard_operator, taskboard_observer;
grant select on taskboard_shards.shards, taskboard_shards.slots
  to taskboard_producer, taskboard_worker, taskboard_operator, taskboard_observer;
revoke execute on all functions in schema taskboard, taskboard_calls from public;
revoke execute on function taskboard_shards.has_foreign_ids(integer),
  taskboard_shards.used_slots(integer), taskboard_shards.add_shard(integer, boolean),
  taskboard_shards.spread() from public;
"""

# PL/Proxy's own troubles, and what a server says that goes down.
AWAY = "internal_error or admin_shutdown or crash_shutdown or cannot_connect_now"
# The bodies of functions: {call} is the call on the shard v_shard.
ON_ONE = """\
begin
  {one}
exception
  when {away} then
    perform taskboard_shards.tell(v_shard, sqlstate, sqlerrm);
    raise;
end"""
# Whoever does not answer is named, and keeps nobody from being asked.
ON_ALL = """\
begin
  for v_shard in select s.shard from taskboard_shards.shards as s order by 1 loop
    begin
      {one}
      v_answered := v_answered + 1;
    exception
      when {away} then
        if sqlerrm ~ 'REMOTE ERROR' then
          raise;
        end if;
        raise warning using message = format('shard %s does not answer: %s', v_shard, sqlerrm);
    end;
  end loop;
  if v_answered = 0 then
    raise exception using errcode = '08001', message = 'no shard answers';
  end if;{last}
end"""
FILL = """\
begin
  for v_shard in select taskboard_shards.shards_up() loop
    begin
      return query select * from {call};
      get diagnostics v_got = row_count;
      v_left := v_left - v_got;
      v_answered := v_answered + 1;
    exception
      when {away} then
        if sqlerrm ~ 'REMOTE ERROR' then
          raise;
        end if;
        perform taskboard_shards.note_down(v_shard);
        raise warning using message = format('shard %s does not answer: %s', v_shard, sqlerrm);
    end;
    exit when v_left <= 0;
  end loop;
  if v_answered = 0 then
    raise exception using errcode = '08001', message = 'no shard answers';
  end if;
end"""
MANY = """\
begin
  for v_shard, v_places in
    select case when v_whole then taskboard_shards.shard_of(j.id)
        else taskboard_shards.shard_of(null) end, array_agg(j.n order by j.n)
    from unnest({ids}) with ordinality as j (id, n)
    group by 1
    order by 1
  loop
    begin
      return query select * from {call};
    exception
      when {away} then
        if sqlerrm ~ 'REMOTE ERROR' then
          raise;
        end if;
        v_state := sqlstate;
        v_trouble := sqlerrm;
        v_lost := v_shard;
    end;
  end loop;
  -- No row would mean: not yours. So the call is to be repeated, which does nothing twice.
  if v_trouble is not null then
    perform taskboard_shards.tell(v_lost, v_state, v_trouble);
  end if;
end"""
ENQUEUE = """\
begin
  if {key} is not null then
    v_shard := taskboard_shards.shard_of_key({key});
    begin
      return {call};
    exception
      when {away} then
        perform taskboard_shards.tell(v_shard, sqlstate, sqlerrm);
        raise;
    end;
  end if;
  for v_shard in select taskboard_shards.shards_up(keyless => true) loop
    begin
      return {call};
    exception
      when {away} then
        -- Elsewhere only if it did not even leave: an answer that is lost may be a job.
        if not taskboard_shards.not_begun(sqlstate, sqlerrm) then
          perform taskboard_shards.tell(v_shard, sqlstate, sqlerrm);
          raise;
        end if;
        perform taskboard_shards.note_down(v_shard);
    end;
  end loop;
  raise exception using errcode = '08001', message = 'no shard answers';
end"""
ENQUEUE_MANY = """\
begin
  v_shards := array(
    select case when k.key is not null then taskboard_shards.shard_of_key(k.key) end
    from unnest({serial_keys}, {unique_keys}, {payloads}) with ordinality
      as a (serial_key, unique_key, payload, n)
    cross join lateral (select coalesce(a.serial_key, a.unique_key)) as k (key)
    order by a.n);
  -- What has no key goes along with what has one; all without are one batch, on any shard.
  select coalesce(min(s), -1) into v_along from unnest(v_shards) as s;
  if not v_whole or v_along = -1 then
    for v_shard in select taskboard_shards.shards_up(keyless => true) loop
      begin
        v_places := array(select generate_series(1, coalesce(cardinality({payloads}), 0)));
        return query select * from {whole};
        return;
      exception
        when {away} then
          if not taskboard_shards.not_begun(sqlstate, sqlerrm) then
            perform taskboard_shards.tell(v_shard, sqlstate, sqlerrm);
            raise;
          end if;
          perform taskboard_shards.note_down(v_shard);
      end;
    end loop;
    raise exception using errcode = '08001', message = 'no shard answers';
  end if;
  for v_shard, v_places in
    select coalesce(s.shard, v_along), array_agg(s.n order by s.n)
    from unnest(v_shards) with ordinality as s (shard, n)
    group by 1
    order by 1
  loop
    begin
      for v_row in
        select p.n, m.job_id, m.created
        from {call} with ordinality as m (job_id, created, nth)
        join unnest(v_places) with ordinality as p (n, nth) on p.nth = m.nth
      loop
        v_ids[v_row.n] := v_row.job_id;
        v_created[v_row.n] := v_row.created;
      end loop;
    exception
      when {away} then
        perform taskboard_shards.tell(v_shard, sqlstate, sqlerrm);
        raise;
    end;
  end loop;
  return query
  select r.job_id, r.created
  from unnest(v_ids, v_created) with ordinality as r (job_id, created, n)
  order by r.n;
end"""

DECLARE = {
    "one": "v_shard integer := {where};",
    "all": "v_shard integer;\n  v_answered integer := 0;",
    "fill": "v_shard integer;\n  v_got integer;\n  v_answered integer := 0;\n"
    "  v_left integer := {max_jobs};",
    "many": "v_shard integer;\n  v_places bigint[];\n  v_lost integer;\n  v_state text;\n"
    "  v_trouble text;\n"
    "  v_whole boolean := {whole_test};",
    "enqueue": "v_shard integer;",
    "enqueue_many": "v_shard integer;\n  v_shards integer[];\n  v_along integer;\n"
    "  v_places bigint[];\n  v_row record;\n  v_ids uuid[];\n  v_created boolean[];\n"
    "  v_whole boolean := {whole_test};",
}
SAYS = {
    "one": "On the proxy: goes to the shard of the {by}.",
    "all": "On the proxy: on all shards; a warning names one that does not answer.",
    "fill": "On the proxy: from one shard after the other, in random order, until filled.",
    "many": "On the proxy: each job on its shard; where one does not answer, repeat all.",
    "enqueue": "On the proxy: by coalesce(serial_key, unique_key), else any shard that answers.",
    "enqueue_many": "On the proxy: as enqueue, by shard, so no atom; all without key on one.",
}
