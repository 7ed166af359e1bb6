"""Every function that somebody may call, from the catalog, with arguments that make sense."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import psycopg

from catalog.matrix import matrix
from support import Connection, rows


@dataclass(frozen=True, slots=True)
class Function:
    """A function, the role that may call it (None: the owner), its arguments with their types."""

    name: str
    role: str | None
    arguments: dict[str, str]

    def usual(self, job_id: object, token: object) -> dict[str, str]:
        """Expressions for an ordinary call about a job that is leased."""
        return {
            name: USUAL.get(name, "null")
            .replace("{job_id}", str(job_id))
            .replace("{token}", str(token))
            + f"::{kind}"
            for name, kind in self.arguments.items()
        }


# By its name, else by its type: what makes a call an ordinary one.
USUAL: Final = {
    "kind": "'k'", "key": "'k'", "queue": "'default'", "payload": "'{}'",
    "payloads": "array['1']::jsonb[]",
    "priority": "5", "max_jobs": "1", "job_id": "'{job_id}'", "lease_token": "'{token}'",
    "job_ids": "array['{job_id}']::uuid[]", "lease_tokens": "array['{token}']::uuid[]",
    "step": "'main'", "happened": "true", "permanent": "false", "force": "false",
    "on_unknown": "'retry'", "unique_until": "'end'", "worker": "'w'", "name": "'nightly'",
    "cron": "'* * * * *'", "time_zone": "'UTC'", "misfire": "'one'", "paused": "true",
    "next_at": "'2999-01-01'", "enqueue": "true", "setting": "'lease'", "value": "'1 minute'",
    "at_most": "'0'", "completed": "true", "role_name": "'taskboard_worker'",
}  # fmt: skip

FUNCTIONS = """
select p.proname, p.proargnames,
  array(
    select format_type(t, null) from unnest(p.proargtypes) with ordinality as a (t, n) order by n)
from pg_proc as p
where p.pronamespace = 'taskboard'::regnamespace
  and (p.proname = any (%s) or obj_description(p.oid) like '%%For the owner alone.%%')
order by 1
"""


def functions(db: Connection) -> list[Function]:
    """Those in the matrix, and those of the owner."""
    allowed = matrix()
    return [
        Function(
            name,
            f"taskboard_{sorted(allowed[name])[-1]}" if name in allowed else None,
            dict(zip(names or (), types, strict=False)),
        )
        for name, names, types in rows(db, FUNCTIONS, (list(allowed),))
    ]


def told(error: psycopg.Error) -> str:
    """Everything that a client is told about an error."""
    diag = error.diag
    parts = (diag.message_primary, diag.message_detail, diag.message_hint, diag.context)
    return " ".join(str(part) for part in (*parts, diag.internal_query))
