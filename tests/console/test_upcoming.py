"""The next runs of schedules are shown as runners will take them."""

from __future__ import annotations

from datetime import datetime, timedelta

from console.conftest import Console
from support import Connection, rows
from taskboard.schedules import first_after


def test_runs_of_all_schedules_are_shown_soonest_first_with_the_clock_there(
    db: Connection, console: Console
) -> None:
    for name, cron in (("early", "30 2 * * *"), ("late", "45 2 * * *"), ("off", "* * * * *")):
        db.execute(
            "select taskboard.schedule(%s, %s, 'k', time_zone => 'Australia/Lord_Howe')",
            [name, cron],
        )
    db.execute("select taskboard.pause_schedule('off')")
    shown = console("upcoming", "--limit", 4, "--json").json
    assert [row["name"] for row in shown] in (["early", "late"] * 2, ["late", "early"] * 2)
    now = rows(db, "select clock_timestamp()")[0][0]
    for cron, row in ((c, r) for r in shown[:2] for c in ["30 2 * * *", "45 2 * * *"]):
        if (row["name"] == "early") == cron.startswith("30"):
            expected = first_after(cron, "Australia/Lord_Howe", now)
            assert datetime.fromisoformat(row["runs_at"]) == expected
    assert all(" 02:30 " in row["there"] for row in shown if row["name"] == "early")
    assert "02:45" in console("upcoming", "late", "--limit", 1).out


def test_what_is_due_already_comes_first(db: Connection, console: Console) -> None:
    db.execute("select taskboard.schedule('s', '0 * * * *', 'k')")
    past = "date_trunc('hour', now()) - interval '2 hours'"
    db.execute(f"update taskboard.schedules set next_at = {past}")
    due, following = console("upcoming", "s", "--limit", 2, "--json").json
    due_at, next_at = (datetime.fromisoformat(row["runs_at"]) for row in (due, following))
    assert rows(db, "select next_at from taskboard.schedule_list") == [(due_at,)]
    assert timedelta(hours=2) < next_at - due_at <= timedelta(hours=4)


def test_a_rule_that_cannot_be_read_is_named_and_hides_no_other(
    db: Connection, console: Console
) -> None:
    assert console("upcoming").err == "no schedule runs: there is none, or it is paused\n"
    db.execute("select taskboard.schedule('good', '0 3 * * *', 'k')")
    db.execute("select taskboard.schedule('odd', 'at noon', 'k')")
    said = console("upcoming", "--limit", 1)
    assert said.code == 1 and "good" in said.out
    assert said.err == "taskboard: odd: cron rule 'at noon': it has five fields\n"
    assert "schedule_list" in console("upcoming", "--show-sql").out
