"""`taskboard demo`: a worker disappears in the middle of its jobs, live, with real processes.

Plain `taskboard run` workers on a throwaway database, with SMTP and Stripe servers of ours that
hold their answers back: so worker A can be stopped exactly between an effect and its report. Every
step is looked for in the database and on the servers; one that is not seen ends the demo with exit
code 1. The SQL here is part of the story: what the screen shows is what is run.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import sys
import time
from contextlib import ExitStack

from taskboard.demo.stage import BOLD, Stage, Unseen, Worker, expect, leave_in_order

SEEN, NOT_SEEN = 0, 1  # exit codes
JOBS = {
    "mail": """\
select job_id from taskboard.enqueue('email', lease => '3 s',
  payload => '{"to": "ann@example.com", "subject": "Welcome, Ann"}')""",
    "charge": """\
select job_id from taskboard.enqueue('stripe', lease => '3 s',
  payload => '{"operation": "payment_intents.create", "params": {"amount": 4200,
    "currency": "eur", "payment_method": "pm_card_visa", "confirm": true}}')""",
    "notice": """\
select job_id from taskboard.enqueue('email', lease => '3 s', on_unknown => 'hold',
  payload => '{"to": "bob@example.com", "subject": "Final notice"}')""",
}


def main(*, step: bool = False) -> int:
    """Play the demo; return 0 when every step was seen to happen, else 1.

    Ends everything that it started, also on a signal, after which it heeds no other. Raises
    LocalError without the embedded server.
    """
    # What the shell says about databases and keys is not meant for a throwaway.
    for name in [name for name in os.environ if name.startswith(("PG", "TASKBOARD_", "STRIPE_"))]:
        del os.environ[name]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    ignore_signals = leave_in_order()
    with ExitStack() as stack:
        stage = Stage(step, stack)
        try:
            play(stage)
        except Unseen as exc:
            print(f"\ntaskboard demo: did not happen: {exc}", file=sys.stderr)
            for worker in stage.workers:
                for line in worker.lines()[-5:]:
                    print(f"  {worker.name}: {stage.shorten(line)}", file=sys.stderr)
            return NOT_SEEN
        finally:
            ignore_signals()
    return SEEN


def play(stage: Stage) -> None:
    """Tell the whole story. Raises Unseen."""
    set_up(stage)
    enqueue(stage)
    a = stop_a_in_the_middle(stage)
    b = let_b_take_over(stage)
    wake_a(stage, a)
    let_a_try_to_complete(stage)
    let_b_complete(stage, b)
    show_the_boundary(stage)
    say_what_next(stage)


def set_up(stage: Stage) -> None:
    stage.write("A lease expires when a worker disappears: see it happen.", BOLD)
    stage.write("Leases last 3 s here, so that you need not wait long; 60 s is the default.")
    stage.write("Tokens are shortened. As in psql, :'mail' stands for the id of the mail.\n")
    stage.say("starting a throwaway PostgreSQL …")
    version = stage.start(stage.set_up, "PostgreSQL starts")
    stage.say(f"taskboard {version} is installed; data in {stage.folder}, for now")


def enqueue(stage: Stage) -> None:
    stage.head("1. Enqueue a mail, a charge, and a notice that must not go out twice")
    for name, sql in JOBS.items():
        stage.say(sql + ";")
        stage.names[name] = str(stage.rows(sql)[0][0])
        stage.say(f"→ {name} = {stage.names[name]}")


def stop_a_in_the_middle(stage: Stage) -> Worker:
    stage.head("2. Worker A claims them, and is stopped in the middle")
    a = stage.run("A")
    show_claims(stage, a, attempt=1)
    stage.wait(lambda: stage.copies("mail") and stage.copies("notice"), "A sends both mails")
    stage.say("the mail server has taken both mails, and lets A wait for the answer")
    stage.wait(lambda: stage.stripe.objects["charges"], "A makes the charge")
    stage.say("Stripe has charged the card, and lets A wait for the answer")
    a.stop()
    stage.say(f"kill -STOP {a.process.pid}", "A")
    stage.say("so A is stopped between what it did and its report")
    sql = "select step, attempt, state from taskboard.effect_list where job_id = :'mail'"
    expect(stage.ask(sql) == [("send", 1, "open")], "A has begun the mail and not reported")
    return a


def show_claims(stage: Stage, worker: Worker, attempt: int) -> None:
    """Wait until a worker has claimed everything; show its call and the tokens that it got."""
    sql = " union all ".join(
        f"select id::text, lease_token::text from taskboard.{table} where attempt = {attempt}"
        for table in ("jobs", "history")
    )

    def claims() -> dict[str, str]:
        found: dict[str, str] = dict(stage.rows(sql))
        return found if len(found) == len(JOBS) else {}

    tokens, name = stage.wait(claims, f"worker {worker.name} claims the jobs"), worker.name
    call = f"kinds => '{{email,stripe}}', max_jobs => 8, worker => '{name}'"
    stage.say(f"select * from taskboard.claim({call});", name)
    for job in JOBS:
        token = tokens[stage.names[job]] or "(void by now)"
        called = f" = claim_{name.lower()}" if job == "mail" else ""
        stage.say(stage.shorten(f"→ {job}: attempt {attempt}, lease_token {token}{called}"), name)
    stage.names[f"claim_{name.lower()}"] = tokens[stage.names["mail"]]


def let_b_take_over(stage: Stage) -> Worker:
    stage.head("3. The lease runs out, and worker B takes over", rest=0)
    b = stage.run("B")
    deadline = count_down(stage)
    show_claims(stage, b, attempt=2)
    early = f"select from taskboard.job_list where worker = 'B' and claimed_at < '{deadline}'"
    expect(not stage.rows(early), "B waits for the end of A's lease")
    expect(stage.names["claim_a"] != stage.names["claim_b"], "B has a token of its own")
    stage.hear(b, "charge", "completed")
    stage.say("(A's outcome was unknown, so B asked Stripe first, and found the charge)")
    stage.hear(b, "notice", "held")
    stage.hear(b, "mail", "may have been sent before")
    stage.wait(lambda: len(stage.copies("mail")) == 2, "B sends the mail again")
    stage.say("the mail server has taken the mail again, and lets B wait for the answer")
    return b


def count_down(stage: Stage) -> str:
    """Show A's leases run out; return when they did."""
    deadline = ""
    while True:
        ends_at, left = stage.rows(
            "select max(claimable_at)::text,"
            " extract(epoch from max(claimable_at) - clock_timestamp())::float8"
            " from taskboard.jobs where leased_by = 'A'"
        )[0]
        deadline = ends_at or deadline
        if left is None or left <= 0:
            expect(deadline, "A has leases")
            stage.say("A's lease has run out")
            return deadline
        stage.say(f"A's lease lasts {left:.1f} s more: until then nobody else may claim")
        time.sleep(min(left, 1))


def wake_a(stage: Stage, a: Worker) -> None:
    stage.head("4. A wakes up, and does not know that it slept")
    a.process.send_signal(signal.SIGCONT)
    stage.say(f"kill -CONT {a.process.pid}", "A")
    for job in ("mail", "charge"):
        stage.hear(a, job, "lease lost")
    stage.say("A's runner looked at its clock, stopped both handlers, and settled nothing")


def let_a_try_to_complete(stage: Stage) -> None:
    """Show the database's own answer, which the runner was too careful to ask for."""
    stage.head("5. A worker that does not look is refused: we ask, with A's token")
    owner = stage.rows("select worker from taskboard.job(:'mail')")[0][0]
    complete = "select * from taskboard.complete(:'mail', :'claim_a')"
    refused = not stage.ask(complete, "A", f"reclaimed by {owner}")
    expect(refused and owner == "B", "the database refuses A's completion")
    for token, who, what in (("claim_a", "A", "not_current"), ("claim_b", "B", "current")):
        status = stage.ask(f"select taskboard.lease_status(:'mail', :'{token}')", who)
        expect(status == [(what,)], f"the lease of {who} is {what}")


def let_b_complete(stage: Stage, b: Worker) -> None:
    stage.head("6. B completes")
    stage.b_may_go_on.set()
    stage.hear(b, "mail", "completed")
    end = stage.ask("select state, worker, attempt from taskboard.job(:'mail')")
    expect(end == [("completed", "B", 2)], "B has completed the mail")
    stage.say("and what went wrong is on record")
    incidents = stage.ask(
        "select what, worker, detail from taskboard.incident_list\n"
        "  where job_id = :'mail' order by id"
    )
    whats = [what for what, _, _ in incidents]
    expect(whats == ["lease_lapsed", "write_refused"], "both incidents are recorded")


def show_the_boundary(stage: Stage) -> None:
    """Show what the fence cannot hold back, and what is known about it."""
    stage.head("7. The boundary: the database can refuse A's report, not undo its effects")
    records = stage.rows(
        "select attempt, state from taskboard.effect_list where job_id = :'mail' order by attempt"
    )
    state_of = {job: stage.rows(f"select state from taskboard.job(:'{job}')")[0][0] for job in JOBS}
    mails, notices = stage.copies("mail"), stage.copies("notice")
    ids = {mail.message_id for mail in mails}
    made, looked = len(stage.calls), stage.stripe.requests - len(stage.calls)
    keys, charges = len(stage.stripe.keys), len(stage.stripe.objects["charges"])
    words = {"open": "`unknown`"}
    known = ", ".join(f"attempt {attempt} {words.get(state, state)}" for attempt, state in records)
    stage.write(
        f"  charge   {made + looked} requests (to charge {made}, to look {looked}),"
        f" {keys} key, {charges} charge\n"
        f"  mail     {len(mails)} copies, {len(ids)} Message-ID, recorded: {known}\n"
        f"  notice   {len(notices)} copy, job {state_of['notice']}:"
        " with on_unknown => 'hold' a person decides"
    )
    expect(made + looked >= 2 and keys == charges == 1, "there is one charge")
    expect(state_of["charge"] == "completed", "the charge is completed")
    expect(len(mails) == 2 and len(ids) == 1, "both copies have one Message-ID")
    expect(records == [(1, "open"), (2, "done")], "the first copy is recorded as unknown")
    expect(len(notices) == 1 and state_of["notice"] == "held", "the notice is held")


def say_what_next(stage: Stage) -> None:
    command = sys.argv[0] if os.access(sys.argv[0], os.X_OK) else f"{sys.executable} -m taskboard"
    if shutil.which("taskboard"):
        command = "taskboard"
    stage.head("All of this was seen to happen. To try next, on a database that stays:")
    stage.write(
        f"  {command} run --dev\n"
        f"""  {command} enqueue email '{{"to": "ann@example.com", "subject": "Hello"}}'\n"""
        f"  {command} psql -c 'select state, kind, worker, attempt from taskboard.job_list'"
    )
