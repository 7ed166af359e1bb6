"""pgtask: functions in the database, a worker in Rust that calls Python."""

from __future__ import annotations

import asyncio

import peer
from meter import meter


def sql() -> dict[str, object]:
    import json

    request = json.dumps({
        "task_name": "email", "payload": json.loads(peer.PAYLOAD), "queue_name": "default",
        "handler_version": 1, "run_at": None, "priority": 0, "max_attempts": 5,
        "idempotency_key": None, "headers": {},
    })  # fmt: skip
    many = "select count(*) from pgtask.enqueue_many({})"
    return {
        "enqueue": many.format(f"'[{request}]'::jsonb"),
        "bulk": many.format(
            f"(select jsonb_agg('{request}'::jsonb) from generate_series(1, @N@))"),
        "waiting": "select count(*) from pgtask.tasks where state in ('pending', 'running')",
        "tables": ["pgtask.tasks"],
        "guarantees": {
            "token checked": "by a lease token in complete_tasks",
            "dead worker's job": "recovered when its lease (30 s) has expired",
            "history": "yes, until retention deletes", "seen in": "pgtask's own schema, once installed",
        },
    }  # fmt: skip


def install() -> None:
    async def run() -> None:
        from pgtask import Client

        await (await Client.connect(peer.DSN)).migrate()

    asyncio.run(run())


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
