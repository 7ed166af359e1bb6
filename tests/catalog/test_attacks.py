"""Callers who bring their own operators, functions and tables, and errors that might tell too much.

Each attack is first shown to work on a naive twin, built in the test, and then tried on ours.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

from catalog.calls import functions, told
from support import Connection, rows

ATTACKER = f"taskboard_test_attacker_{os.getpid()}"
SECRET = "customer-4711"


@pytest.fixture
def attacker(db: Connection) -> Iterator[Connection]:
    """The session of a worker and producer who owns a schema and may make temporary tables."""
    role = sql.Identifier(ATTACKER)
    ((database,),) = rows(db, "select current_database()")
    db.execute(sql.SQL("create role {}").format(role))
    db.execute(sql.SQL("grant taskboard_worker, taskboard_producer to {}").format(role))
    db.execute(sql.SQL("create schema evil authorization {}").format(role))
    db.execute(
        sql.SQL("grant temporary on database {} to {}").format(sql.Identifier(database), role)
    )
    db.execute(sql.SQL("set session authorization {}").format(role))
    yield db
    db.execute("reset session authorization")
    db.execute(sql.SQL("drop owned by {} cascade").format(role))
    db.execute(sql.SQL("drop role {}").format(role))


def as_owner(db: Connection, *statements: str) -> None:
    """Run statements as the superuser of the test, then be the attacker again."""
    db.execute("reset session authorization")
    for statement in statements:
        db.execute(statement)
    db.execute(sql.SQL("set session authorization {}").format(sql.Identifier(ATTACKER)))


def seen_by_owner(db: Connection, statement: str) -> list[tuple[Any, ...]]:
    """Look behind the fence, then be the attacker again."""
    db.execute("reset session authorization")
    found = rows(db, statement)
    db.execute(sql.SQL("set session authorization {}").format(sql.Identifier(ATTACKER)))
    return found


# Operators that say yes to everything, for every type that a body of ours compares.
TYPES = ("uuid", "text", "timestamptz", "integer", "bigint", "interval", "boolean", "smallint")
OPERATORS = ("=", "<>", "<", ">", "<=", ">=")
FUNCTIONS = (
    "now() returns timestamptz",
    "clock_timestamp() returns timestamptz",
    "gen_random_uuid() returns uuid",
    "session_user_name() returns text",
    "isfinite(timestamptz) returns boolean",
    "unnest(uuid[]) returns setof uuid",
    "cardinality(anyarray) returns integer",
    "nextval(regclass) returns bigint",
)


def arm(db: Connection) -> None:
    """Give the attacker's schema operators and functions that note as whom they were called."""
    db.execute("create table evil.calls (who text, what text)")
    db.execute("grant all on evil.calls to public")
    db.execute("grant usage on schema evil to public")
    for kind in TYPES:
        db.execute(
            f"create function evil.yes({kind}, {kind}) returns boolean language plpgsql as"
            " $$ begin insert into evil.calls values (current_user::pg_catalog.text, 'operator');"
            " return true; end $$"
        )
        for operator in OPERATORS:
            db.execute(
                f"create operator evil.{operator} (leftarg = {kind}, rightarg = {kind},"
                " function = evil.yes)"
            )
    for function in FUNCTIONS:
        result = function.partition(" returns ")[2].removeprefix("setof ")
        db.execute(
            f"create function evil.{function} language plpgsql as $$ begin"
            " insert into evil.calls values (current_user::pg_catalog.text, 'function');"
            f" return {'' if 'setof' in function else 'null::' + result}; end $$"
        )
    db.execute("set search_path = evil, pg_catalog")


NAIVE_COMPLETE = """
create function naive.complete(job_id uuid, lease_token uuid) returns setof uuid
language sql security definer as $$
  delete from taskboard.jobs as j
  where j.id = complete.job_id and j.lease_token = complete.lease_token
  returning j.id
$$
"""
NAIVE_SETTING = """
create function naive.payload_limit() returns integer
language plpgsql security definer set search_path = taskboard, pg_catalog as $$
begin
  return (select s.payload_bytes from settings as s);
end
$$
"""


def naive(db: Connection, body: str) -> None:
    """Install a twin of ours as its author would who forgot about the path."""
    as_owner(
        db,
        "create schema naive",
        body,
        "grant usage on schema naive to public",
        "alter function "
        + body.split("function ", 1)[1]
        .split(" returns", 1)[0]
        .replace("job_id ", "")
        .replace("lease_token ", "")
        + " owner to taskboard_owner",
    )


def test_own_operators_take_over_a_function_without_a_pinned_path(attacker: Connection) -> None:
    rows(attacker, "select job_id from taskboard.enqueue('k')")
    ((job_id,),) = rows(attacker, "select job_id from taskboard.claim()")
    naive(attacker, NAIVE_COMPLETE)
    assert rows(attacker, "select naive.complete(%s, %s)", (job_id, uuid4())) == []
    arm(attacker)
    # Any token will do, and the attacker's code has run as the owner.
    assert rows(attacker, "select naive.complete(%s, %s)", (job_id, uuid4())) == [(job_id,)]
    assert ("taskboard_owner",) in rows(attacker, "select distinct who from evil.calls")


def test_own_operators_and_functions_are_never_called_by_ours(attacker: Connection) -> None:
    arm(attacker)
    ((job_id,),) = rows(
        attacker, "select job_id from taskboard.enqueue('k', unique_key => 'u', serial_key => 's')"
    )
    rows(
        attacker,
        "select * from taskboard.enqueue_many('k', array['1', '2']::jsonb[],"
        " unique_keys => array['u', 'v'], serial_keys => array['s', 't'])",
    )
    ((mine, token),) = rows(
        attacker, "select job_id, lease_token from taskboard.claim(max_jobs => 1)"
    )
    assert mine == job_id
    guess = uuid4()
    for verb in ("renew", "begin_effect", "end_effect", "complete", "fail", "release"):
        assert rows(attacker, f"select * from taskboard.{verb}(%s, %s)", (job_id, guess)) == []
    for verb in ("renew_many", "complete_many", "release_many"):
        assert rows(attacker, f"select * from taskboard.{verb}(%s, %s)", ([job_id], [guess])) == []
    for verb in ("renew", "begin_effect", "end_effect", "require_lease", "complete"):
        assert len(rows(attacker, f"select * from taskboard.{verb}(%s, %s)", (job_id, token))) == 1
    for call in (
        "claim()", "next_claimable_at()", "count_ready()", "maintain()", "listen()", "unlisten()",
        "version()", f"job('{job_id}')", f"cancel('{job_id}')",
        f"lease_status('{job_id}', '{token}')",
    ):  # fmt: skip
        rows(attacker, f"select * from taskboard.{call}")
    assert rows(attacker, "select * from evil.calls") == []


def test_no_function_at_all_calls_an_own_operator_or_function(attacker: Connection) -> None:
    as_owner(attacker, f"grant taskboard_operator, taskboard_observer to {ATTACKER}")
    rows(attacker, "select job_id from taskboard.enqueue('k', unique_key => 'u')")
    ((job_id, token),) = rows(attacker, "select job_id, lease_token from taskboard.claim()")
    arm(attacker)
    for (name,) in rows(
        attacker,
        "select oid::regprocedure::text from pg_proc where pronamespace = 'evil'::regnamespace",
    ):
        ((source,),) = rows(attacker, "select pg_get_functiondef(%s::regprocedure)", (name,))
        attacker.execute(re.sub(r"(?s)\bbegin.*\bend", "begin raise 'evil ran'; end", source))
    with pytest.raises(psycopg.errors.RaiseException, match="evil ran"):
        attacker.execute("select 1 = 2")
    called = []
    allowed = [one for one in functions(attacker) if one.role]
    for function in allowed:
        # Casts of arguments are the caller's own business: they come ready.
        usual = function.usual(job_id, token)
        given = ", ".join(f"{name} => {value}" for name, value in usual.items())
        try:
            with attacker.transaction(force_rollback=True):
                attacker.execute(f"select taskboard.{function.name}({given})")
        except psycopg.Error as error:
            if "evil ran" in str(error):
                called.append(function.name)
    assert len(allowed) > 30
    assert called == []
    as_owner(attacker, f"revoke taskboard_operator, taskboard_observer from {ATTACKER}")


CAST = """
create type evil.guess as (n integer);
create function evil.as_uuid(evil.guess) returns uuid language plpgsql as $$ begin
  insert into evil.calls values (current_user::pg_catalog.text, 'cast');
  return (select token from evil.tokens limit 1); end $$;
create cast (evil.guess as uuid) with function evil.as_uuid(evil.guess) as implicit;
"""


def test_a_cast_of_the_caller_runs_as_the_caller_before_the_function_does(
    attacker: Connection,
) -> None:
    rows(attacker, "select job_id from taskboard.enqueue('k')")
    ((job_id,),) = rows(attacker, "select job_id from taskboard.claim()")
    attacker.execute("create table evil.calls (who text, what text)")
    attacker.execute("create table evil.tokens as select gen_random_uuid() as token")
    attacker.execute(CAST)
    guess = "row(1)::evil.guess"
    assert rows(attacker, f"select * from taskboard.complete(%s, {guess})", (job_id,)) == []
    assert rows(attacker, "select distinct who from evil.calls") == [(ATTACKER,)]


@pytest.mark.parametrize(
    "beside", ["Taskboard", "task board", 'task"board', "TASKBOARD", "pg_temp"]
)
def test_a_schema_beside_ours_with_the_same_tables_and_functions_is_never_used(
    attacker: Connection, beside: str
) -> None:
    name = sql.Identifier(beside)
    if beside != "pg_temp":
        as_owner(attacker)
        attacker.execute("reset session authorization")
        attacker.execute(
            sql.SQL("create schema {} authorization {}").format(name, sql.Identifier(ATTACKER))
        )
        as_owner(attacker)
    for table in ("jobs", "lanes", "settings", "history", "unique_keys", "queue_rights"):
        attacker.execute(sql.SQL("create table {}.{} (id int)").format(name, sql.Identifier(table)))
    for function in ("may_use(text)", "may_see(uuid)", "check_name(text, text)"):
        attacker.execute(
            sql.SQL(
                "create function {}." + function + " returns boolean language plpgsql"
                " as $$ begin raise 'evil ran'; end $$"
            ).format(name)
        )
    attacker.execute(sql.SQL("set search_path = {}, taskboard, public").format(name))
    ((job_id,),) = rows(attacker, "select job_id from taskboard.enqueue('k', unique_key => 'u')")
    ((mine, token),) = rows(attacker, "select job_id, lease_token from taskboard.claim()")
    assert mine == job_id
    assert len(rows(attacker, "select * from taskboard.complete(%s, %s)", (job_id, token))) == 1


def test_own_temporary_table_takes_over_a_function_whose_path_omits_pg_temp(
    attacker: Connection,
) -> None:
    naive(attacker, NAIVE_SETTING)
    assert rows(attacker, "select naive.payload_limit()") == [(1048576,)]
    attacker.execute("create temporary table settings (payload_bytes integer)")
    attacker.execute("grant all on settings to public")
    attacker.execute("insert into settings values (2000000000)")
    assert rows(attacker, "select naive.payload_limit()") == [(2000000000,)]


def test_own_temporary_tables_are_never_read_by_ours(attacker: Connection) -> None:
    as_owner(attacker, "update taskboard.settings set payload_bytes = 2000")
    tables = rows(
        attacker,
        "select relname from pg_class"
        " where relnamespace = 'taskboard'::regnamespace and relkind in ('r', 'p', 'v', 'S')",
    )
    for (table,) in tables:
        with suppress(psycopg.errors.DuplicateTable):
            attacker.execute(
                sql.SQL("create temporary table {} (payload_bytes integer)").format(
                    sql.Identifier(table)
                )
            )
    attacker.execute("insert into pg_temp.settings values (2000000000)")
    attacker.execute("set search_path = pg_temp, taskboard, pg_catalog")
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        attacker.execute("select taskboard.enqueue('k', %s)", (Jsonb("x" * 3000),))
    ((job_id,),) = rows(attacker, "select job_id from taskboard.enqueue('k', '1')")
    ((token,),) = rows(attacker, "select lease_token from taskboard.claim()")
    assert len(rows(attacker, "select * from taskboard.complete(%s, %s)", (job_id, token))) == 1


def test_ours_work_under_any_path(attacker: Connection) -> None:
    for path in ("''", "pg_temp", "taskboard", '"$user"', "evil, pg_temp"):
        attacker.execute(f"set search_path = {path}")
        ((job_id,),) = rows(
            attacker, "select job_id from taskboard.enqueue('k', unique_key => 'u')"
        )
        ((token,),) = rows(attacker, "select lease_token from taskboard.claim()")
        done = rows(attacker, "select * from taskboard.complete(%s, %s)", (job_id, token))
        assert len(done) == 1, path


SETTINGS = (
    "standard_conforming_strings = off",
    "transform_null_equals = on",
    "backslash_quote = on",
    "timezone = 'Asia/Kolkata'",
    "datestyle = 'SQL, DMY'",
    "intervalstyle = 'iso_8601'",
    "extra_float_digits = -15",
    "application_name = ''",
    "plan_cache_mode = force_custom_plan",
    "enable_indexscan = off",
    "statement_timeout = '10s'",
)


def test_settings_of_the_caller_do_not_change_what_ours_do(attacker: Connection) -> None:
    ((now, claims),) = rows(
        attacker,
        "select extract(epoch from clock_timestamp()),"
        " hashtextextended(format('%s/%s', null::text[], null::text[]), 0)",
    )
    late = "{" + ",".join([str(now + 3600)] * 3) + "}"
    # Plans that name us, with no lanes, with floors that lie in the future, and with neither.
    forged = [
        f"taskboard.plan_{claims & 7} = '{claims}/{now}/{rest}'"
        for rest in (
            "/".join([*["{}"] * 10, "0.02"]),
            "/".join(["{1,2,1}", late, "{0,0,0}", "{1,2,3}", "{1,1,1}", "{0,0,0}", late, late]
                     + ["{0,0,0}"] * 2 + ["0.02"]),
            "/".join(["{9}", "{0}", "{0}", "{2}"] + ["{0}"] * 6 + ["0.02"]),
        )
    ] + [f"taskboard.plan_{n} = '{text}'" for n in range(8) for text in ("x", "1/2/3", "{}")]
    for setting in (*SETTINGS, *forged):
        with suppress(psycopg.errors.UndefinedObject):
            attacker.execute(f"set {setting}")
        ((job_id,),) = rows(
            attacker, "select job_id from taskboard.enqueue('k', delay => '0', lease => '30 s')"
        )
        claimed = (
            "select job_id, lease_token, lease = '30 s', lease_expires_at > clock_timestamp()"
            " from taskboard.claim()"
        )
        # A plan of one's own making is believed for 20 ms, which nobody else feels.
        job = rows(attacker, claimed) or time.sleep(0.03) or rows(attacker, claimed)
        assert [(row[0], *row[2:]) for row in job] == [(job_id, True, True)], setting
        rows(attacker, "select step from taskboard.maintain()")
        done = "select count(*) from taskboard.complete(%s, %s)"
        assert rows(attacker, done, (job_id, uuid4())) == [(0,)], setting
        assert rows(attacker, done, (job_id, job[0][1])) == [(1,)], setting
        attacker.execute("reset all")


def test_no_error_shows_a_row_a_payload_or_a_token(db: Connection, attacker: Connection) -> None:
    secret = Jsonb({"card": SECRET})
    ((job_id,),) = rows(
        attacker,
        "select job_id from taskboard.enqueue('k', %s, headers => %s, on_unknown => 'hold')",
        (secret, secret),
    )
    ((token,),) = rows(attacker, "select lease_token from taskboard.claim()")
    owner: dict[str, Any] = {"job": job_id, "token": token, "doc": secret, "nul": "\\u0000"}
    calls = [
        "enqueue('k', %(doc)s, priority => 99)",
        "enqueue('k', %(doc)s, priority => null)",
        "enqueue(null, %(doc)s)",
        "enqueue('', %(doc)s)",
        "enqueue('k', %(doc)s, queue => repeat('q', 201))",
        "enqueue('k', %(doc)s, max_attempts => 0)",
        "enqueue('k', %(doc)s, max_lost_leases => -1)",
        "enqueue('k', %(doc)s, on_unknown => 'x')",
        "enqueue('k', %(doc)s, run_at => 'infinity')",
        "enqueue('k', %(doc)s, run_at => '-infinity')",
        "enqueue('k', %(doc)s, run_at => '4713-01-01 BC')",
        "enqueue('k', %(doc)s, lease => '0')",
        "enqueue('k', %(doc)s, timeout => '-1 s')",
        "enqueue('k', %(doc)s, delay => '178000000 years')",
        "enqueue('k', %(doc)s, delay => '1 s', run_at => '2030-01-01')",
        "enqueue('k', %(doc)s, unique_for => '1 s')",
        "enqueue('k', %(doc)s, unique_key => '')",
        "enqueue('k', %(doc)s, serial_key => repeat('ü', 201))",
        "enqueue('k', %(doc)s, headers => '[]')",
        "enqueue_many('k', array[%(doc)s::jsonb, null])",
        "enqueue_many('k', array[%(doc)s::jsonb], unique_keys => '{a,b}')",
        "claim(max_jobs => 0)",
        "claim(lease => '-1 s')",
        "claim(worker => '')",
        "renew(%(job)s, %(token)s, '0')",
        "renew(%(job)s, %(token)s, '1000 years')",
        "renew_many(array[%(job)s, null]::uuid[], array[%(token)s, %(token)s]::uuid[])",
        "complete(%(job)s, null)",
        "complete_many(array[%(job)s]::uuid[], array[%(token)s]::uuid[], array[]::jsonb[])",
        "fail(%(job)s, %(token)s, retry_in => '-1 s')",
        "fail(%(job)s, %(token)s, permanent => null)",
        "release(%(job)s, %(token)s, '1000 years')",
        "release_many(array[%(job)s]::uuid[], array[%(token)s]::uuid[], array[]::interval[])",
        "begin_effect(%(job)s, %(token)s, 'Not A Step')",
        "end_effect(%(job)s, %(token)s, happened => null)",
        "require_lease(%(token)s, %(job)s)",
        "cancel(%(token)s)",
        "cancel(%(job)s, force => null)",
        "job(null)",
    ]
    refused = 0
    for call in calls:
        try:
            attacker.execute(f"select * from taskboard.{call}", owner)
        except psycopg.Error as error:
            refused += 1
            text = told(error)
            assert "Failing row" not in text, call
            for hidden in (SECRET, str(token)):
                assert hidden not in text, call
    assert refused > len(calls) - 4


def test_no_error_of_a_race_shows_a_row_a_payload_or_a_token(
    db: Connection, attacker: Connection, dsn: str
) -> None:
    ((job_id,),) = rows(attacker, "select job_id from taskboard.enqueue('k', %s)", (Jsonb(SECRET),))
    ((token,),) = rows(attacker, "select lease_token from taskboard.claim()")
    owner: tuple[UUID, UUID] = (job_id, token)
    errors = []
    with psycopg.connect(dsn, autocommit=True, prepare_threshold=None) as other:
        attacker.execute("begin isolation level repeatable read")
        attacker.execute("select 1 from taskboard.job(%s)", (job_id,))
        other.execute("select taskboard.renew(%s, %s)", owner)
        with pytest.raises(psycopg.Error) as changed:
            attacker.execute("select taskboard.complete(%s, %s)", owner)
        attacker.execute("rollback")
        errors.append(changed.value)
        other.execute("begin")
        other.execute("select from taskboard.jobs for update")
        attacker.execute("begin")
        attacker.execute("set local statement_timeout = '50ms'")
        with pytest.raises(psycopg.Error) as waited:
            attacker.execute("select taskboard.complete(%s, %s)", owner)
        attacker.execute("rollback")
        errors.append(waited.value)
        other.execute("rollback")
    assert [error.sqlstate for error in errors] == ["40001", "57014"]
    for error in errors:
        assert SECRET not in told(error)
        assert str(token) not in told(error)


def test_nobody_but_the_claimer_is_shown_a_token(db: Connection) -> None:
    db.execute("select taskboard.enqueue('k')")
    ((job_id, token),) = rows(db, "select job_id, lease_token from taskboard.claim()")
    db.execute("select taskboard.begin_effect(%s, %s)", (job_id, token))
    shown = [
        f"select x::text from taskboard.{view} as x"
        for (view,) in rows(
            db,
            "select relname from pg_class where relnamespace = 'taskboard'::regnamespace"
            " and relkind = 'v' and has_table_privilege('taskboard_observer', oid, 'select')",
        )
    ]
    assert len(shown) > 6
    shown += [
        f"select x::text from taskboard.{call} as x"
        for call in (f"job('{job_id}')", f"job_documents('{job_id}')", "maintain()", "prune()")
    ]
    for verb in ("complete", "fail", "renew"):
        db.execute(f"select taskboard.{verb}(%s, %s)", (job_id, uuid4()))
    for finish in ("select 1", f"select taskboard.complete('{job_id}', '{token}')"):
        db.execute(finish)
        for statement in shown:
            for (text,) in rows(db, statement):
                assert str(token) not in text, statement


NAIVE_QUEUE = """
create schema naive;
grant usage on schema naive to public;
create table naive.jobs (
  id uuid primary key default gen_random_uuid(), token uuid, priority integer not null default 5
  constraint priority_bounded check (priority between 0 and 9), payload jsonb not null);
create function naive.change_priority(job_id uuid, priority integer) returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  update naive.jobs as j set priority = change_priority.priority where j.id = job_id;
end $$;
create function naive.complete(job_id uuid, lease_token uuid) returns setof uuid
language sql security definer set search_path = pg_catalog, pg_temp as $$
  delete from naive.jobs as j where j.id = job_id and j.token is not distinct from lease_token
  returning j.id
$$;
create function naive.claim(max_jobs integer) returns table (job_id uuid, lease_token uuid)
language sql security definer set search_path = pg_catalog, pg_temp as $$
  update naive.jobs as j set token = gen_random_uuid()
  where j.id = any (array(
    select p.id from naive.jobs as p where p.token is null limit max_jobs for update skip locked))
  returning j.id, j.token
$$;
"""


@pytest.fixture
def naive_queue(attacker: Connection) -> Connection:
    """The attacker's session, beside a queue whose author pinned the path and no more."""
    as_owner(attacker, NAIVE_QUEUE)
    return attacker


def test_a_naive_check_shows_a_whole_row_in_the_detail_of_its_error(
    naive_queue: Connection,
) -> None:
    token = uuid4()
    secret = f"insert into naive.jobs (token, payload) values ('{token}', '\"{SECRET}\"')"
    as_owner(naive_queue, secret)
    ((job_id,),) = seen_by_owner(naive_queue, "select id from naive.jobs")
    with pytest.raises(psycopg.errors.CheckViolation) as error:
        naive_queue.execute("select naive.change_priority(%s, 99)", (job_id,))
    assert SECRET in told(error.value)
    assert str(token) in told(error.value)


def test_no_constraint_of_ours_is_the_one_to_refuse_an_argument(attacker: Connection) -> None:
    # A constraint that refuses tells a row; so each bound is looked at before anything is written.
    for call in (
        "enqueue('k', priority => 99)", "enqueue('k', priority => -1)",
        "enqueue('k', max_attempts => 0)", "enqueue('k', lease => '-1 s')",
        "enqueue('k', on_unknown => 'guess')", "enqueue('k', unique_until => 'never')",
        "enqueue(null)", "enqueue('k', null)", "enqueue_many('k', array[null]::jsonb[])",
    ):  # fmt: skip
        with pytest.raises(psycopg.Error) as error:
            attacker.execute(f"select * from taskboard.{call}")
        assert error.value.sqlstate in ("22023", "22004"), call
        assert error.value.diag.message_detail is None
        assert error.value.diag.constraint_name is None


def test_a_comparison_that_is_safe_for_nulls_lets_a_null_token_end_any_waiting_job(
    naive_queue: Connection,
) -> None:
    as_owner(naive_queue, "insert into naive.jobs (payload) values ('1')")
    ((job_id,),) = seen_by_owner(naive_queue, "select id from naive.jobs")
    assert rows(naive_queue, "select naive.complete(%s, null)", (job_id,)) == [(job_id,)]


def test_no_verb_takes_a_null_for_the_token_of_a_job_without_one(attacker: Connection) -> None:
    ((job_id,),) = rows(attacker, "select job_id from taskboard.enqueue('k')")
    verbs = rows(
        attacker,
        "select proname, proargnames @> array['job_ids'] from pg_proc"
        " where pronamespace = 'taskboard'::regnamespace"
        " and (proargnames @> array['lease_token'] or proargnames @> array['lease_tokens'])"
        " and has_function_privilege('taskboard_worker', oid, 'execute')",
    )
    assert len(verbs) > 8
    jobs = "select j::text from taskboard.jobs as j"
    before = seen_by_owner(attacker, jobs)
    for verb, many in verbs:
        pair = f"array['{job_id}']::uuid[], array[null]::uuid[]" if many else f"'{job_id}', null"
        with pytest.raises(psycopg.Error) as error:
            attacker.execute(f"select * from taskboard.{verb}({pair})")
        assert error.value.sqlstate in ("22004", "22023"), verb
    assert seen_by_owner(attacker, jobs) == before


def test_a_limit_that_may_be_null_gives_a_caller_the_whole_queue(naive_queue: Connection) -> None:
    as_owner(
        naive_queue, "insert into naive.jobs (payload) select '1' from generate_series(1, 2000)"
    )
    assert len(rows(naive_queue, "select * from naive.claim(null)")) == 2000


def test_no_argument_of_claim_gives_more_than_a_batch(attacker: Connection) -> None:
    attacker.execute(
        "select count(*) from taskboard.enqueue_many("
        "'k', array(select '1'::jsonb from generate_series(1, 1100)))"
    )
    for absurd in ("null", "0", "-1", "1001", "2147483647"):
        with pytest.raises(psycopg.Error) as error:
            attacker.execute(f"select * from taskboard.claim(max_jobs => {absurd})")
        assert error.value.sqlstate in ("22004", "22023"), absurd
    assert len(rows(attacker, "select * from taskboard.claim(max_jobs => 1000)")) == 1000


# What jsonb stores and Python's json refuses: 5,000 digits, and nesting without end.
POISON = ("1" * 5000, "[" * 5000 + "]" * 5000)


@pytest.mark.parametrize("poison", POISON, ids=["a long number", "deep nesting"])
def test_one_document_that_cannot_be_decoded_loses_a_whole_batch_of_a_naive_client(
    attacker: Connection, poison: str
) -> None:
    for document in ("1", poison, "2"):
        attacker.execute("select taskboard.enqueue('k', %s::text::jsonb)", (document,))
    # The driver decodes all rows at once: the claim has been made, and nobody learns of it.
    with pytest.raises((ValueError, RecursionError)):
        rows(attacker, "select job_id, payload from taskboard.claim(max_jobs => 3)")
    assert rows(attacker, "select * from taskboard.claim(max_jobs => 3)") == []
    as_owner(attacker, "update taskboard.jobs set claimable_at = clock_timestamp()")
    # As text it is one row's trouble.
    claimed = rows(attacker, "select payload::text from taskboard.claim(max_jobs => 3)")
    decoded = []
    for (text,) in claimed:
        with suppress(ValueError, RecursionError):
            decoded.append(json.loads(text))
    assert sorted(decoded) == [1, 2]
    assert len(claimed) == 3
