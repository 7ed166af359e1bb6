"""What the installed catalog must look like: names, paths, comments, and what history keeps."""

from __future__ import annotations

import re
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from support import Connection, rows

OURS = "'taskboard'::regnamespace"

# Columns of jobs that history does not have, and why.
NOT_KEPT = {
    "lane_id": "history has queue, kind and priority",
    "place": "it stands in no line any more",
    "claimable_at": "nothing claims it any more",
    "last_token": "history has the token that finished it",
    "lease_granted": "belongs to a lease that has ended",
    "serial_no": "a retried job draws a new one",
    "cancel_requested_at": "history has the state and the error",
    "waits_for": "it waits for nothing",
    "held_step": "it waits for nothing",
    "lapsed_by": "stands in the incidents",
    "progress": "the result has taken its place",
    "leased_by": "finished_by",
    "cancel_reason": "error",
    "last_error": "error",
}


def functions(db: Connection) -> list[tuple[str, bool, list[str], bool, str]]:
    """Name, definer, settings, whether the body was parsed at creation, comment."""
    return rows(
        db,
        "select p.proname, p.prosecdef, coalesce(p.proconfig, '{}'), p.prosqlbody is not null,"
        f" obj_description(p.oid, 'pg_proc') from pg_proc as p where p.pronamespace = {OURS}",
    )


def test_every_function_has_one_signature(installed: Connection) -> None:
    names = [name for name, *_ in functions(installed)]
    assert sorted(names) == sorted(set(names))


def test_every_function_pins_its_path_or_was_parsed_when_it_was_made(installed: Connection) -> None:
    wrong = [
        name
        for name, definer, settings, parsed, _ in functions(installed)
        if "search_path=pg_catalog, pg_temp" not in settings and (definer or not parsed)
    ]
    assert wrong == []


def test_only_the_owner_and_nobody_who_can_log_in_owns_anything(installed: Connection) -> None:
    owners = rows(
        installed,
        f"select distinct o.rolname, o.rolcanlogin from ("
        f" select proowner as oid from pg_proc where pronamespace = {OURS}"
        f" union select relowner from pg_class where relnamespace = {OURS}"
        f" and relname not like '%%yoyo%%'"
        f" union select typowner from pg_type where typnamespace = {OURS}"
        f" and typname not like '%%yoyo%%'"
        f" union select nspowner from pg_namespace where oid = {OURS}) as x"
        " join pg_roles as o on o.oid = x.oid",
    )
    assert owners == [("taskboard_owner", False)]


def test_every_argument_can_be_named_and_nothing_is_strict(installed: Connection) -> None:
    wrong = rows(
        installed,
        f"select proname from pg_proc where pronamespace = {OURS} and (proisstrict"
        " or (pronargs > 0 and (proargnames is null or '' = any (proargnames))))",
    )
    assert wrong == []


def test_functions_that_wait_for_rows_have_a_bound_and_no_other_setting_is_unknown(
    installed: Connection,
) -> None:
    known = re.compile(
        r"search_path=pg_catalog, pg_temp|lock_timeout=(5s|100ms)|plan_cache_mode=\w+"
        r"|(enable_\w+|jit)=(on|off)"
    )
    wrong = [
        (name, setting)
        for name, _, settings, _, _ in functions(installed)
        for setting in settings
        if not known.fullmatch(setting)
    ]
    assert wrong == []
    bounded = {
        name for name, _, settings, _, _ in functions(installed) if "lock_timeout=5s" in settings
    }
    assert bounded >= {
        "enqueue_many", "claim", "renew", "renew_many", "complete", "complete_many", "fail",
        "release", "release_many", "require_lease", "begin_effect", "end_effect", "cancel", "retry",
        "retry_failed", "resolve", "evict",
    }  # fmt: skip


def test_first_line_of_every_comment_says_what_it_does_in_72_characters(
    installed: Connection,
) -> None:
    wrong = {}
    for name, _, _, _, comment in functions(installed):
        first = (comment or "").partition("\n")[0].removesuffix(" (internal).")
        word = first.partition(" ")[0]
        # An imperative: "Add one job", not "Adds", "Adding", "This adds" or "The job".
        imperative = re.fullmatch(r"[A-Z][a-z]+", word) and not re.search(
            r"[^s]s$|ing$|^(The|This|A|An|It|Function|Helper)$", word
        )
        if len(first) > 72 or not imperative:
            wrong[name] = (len(first), first)
    assert wrong == {}


def test_every_table_and_view_has_a_comment(installed: Connection) -> None:
    wrong = rows(
        installed,
        f"select relname from pg_class where relnamespace = {OURS} and relkind in ('r', 'p', 'v')"
        " and not relispartition and relname not like '%%yoyo%%'"
        " and obj_description(oid, 'pg_class') is null",
    )
    assert wrong == []


def test_every_column_is_explained_where_its_name_first_means_something(
    installed: Connection,
) -> None:
    columns = rows(
        installed,
        "select c.relname, a.attname, col_description(c.oid, a.attnum) is not null"
        " from pg_attribute as a join pg_class as c on c.oid = a.attrelid"
        f" where c.relnamespace = {OURS} and c.relkind in ('r', 'p') and not c.relispartition"
        " and a.attnum > 0 and not a.attisdropped and c.relname not like '%%yoyo%%'",
    )
    explained = {column for _, column, commented in columns if commented}
    # The words of the glossary, and names that say all there is.
    plain = {"id", "queue", "kind", "priority", "name", "key", "job_id", "step", "one_row"}
    unexplained = sorted(
        f"{table}.{column}"
        for table, column, commented in columns
        if not commented and column not in explained | plain
    )
    assert unexplained == []
    assert [c for t, c, commented in columns if t == "jobs" and not commented] == []


def test_every_constraint_says_its_rule_and_every_index_its_query(installed: Connection) -> None:
    names = rows(
        installed,
        "select c.relname, k.conname"
        " from pg_constraint as k join pg_class as c on c.oid = k.conrelid"
        f" where c.relnamespace = {OURS} and not c.relispartition and k.contype <> 'n'"
        " and c.relname not like '%%yoyo%%'",
    )
    generated = re.compile(r"_(check|pkey|fkey|excl)\d*$")
    assert [pair for pair in names if generated.search(pair[1])] == []


def test_history_has_every_column_of_jobs_that_matters(installed: Connection) -> None:
    def columns(table: str) -> dict[str, str]:
        return dict(
            rows(
                installed,
                "select attname, format_type(atttypid, atttypmod) from pg_attribute"
                " where attrelid = %s::regclass and attnum > 0 and not attisdropped",
                (f"taskboard.{table}",),
            )
        )

    jobs, history = columns("jobs"), columns("history")
    assert sorted(set(jobs) - set(history)) == sorted(NOT_KEPT)
    assert {name: history[name] for name in jobs if name in history} == {
        name: kind for name, kind in jobs.items() if name in history
    }


OPTIONS: dict[str, Any] = {
    "kind": "k", "payload": Jsonb({"a": 1}), "queue": "q", "priority": 3,
    "unique_key": "u", "serial_key": "s", "max_attempts": 7, "max_lost_leases": 8,
    "lease": "9 s", "timeout": "10 min", "on_unknown": "hold", "headers": Jsonb({"h": 1}),
}  # fmt: skip


@pytest.mark.parametrize("end", ["completed", "failed", "cancelled"])
def test_what_was_enqueued_is_in_history_and_comes_back_with_a_retry(
    db: Connection, end: str
) -> None:
    kept = (
        "id, attempt, failures, lost_leases, max_attempts, max_lost_leases, run_at, created_at,"
        " lease, timeout, on_unknown, unique_key, serial_key, headers, payload"
    )
    named = ", ".join(f"{name} => %({name})s" for name in OPTIONS)
    ((job_id,),) = rows(db, f"select job_id from taskboard.enqueue({named})", OPTIONS)
    ((token,),) = rows(db, "select lease_token from taskboard.claim()")
    ((job,),) = rows(db, f"select ({kept})::text from taskboard.jobs")
    match end:
        case "completed":
            db.execute("select taskboard.complete(%s, %s)", (job_id, token))
        case "failed":
            # A failure counts; everything else stays.
            db.execute("update taskboard.jobs set failures = -1")
            db.execute("select taskboard.fail(%s, %s, permanent => true)", (job_id, token))
        case _:
            db.execute("select taskboard.cancel(%s, force => true)", (job_id,))
    ended = f"select ({kept})::text, state, queue, kind, priority from taskboard.history"
    assert rows(db, ended) == [(job, end, "q", "k", 3)]
    db.execute("select taskboard.retry(%s)", (job_id,))
    assert rows(db, f"select ({kept})::text from taskboard.jobs") == [(job,)]
    assert rows(
        db, "select queue, kind, priority from taskboard.job_list where job_id = %s", (job_id,)
    ) == [("q", "k", 3)]
    # And a new budget.
    budget = rows(db, "select failures, lost_leases from taskboard.jobs")
    assert budget == [(0, 0)]


def test_history_is_found_by_id_and_its_days_are_partitions_ahead(installed: Connection) -> None:
    days = rows(
        installed,
        "select count(*) from pg_inherits as i join pg_class as c on c.oid = i.inhrelid"
        " where i.inhparent = 'taskboard.history'::regclass and c.relname >= 'history_' ||"
        " to_char(clock_timestamp() at time zone 'UTC', 'YYYYMMDD')",
    )
    assert days >= [(3,)]
