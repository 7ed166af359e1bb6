"""What the programs of the peers share. They run where only the peer is installed.

Each is called with `sql`, `install` or `work`, and BENCH_DSN. `sql` prints JSON: the statements
that the peer's own client sends, taken from the installed package, as pgbench scripts with a
payload in them and @N@ for a number of jobs.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable

PAYLOAD = '{"to": "ada@example.com", "subject": "Hello", "text": "about a hundred bytes of text"}'
DSN = os.environ.get("BENCH_DSN", "")
SLOTS = int(os.environ.get("BENCH_SLOTS", "10"))


def main(
    sql: Callable[[], dict[str, object]], install: Callable[[], None], work: Callable[[], None]
) -> None:
    what = sys.argv[1]
    if what == "sql":
        print(json.dumps(sql()))
    else:
        {"install": install, "work": work}[what]()


def bind(statement: str, *values: str) -> str:
    """Put SQL for its $1, $2, … into a statement, on one line."""
    statement = re.sub(r"--[^\n]*", "", statement)
    for n in range(len(values), 0, -1):
        statement = statement.replace(f"${n}", values[n - 1])
    return " ".join(statement.split()).rstrip(";")


def collected(statement: str, select: str) -> str:
    """Let a statement's rows be the input of a `select`: its end becomes one more `with` part."""
    depth, quoted, cut = 0, False, -1
    begins = statement.lower().startswith("with ")
    for found in re.finditer(
        r"[()']|\b(?:select|update|delete|insert)\b", statement, re.IGNORECASE
    ):
        word = found[0].lower()
        if word == "'":
            quoted = not quoted
        elif not quoted and word in "()":
            depth += 1 if word == "(" else -1
        elif not quoted and depth == 0 and cut < 0:
            cut = found.start()
    head, rest = statement[:cut].strip(), statement[cut:]
    head = f"{head}, " if begins else "with "
    return f"{head}final_rows as ({rest}) select {select} from final_rows"
