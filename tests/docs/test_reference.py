"""The reference is made of the comments, says everything, and is of today."""

from __future__ import annotations

import re

import pytest

from docs.reference import PAGE, Entry, read, render
from support import Connection, rows

Both = tuple[list[Entry], list[Entry]]


@pytest.fixture
def entries(dsn: str) -> Both:
    return read(dsn)


def test_the_reference_is_what_the_comments_say(entries: Both) -> None:
    assert PAGE.read_text() == render(*entries), "run: python tests/docs/reference.py"


def test_every_argument_and_every_column_that_is_shown_is_explained(entries: Both) -> None:
    unexplained = [name for both in entries for one in both for name in one.unexplained()]
    assert unexplained == []
    assert [one.name for both in entries for one in both if not one.comment] == []


def test_every_function_and_view_that_somebody_may_use_is_in_it(
    entries: Both, db: Connection
) -> None:
    usable = rows(
        db,
        """
        select distinct o.name
        from (
          select proname, proacl from pg_proc where pronamespace = 'taskboard'::regnamespace
          union all
          select relname, relacl from pg_class where relnamespace = 'taskboard'::regnamespace
        ) as o (name, acl), aclexplode(o.acl) as a
        join pg_roles as r on r.oid = a.grantee
        where r.rolname ~ '^taskboard_(producer|worker|operator|observer)$'
        """,
    )
    shown = {one.name for both in entries for one in both}
    assert {name for (name,) in usable} - shown == set()


def test_comments_name_the_roles_that_have_the_right(entries: Both) -> None:
    functions, _ = entries
    wrong = {}
    for one in functions:
        said = set(re.findall(r"\btaskboard_(\w+)", one.comment.partition("Role")[2]))
        everybody = re.search(r"Role: everybody|For the owner alone", one.comment)
        if not everybody and said != set(one.roles):
            wrong[one.name] = (said, one.roles)
    assert wrong == {}
