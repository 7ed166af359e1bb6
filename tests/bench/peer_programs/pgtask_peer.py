"""pgtask: functions in the database, a worker in Rust that calls Python."""

from __future__ import annotations

import asyncio
import os

import peer
from meter import meter


def sql() -> dict[str, object]:
    import json

    request = json.dumps(
        {
            "task_name": "email",
            "payload": json.loads(peer.PAYLOAD),
            "queue_name": "default",
            "handler_version": 1,
            "run_at": None,
            "priority": 0,
            "max_attempts": 5,
            "idempotency_key": None,
            "headers": {},
        }
    )
    many = "select count(*) from pgtask.enqueue_many({})"
    claim = (
        "pgtask.claim('default', '00000000-0000-0000-0000-000000000001', '{email}', '{1}',"
        " @N@, 30000)"
    )
    done = (
        "jsonb_build_object('task_id', id, 'attempt', attempt, 'lease_token', lease_token,"
        " 'has_result', false)"
    )
    return {
        "enqueue": many.format(f"'[{request}]'::jsonb"),
        "bulk": many.format(f"(select jsonb_agg('{request}'::jsonb) from generate_series(1, @N@))"),
        "one": f"select * from {claim} \\gset\n".replace("@N@", "1")
        + "select completed from pgtask.complete_tasks(jsonb_build_array(jsonb_build_object("
        "'task_id', ':id', 'attempt', :attempt, 'lease_token', ':lease_token',"
        " 'has_result', false)))",
        "many": f"select jsonb_agg({done}) as done, count(payload) from {claim} \\gset\n"
        "select count(*) from pgtask.complete_tasks(':done')",
        "waiting": "select count(*) from pgtask.tasks where state in ('pending', 'running')",
        "tables": ["pgtask.tasks"],
        "guarantees": {
            "token checked": "by a lease token in complete_tasks",
            "dead worker's job": "recovered when its lease (30 s) has expired",
            "history": "yes, until retention deletes",
            "seen in": "pgtask.claim, pgtask.complete_tasks",
        },
    }


def install() -> None:
    async def run() -> None:
        from pgtask import Client

        await (await Client.connect(peer.DSN)).migrate()

    asyncio.run(run())
    os._exit(0)  # it was seen to crash when the interpreter ends


def work() -> None:
    async def run() -> None:
        from pgtask import TaskRegistry, Worker

        tasks = TaskRegistry(queue_name="default")

        @tasks.task("email")
        async def email(task: object, payload: dict[str, object]) -> None:
            meter.hit(payload.get("n"))

        await Worker(peer.DSN, tasks, concurrency=peer.SLOTS).run()

    asyncio.run(run())


if __name__ == "__main__":
    peer.main(sql, install, work)
