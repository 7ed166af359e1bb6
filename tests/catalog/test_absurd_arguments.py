"""Absurd arguments to every function that somebody may call: a table of them, and generated ones.

The functions come from the catalog, so that a new one is attacked without being named here. Each
call is undone; an error must have a documented code, change nothing and tell nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import pq, sql

from catalog.calls import Function, functions, told
from support import Connection, Databases, rows, session

SECRET: Final = "customer-4711"
# What the functions may raise. Whatever PostgreSQL refuses to read is refused before they run.
DOCUMENTED: Final = frozenset(
    ("TB001", "TB002", "TB003", "22023", "22004", "40001", "40P01", "55P03", "0A000", "42501")
)
UNREADABLE: Final = frozenset(("22021", "22P05", "22P02", "22P03", "22003", "22007", "22008"))
SECONDS: Final = 10.0  # no call may take longer, on a busy machine


@dataclass(frozen=True, slots=True)
class Target:
    """A session as superuser in a database that is lived in; what must never be shown."""

    conn: Connection
    functions: list[Function]
    job_id: str
    token: str
    secrets: tuple[str, ...]


TEN_MEGABYTES = 10 << 20
NAMES = (
    "null", "''", "' '", f"repeat('x', {TEN_MEGABYTES})", "repeat('ü', 201)", "repeat('x', 200)",
    "E'a\\nb'", "E'\\x7f'", "U&'\\202Ea'", "'''; drop table taskboard.jobs; --'", "'%s%n{}'",
    "'\"'", "E'\\\\'", "'-Infinity'", "'NaN'", "'12x'",
)  # fmt: skip
DOCUMENTS = (
    "null", "'null'", "'[]'", "'0'", "'\"\"'", "'-1e1000'", "'{\"\": {}}'",
    f"to_jsonb(repeat('x', {TEN_MEGABYTES}))", "(repeat('[', 5000) || repeat(']', 5000))::jsonb",
)  # fmt: skip
UUIDS = (
    "null", "'00000000-0000-0000-0000-000000000000'", "'ffffffff-ffff-ffff-ffff-ffffffffffff'",
    "'12345678-1234-4234-8234-123456789abc'",
)  # fmt: skip
ABSURD: Final[dict[str, tuple[str, ...]]] = {
    "text": NAMES,
    "jsonb": DOCUMENTS,
    "uuid": UUIDS,
    "integer": ("null", "0", "-1", "2147483647", "-2147483648"),
    "bigint": ("null", "0", "-1", "9223372036854775807", "-9223372036854775808"),
    "boolean": ("null", "true", "false"),
    "interval": (
        "null", "'0'", "'-1 us'", "'0.0999 s'", "'1 month'", "'-1 month'", "'178000000 years'",
        "'-178000000 years'", "'2147483647 days'", "'infinity'", "'-infinity'",
    ),
    "timestamp with time zone": (
        "null", "'infinity'", "'-infinity'", "'4713-01-01 BC'", "'294276-12-31'", "'1970-01-01Z'",
    ),
}  # fmt: skip
TABLES = """
select relname from pg_class
where relnamespace = 'taskboard'::regnamespace and relkind in ('r', 'p') and not relispartition
  and relname !~ '^_?yoyo'
order by 1
"""


def array_of(kind: str) -> tuple[str, ...]:
    """Absurd arrays of a type: of every length, nested, with nulls, with odd bounds, very long."""
    one = "'12345678-1234-4234-8234-123456789abc'" if kind == "uuid" else "'1'"
    many = "gen_random_uuid()" if kind == "uuid" else "n::text"
    return (
        "null", f"'{{}}'::{kind}[]", f"array[null]::{kind}[]", f"array[{one}, null]::{kind}[]",
        f"array[{one}, {one}, {one}]::{kind}[]", f"array[[{one}], [{one}]]::{kind}[]",
        f"array[[{one}, {one}]]::{kind}[]",
        f"(array_fill({one}::{kind}, array[1], array[-7]))",
        f"(array_fill({one}::{kind}, array[2], array[2147483000]))",
        f"(array_fill({one}::{kind}, array[100001]))",
        f"array(select {many}::{kind} from generate_series(1, 100001) as n)",
        *(f"array[{value}]::{kind}[]" for value in ABSURD[kind]),
    )  # fmt: skip


@pytest.fixture(scope="module")
def target(databases: Databases, template: str) -> Iterator[Target]:
    with session(
        databases.server.dsn(databases.create(template)), "victim", options="-c timezone=UTC"
    ) as db:
        db.execute(
            "select taskboard.enqueue('k', %s, headers => %s, unique_key => 'u')",
            (f'"{SECRET}"', f'{{"h": "{SECRET}"}}'),
        )
        ((job_id, token),) = rows(db, "select job_id, lease_token from taskboard.claim()")
        db.execute("select taskboard.begin_effect(%s, %s)", (job_id, token))
        db.execute(
            "select taskboard.enqueue('k', %s, serial_key => 's') from generate_series(1, 2)",
            (f'"{SECRET}"',),
        )
        held = rows(db, "select * from taskboard.enqueue('held', on_unknown => 'hold')")[0][0]
        db.execute("select taskboard.enqueue('done', %s)", (f'"{SECRET}"',))
        ((_, held_token),) = rows(
            db, "select job_id, lease_token from taskboard.claim(kinds => array['held'])"
        )
        db.execute("select taskboard.begin_effect(%s, %s)", (held, held_token))
        db.execute(
            "select taskboard.fail(%s, %s, %s, permanent => true)", (held, held_token, SECRET)
        )
        ((done, done_token),) = rows(
            db, "select job_id, lease_token from taskboard.claim(kinds => array['done'])"
        )
        db.execute("select taskboard.complete(%s, %s)", (done, done_token))
        db.execute("select taskboard.schedule('nightly', '0 3 * * *', 'k', %s)", (f'"{SECRET}"',))
        secrets = (SECRET, *(str(t) for t in (token, held_token, done_token)))
        yield Target(db, functions(db), str(job_id), str(token), secrets)


def content(db: Connection, tables: list[str]) -> list[tuple[Any, ...]]:
    """A checksum of all that is stored."""
    return rows(
        db,
        " union all ".join(
            f"(select '{table}', count(*), md5(string_agg(t::text, '' order by t::text))"
            f" from taskboard.{table} as t)"
            for table in tables
        ),
    )


class Attack:
    """Calls that are undone; `faults` has what should not have happened."""

    def __init__(self, target: Target) -> None:
        self.target, self.conn = target, target.conn
        self.tables = [name for (name,) in rows(self.conn, TABLES)]
        self.before = content(self.conn, self.tables)
        self.faults: list[str] = []
        self.ways: set[tuple[str, str | None, str | None]] = set()
        self.calls = self.refused = 0

    def usual(self, function: Function) -> dict[str, str]:
        return function.usual(self.target.job_id, self.target.token)

    def call(self, function: Function, arguments: dict[str, str], values: Any = None) -> None:
        """Call with expressions; compare all that is stored, and what is said."""
        given = ", ".join(f"{name} => {value}" for name, value in arguments.items())
        what = f"{function.name}({given[:300]})"
        if values:
            what += f" with {str(values)[:300]}"
        self.calls += 1
        began = time.monotonic()
        role = sql.Identifier(function.role) if function.role else sql.SQL("none")
        with self.conn.transaction(force_rollback=True):
            self.conn.execute(sql.SQL("set local role {}").format(role))
            try:
                with self.conn.transaction():
                    said = str(
                        rows(
                            self.conn,
                            f"select left(x::text, 5000) from taskboard.{function.name}({given})"
                            " as x limit 50",
                            values,
                        )
                    )
                    documents = function.name in ("claim", "job_documents")
            except psycopg.Error as error:
                self.refused += 1
                said, documents = told(error), False
                if error.sqlstate not in DOCUMENTED:
                    self.faults.append(f"{what}: {error.sqlstate} {said[:300]}")
                if error.diag.message_detail or not error.diag.message_hint:
                    self.faults.append(f"{what}: a detail, or no hint: {said[:300]}")
                if len(said) > 2000:
                    self.faults.append(f"{what}: {len(said)} characters of error")
                self.conn.execute("set local role none")
                # Once for each way to be refused: a look at everything takes longer than a call.
                way = (function.name, error.sqlstate, error.diag.message_primary)
                if way not in self.ways and content(self.conn, self.tables) != self.before:
                    self.faults.append(f"{what}: refused, but something changed")
                self.ways.add(way)
                if rows(self.conn, OWN_LOCKS):
                    self.faults.append(f"{what}: refused, but a lock stayed")
            if not documents and any(secret in said for secret in self.target.secrets):
                self.faults.append(f"{what}: shows {said[:300]}")
        if (took := time.monotonic() - began) > SECONDS:
            self.faults.append(f"{what}: took {took:.1f} s")
        self.conn.execute("select pg_advisory_unlock_all()")
        self.conn.execute("unlisten *")

    def caller_of(self, function: Function) -> Callable[[dict[str, Any]], None]:
        """Call with values that the driver sends."""
        usual = self.usual(function)

        def one(values: dict[str, Any]) -> None:
            absurd = {name: placeholder(name, function.arguments[name]) for name in values}
            self.call(function, usual | absurd, values)

        return one


OWN_LOCKS = "select from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()"


def readable(db: Connection, value: str, kind: str) -> bool:
    """Whether this server reads the value as one of the type; older ones know no infinite span."""
    try:
        db.execute(f"select ({value})::{kind} is null")
    except psycopg.Error as error:
        assert error.sqlstate in UNREADABLE, (value, kind, error.sqlstate)
        return False
    return True


def absurd(kind: str) -> tuple[str, ...]:
    return array_of(kind.removesuffix("[]")) if kind.endswith("[]") else ABSURD[kind]


def test_each_argument_in_turn_is_given_each_absurd_value(target: Target) -> None:
    attack = Attack(target)
    known: dict[tuple[str, str], bool] = {}
    for function in target.functions:
        for argument, kind in function.arguments.items():
            for value in absurd(kind):
                if (value, kind) not in known:
                    known[value, kind] = readable(target.conn, value, kind)
                if known[value, kind]:
                    attack.call(function, attack.usual(function) | {argument: f"({value})::{kind}"})
    assert attack.faults == []
    assert attack.refused > 500  # as so many are refused, the rest was accepted knowingly
    assert content(target.conn, attack.tables) == attack.before


NAMES_OF_ANY_KIND = st.one_of(
    st.none(),
    st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=300),
    st.sampled_from(["default", "k", "main", "u", "s", "retry", "hold", "nightly", "lease", "w"]),
)
NUMBERS = st.one_of(
    st.none(), st.integers(-(2**31), 2**31 - 1), st.integers(-2, 10), st.sampled_from([1000, 1001])
)
DOCUMENTS_OF_ANY_KIND = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False),
        st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=20),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=6,
)  # fmt: skip
SPANS = st.one_of(
    st.none(),
    st.tuples(st.integers(-(2**31) + 1, 2**31 - 1), st.integers(-(10**5), 10**5)).map(
        lambda pair: f"{pair[0]} hours {pair[1]} microseconds"
    ),
    st.tuples(st.integers(-(10**6), 10**6), st.integers(-(10**6), 10**6)).map(
        lambda pair: f"{pair[0]} months {pair[1]} days"
    ),
    st.sampled_from(["0", "0.1 s", "0.01 s", "24 hours", "24:00:00.000001", "8784 hours"]),
)
DATES = st.one_of(
    st.none(),
    st.sampled_from(["infinity", "-infinity"]),
    st.integers(-200_000_000_000, 9_000_000_000_000).map(lambda n: f"epoch {n}"),
)


def of_kind(kind: str, target: Target) -> st.SearchStrategy[Any]:
    """Values of a type as parameters that psycopg sends as text."""
    if kind.endswith("[]"):
        return st.none() | st.lists(of_kind(kind.removesuffix("[]"), target), max_size=4)
    match kind:
        case "text":
            return NAMES_OF_ANY_KIND
        case "integer" | "bigint":
            return NUMBERS
        case "boolean":
            return st.sampled_from([True, False, None])
        case "jsonb":
            return DOCUMENTS_OF_ANY_KIND.map(psycopg.types.json.Jsonb)
        case "uuid":
            known = st.sampled_from([target.job_id, target.token])
            return st.one_of(st.none(), known, st.uuids().map(str))
        case "interval":
            return SPANS
        case "timestamp with time zone":
            return DATES
    raise AssertionError(f"say how to make values of type {kind}")


def placeholder(name: str, kind: str) -> str:
    if kind == "timestamp with time zone":
        return (
            f"(case when %({name})s::text like 'epoch %%' then"
            f" to_timestamp(substr(%({name})s::text, 7)::float8) else %({name})s::timestamptz end)"
        )
    return f"%({name})s::{kind}"


def test_generated_calls_of_every_function_tell_nothing_and_change_nothing_on_an_error(
    target: Target,
) -> None:
    attack = Attack(target)
    for function in target.functions:
        strategy = st.fixed_dictionaries(
            {},
            optional={name: of_kind(kind, target) for name, kind in function.arguments.items()},
        )
        bounded = settings(
            max_examples=30, derandomize=True, database=None, deadline=None,
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        bounded(given(strategy)(attack.caller_of(function)))()
    assert attack.faults == []
    assert attack.calls > 500
    assert content(target.conn, attack.tables) == attack.before


# Bytes that are no text in UTF-8: half a character, a surrogate, NUL in two bytes, and plain NUL.
BYTES = (b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\xc0\x80", b"a\0b", b"\x80\x81")


@pytest.mark.parametrize("encoding", ["UTF8", "LATIN1", "SQL_ASCII", "WIN1252", "EUC_JP", "SJIS"])
def test_bytes_that_are_no_text_are_refused_in_every_client_encoding(
    target: Target, encoding: str
) -> None:
    attack = Attack(target)
    conn = target.conn
    conn.execute(f"set client_encoding = '{encoding}'")
    refused, wrong = set(), []
    try:
        for function in target.functions:
            for argument, kind in function.arguments.items():
                if kind not in ("text", "jsonb"):
                    continue
                for raw in BYTES:
                    usual = attack.usual(function)
                    usual[argument] = "$1" if kind == "text" else "convert_from($1, 'UTF8')::jsonb"
                    given = ", ".join(f"{n} => {v}" for n, v in usual.items())
                    oid, sent = (25, raw) if kind == "text" else (17, b'"' + raw + b'"')
                    conn.pgconn.exec_(b"begin")
                    result = conn.pgconn.exec_params(
                        f"select 1 from taskboard.{function.name}({given})".encode(),
                        [sent], [oid], [1],
                    )  # fmt: skip
                    conn.pgconn.exec_(b"rollback")
                    code = result.error_field(pq.DiagnosticField.SQLSTATE)
                    refused.add(code)
                    if code is not None and code.decode() not in DOCUMENTED | UNREADABLE:
                        wrong.append((function.name, argument, raw, code))
    finally:
        conn.execute("set client_encoding = 'UTF8'")
        conn.execute("select pg_advisory_unlock_all()")
    assert wrong == []
    assert b"22021" in refused
    assert content(conn, attack.tables) == attack.before


def test_a_document_with_nul_or_half_a_surrogate_is_refused_before_any_function_runs(
    target: Target,
) -> None:
    for text, code in (('"\\u0000"', "22P05"), ('"\\ud800"', "22P02"), ("NaN", "22P02")):
        with pytest.raises(psycopg.Error) as error:
            target.conn.execute("select taskboard.enqueue('k', %s::text::jsonb)", (text,))
        assert error.value.sqlstate == code


def test_a_client_whose_encoding_lacks_a_character_leases_nothing_and_others_get_the_job(
    dsn: str, connect: Callable[..., Connection]
) -> None:
    narrow, wide = connect("narrow"), connect("wide")
    wide.execute("""select taskboard.enqueue('k', '"10 €"')""")
    narrow.execute("set client_encoding = 'LATIN1'")
    with pytest.raises(psycopg.Error) as error:
        rows(narrow, "select payload::text from taskboard.claim()")
    assert error.value.sqlstate == "22P05"
    assert rows(wide, "select payload, attempt from taskboard.claim()") == [("10 €", 1)]


FOREIGNER = f"taskboard_test_foreigner_{os.getpid()}"


@pytest.fixture
def foreigner(target: Target) -> Iterator[Connection]:
    """The session of a producer and worker who is limited to the queue `mine`."""
    role, conn = sql.Identifier(FOREIGNER), target.conn
    conn.execute(sql.SQL("create role {}").format(role))
    conn.execute(sql.SQL("grant taskboard_worker, taskboard_producer to {}").format(role))
    conn.execute("select taskboard.allow_queue(%s, 'mine')", (FOREIGNER,))
    conn.execute(sql.SQL("set session authorization {}").format(role))
    yield conn
    conn.execute("reset session authorization")
    conn.execute("select taskboard.disallow_queue(%s, 'mine')", (FOREIGNER,))
    conn.execute(sql.SQL("drop role {}").format(role))


def test_with_a_stolen_token_no_function_shows_or_changes_anything_of_a_foreign_queue(
    target: Target, foreigner: Connection
) -> None:
    tables = [name for (name,) in rows(foreigner, TABLES)]
    wrong, ran = [], 0
    for function in target.functions:
        if function.role not in ("taskboard_producer", "taskboard_worker"):
            continue
        ran += 1
        usual = function.usual(target.job_id, target.token)
        for arguments in (usual, {n: v for n, v in usual.items() if n not in ("queues", "kinds")}):
            given = ", ".join(f"{name} => {value}" for name, value in arguments.items())
            with foreigner.transaction(force_rollback=True):
                before = seen_by_owner(foreigner, tables)
                said = ""
                try:
                    with foreigner.transaction():
                        found = f"select x::text from taskboard.{function.name}({given}) as x"
                        said = str(rows(foreigner, found))
                except psycopg.Error as error:
                    said = told(error)
                    if error.sqlstate not in DOCUMENTED:
                        wrong.append((function.name, error.sqlstate))
                if any(secret in said for secret in target.secrets):
                    wrong.append((function.name, said))
                if seen_by_owner(foreigner, tables) != before:
                    wrong.append((function.name, "changed something"))
            foreigner.execute("select pg_advisory_unlock_all()")
            foreigner.execute("unlisten *")
    assert wrong == []
    assert ran > 20


def seen_by_owner(conn: Connection, tables: list[str]) -> list[tuple[Any, ...]]:
    """What is stored, but for the record of refusals; then be the foreigner again."""
    conn.execute("reset session authorization")
    found = content(conn, [table for table in tables if table != "incidents"])
    conn.execute(sql.SQL("set session authorization {}").format(sql.Identifier(FOREIGNER)))
    return found
