"""A person at the page decides what becomes of a held mail and of a failed job; an observer not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from board.conftest import Open
from browser.conftest import DOWN, ENTER, TAB, Browser
from console.conftest import claim, enqueue, make_jobs
from support import Connection, expire, rows
from taskboard.dev.smtp import DevSmtp, Envelope
from taskboard.handlers.email import email_handler
from taskboard.mail import MailSettings
from taskboard.process import run
from taskboard.settings import Settings

pytestmark = pytest.mark.wide

OBSERVER, OPERATOR = "taskboard_observer", "taskboard_operator"
TOKEN = "correct horse battery staple"


def held_mail(db: Connection, subject: str) -> str:
    """Make a mail job whose worker died between its beginning and its report; answer its id."""
    mail = {"to": "ann@example.com", "subject": subject, "text": "Hi"}
    job_id = enqueue(db, "email", queue="mails", payload=Jsonb(mail), on_unknown="hold")
    owner = claim(db, "email", "web-1-4711")
    rows(db, "select taskboard.begin_effect(%s, %s, 'send')", owner)
    expire(db, owner[0])
    rows(db, "select taskboard.begin_effect(%s, %s, 'send')", claim(db, "email", "web-2-812"))
    assert state(db, job_id) == "held"
    return job_id


def failed_mail(db: Connection, subject: str) -> str:
    mail = {"to": "bob@example.com", "subject": subject, "text": "Hi"}
    job_id = enqueue(db, "email", queue="mails", payload=Jsonb(mail), unique_key="order-4711")
    rows(db, "select taskboard.fail(%s, %s, '550 no such mailbox', permanent => true)",
         claim(db, "email", "web-2-812"))  # fmt: skip
    return job_id


def state(db: Connection, job_id: str) -> str:
    found: str = rows(db, "select state from taskboard.job(%s)", [job_id])[0][0]
    return found


def send_all(dsn: str) -> list[str]:
    """Let a runner send what waits; answer the subjects that a mail server was given."""
    sent: list[str] = []

    def note(mail: Envelope) -> None:
        sent.append(mail.message["Subject"])

    async def work() -> None:
        async with DevSmtp(on_mail=note) as smtp, asyncio.timeout(30):
            server = MailSettings.from_url(smtp.url, "shop@example.com")
            settings = Settings(database_url=dsn, pool=4, until_empty=True, listen=False)
            await run(settings, {"email": email_handler(server)})

    asyncio.run(work())
    return sorted(sent)


def test_a_person_resolves_held_mails_and_retries_a_failed_one_and_the_runner_does_as_told(
    dsn: str, db: Connection, board: Open, login: Callable[..., str], browser: Browser
) -> None:
    arrived, lost = held_mail(db, "arrived"), held_mail(db, "lost")
    failed = failed_mail(db, "failed")
    site = board(login(OBSERVER, OPERATOR), operator=True, token=TOKEN)
    browser.address = site.address

    browser.go("/held")
    browser.find("#name").send_keys("Ann")
    browser.find("#token").send_keys(TOKEN)
    browser.picture("login")
    browser.click("Come in")
    assert browser.shows("Held jobs")

    browser.picture("held")
    form = browser.find(f'article[aria-labelledby="job-{arrived}"] form')
    form.find_element("css selector", "input[value=yes]").click()
    form.find_element("css selector", "input[name=reason]").send_keys("it is in the server's log")
    form.find_element("css selector", "button").click()
    assert browser.shows("The question is answered") and state(db, arrived) == "ready"
    browser.picture("held-answered")

    # The other one with the keyboard alone.
    browser.go(f"/jobs/{lost}")
    browser.picture("job-held")
    browser.tab_to("input[value=yes]")
    browser.keys(DOWN, TAB, "the log has no such id", ENTER)
    assert browser.shows("The question is answered") and state(db, lost) == "ready"
    assert browser.shows("Ann: the log has no such id")

    browser.go("/jobs?state=failed")
    browser.picture("jobs-failed")
    browser.driver.find_element("partial link text", failed[-10:]).click()
    assert browser.shows("550 no such mailbox")
    browser.picture("job-failed")
    browser.find("#reason-retry").send_keys("the mailbox is there now")
    browser.click("Retry")
    assert browser.shows("waits again") and state(db, failed) == "ready"

    assert send_all(dsn) == ["failed", "lost"], "the one that had arrived is not sent again"
    browser.go(f"/jobs/{arrived}")
    assert browser.shows("Completed") and "by Ann" not in browser.text
    browser.picture("job-completed")
    details = [row[0] for row in rows(db, "select detail from taskboard.incident_list")]
    assert "send happened: yes; Ann: it is in the server's log" in details
    assert "was failed; Ann: the mailbox is there now" in details


def test_an_observer_sees_the_same_and_is_refused(
    db: Connection, board: Open, login: Callable[..., str], browser: Browser
) -> None:
    held, failed = held_mail(db, "secret-subject"), failed_mail(db, "secret-subject")
    browser.address = board(login(OBSERVER)).address
    for path in ("/", "/held", f"/jobs/{held}", f"/jobs/{failed}", "/jobs"):
        browser.go(path)
        assert "secret-subject" not in browser.driver.page_source
        assert "550 no such mailbox" not in browser.driver.page_source
        assert not browser.driver.find_elements("css selector", "form[method=post]"), path
    browser.go(f"/jobs/{held}")
    assert browser.shows("This board is read-only: an operator answers.")
    browser.picture("observer-job-held")
    # Not even by a form that the page does not have.
    browser.driver.execute_script(
        "const f = document.createElement('form'); f.method = 'post'; f.action = '/do/retry';"
        "f.innerHTML = `<input name=job_id value=${arguments[0]}>`;"
        "document.body.append(f); f.submit();", failed,
    )  # fmt: skip
    assert browser.shows("That did not work") and state(db, failed) == "failed"
    browser.complaints()  # it reports the answer 403, as it should


@pytest.mark.parametrize(
    ("looks", "dark", "wide"),
    [("light", False, 1280), ("dark", True, 1280), ("narrow", False, 390)],
)
def test_each_page_can_be_read_in_light_in_dark_and_on_a_telephone(
    looks: str, dark: bool, wide: int, db: Connection, board: Open, browser: Browser
) -> None:
    jobs = make_jobs(db)
    held_mail(db, "held")
    for number in range(60):
        enqueue(db, "email", queue="mails", unique_key=f"order-{number}")
        owner = claim(db, "email", f"web-{number % 3}-4711")
        call = "fail(%s, %s, 'no', permanent => true)" if number % 9 == 4 else "complete(%s, %s)"
        rows(db, f"select taskboard.{call}", owner)
    db.execute(
        "update taskboard.history set finished_at = finished_at - t.ago,"
        " claimed_at = finished_at - t.ago - t.took from (select id as job_id,"
        " random() * random() * interval '55 minutes' as ago,"
        " (0.05 + random() * random() * 3) * interval '1 s' as took from taskboard.history) as t"
        " where t.job_id = id"
    )
    rows(db, "select taskboard.pause('mails', 'the mail server is being mended')")
    browser.address = board(operator=True).address
    browser.looks(dark=dark, wide=wide)
    pages: dict[str, Any] = {
        "overview": "/", "jobs": "/jobs", "held": "/held", "schedules": "/schedules",
        "workers": "/workers", "incidents": "/incidents", "job": f"/jobs/{jobs['completed']}",
        "stale": f"/jobs/{jobs['stale']}",
    }  # fmt: skip
    for name, path in pages.items():
        browser.go(path)
        if name == "overview":
            for _ in range(100):
                if browser.driver.find_elements("css selector", ".bar.failed"):
                    break
                browser.go(path)
        browser.picture(f"{name}-{looks}")
    browser.go("/jobs")
    browser.driver.execute_script("document.querySelector('h1').style.color = '#777'")
    assert len(browser.faint()) == 1, "what cannot be read is noticed"
    browser.keys(TAB)
    assert browser.driver.switch_to.active_element.text == "Skip to the page"
