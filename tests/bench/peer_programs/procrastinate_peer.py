"""procrastinate: functions in the database, called one job at a time."""

from __future__ import annotations

import asyncio

import peer
from meter import meter


def sql() -> dict[str, object]:
    from procrastinate import sql as own

    job = (
        f"row('default', 'email', 0, null, null, '{peer.PAYLOAD}'::jsonb, null)"
        "::procrastinate_job_to_defer_v1"
    )

    def call(name: str, **values: str) -> str:
        text = own.queries[name]
        for key, value in values.items():
            text = text.replace(f"%({key})s", value)
        return peer.bind(text)

    return {
        "enqueue": call("defer_jobs", jobs=f"array[{job}]"),
        "bulk": call("defer_jobs", jobs=f"(select array_agg({job}) from generate_series(1, @N@))"),
        "one": call("fetch_job", queues="null", worker_id="null")
        + " \\gset\n"
        + call("finish_job", job_id=":id", status="'succeeded'", delete_job="false"),
        "waiting": "select count(*) from procrastinate_jobs where status in ('todo', 'doing')",
        "tables": ["procrastinate_jobs", "procrastinate_events"],
        "guarantees": {
            "token checked": "no: finish by id and status",
            "dead worker's job": "found by heartbeat, retried by a task of yours",
            "history": "yes, rows stay with events until deleted",
            "seen in": "procrastinate/sql/schema.sql, queries.sql",
        },
    }


def app() -> object:
    import procrastinate

    app = procrastinate.App(
        connector=procrastinate.PsycopgConnector(conninfo=peer.DSN, max_size=peer.SLOTS + 2)
    )

    @app.task(name="email")
    async def email(**payload: object) -> None:
        meter.hit(payload.get("n"))

    return app


def install() -> None:
    async def run() -> None:
        async with app().open_async() as own:
            await own.schema_manager.apply_schema_async()

    asyncio.run(run())


def work() -> None:
    async def run() -> None:
        async with app().open_async() as own:
            await own.run_worker_async(concurrency=peer.SLOTS, wait=True)

    asyncio.run(run())


if __name__ == "__main__":
    peer.main(sql, install, work)
