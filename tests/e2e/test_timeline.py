"""The timeline with real runners: one stops or dies in the middle, another one takes over.

A mail, a charge, and a mail that must not go out twice are in the hands of A when it disappears,
either before anything went out or after everything did and nothing was reported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import enqueue, state

from e2e.outside import (
    CHARGE,
    MAIL,
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


def facts(db: Connection, job_id: Any) -> tuple[Any, ...]:
    job = state(db, job_id)
    return job["state"], job["worker"], job["attempt"], job["lost_leases"], job["failures"]


@pytest.mark.parametrize("fate", ["stopped", "killed"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_another_worker_completes_what_a_worker_left_and_charges_once(
    moment: str, fate: str, dsn: str, db: Connection, tmp_path: Path, upstream: str
) -> None:
    mail_gate, charge_gate = Gate(), Gate()
    mailbox = Mailbox()
    if moment == "before":
        mailbox.at_rcpt = mail_gate
    else:
        mailbox.at_dot = lambda mail: mail_gate(mail.rcpt_tos[0])
    mail = enqueue(db, "email", MAIL, lease="3s")
    notice = enqueue(db, "email", MAIL | {"to": "bob@example.com"}, lease="3s", on_unknown="hold")
    charge = enqueue(db, "stripe", CHARGE, lease="3s")
    jobs = [mail, notice, charge]
    with serving(mailbox.open()), serving(SlowStripe(upstream, **{moment: charge_gate})) as stripe:
        environment = keys(mailbox, stripe)
        with worker("A", dsn, tmp_path, **environment) as a:
            wait_until(lambda: len(mail_gate.held) == 2 and charge_gate.held, "A in the middle")
            a.stop() if fate == "stopped" else a.kill()
            begun = [("send", 1, "open")] if moment == "after" else []
            assert effects(db, mail) == effects(db, notice) == begun
            if fate == "killed":  # while A is only stopped, its own clock runs, too
                for job in jobs:
                    expire(db, job)
            with worker("B", dsn, tmp_path, **environment) as b:
                ends = ["completed", "completed" if moment == "before" else "held", "completed"]
                wait_until(lambda: [state(db, job)["state"] for job in jobs] == ends, str(ends))
                # What was on its way arrives late, and A finds its answers when it wakes up.
                mail_gate.opened.set()
                charge_gate.opened.set()
                wait_until(lambda: stripe.under_way == 0, "the late request")
                if fate == "stopped":
                    a.go_on()
                    wait_until(lambda: all(a.said(job, "attempt=1") for job in jobs), "A's word")
                    assert a.said(mail, "lease lost (finished_by_other)")
                    assert a.said(charge, "lease lost (finished_by_other)")
                    a.leave()
                b.leave()
        [one] = rows(db, "select count(*) from taskboard.incidents where what = 'lease_lapsed'")
        assert one == (3,)
        assert not a.said(mail, "completed") and not a.said(charge, "completed")
        assert facts(db, mail) == facts(db, charge) == ("completed", "B", 2, 1, 0)
        # The charge: once, whoever asked for it and however often.
        assert len(stripe.charges()) == 1
        assert len({(request.key, request.body) for request in stripe.writes()}) == 1
        # The mails: one copy, or it is on record that nobody knew.
        copies = [len(mailbox.recipients(job)) for job in (mail, notice)]
        if moment == "before":
            assert copies == [1, 1]
            assert effects(db, mail) == effects(db, notice) == [("send", 2, "done")]
            assert facts(db, notice) == ("completed", "B", 2, 1, 0)
        else:
            assert copies == [2, 1] and b.said(mail, "may have been sent before")
            assert effects(db, mail)[1:] == [("send", 2, "done")]
        if (moment, fate) == ("after", "killed"):  # nobody is left to testify
            assert effects(db, mail)[0] == effects(db, notice)[0] == ("send", 1, "open")
            assert facts(db, notice) == ("held", None, 2, 1, 0)
