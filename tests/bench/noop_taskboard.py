"""A handler that does nothing, for the runner to be measured with."""

from __future__ import annotations

from meter import meter

from taskboard.handlers import Context, handler


@handler("email")
async def email(ctx: Context) -> None:
    payload = ctx.job.payload
    meter.hit(payload.get("n") if isinstance(payload, dict) else None)
