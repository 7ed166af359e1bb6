"""Makes sql/REFERENCE.md of what an installed database says about itself: `comment on`.

    python tests/docs/reference.py

writes it again, from an installation on a throwaway server. A test compares.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psycopg

PAGE: Final = Path(__file__).parents[2] / "sql/REFERENCE.md"
INTERNAL: Final = "(internal)"
ROLES: Final = ("producer", "worker", "operator", "observer")
SECTIONS: Final = {
    "everybody": "Everybody", "producer": "Producers", "worker": "Workers",
    "operator": "Operators", "owner": "The owner alone",
}  # fmt: skip
# They mean something else in each place.
OF_ITS_OWN: Final = {"id", "state", "result", "error", "lease", "worker", "paused_at"}
# Whose word on a column counts, when several tables have one of its name.
TABLES: Final = (
    "jobs", "history", "effects", "incidents", "schedules", "queues", "lanes", "settings",
    "enqueued", "leased", "renewed", "maintained",
)  # fmt: skip

HEAD: Final = """\
# Reference

Every function and view that somebody may use, as the comments in the database say it; `\\df+
taskboard.*` and `\\d+` show them there. This page is made of them: change the comment, then run
`python tests/docs/reference.py`.

All arguments can be named, and should be: `taskboard.claim(max_jobs => 10)`. One without a default
must be given. Tables are private: no role but the owner has a right on one. Any function may raise
22023 and 22004 (an argument is out of bounds, or null), 42501 (no right), 40001, 40P01 and 55P03
(nothing changed, repeat); [all codes](README.md#codes). What the states are, and what a verb does
when another comes first: [the life of a job](README.md).
"""

FUNCTIONS: Final = """
select p.proname as name, obj_description(p.oid, 'pg_proc') as comment,
  pg_get_function_result(p.oid) as result, p.proretset as many, t.typrelid as columns_of,
  array(
    select substring(r.rolname from 11)
    from aclexplode(p.proacl) as a
    join pg_roles as r on r.oid = a.grantee
    where r.rolname in ('taskboard_producer', 'taskboard_worker', 'taskboard_operator',
      'taskboard_observer')
    order by r.rolname) as roles,
  array(
    select jsonb_build_object('name', a.name, 'mode', coalesce(a.mode, 'i'),
      'type', format_type(a.type, null),
      'default', pg_get_function_arg_default(p.oid, a.no::integer))
    from unnest(p.proargnames, coalesce(p.proallargtypes, p.proargtypes::oid[]), p.proargmodes)
      with ordinality as a (name, type, mode, no)
    order by a.no) as arguments
from pg_proc as p
join pg_type as t on t.oid = p.prorettype
where p.pronamespace = 'taskboard'::regnamespace
order by p.oid"""

VIEWS: Final = """
select c.relname as name, obj_description(c.oid, 'pg_class') as comment, c.oid as columns_of
from pg_class as c
where c.relnamespace = 'taskboard'::regnamespace and c.relkind = 'v'
order by c.oid"""

COLUMNS: Final = """
select c.oid, c.relname as relation, a.attname as name,
  format_type(a.atttypid, a.atttypmod) as type, col_description(c.oid, a.attnum) as comment
from pg_class as c
join pg_attribute as a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
where c.relnamespace = 'taskboard'::regnamespace and c.relkind in ('r', 'p', 'v', 'c')
  and not c.relispartition
order by c.oid, a.attnum"""


@dataclass(frozen=True, slots=True)
class Field:
    """An argument or a column: what it is called, its type, its default, what it means."""

    name: str
    type: str
    default: str | None
    meaning: str | None


@dataclass(frozen=True, slots=True)
class Entry:
    """A function or a view; `result` says what a function returns, where that has no columns."""

    name: str
    comment: str
    roles: tuple[str, ...]
    arguments: tuple[Field, ...]
    columns: tuple[Field, ...]
    result: str
    many: bool

    def unexplained(self) -> list[str]:
        """Name what stands in the signature and nowhere in words."""
        fields = self.arguments + self.columns
        return [f"{self.name}.{field.name}" for field in fields if field.meaning is None]

    @property
    def section(self) -> str:
        if len(self.roles) == len(ROLES):
            return "everybody"
        return next((role for role in ROLES if role in self.roles), "owner")


def read(dsn: str) -> tuple[list[Entry], list[Entry]]:
    """Read the functions and the views of an installation, in the order of sql/."""
    with psycopg.connect(dsn, row_factory=psycopg.rows.dict_row) as conn:
        functions, views = conn.execute(FUNCTIONS).fetchall(), conn.execute(VIEWS).fetchall()
        columns = conn.execute(COLUMNS).fetchall()
    words = {
        column["name"]: column["comment"]
        for table in reversed(TABLES) for column in columns
        if column["relation"] == table and column["comment"] and column["name"] not in OF_ITS_OWN
    }  # fmt: skip

    def field(of: Mapping[str, Any], row: Mapping[str, Any]) -> Field:
        name, default = row["name"], row.get("default")
        own = row.get("comment")
        if re.search(rf"\b{name}\b(, \w+)*:", of["comment"] or ""):
            said: str | None = ""
        else:
            said = words.get(name)
            # Less than a sentence of its own, but it is spoken of.
            if said is None and re.search(rf"\b{name}\b", of["comment"] or ""):
                said = ""
        of_type = row["type"].replace("timestamp with time zone", "timestamptz")
        return Field(name, of_type, default and default.partition("::")[0].lower(), own or said)

    def entry(row: Mapping[str, Any]) -> Entry:
        given = row.get("arguments", [])
        shown = [one for one in columns if one["oid"] == row["columns_of"]]
        shown += [one for one in given if one["mode"] in "ot"]
        return Entry(
            row["name"], row["comment"] or "", tuple(row.get("roles", ())),
            tuple(field(row, one) for one in given if one["mode"] in "ib"),
            tuple(field(row, one) for one in shown), row.get("result", ""), row.get("many", True),
        )  # fmt: skip

    def public(rows: list[dict[str, Any]]) -> list[Entry]:
        return [entry(row) for row in rows if INTERNAL not in (row["comment"] or "").split("\n")[0]]

    return public(functions), public(views)


def render(functions: list[Entry], views: list[Entry]) -> str:
    """Write the page."""
    return "\n".join(_page(functions, views)) + "\n"


def _page(functions: list[Entry], views: list[Entry]) -> Iterator[str]:
    yield HEAD
    yield "| | |\n|---|---|"
    sections = {key: [one for one in functions if one.section == key] for key in SECTIONS}
    for key, title in SECTIONS.items():
        yield f"| {title} | {_links(sections[key])} |"
    yield f"| Views | {_links(views)} |"
    for key, title in SECTIONS.items():
        yield f"\n## {title}"
        for one in sections[key]:
            yield f"\n### {one.name}\n\n{_text(one)}"
            if one.arguments:
                yield "\n| argument | type | default | |\n|---|---|---|---|"
                for each in one.arguments:
                    default = "" if each.default is None else f"`{each.default}`"
                    yield f"| `{each.name}` | {each.type} | {default} | {_cell(each.meaning)} |"
            yield from _result(one)
    yield "\n## Views"
    for one in views:
        yield f"\n### {one.name}\n\n{_text(one)}"
        yield from _columns(one, "column")


def _links(entries: list[Entry]) -> str:
    return ", ".join(f"[{one.name}](#{one.name})" for one in entries)


def _text(one: Entry) -> str:
    first, _, rest = one.comment.partition("\n")
    return f"**{first}**" + (f"\n{rest}" if rest else "")


def _result(one: Entry) -> Iterator[str]:
    if one.columns:
        yield from _columns(one, "a row of the answer has" if one.many else "the answer has")
    elif one.result == "void":
        yield "\nReturns nothing."
    else:
        yield f"\nReturns {one.result.removeprefix('SETOF ')}."


def _columns(one: Entry, title: str) -> Iterator[str]:
    yield f"\n| {title} | type | |\n|---|---|---|"
    for each in one.columns:
        yield f"| `{each.name}` | {each.type} | {_cell(each.meaning)} |"


def _cell(text: str | None) -> str:
    return (text or "").replace("\n", " ").replace("|", "\\|")


if __name__ == "__main__":
    from taskboard.localpg import throwaway
    from taskboard.migrate import migrate

    with throwaway() as local:
        migrate(local.dsn)
        PAGE.write_text(render(*read(local.dsn)))
