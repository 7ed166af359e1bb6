"""The `email` handler: one job is one message, sent over SMTP stage by stage.

Connecting, logging in and naming sender and recipients come before the effect, so what fails
there simply retries. The gate (`begin_effect`) stands directly before DATA. Once the final dot
may be on its way only a reply closes the effect; without one it stays open: unknown.
Recipients deferred with 4yz are the next round, in a step of its own: `send/2`, `send/3`, …
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from taskboard.handlers import Context, Handler, Outcome, Permanent, Retry, handler
from taskboard.mail import Mail, MailSettings, compose
from taskboard.smtp import Unanswered, conversation

log = logging.getLogger(__name__)


def email_handler(settings: MailSettings) -> Handler:
    """Make the handler of kind `email` for one mail server."""
    return handler("email")(partial(send_mail, settings=settings))


async def send_mail(ctx: Context, settings: MailSettings) -> dict[str, Any]:
    """Send the job's mail to whoever has not had it yet.

    Returns `message_id`, `accepted`, `refused` (address: [code, text]) and `rounds`. Raises
    `Permanent` (invalid, or refused by everybody) or `Retry` (also while recipients are deferred).
    """
    try:
        mail = compose(ctx.job, settings)
    except ValueError as exc:
        raise Permanent(f"invalid mail: {exc}") from exc
    left, rounds, step = mail.recipients, list[dict[str, Any]](), "send"
    while left and ctx.job.attempt > 1:  # nothing can lie behind a first attempt
        effect = await ctx.begin_effect(step)
        if effect.state != "done":
            # A look only. Closed again, so that a crash while connecting is not an unknown outcome.
            await ctx.end_effect(step, happened=False)
            break
        # A person's `resolve` leaves no record, and speaks for the whole round.
        rounds.append(effect.result or {"accepted": left, "refused": {}, "deferred": {}})
        left = [address for address in left if address in rounds[-1]["deferred"]]
        step = f"send/{len(rounds) + 1}"
    if left:
        rounds.append(await _send_round(ctx, settings, mail, left, step))
    accepted = [address for one in rounds for address in one["accepted"]]
    refused = {address: reply for one in rounds for address, reply in one["refused"].items()}
    if deferred := rounds[-1]["deferred"]:
        raise Retry(f"accepted by {len(accepted)}, deferred: {_listing(deferred)}")
    if not accepted:
        raise Permanent(f"refused by every recipient: {_listing(refused)}")
    sent = sum(bool(one["accepted"]) for one in rounds)
    return {"message_id": mail.message_id, "accepted": accepted, "refused": refused, "rounds": sent}


async def _send_round(
    ctx: Context, settings: MailSettings, mail: Mail, left: list[str], step: str
) -> dict[str, Any]:
    """Offer the mail to `left`; returns who accepted, refused, deferred; recorded if sent."""
    async with conversation(ctx.job, settings) as server:
        answers = await server.offer(mail, left)
        record = {"accepted": list(answers[2]), "refused": answers[5], "deferred": answers[4]}
        if not answers[2]:
            return record
        effect = await ctx.begin_effect(step)
        if effect.state == "done":  # late evidence: an earlier attempt did send it
            return effect.result or record
        if effect.state == "unknown":
            log.warning("job=%s may have been sent before; sending %s again", ctx.job.id, step)
        try:
            record["reply"] = await server.send(mail.wire)
        except Unanswered:
            raise
        except Outcome:
            await ctx.end_effect(step, happened=False)
            raise
        await ctx.end_effect(step, result=record)
    return record


def _listing(replies: dict[str, Any]) -> str:
    return "; ".join(f"{address}: {code} {text}" for address, (code, text) in replies.items())
