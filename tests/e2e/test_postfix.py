"""The `email` handler and Postfix: what arrives in the mailboxes is what the record says."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
from harness import drain, enqueue, state
from tcp_proxy import TcpProxy

from e2e.outside import effects
from e2e.postfix import DOMAIN, SIZE_LIMIT, Postfix, postfix
from support import Connection, expire, rows
from taskboard.handlers.email import email_handler
from taskboard.mail import MailSettings

pytestmark = pytest.mark.wide

FINE, JOBS_FAILED = 0, 3
REFUSED, DEFERRED = "550 5.1.1 no such mailbox", "450 4.2.0 try again later"


@pytest.fixture(scope="module")
def mta() -> Iterator[Postfix]:
    assert os.getuid() == 0, "Postfix wants to be started by root"
    with postfix() as mta:
        yield mta


def send(dsn: str, url: str) -> int:
    """Let a runner of its own work until nothing is left."""
    handler = email_handler(MailSettings.from_url(url, f"shop@{DOMAIN}"))
    return drain(dsn, {"email": handler}, within=30)


def mail(db: Connection, *names: str, text: str = "Hi", **options: Any) -> UUID:
    to = [f"{name}@{DOMAIN}" for name in names]
    return enqueue(db, "email", {"to": to, "subject": "Hello", "text": text}, **options)


def arrived(mta: Postfix, job: UUID) -> Counter[str]:
    """How many copies of a job's mail each recipient has."""
    copies: Counter[str] = Counter()
    for (name, message_id), count in mta.mails().items():
        copies[name] += count if message_id == f"<{job}@{DOMAIN}>" else 0
    return +copies


def error(db: Connection, job: UUID) -> str:
    return str(rows(db, "select error from taskboard.job_documents(%s)", [job])[0][0])


def test_a_mail_over_starttls_arrives_once_and_with_lines_that_begin_with_a_dot(
    dsn: str, db: Connection, mta: Postfix
) -> None:
    job = mail(db, "ann", "bob", text=".\n..\nfrom here\n.")
    assert send(dsn, mta.url()) == FINE
    assert arrived(mta, job) == {"ann": 1, "bob": 1}
    path = next((mta.folder / "mail").rglob("new/*"))
    assert path.read_text().endswith("\n\n.\n..\nfrom here\n.\n")
    assert (state(db, job)["attempt"], effects(db, job)) == (1, [("send", 1, "done")])


def test_refused_recipients_get_nothing_and_deferred_ones_get_theirs_in_a_step_of_its_own(
    dsn: str, db: Connection, mta: Postfix
) -> None:
    job, nobody = mail(db, "ann", "no", "busy"), mail(db, "no")
    mta.answer(no=REFUSED, busy=DEFERRED)
    assert send(dsn, mta.url()) == JOBS_FAILED
    assert arrived(mta, job) == {"ann": 1} and not arrived(mta, nobody)
    assert (state(db, job)["state"], state(db, nobody)["state"]) == ("scheduled", "failed")
    assert "450 4.2.0" in error(db, job) and "550 5.1.1" in error(db, nobody)
    expire(db, job)
    assert send(dsn, mta.url()) == JOBS_FAILED  # deferred once more
    mta.answer(no=REFUSED)
    expire(db, job)
    assert send(dsn, mta.url()) == FINE
    assert arrived(mta, job) == {"ann": 1, "busy": 1}
    done = [(step, told) for step, _, told in effects(db, job) if told != "refused"]
    assert done == [("send", "done"), ("send/2", "done")]
    mta.answer()


def test_a_mail_that_is_too_large_is_refused_after_the_final_dot_and_failed_for_good(
    dsn: str, db: Connection, mta: Postfix
) -> None:
    job = mail(db, "ann", text="0123456789\n" * (SIZE_LIMIT // 10))
    assert send(dsn, mta.url()) == JOBS_FAILED
    assert (state(db, job)["state"], effects(db, job)) == ("failed", [("send", 1, "refused")])
    assert "552 5.3.4" in error(db, job) and not arrived(mta, job)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("no trust", "STARTTLS: "),
        ("another name", "STARTTLS: "),
        ("not offered", "STARTTLS: not offered"),
        ("not wanted", "530 5.7.0 Must issue a STARTTLS command first"),
    ],
)
def test_nothing_is_sent_where_encryption_is_not_as_it_must_be(
    dsn: str, db: Connection, mta: Postfix, change: str, said: str
) -> None:
    url = {
        "no trust": mta.url().partition("?")[0],
        "another name": mta.url().replace("127.0.0.1", "localhost"),
        "not offered": f"smtp://127.0.0.1:{mta.plain}",
        "not wanted": mta.url(starttls="off"),
    }[change]
    job = mail(db, "ann")
    assert send(dsn, url) == JOBS_FAILED
    assert said in error(db, job) and not arrived(mta, job)
    assert (state(db, job)["state"], effects(db, job)) == ("scheduled", [])
    expire(db, job)
    assert send(dsn, mta.url()) == FINE
    assert arrived(mta, job) == {"ann": 1}


@pytest.mark.parametrize(("policy", "copies"), [("retry", 2), ("hold", 1)])
def test_a_connection_dropped_after_the_final_dot_is_an_unknown_outcome(
    dsn: str, db: Connection, mta: Postfix, policy: str, copies: int
) -> None:
    job = mail(db, "ann", on_unknown=policy)
    with TcpProxy(f"host=127.0.0.1 port={mta.plain}") as proxy:
        proxy.lose_reply_to = b"\r\n.\r\n"
        assert send(dsn, f"smtp://127.0.0.1:{proxy.port}?starttls=off") == JOBS_FAILED
        assert proxy.replies_lost == 1 and effects(db, job) == [("send", 1, "open")]
        assert arrived(mta, job) == {"ann": 1}
        expire(db, job)
        assert send(dsn, f"smtp://127.0.0.1:{proxy.port}?starttls=off") == FINE
    assert state(db, job)["state"] == ("held" if policy == "hold" else "completed")
    # Copies have one Message-ID: the count is by that.
    assert arrived(mta, job) == {"ann": copies}


def test_a_connection_dropped_before_the_body_did_not_happen(
    dsn: str, db: Connection, mta: Postfix
) -> None:
    job = mail(db, "ann", on_unknown="hold")
    with TcpProxy(f"host=127.0.0.1 port={mta.plain}") as proxy:
        url = f"smtp://127.0.0.1:{proxy.port}?starttls=off"
        proxy.lose_reply_to = b"DATA\r\n"
        assert send(dsn, url) == JOBS_FAILED
        assert effects(db, job) == [("send", 1, "refused")] and not arrived(mta, job)
        expire(db, job)
        assert send(dsn, url) == FINE
    assert arrived(mta, job) == {"ann": 1}
