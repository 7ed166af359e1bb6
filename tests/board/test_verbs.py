"""Each form makes its one call, with the person's name; a refusal says why and changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from board.conftest import Open, Site, words
from console.conftest import claim, enqueue, make_jobs
from support import Connection, rows


@pytest.fixture
def jobs(db: Connection) -> dict[str, str]:
    """The ids of a job in each interesting state."""
    return make_jobs(db)


@pytest.fixture
def site(jobs: dict[str, str], board: Open) -> Site:
    """A board for operators, used by ann."""
    return board(operator=True)


def last_incident(db: Connection) -> tuple[Any, ...]:
    text = "select what, detail from taskboard.incident_list order by id desc limit 1"
    return rows(db, text)[0]


def state(db: Connection, job_id: str) -> Any:
    return rows(db, "select state from taskboard.job(%s)", [job_id])[0][0]


@pytest.mark.parametrize(("happened", "known"), [("yes", "done"), ("no", "refused")])
def test_a_held_job_is_resolved(
    happened: str, known: str, site: Site, jobs: dict[str, str], db: Connection
) -> None:
    answer = site.act(
        "resolve", job_id=jobs["held"], step="main", happened=happened, reason="seen in the log"
    )
    assert answer.headers["location"] == "/held?done=resolve"
    assert "The question is answered" in words(site.get("/held?done=resolve"))
    assert state(db, jobs["held"]) == "ready"
    said = f"main happened: {happened}; ann: seen in the log"
    assert last_incident(db) == ("job_resolved", said)
    effects = rows(
        db, "select state from taskboard.effect_list where job_id = %s", [jobs["held"]]
    )
    assert effects == [(known,)]


def test_a_question_that_was_answered_otherwise_meanwhile_is_not_answered_again(
    site: Site, jobs: dict[str, str], db: Connection
) -> None:
    form = {"form_token": site.form_token("/held"), "job_id": jobs["held"], "step": "main"}
    rows(db, "select taskboard.resolve(%s, 'main', true)", [jobs["held"]])
    answer = site.post("/do/resolve", form | {"happened": "no"})
    assert answer.status_code == 409
    assert "the job is not held for this step" in words(answer) and "TB003" in answer.text
    answer = site.post("/do/resolve", form)
    assert answer.status_code == 400 and "Say whether the effect took place." in words(answer)


def test_a_failed_job_is_retried_and_one_that_is_unknown_is_not(
    site: Site, jobs: dict[str, str], db: Connection
) -> None:
    page = f"/jobs/{jobs['failed']}"
    answer = site.act("retry", page, job_id=jobs["failed"])
    assert answer.headers["location"] == f"{page}?done=retry"
    assert state(db, jobs["failed"]) == "ready"
    assert last_incident(db) == ("job_retried", "was failed; ann")
    answer = site.act("retry", page, job_id="01a22997-0c08-7927-8591-14c3845f0000")
    assert answer.status_code == 404 and "no such job" in words(answer)
    assert site.act("retry", page, job_id="nonsense").status_code == 400


def test_all_that_failed_is_retried_when_a_person_is_sure(
    site: Site, jobs: dict[str, str], db: Connection
) -> None:
    enqueue(db, "bill")
    rows(db, "select taskboard.fail(%s, %s, permanent => true)", claim(db, "bill"))
    page = "/jobs?state=failed"
    assert site.act("retry_failed", page, kind="bill").status_code == 400
    assert site.act("retry_failed", page, kind="bill", sure="yes").is_redirect
    left = rows(db, "select job_id::text from taskboard.job_list where state = 'failed'")
    assert left == [(jobs["failed"],)]


def test_jobs_are_cancelled_at_once_or_asked_to_stop(
    site: Site, jobs: dict[str, str], db: Connection
) -> None:
    for name, force, then in (
        ("ready", "", "cancelled"), ("running", "", "running"), ("running", "yes", "cancelled"),
    ):  # fmt: skip
        page = f"/jobs/{jobs[name]}"
        answer = site.act("cancel", page, job_id=jobs[name], force=force, reason="wrong price")
        assert answer.is_redirect and state(db, jobs[name]) == then
    assert last_incident(db) == ("job_cancelled", "ann: wrong price")


def test_a_worker_is_evicted_and_queues_and_schedules_are_paused_and_resumed(
    site: Site, jobs: dict[str, str], db: Connection
) -> None:
    assert site.act("evict", "/workers", worker="w2", reason="burnt").is_redirect
    assert state(db, jobs["stale"]) == "expired"
    assert last_incident(db) == ("worker_evicted", "1 leases lapse; ann: burnt")
    assert site.act("pause", "/", queue="mails").is_redirect
    assert rows(db, "select paused from taskboard.queue_stats where queue = 'mails'") == [(True,)]
    assert "paused" in words(site.get("/"))
    assert site.act("resume", "/", queue="mails").is_redirect
    assert last_incident(db)[0] == "queue_resumed"
    for paused in ("yes", "no"):
        assert site.act("pause_schedule", "/schedules", name="report", paused=paused).is_redirect
        text = "select paused_at is not null from taskboard.schedule_list"
        assert rows(db, text) == [(paused == "yes",)]


def test_a_form_for_no_verb_is_refused(site: Site) -> None:
    assert site.act("drop", "/held").status_code == 404
