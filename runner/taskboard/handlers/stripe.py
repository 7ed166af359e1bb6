"""The `stripe` handler: one billing operation per job.

Payload: `{"operation": "payment_intents.create", "params": {…}, "id": "pi_…"}`; `id` names the
object to work on and is absent when the operation creates one.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import stripe

from taskboard.handlers import Context, Effect, Handler, Held, Permanent, Release, handler
from taskboard.stripe_calls import Account, StripeSettings, judge, kept, read_payload

KEY_VALID_FOR = timedelta(hours=23)  # Stripe may forget a key from 24 hours on


def stripe_handler(settings: StripeSettings) -> Handler:
    """Make the handler of kind `stripe`; await its attribute `aclose` to end the connections."""
    account = Account(settings)
    run = handler("stripe")(partial(run_operation, account=account))
    run.aclose = account.aclose  # type: ignore[attr-defined]
    return run


async def run_operation(ctx: Context, account: Account) -> Any:
    """Perform the job's operation, or learn that an earlier attempt did; tell what came of it.

    Raises `Permanent`, `Retry` or `Release`; `LeaseLost` and `Held` come through from the context.
    """
    request, sent, seen = read_payload(ctx.job), False, None
    name = request.name
    effect = await ctx.begin_effect(name)
    # A later attempt that finds no record at all may have lost it in a failover.
    lost = ctx.job.attempt > 1 and effect.state == "fresh" and effect.result is None
    try:
        if lost or effect.state == "unknown":
            seen = await account.look_up(request)
            if seen is None:
                effect = await _pass_again(ctx, name)
        if effect.state == "done":
            return _told(effect.result)
        if seen is None:
            sent = True
            seen = await account.perform(request, effect.idempotency_key)
    except stripe.StripeError as exc:
        outcome, happened, record = judge(request, exc)
        if not sent:  # whatever earlier attempts did, this one did nothing
            happened, record = False, None
    if seen is None and happened is None and not isinstance(outcome, Release):
        # Look before calling it unknown: that may be the last attempt, or leave it to a person.
        with suppress(stripe.StripeError):
            seen = await account.look_up(request)
    if seen is not None:
        happened = True
        record = {"operation": name, "api_version": account.settings.api_version} | kept(seen)
    if happened is not None:
        await ctx.end_effect(name, happened=happened, result=record)
    if seen is not None:
        return record
    raise outcome


async def _pass_again(ctx: Context, step: str) -> Effect:
    """Pass the gate after a vain look, which took time; from here on the key has to be valid."""
    try:
        return await ctx.begin_effect(step, key_valid_for=KEY_VALID_FOR)
    except Held:
        await ctx.end_effect(step, happened=False)  # by this attempt; the question is an older one
        raise


def _told(result: Any) -> Any:
    """Repeat what an earlier attempt recorded: a result, or a decline."""
    if isinstance(result, dict) and "error" in result:
        raise Permanent(result["error"])
    return result
