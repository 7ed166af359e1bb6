"""absurd: functions in the database; a task has runs, and a run is completed by itself."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import peer
from meter import meter


def sql() -> dict[str, object]:
    spawn = f"absurd.spawn_task('default', 'email', '{peer.PAYLOAD}'::jsonb, '{{}}'::jsonb)"
    return {
        "enqueue": f"select task_id, run_id, attempt from {spawn}",
        "bulk": f"select count(s) from (select {spawn} as s from generate_series(1, @N@)"
        " offset 0) as x",
        "one": "select run_id, task_id, attempt, task_name, params, retry_strategy, max_attempts,"
        " headers, wake_event, event_payload from absurd.claim_task('default', 'w', 120, 1)"
        " \\gset\nselect absurd.complete_run('default', ':run_id', 'null'::jsonb)",
        "waiting": "select count(*) from absurd.t_default"
        " where state not in ('completed', 'failed', 'cancelled')",
        "tables": ["absurd.t_default", "absurd.r_default"],
        "guarantees": {
            "token checked": "by the run's id, new with each attempt",
            "dead worker's job": "run again when its claim has timed out (120 s)",
            "history": "yes, rows stay until cleaned up",
            "seen in": "absurd_sdk/__init__.py",
        },
    }


def install() -> None:
    ctl = Path(sys.executable).parent / "absurdctl"
    env = os.environ | {"PGDATABASE": peer.DSN, "ABSURD_DATABASE_URL": peer.DSN}
    for words in (["init"], ["create-queue", "default"]):
        subprocess.run([ctl, *words], env=env, check=True, stdin=subprocess.DEVNULL)


def work() -> None:
    async def run() -> None:
        from absurd_sdk import AsyncAbsurd

        own = AsyncAbsurd(peer.DSN, queue_name="default")

        @own.register_task("email")
        async def email(params: dict[str, object], ctx: object) -> None:
            meter.hit(params.get("n"))

        await own.start_worker(concurrency=peer.SLOTS)

    asyncio.run(run())


if __name__ == "__main__":
    peer.main(sql, install, work)
