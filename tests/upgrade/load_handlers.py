"""What the runners of both versions do under load: every way in which a handler can end.

Each call is a line in the file $EVIDENCE: job, attempt, kind. `held` ends when $GO is there.
"""

from __future__ import annotations

import asyncio
import os
from datetime import timedelta

from taskboard.handlers import Context, Release, Retry, ThreadContext, handler


def evidence(ctx: Context) -> None:
    line = f"{ctx.job.id} {ctx.job.attempt} {ctx.job.kind}\n".encode()
    file = os.open(os.environ["EVIDENCE"], os.O_WRONLY | os.O_APPEND)
    os.write(file, line)
    os.close(file)


@handler("quick")
async def quick(ctx: Context) -> int:
    evidence(ctx)
    return ctx.job.attempt


@handler("flaky")
async def flaky(ctx: Context) -> None:
    evidence(ctx)
    if ctx.job.attempt == 1:
        raise Retry("not today", retry_in=timedelta(seconds=0.1))


@handler("early")
async def early(ctx: Context) -> None:
    evidence(ctx)
    if ctx.job.attempt == 1:
        raise Release("not yet", delay=timedelta(seconds=0.1))


@handler("fenced")
async def fenced(ctx: Context) -> None:
    evidence(ctx)
    async with ctx.transaction(complete=True) as conn:
        await conn.execute("insert into public.ledger values (%s)", [ctx.job.id])


@handler("effect")
async def effect(ctx: Context) -> None:
    evidence(ctx)
    await ctx.begin_effect()
    await ctx.end_effect(result={"sent": True})


@handler("thread")
def thread(ctx: ThreadContext) -> None:
    evidence(ctx)


@handler("held")
async def held(ctx: Context) -> str:
    evidence(ctx)
    while not os.path.exists(os.environ["GO"]):  # noqa: ASYNC110, ASYNC240
        await asyncio.sleep(0.02)
    return "held on"
