"""Each page, over HTTP: that it shows what is stored, to whom, and is made to be read by all."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from psycopg.types.json import Jsonb

from board.conftest import Open, Site, words
from console.conftest import claim, enqueue, make_jobs
from support import Connection, Server, expire, rows
from taskboard.console.board import queries
from taskboard.migrate import migrate

OBSERVER, OPERATOR = "taskboard_observer", "taskboard_operator"
Login = Callable[..., str]


def pages(jobs: dict[str, str]) -> list[str]:
    listed = ["/", "/jobs", "/held", "/schedules", "/workers", "/incidents", "/jobs?state=failed"]
    return listed + [f"/jobs/{job_id}" for job_id in jobs.values()]


class Reader(HTMLParser):
    """What makes a page accessible or not, as far as its source tells."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.feed(page)
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in ("meta", "link", "input", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def all(self, *tags: str) -> list[dict[str, str]]:
        return [attributes for tag, attributes in self.tags if tag in tags]


@pytest.mark.parametrize("operator", [False, True])
def test_each_page_is_whole_labelled_and_without_scripts_or_foreign_things(
    operator: bool, jobs: dict[str, str], board: Open
) -> None:
    site = board(operator=operator)
    for path in [*pages(jobs), "/jobs?state=nonsense", "/jobs/1", "/nothing", "/login"]:
        page = site.get(path, follow_redirects=True)
        assert page.headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert page.headers["Cache-Control"] == "no-store"
        reader = Reader(page.text)
        for tag in ("h1", "main", "title", "nav" if "pager" not in page.text else "h1"):
            assert len(reader.all(tag)) == 1, (path, tag)
        assert reader.all("html")[0]["lang"] == "en"
        assert not reader.all("script", "iframe", "object", "img", "style"), path
        assert not [a for _, a in reader.tags if "style" in a or any(n[:2] == "on" for n in a)]
        links = [a.get("href") or a.get("src") or a.get("action") or "" for _, a in reader.tags]
        assert not [link for link in links if link and not link.startswith(("/", "#"))], path
        ids = [a["id"] for _, a in reader.tags if "id" in a]
        assert len(ids) == len(set(ids)), path
        labelled = {a.get("for") for a in reader.all("label")}
        for field in reader.all("input", "select"):
            quiet = field.get("type") in ("hidden", "radio", "checkbox")  # these lie in a label
            assert quiet or field["id"] in labelled, (path, field)
        assert len(reader.all("caption")) == len(reader.all("table")), path
        charts = [a for a in reader.all("svg") if "aria-hidden" not in a]
        assert all(a["role"] == "img" and a["aria-label"] for a in charts), path
        targets = {name for _, a in reader.tags for name in a.get("aria-labelledby", "").split()}
        assert targets <= set(ids), path


@pytest.fixture
def jobs(db: Connection) -> dict[str, str]:
    """The ids of a job in each interesting state."""
    return make_jobs(db)


def test_an_observer_is_shown_every_page_and_no_document_or_form(
    jobs: dict[str, str], db: Connection, board: Open, login: Login
) -> None:
    secret = enqueue(db, "secret", payload=Jsonb({"card": "4242-secret"}))
    rows(db, "select taskboard.fail(%s, %s, 'error-secret')", claim(db, "secret"))
    site = board(login(OBSERVER))
    for path in pages(jobs | {"secret": secret}):
        page = site.get(path)
        assert page.status_code == 200, (path, page.text)
        assert "-secret" not in page.text and "no such address" not in page.text
        assert 'method="post"' not in page.text, path
    assert "They are shown to operators, not here." in words(site.get(f"/jobs/{secret}"))
    assert "This board is read-only" in words(site.get("/held"))


def test_a_board_for_reading_shows_no_document_though_its_login_could_read_it(
    jobs: dict[str, str], board: Open, login: Login
) -> None:
    site = board(login(OBSERVER, OPERATOR))
    assert "no such address" not in site.get(f"/jobs/{jobs['failed']}").text


def test_an_operator_is_shown_the_documents(
    jobs: dict[str, str], board: Open, login: Login
) -> None:
    site = board(login(OBSERVER, OPERATOR), operator=True)
    assert "no such address" in site.get(f"/jobs/{jobs['failed']}").text
    assert "&#34;sent&#34;: true" in site.get(f"/jobs/{jobs['completed']}").text


def test_a_login_that_lost_its_rights_is_told_so_calmly(
    jobs: dict[str, str], db: Connection, board: Open, login: Login
) -> None:
    dsn = login(OBSERVER, OPERATOR)
    site = board(dsn, operator=True)
    form = site.form_token("/held")
    name = rows(db, "select rolname from pg_roles where rolname like 'board%'")[0][0]
    db.execute(f"revoke taskboard_operator from {name}")
    page = site.get(f"/jobs/{jobs['failed']}")
    assert page.status_code == 200 and "They are shown to operators" in words(page)
    answer = site.post("/do/retry", {"form_token": form, "job_id": jobs["failed"]})
    assert answer.status_code == 403
    assert "The login that this board uses has no right to that." in words(answer)
    assert rows(db, "select state from taskboard.job(%s)", [jobs["failed"]]) == [("failed",)]


def test_a_database_without_taskboard_or_without_the_right_is_named(
    empty_dsn: str, board: Open, login: Login
) -> None:
    page = board(empty_dsn).get("/jobs")
    assert page.status_code == 500 and "taskboard migrate" in words(page)
    page = board(login("taskboard_producer")).get("/jobs")
    assert page.status_code == 403 and "has no right to that" in words(page)


@pytest.mark.wide
def test_a_database_that_is_away_is_said_and_comes_back(
    server_factory: Callable[..., Server], board: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "POOL_WAITS", 1.0)
    server = server_factory(fsync="off")
    migrate(server.dsn())
    site = board(server.dsn())
    assert site.get("/healthz").status_code == 200
    server.stop()
    page = site.get("/")
    assert page.status_code == 503 and "The database does not answer." in words(page)
    assert site.get("/healthz").status_code == 503
    server.start()
    assert any(site.get("/").status_code == 200 for _ in range(20))


def test_names_and_texts_of_others_are_shown_as_texts(db: Connection, board: Open) -> None:
    evil = "<script>alert(1)</script>\"'"
    job_id = enqueue(db, evil, queue=evil, unique_key=evil, serial_key=evil)
    owner = claim(db, evil, evil)
    rows(db, "select taskboard.begin_effect(%s, %s)", owner)
    expire(db, owner[0])
    claim(db, evil, evil)
    rows(db, "select taskboard.fail(%s, %s, %s)", [*owner, evil])
    rows(db, "select taskboard.cancel(%s, reason => %s)", [job_id, evil])
    site = board(operator=True)
    for path in ("/", "/jobs", f"/jobs/{job_id}", "/incidents", "/workers"):
        text = site.get(path).text
        assert "<script" not in text and "&lt;script&gt;" in text, path
        Reader(text)


def test_the_life_of_a_job_is_told_in_order_with_what_is_not_kept(
    db: Connection, board: Open
) -> None:
    job_id = enqueue(db, "mail", on_unknown="hold")
    stale = claim(db, "mail", "web-1")
    rows(db, "select taskboard.begin_effect(%s, %s)", stale)
    expire(db, stale[0])
    rows(db, "select taskboard.begin_effect(%s, %s)", claim(db, "mail", "web-2"))
    rows(db, "select taskboard.complete(%s, %s)", stale)
    rows(db, "select taskboard.resolve(%s, 'main', true, 'ann: it is in the log')", [job_id])
    rows(db, "select taskboard.complete(%s, %s)", claim(db, "mail", "web-3"))
    rows(db, "select taskboard.retry(%s, 'bob: again')", [job_id])
    rows(db, "select taskboard.complete(%s, %s)", claim(db, "mail", "web-4"))
    told = words(board().get(f"/jobs/{job_id}"))
    life = [
        "Enqueued", "Effect main begun", "A lease lapsed of web-1", "Held: an outcome is unknown",
        "A write was refused", "complete: held", "Resolved by a person", "ann: it is in the log",
        "Effect main took place", "Retried by a person", "bob: again",
        "Claimed, the last time by web-4", "attempt 4", "Completed by web-4", "Not kept:",
    ]  # fmt: skip
    at = [told.index(part) for part in life if part != "Effect main took place"]
    assert at == sorted(at) and "Effect main took place" in told


def ids(page: Any) -> list[str]:
    return re.findall(r'<th scope="row"><a class="id" href="/jobs/([0-9a-f-]{36})"', page.text)


def walk(site: Site, path: str) -> list[str]:
    """The ids on all pages from this one on, following the links."""
    found: list[str] = []
    while path:
        page = site.get(path)
        found += ids(page)
        link = re.search(r'<a rel="next" href="([^"]+)"', page.text)
        path = link[1].replace("&amp;", "&") if link else ""
    return found


def test_pages_of_jobs_show_each_job_once_the_newest_first(
    db: Connection, board: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "PAGE", 7)
    monkeypatch.setattr(queries.Database.jobs, "__defaults__", (7,))
    monkeypatch.setattr(queries, "WINDOW", 10)
    monkeypatch.setattr(queries, "LOOKS_FOR", 0)
    made = [enqueue(db, "mail" if n % 3 else "bill", unique_key=f"k{n}") for n in range(40)]
    for _ in range(20):
        rows(db, "select taskboard.complete(%s, %s)", claim(db, "mail"))
    expected = sorted(made, reverse=True)
    site = board()
    assert walk(site, "/jobs") == expected
    assert walk(site, "/jobs?kind=bill") == [id for id in expected if made.index(id) % 3 == 0]
    done = rows(db, "select job_id::text from taskboard.job_list where state = 'completed'")
    assert sorted(walk(site, "/jobs?state=completed&worker=w1")) == sorted(id for (id,) in done)
    assert walk(site, "/jobs?key=k5") == [made[5]]
    assert walk(site, "/jobs?queue=elsewhere") == []


def test_filters_find_jobs_by_state_key_and_time(
    jobs: dict[str, str], db: Connection, board: Open
) -> None:
    site = board()
    for state in ("failed", "completed", "running", "held", "ready", "scheduled"):
        found = ids(site.get(f"/jobs?state={state}"))
        assert jobs[state] in found, state
        assert rows(
            db, "select distinct state from taskboard.job_list where job_id = any (%s)",
            [[UUID(one) for one in found]],
        ) == [(state,)]  # fmt: skip
    assert ids(site.get("/jobs?since=2000-01-01T00:00")) == ids(site.get("/jobs"))
    assert ids(site.get("/jobs?until=2000-01-01T00:00")) == []
    at = rows(
        db, "select to_char(created_at at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US')"
        " from taskboard.job(%s)", [jobs["ready"]],
    )[0][0]  # fmt: skip
    newer = ids(site.get(f"/jobs?since={at}"))
    assert jobs["ready"] in newer and jobs["failed"] not in newer
    page = site.get("/jobs?since=yesterday")
    assert page.status_code == 400 and "yesterday is no time" in words(page)


def test_the_overview_counts_and_draws_what_has_ended_in_the_last_hour(
    db: Connection, board: Open
) -> None:
    for _ in range(3):
        enqueue(db, "mail")
        rows(db, "select taskboard.complete(%s, %s)", claim(db, "mail"))
    db.execute(
        "update taskboard.history set finished_at = finished_at - interval '5 minutes',"
        " claimed_at = claimed_at - interval '5 minutes 2 seconds'"
    )
    enqueue(db, "mail", queue="later", delay="1 hour")
    site = board()
    text = site.get("/").text
    for _ in range(50):
        if "at most 3;" in text:
            break
        text = site.get("/").text
    assert "completed: now 0, at most 3; failed: now 0, at most 0" in text
    assert '<rect class="bar completed"' in text
    assert "scheduled: now 1, at most 1" in text
    assert re.search(r"half of them: now 2\S* s", text)


def test_the_depth_of_the_queues_is_served_as_figures_to_who_has_the_token(
    db: Connection, board: Open
) -> None:
    evil = 'a"b\\c'
    enqueue(db, evil, queue="mails")
    enqueue(db, "mail", queue="mails", delay="1 hour")
    rows(db, "select taskboard.pause('mails')")
    found = board().get("/metrics").text.splitlines()
    named = r'queue="mails",kind="a\"b\\c",priority="5"'
    assert f'taskboard_queue_jobs{{{named},state="ready"}} 1' in found
    assert f"taskboard_queue_paused{{{named}}} 1" in found
    waits = [line for line in found if line.startswith("taskboard_queue_oldest_ready_seconds{")]
    assert sorted(float(line.rsplit(" ", 1)[1]) > 0 for line in waits) == [False, True]
    token = "correct horse battery staple"
    site = board(token=token)
    for given in ("", "Bearer wrong", f"Basic {token}", token):
        answer = site.get("/metrics", headers={"Authorization": given} if given else {})
        assert answer.status_code == 401 and "mails" not in answer.text
    answer = site.get("/metrics", headers={"Authorization": f"Bearer {token}"})
    assert answer.status_code == 200 and "mails" in answer.text


def test_all_statements_of_the_board_stand_in_one_file() -> None:
    folder = Path(queries.__file__).parent
    for path in folder.rglob("*.py"):
        text = path.read_text()
        if path.name != "queries.py":
            assert not re.search(r"\bselect .*\bfrom\b|taskboard\.\w+\(%", text), path
