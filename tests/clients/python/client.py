"""What the conformance kit talks to: one JSON request a line in, one JSON answer a line out."""

import json
import os
import sys

import psycopg
from psycopg.rows import dict_row
from psycopg.types.string import TextLoader

conn = psycopg.connect(
    os.environ["TASKBOARD_DATABASE_URL"],
    autocommit=True,
    prepare_threshold=None,  # a transaction pooler gives each call another session
    row_factory=dict_row,
)
conn.adapters.register_loader("jsonb", TextLoader)  # documents as text, to the last digit


def answer(request):
    if "wait" in request:
        woken = list(conn.notifies(timeout=request["wait"], stop_after=1))
        return {"notified": bool(woken)}
    if "run" in request:
        conn.execute(request["run"])
        return {"rows": []}
    # The names are the kit's own, the values are sent apart, as texts whose type is left open.
    named = ", ".join(f"{name} => %s" for name in request["args"])
    call = f"select * from taskboard.{request['call']}({named})"
    return {"rows": conn.execute(call, list(request["args"].values())).fetchall()}


for line in sys.stdin:
    try:
        found = answer(json.loads(line))
    except psycopg.Error as exc:
        found = {"error": {"sqlstate": exc.sqlstate, "message": str(exc)}}
    print(json.dumps(found, default=str), flush=True)
