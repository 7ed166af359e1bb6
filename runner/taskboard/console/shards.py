"""`taskboard shards`: print the functions of a proxy, made from the signatures of a shard.

For each function there are two: taskboard_calls.f(shard, …), in PL/Proxy, calls it on one shard;
taskboard.f(…), with the shard's own signature, says on which. Arguments are passed by number, so
that no name of theirs can be taken for another.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import psycopg

import taskboard
from taskboard.cli import OK
from taskboard.console.verb import connection
from taskboard.console.verbs import Mistake, Verb

FUNCTIONS = """
select p.proname as name, pg_get_function_arguments(p.oid) as declared,
  pg_get_function_identity_arguments(p.oid) as plain, pg_get_function_result(p.oid) as result,
  (p.proargnames)[:p.pronargs] as arguments, obj_description(p.oid) as comment,
  array(
    select format_type(t, null)
    from unnest(p.proargtypes) with ordinality as a (t, n) order by n) as types,
  coalesce(
    (select array_agg(quote_ident(a.attname) order by a.attnum)
      from pg_attribute as a
      where a.attrelid = r.typrelid and a.attnum > 0 and not a.attisdropped),
    (select array_agg(quote_ident(o.name) order by o.n)
      from unnest(p.proargnames, p.proargmodes) with ordinality as o (name, mode, n)
      where o.mode in ('o', 't')), '{}') as columns,
  array(
    select a.grantee::regrole::text
    from aclexplode(p.proacl) as a
    where a.grantee <> p.proowner and a.grantee::regrole::text ~ '^taskboard_') as roles
from pg_proc as p
join pg_type as r on r.oid = p.prorettype
where p.pronamespace = 'taskboard'::regnamespace
  and (obj_description(p.oid) ~ 'For the owner alone' or exists (
    select from aclexplode(p.proacl) as a where a.grantee <> p.proowner))
order by p.proname"""

RELATIONS = """
select c.relname as name, c.relkind = 'v' as is_view, obj_description(c.oid) as comment,
  array(
    select format('%I %s', a.attname, format_type(a.atttypid, null))
    from pg_attribute as a
    where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
    order by a.attnum) as columns,
  array(
    select a.grantee::regrole::text
    from aclexplode(c.relacl) as a
    where a.grantee <> c.relowner and a.grantee::regrole::text ~ '^taskboard_') as roles
from pg_class as c
where c.relnamespace = 'taskboard'::regnamespace and (
  c.relkind = 'c' or c.relkind = 'v' and exists (
    select from aclexplode(c.relacl) as a where a.grantee <> c.relowner))
order by c.relkind, c.relname"""

# A view of very many rows shows the newest of each shard.
NEWEST = {"job_list": "job_id", "incident_list": "id", "effect_list": "job_id"}
AT_MOST = 10_000
# What is one row on a shard, and a row of each shard together.
TOGETHER = {
    "queue_stats": (
        "queue, kind, priority",
        {"paused": "bool_or", "oldest_ready_at": "min"},
    ),
    "queue_rates": ("queue, kind", {"median_seconds": "max"}),
    "worker_list": (
        "worker",
        {"oldest_claim_at": "min", "last_seen_at": "max", "leased_until": "max"},
    ),
}
# All shards give the same answer to these: that of the first will do.
ALIKE = ("pause", "resume")
SCALARS = {"next_claimable_at": "min", "version": "min", "may_use": "bool_and"}
LEFT_OUT = ("listen", "unlisten")  # they are about a session of the shard itself

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

# What only the owner of the shards may ask: it reads their tables.
OWNERS = """
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


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the shard, from its catalog."""

    name: str
    declared: str
    plain: str
    result: str
    arguments: list[str] | None
    comment: str
    types: list[str]
    columns: list[str]
    roles: list[str]

    def number(self, argument: str) -> str:
        return f"${(self.arguments or []).index(argument) + 1}"

    @property
    def route(self) -> str:
        """How a call is routed; by what its arguments are called."""
        names = self.arguments or []
        if self.name in ("enqueue", "enqueue_many"):
            return self.name
        if "job_id" in names or "name" in names:
            return "one"
        if "job_ids" in names:
            return "many"
        return "fill" if "max_jobs" in names else "all"


def run(verb: Verb, arguments: argparse.Namespace) -> int:
    """Print the script for the proxy's database; return the exit code."""
    with connection("taskboard shards") as conn:
        try:
            print(script(conn))
        except psycopg.errors.InvalidSchemaName:
            raise Mistake("this database is no shard", "run taskboard migrate there") from None
    return OK


def script(conn: psycopg.Connection[dict[str, Any]]) -> str:
    """Make the script from a shard that is up to date."""
    relations = conn.execute(RELATIONS.encode()).fetchall()
    found = [Function(**row) for row in conn.execute(FUNCTIONS.encode()).fetchall()]
    functions = [function for function in found if function.name not in LEFT_OUT]
    routing = (taskboard.SQL / "shards" / "routing.sql").read_text()
    parts = [OPEN, routing, OWNERS]
    parts += [_relation(**row) for row in relations]
    parts += [text for function in functions for text in _both(function)]
    parts += [CLOSE]
    granted = [(f"function taskboard{s}.{f.name}", f.roles, "execute")
               for f in functions for s in ("", "_calls")]  # fmt: skip
    for row in relations:
        if row["is_view"]:
            granted += [
                (f"function taskboard_calls.{row['name']}(integer)", row["roles"], "execute"),
                (f"function taskboard_calls.{row['name']}()", row["roles"], "execute"),
                (f"taskboard.{row['name']}", row["roles"], "select"),
            ]
    parts += [f"grant {r} on {what} to {', '.join(to)};" for what, to, r in granted if to]
    return "\n".join([*parts, "commit;"])


def _relation(
    name: str, is_view: bool, comment: str | None, columns: list[str], roles: list[str]
) -> str:
    """Make a type; of a view, also the functions that read it, and the view."""
    if not is_view:
        return f"create type taskboard.{name} as ({', '.join(columns)});"
    names = [column.split(" ", 1)[0] for column in columns]
    newest = f"\n  order by v.{NEWEST[name]} desc\n  limit {AT_MOST}" if name in NEWEST else ""
    read = ", ".join(f"v.{column}" for column in names)
    every = f"select * from taskboard_calls.{name}()"
    if name in TOGETHER:
        by, how = TOGETHER[name]
        shown = [
            column if column in by.split(", ")
            else f"{how.get(column, 'sum')}(v.{column})::{kind} as {column}"
            for column, kind in (each.split(" ", 1) for each in columns)
        ]  # fmt: skip
        every = f"select {', '.join(shown)}\nfrom taskboard_calls.{name}() as v\ngroup by {by}"
    said = "Over all shards; a warning names one that does not answer."
    said += f" The newest {AT_MOST:,} of each." if newest else ""
    one = f"return query select * from taskboard_calls.{name}(v_shard);"
    return f"""\
create type taskboard_calls.{name} as ({', '.join(columns)});
create function taskboard_calls.{name}(shard integer)
returns setof taskboard_calls.{name}
language plproxy
as $$
  cluster 'taskboard';
  run on shard;
  select {read}
  from taskboard.{name} as v{newest};
$$;
create function taskboard_calls.{name}()
returns setof taskboard_calls.{name}
language plpgsql
set client_min_messages = warning
as $$
declare
  {DECLARE["all"]}
{ON_ALL.format(one=one, last="", away=AWAY)}
$$;
create view taskboard.{name} as
{every};
comment on view taskboard.{name} is {_quoted(f"{comment}{chr(10)}{said}")};"""


def _both(function: Function) -> tuple[str, str]:
    """Make the call on one shard, and the function that says on which."""
    name, count = function.name, len(function.types)
    sent = ", ".join(f"${number}" for number in range(2, count + 2))
    is_set = function.result.startswith("SETOF ")
    # What is called alike on the shard, by number: no argument is taken for a column.
    shown = ", ".join(f"r.{column}" for column in function.columns)
    ask = f"select {shown} from taskboard.{name}({sent}) as r" if shown else (
        f"select taskboard.{name}({sent})"
    )  # fmt: skip
    plain = f", {function.plain}" if function.plain else ""
    call = f"""\
create function taskboard_calls.{name}(shard integer{plain})
returns {function.result}
language plproxy
as $$
  cluster 'taskboard';
  run on shard;
  {ask};
$$;"""
    route, given = function.route, [f"${number}" for number in range(1, count + 1)]
    values: dict[str, str] = {"last": "", "away": AWAY}
    if route == "one":
        by = "job_id" if "job_id" in (function.arguments or []) else "name"
        where = "shard_of" if by == "job_id" else "shard_of_key"
        values["where"] = f"taskboard_shards.{where}({function.number(by)})"
        values["by"] = "job id" if by == "job_id" else "name, as if it were a key"
    if route == "fill":
        values["max_jobs"] = function.number("max_jobs")
        given[int(values["max_jobs"][1:]) - 1] = "v_left"
        if "worker" in (function.arguments or []):  # on the shard, the caller is the proxy
            at = int(function.number("worker")[1:])
            given[at - 1] = (
                f"coalesce(${at}, nullif(current_setting('application_name'), ''),"
                " 'pid-' || pg_backend_pid()::text)"
            )
    if route == "enqueue":
        keys = function.number("serial_key"), function.number("unique_key")
        values["key"] = f"coalesce({', '.join(keys)})"
    if route in ("many", "enqueue_many"):
        values["whole"] = f"taskboard_calls.{name}({', '.join(['v_shard', *given])})"
        arrays = [f"${n}" for n, kind in enumerate(function.types, 1) if kind.endswith("[]")]
        first = arrays[0]
        values["whole_test"] = f"coalesce(array_ndims({first}), 1) = 1" + "".join(
            f"\n    and coalesce(cardinality({each}) = cardinality({first}), {each} is null)"
            f" and coalesce(array_ndims({each}), 1) = 1"
            for each in arrays[1:]
        )
        for each in arrays:
            part = f"""array(
        select a.value from unnest({each}) with ordinality as a (value, n)
        join unnest(v_places) as p (n) on p.n = a.n
        order by a.n)"""
            given[int(each[1:]) - 1] = f"case when {each} is not null then {part} end"
        if route == "many":
            values["ids"] = function.number("job_ids")
        else:
            for argument in ("serial_keys", "unique_keys", "payloads"):
                values[argument] = function.number(argument)
    values["call"] = f"taskboard_calls.{name}({', '.join(['v_shard', *given])})"
    values["one"] = f"return query select * from {values['call']};"
    declared = DECLARE[route].format_map(values | {"by": ""})
    if name in ALIKE:
        values["one"] = f"""\
if v_answered = 0 then
        {values["one"]}
      else
        perform {values["call"]};
      end if;"""
    if not is_set and function.result == "void":
        values["one"] = f"perform {values['call']};"
    elif not is_set and route == "one":
        values["one"] = f"return {values['call']};"
    elif not is_set and route == "all":
        declared += f"\n  v_all {function.result}[];"
        values["one"] = f"v_all := v_all || {values['call']};"
        values["last"] = (
            f"\n  return (select {SCALARS[name]}(a) from unnest(v_all) as a);"
        )
    body = {"one": ON_ONE, "all": ON_ALL, "fill": FILL, "many": MANY, "enqueue": ENQUEUE,
            "enqueue_many": ENQUEUE_MANY}[route]  # fmt: skip
    guard = _guard(function)
    said = f"{function.comment}\n{SAYS[route].format_map(values)}"
    wrapper = f"""\
create function taskboard.{name}({function.declared})
returns {function.result}
language plpgsql
set client_min_messages = warning
as $$
#variable_conflict use_column
declare
  {declared}
{body.format_map(values).replace("begin", "begin" + guard, 1)}
$$;
comment on function taskboard.{name} is {_quoted(said)};"""
    return call, wrapper


def _guard(function: Function) -> str:
    if function.name != "configure":
        return ""
    setting = function.number("setting")
    return f"""
  if {setting} = 'shard' then
    raise exception using errcode = '22023', message = 'each shard has a number of its own',
      hint = 'taskboard_shards.add_shard gives it.';
  end if;"""


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
