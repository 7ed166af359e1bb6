"""Mail and money by the real runner on the real database, when answers are lost or divided.

Each `drain` is a runner of its own, so what the second one knows came through the database.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import drain as run
from harness import enqueue, state

from e2e.outside import (
    CHARGE,
    MAIL,
    PATIENCE,
    Gate,
    Mailbox,
    SlowStripe,
    effects,
    keys,
    serving,
    wait_until,
    worker,
)
from support import Connection, expire, rows
from taskboard.handlers import Handler
from taskboard.handlers.email import email_handler
from taskboard.handlers.stripe import stripe_handler
from taskboard.mail import MailSettings
from taskboard.stripe_calls import StripeSettings

FINE, JOBS_FAILED = 0, 3
ANN, BOB, CY = "ann@example.com", "bob@example.com", "cy@example.com"


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    with serving(Mailbox().open()) as mailbox:
        yield mailbox


@pytest.fixture
def stripe(upstream: str) -> Iterator[SlowStripe]:
    with serving(SlowStripe(upstream)) as proxy:
        yield proxy


def drain(dsn: str, handlers: dict[str, Handler]) -> int:
    return run(dsn, handlers, within=PATIENCE)


def mailing(mailbox: Mailbox, options: str = "") -> dict[str, Handler]:
    return {
        "email": email_handler(MailSettings.from_url(mailbox.url + options, "shop@example.com"))
    }


def charging(stripe: SlowStripe) -> dict[str, Handler]:
    return {"stripe": stripe_handler(StripeSettings("sk_test_end_to_end", stripe.url))}


def documents(db: Connection, job_id: Any) -> tuple[Any, Any]:
    """Result and error of a job."""
    return rows(db, "select result, error from taskboard.job_documents(%s)", [job_id])[0]


# Mail


def test_a_lost_answer_is_recorded_as_unknown_and_the_second_copy_has_the_same_message_id(
    dsn: str, db: Connection, mailbox: Mailbox
) -> None:
    mail, notice = enqueue(db, "email", MAIL), enqueue(db, "email", MAIL, on_unknown="hold")
    mailbox.at_dot = answers = Gate()
    assert drain(dsn, mailing(mailbox, "&data_timeout=0.4")) == JOBS_FAILED
    answers.opened.set()
    for job in (mail, notice):
        assert effects(db, job) == [("send", 1, "open")]
        assert (state(db, job)["state"], state(db, job)["failures"]) == ("scheduled", 1)
        assert "unknown whether it was sent" in documents(db, job)[1]
        expire(db, job)
    assert drain(dsn, mailing(mailbox)) == FINE
    assert effects(db, mail) == [("send", 1, "open"), ("send", 2, "done")]
    assert (state(db, mail)["state"], state(db, notice)["state"]) == ("completed", "held")
    # One Message-ID finds both copies, and there is one copy of what must not go out twice.
    assert (len(mailbox.recipients(mail)), len(mailbox.recipients(notice))) == (2, 1)
    assert len(mailbox.mails) == 3


def test_a_worker_killed_between_the_answer_and_its_completion_leaves_a_mail_that_is_known_as_sent(
    dsn: str,
    db: Connection,
    connect: Callable[..., Connection],
    mailbox: Mailbox,
    stripe: SlowStripe,
    tmp_path: Path,
) -> None:
    mail, observer = enqueue(db, "email", MAIL), connect("observer")
    mailbox.at_dot = answer = Gate()
    waiting = (
        "select pid from pg_stat_activity where datname = current_database()"
        " and wait_event_type = 'Lock' and query ~ 'complete'"
    )
    with worker("A", dsn, tmp_path, **keys(mailbox, stripe)) as a:
        wait_until(lambda: answer.held, "A to send the mail")
        with db.transaction():
            # Evidence may be given over this lock, and renewals pass; a completion has to wait.
            db.execute("select from taskboard.jobs for key share")
            answer.opened.set()
            wait_until(lambda: rows(observer, waiting), "A to complete")
            a.kill()
            # Its call dies with it; else the server would still perform it.
            for (pid,) in rows(observer, waiting):
                observer.execute("select pg_terminate_backend(%s, 5000)", [pid])
    expire(db, mail)
    assert drain(dsn, mailing(mailbox)) == FINE
    assert mailbox.recipients(mail) == [[ANN]]
    assert effects(db, mail) == [("send", 1, "done")]
    assert (state(db, mail)["state"], state(db, mail)["attempt"]) == ("completed", 2)


def test_of_three_recipients_the_second_round_mails_only_the_one_that_was_deferred(
    dsn: str, db: Connection, mailbox: Mailbox
) -> None:
    three = enqueue(db, "email", MAIL | {"to": [ANN, BOB, CY]})
    refused, deferred = (enqueue(db, "email", MAIL | {"to": to}) for to in (BOB, CY))
    mailbox.answers |= {BOB: "550 no such user", CY: "451 come back later"}
    assert drain(dsn, mailing(mailbox)) == JOBS_FAILED
    assert mailbox.recipients(three) == [[ANN]]
    assert effects(db, three) == [("send", 1, "done")]
    assert effects(db, refused) == effects(db, deferred) == []
    states = [state(db, job)["state"] for job in (three, refused, deferred)]
    assert states == ["scheduled", "failed", "scheduled"]
    assert "550 no such user" in documents(db, refused)[1]

    asked: list[str] = []
    mailbox.at_rcpt = asked.append
    mailbox.answers = {}
    expire(db, three)
    expire(db, deferred)
    assert drain(dsn, mailing(mailbox)) == FINE
    assert asked == [CY, CY]
    assert (mailbox.recipients(three), mailbox.recipients(deferred)) == ([[ANN], [CY]], [[CY]])
    assert effects(db, three) == [("send", 1, "done"), ("send/2", 2, "done")]
    result = documents(db, three)[0]
    assert (result["accepted"], result["rounds"]) == ([ANN, CY], 2)
    assert result["refused"] == {BOB: [550, "no such user"]}


# Money


def test_charges_whose_answers_were_lost_are_repeated_with_the_same_key_and_body(
    dsn: str, db: Connection, stripe: SlowStripe
) -> None:
    charge = enqueue(db, "stripe", CHARGE)
    dead = enqueue(db, "stripe", CHARGE, max_attempts=1)
    stripe.blind = True  # nothing can be looked up, as right after a charge
    stripe.fault(times=2, lost=True)
    assert drain(dsn, charging(stripe)) == JOBS_FAILED
    assert (state(db, charge)["state"], state(db, dead)["state"]) == ("scheduled", "failed")
    expire(db, charge)
    db.execute("select taskboard.retry(%s)", [dead])
    assert drain(dsn, charging(stripe)) == FINE
    for job in (charge, dead):
        assert (state(db, job)["state"], state(db, job)["attempt"]) == ("completed", 2)
        step = CHARGE["operation"]
        assert effects(db, job) == [(step, 1, "open"), (step, 2, "done")]
        asked = [request for request in stripe.writes() if request.key == f"{job}/{step}"]
        assert len(asked) == 2 and asked[0].body == asked[1].body
    assert len(stripe.charges()) == 2  # one a job
    assert documents(db, charge)[0]["id"] != documents(db, dead)[0]["id"]


def test_a_charge_whose_answer_was_lost_is_found_and_not_asked_for_again(
    dsn: str, db: Connection, stripe: SlowStripe
) -> None:
    charge = enqueue(db, "stripe", CHARGE)
    stripe.fault(lost=True)
    assert drain(dsn, charging(stripe)) == FINE
    assert (state(db, charge)["state"], state(db, charge)["attempt"]) == ("completed", 1)
    assert len(stripe.writes()) == len(stripe.charges()) == 1
