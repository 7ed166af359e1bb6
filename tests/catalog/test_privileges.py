"""Run every function and touch every relation as each role: the matrix in 90_grants.sql decides."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql

from catalog.matrix import ROLES, ROOT, matrix, private, table_for_people
from support import Connection, rows

DENIED = "42501"
NO_TABLE = ("0A000", "42809", "428C9", "55000")
NOBODY = f"taskboard_test_nobody_{os.getpid()}"
MATRIX = matrix()

FUNCTIONS = """
select p.proname, p.oid::regprocedure::text,
  (select coalesce(string_agg(format('null::%s', format_type(t, null)), ', ' order by n), '')
   from unnest(p.proargtypes) with ordinality as a (t, n)),
  obj_description(p.oid, 'pg_proc')
from pg_proc as p
where p.pronamespace = 'taskboard'::regnamespace
order by 1
"""
# Days of history are made by maintain(); the tables of yoyo belong to the installer.
COME_AND_GO = r"^(history_\d{8}|_?yoyo\w*)$"
RELATIONS = """
select c.relname, c.relkind, obj_description(c.oid, 'pg_class')
from pg_class as c
where c.relnamespace = 'taskboard'::regnamespace and c.relkind in ('r', 'p', 'v', 'm', 'f', 'S')
order by 1
"""
TYPES = """
select t.typname, c.relkind
from pg_type as t
left join pg_class as c on c.oid = t.typrelid
where t.typnamespace = 'taskboard'::regnamespace and t.typcategory <> 'A'
order by 1
"""


@pytest.fixture(scope="module")
def nobody(installed: Connection) -> Iterator[str]:
    """A role with no right at all."""
    installed.execute(sql.SQL("create role {}").format(sql.Identifier(NOBODY)))
    yield NOBODY
    installed.execute(sql.SQL("drop role {}").format(sql.Identifier(NOBODY)))


@pytest.fixture(scope="module")
def lived_in(installed: Connection) -> Connection:
    """A database with jobs in many states, so that a view has to compute them."""
    db = installed
    db.execute("select taskboard.enqueue('k', delay => '1 hour')")
    db.execute("select taskboard.enqueue('k', serial_key => 's') from generate_series(1, 2)")
    db.execute("select taskboard.enqueue('k') from generate_series(1, 2)")
    for done in ("complete", "begin_effect", "fail"):
        for job_id, token in rows(db, "select job_id, lease_token from taskboard.claim()"):
            db.execute(f"select taskboard.{done}(%s, %s)", (job_id, token))
    return db


def state_of(db: Connection, role: str, statement: str) -> str:
    """Run a statement as a role, undo it, and return its SQLSTATE."""
    try:
        with db.transaction(force_rollback=True):
            db.execute(sql.SQL("set local role {}").format(sql.Identifier(role)))
            db.execute(statement)
    except psycopg.Error as error:
        return error.sqlstate or "?"
    return "00000"


def as_each(nobody: str) -> list[tuple[str, str]]:
    """The roles by their names in the matrix and in the database."""
    return [*((role, f"taskboard_{role}") for role in ROLES), ("nobody", nobody)]


def wrong(db: Connection, nobody: str, name: str, statement: str) -> list[str]:
    """Run a statement as every role; return where that is not as the matrix says."""
    found = []
    for role, login in as_each(nobody):
        state = state_of(db, login, statement)
        allowed = role in MATRIX.get(name, ())
        if (state == DENIED) == allowed:
            found.append(f"{role}: {statement} gave {state}, the matrix says {allowed}")
    return found


def test_every_function_runs_for_whom_the_matrix_names_and_for_nobody_else(
    lived_in: Connection, nobody: str
) -> None:
    found = []
    for name, _, nulls, _ in rows(lived_in, FUNCTIONS):
        found += wrong(lived_in, nobody, name, f"select taskboard.{name}({nulls})")
    assert found == []


def test_every_view_shows_its_rows_to_whom_the_matrix_names_and_to_nobody_else(
    lived_in: Connection, nobody: str
) -> None:
    found = []
    for name, kind, _ in rows(lived_in, RELATIONS):
        if kind == "v":
            found += wrong(lived_in, nobody, name, f"select * from taskboard.{name}")
    assert found == []


def test_no_role_can_touch_a_table_a_view_or_a_sequence_past_the_functions(
    lived_in: Connection, nobody: str
) -> None:
    reads = ["select 1 from {0}", "select from {0} for update", "copy {0} to stdout"]
    writes = [
        "insert into {0} default values",
        "delete from {0}",
        "truncate {0}",
        "lock table {0}",
        "alter table {0} add column mine text",
        "drop table {0}",
        "create trigger t before insert on {0} execute function tsvector_update_trigger()",
    ]
    draws = ["select nextval('{0}')", "select setval('{0}', 1)", "select last_value from {0}"]
    found = []
    for name, kind, _ in rows(lived_in, RELATIONS):
        statements = draws if kind == "S" else writes if kind == "v" else reads + writes
        for _, login in as_each(nobody):
            for statement in statements:
                text = statement.format(f"taskboard.{name}")
                # A view may be none that anybody could write to; everything else is refused.
                if (state := state_of(lived_in, login, text)) not in (DENIED, *NO_TABLE):
                    found.append(f"{login}: {text} gave {state}")
    columns = """
        select c.relname, a.attname from pg_attribute as a join pg_class as c on c.oid = a.attrelid
        where c.relnamespace = 'taskboard'::regnamespace and c.relkind in ('r', 'p', 'v')
          and a.attnum > 0 and not a.attisdropped"""
    for name, column in rows(lived_in, columns):
        for _, login in as_each(nobody):
            text = f'update taskboard.{name} set "{column}" = null'
            if (state := state_of(lived_in, login, text)) not in (DENIED, *NO_TABLE):
                found.append(f"{login}: {text} gave {state}")
    assert found == []


def test_no_role_can_make_or_change_anything_in_the_schema(
    lived_in: Connection, nobody: str
) -> None:
    statements = [
        "create table taskboard.mine ()",
        "create function taskboard.mine() returns int language sql as 'select 1'",
        "create view taskboard.mine as select 1",
        "create or replace function taskboard.version() returns text language sql as 'select 1'",
        "alter function taskboard.version() owner to current_user",
        "alter function taskboard.version() reset all",
        "grant usage on schema taskboard to public with grant option",
        "alter schema taskboard rename to mine",
        "comment on schema taskboard is ''",
    ]
    found = [
        f"{login}: {statement} gave {state}"
        for _, login in as_each(nobody)
        for statement in statements
        if (state := state_of(lived_in, login, statement)) not in (DENIED, "0LP01")
    ]
    assert found == []


def test_no_role_of_the_matrix_is_a_member_of_another(installed: Connection, nobody: str) -> None:
    names = ["taskboard_owner", *(login for _, login in as_each(nobody))]
    members = rows(
        installed,
        "select a.rolname, b.rolname from pg_roles as a, pg_roles as b"
        " where a.rolname = any (%s) and b.rolname = any (%s) and a.oid <> b.oid"
        " and pg_has_role(a.oid, b.oid, 'member')",
        (names, names),
    )
    assert members == []


def test_no_role_can_use_a_type_in_an_object_of_its_own(lived_in: Connection, nobody: str) -> None:
    # Such a column would stand in the way of a migration, or of dropping a day of history.
    statements = (
        "create temporary table mine (x taskboard.{0})",
        "create temporary table mine (x taskboard.{0}[])",
        "create function pg_temp.mine(x taskboard.{0}) returns int language sql as 'select 1'",
    )
    found = []
    for name, _ in rows(lived_in, TYPES):
        for _, login in as_each(nobody):
            for statement in statements:
                text = statement.format(name)
                if (state := state_of(lived_in, login, text)) != DENIED:
                    found.append(f"{login}: {text} gave {state}")
    assert found == []


def test_with_a_right_on_types_a_column_keeps_a_day_of_history_for_ever(db: Connection) -> None:
    drop = "select step from taskboard.drop_days(%s, 1000)"
    ((day,),) = rows(db, "select max(relname) from pg_class where relname ~ '^history_[0-9]{8}$'")
    db.execute(f"grant usage on type taskboard.{day} to taskboard_worker")
    db.execute("set role taskboard_worker")
    db.execute(f"create temporary table mine (x taskboard.{day})")
    db.execute("reset role")
    with pytest.raises(psycopg.errors.DependentObjectsStillExist):
        rows(db, drop, ([day],))
    db.execute("drop table mine")
    assert rows(db, drop, ([day],))


def test_without_the_right_results_can_still_be_kept_in_variables(lived_in: Connection) -> None:
    block = (
        "do $$ declare v taskboard.claimed; begin select * into v from taskboard.claim(); end $$"
    )
    assert state_of(lived_in, "taskboard_worker", block) == "00000"


def test_a_role_with_nothing_cannot_even_name_a_type(installed: Connection, nobody: str) -> None:
    assert state_of(installed, nobody, "select null::taskboard.claimed") == DENIED


def unlisted(db: Connection) -> set[str]:
    """Find objects without a row in the matrix, and rows without an object."""
    kinds: dict[str, set[str]] = {"tables": set(), "views": set(), "sequences": set()}
    for name, kind, _ in rows(db, RELATIONS):
        if not re.match(COME_AND_GO, name):
            kinds["sequences" if kind == "S" else "views" if kind in "vm" else "tables"].add(name)
    # What has a row type of its own is listed as what it is.
    kinds["types"] = {name for name, kind in rows(db, TYPES) if kind in (None, "c")}
    functions = rows(db, FUNCTIONS)
    open_to_none = {
        name
        for name, _, _, text in functions
        if any(mark in (text or "") for mark in ("(internal)", "For the owner alone."))
    }
    callable_ = {name for name, *_ in functions}
    wrong = (callable_ - open_to_none) ^ (set(MATRIX) - kinds["views"])
    for kind, present in kinds.items():
        wrong |= (present - set(MATRIX)) ^ private(kind)
    return wrong


def test_every_object_has_its_row_in_the_matrix(installed: Connection) -> None:
    assert unlisted(installed) == set()


def test_the_table_for_people_is_the_matrix() -> None:
    assert table_for_people() == MATRIX


@pytest.mark.parametrize(
    "statement",
    [
        "create function taskboard.mine() returns int language sql as 'select 1'",
        "create procedure taskboard.mine() language sql as 'select 1'",
        "create aggregate taskboard.mine (integer) (sfunc = int4pl, stype = integer)",
        "create table taskboard.mine ()",
        "create view taskboard.mine as select 1",
        "create materialized view taskboard.mine as select 1",
        "create sequence taskboard.mine",
        "create type taskboard.mine as (a int)",
        "create type taskboard.mine as enum ('a')",
        "create type taskboard.mine as range (subtype = float8)",
        "create domain taskboard.mine as int",
    ],
)
def test_an_object_that_is_added_without_a_row_is_noticed(
    installed: Connection, statement: str
) -> None:
    with installed.transaction(force_rollback=True):
        installed.execute(statement)
        assert "mine" in unlisted(installed)


def test_grants_in_the_catalog_are_those_of_the_matrix_and_cannot_be_passed_on(
    installed: Connection,
) -> None:
    granted: list[tuple[Any, ...]] = rows(
        installed,
        """
        select o.name, g.rolname, a.privilege_type, a.is_grantable
        from (
          select p.proname as name, p.proacl as acl, p.proowner as owner from pg_proc as p
          where p.pronamespace = 'taskboard'::regnamespace
          union all
          select c.relname, c.relacl, c.relowner from pg_class as c
          where c.relnamespace = 'taskboard'::regnamespace
          union all
          select t.typname, coalesce(t.typacl, acldefault('T', t.typowner)), t.typowner
          from pg_type as t
          where t.typnamespace = 'taskboard'::regnamespace and t.typcategory <> 'A') as o
        cross join lateral aclexplode(o.acl) as a
        left join pg_roles as g on g.oid = a.grantee
        where a.grantee <> o.owner""",
    )
    expected = {(name, f"taskboard_{role}") for name, roles in MATRIX.items() for role in roles}
    assert {(name, role) for name, role, _, _ in granted} == expected
    assert {(privilege, passed) for _, _, privilege, passed in granted} == {
        ("EXECUTE", False),
        ("SELECT", False),
    }


def test_a_drifted_grant_is_taken_back_by_the_next_installation(db: Connection) -> None:
    grants = [
        "grant all on taskboard.jobs to taskboard_observer, public",
        "grant execute on function taskboard.claim to taskboard_observer, public",
        "grant all on sequence taskboard.lane_ids to taskboard_observer, public",
        "grant create on schema taskboard to taskboard_observer, public",
        "grant usage on type taskboard.jobs to taskboard_observer, public",
    ]
    text = (ROOT / "sql" / "90_grants.sql").read_text(encoding="utf-8")
    try:
        for grant in grants:
            db.execute(grant)
        with db.transaction():
            db.execute(text)
        assert [
            state_of(db, "taskboard_observer", statement)
            for statement in (
                "select 1 from taskboard.jobs",
                "select taskboard.claim()",
                "select nextval('taskboard.lane_ids')",
                "create table taskboard.mine ()",
                "create temporary table mine (x taskboard.jobs)",
            )
        ] == [DENIED] * 5
    finally:
        for grant in grants:
            db.execute(grant.replace("grant", "revoke", 1).replace(" to ", " from "))


def test_every_role_can_do_its_part_of_a_jobs_life(db: Connection) -> None:
    def as_role(role: str, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        with db.transaction():
            db.execute(sql.SQL("set local role {}").format(sql.Identifier(f"taskboard_{role}")))
            return rows(db, statement, values)

    ((job_id, created),) = as_role(
        "producer",
        "select * from taskboard.enqueue('k', '1', unique_key => 'u', serial_key => 's')",
    )
    assert created
    ((token,),) = as_role("worker", "select lease_token from taskboard.claim()")
    owner = (job_id, token)
    assert as_role("worker", "select state from taskboard.begin_effect(%s, %s)", *owner)
    assert as_role("worker", "select state from taskboard.end_effect(%s, %s)", *owner)
    assert as_role("worker", "select 1 from taskboard.renew(%s, %s)", *owner)
    assert as_role("worker", "select 1 from taskboard.require_lease(%s, %s)", *owner)
    assert as_role("worker", "select taskboard.lease_status(%s, %s)", *owner) == [("current",)]
    assert as_role("observer", "select state from taskboard.job_list") == [("running",)]
    assert as_role("observer", "select running from taskboard.queue_stats") == [(1,)]
    assert as_role("worker", "select 1 from taskboard.complete(%s, %s)", *owner)
    assert as_role("operator", "select state from taskboard.retry(%s)", job_id) == [("ready",)]
    assert as_role("producer", "select state from taskboard.cancel(%s)", job_id) == [("cancelled",)]
    assert as_role("operator", "select payload from taskboard.job_documents(%s)", job_id) == [(1,)]
    assert as_role("operator", "select 1 from taskboard.prune('0')")
    as_role("worker", "select 1 from taskboard.maintain()")
    who = rows(db, "select distinct by_role from taskboard.incident_list where what like 'job_%%'")
    assert {role for (role,) in who} <= {"taskboard_operator", "taskboard_producer"}
