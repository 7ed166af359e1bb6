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
from taskboard.console.proxied import (
    AWAY,
    CLOSE,
    DECLARE,
    ENQUEUE,
    ENQUEUE_MANY,
    FILL,
    MANY,
    ON_ALL,
    ON_ONE,
    OPEN,
    SAYS,
)  # fmt: skip
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
    "queue_list": (
        "queue",
        {"paused_at": "min"}
        | dict.fromkeys(("paused_by", "pause_reason", "starts_per", "lease"), "max"),
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
    with connection("taskboard shards", "log in as the owner of the schema taskboard") as conn:
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
    parts = [OPEN, routing]
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
