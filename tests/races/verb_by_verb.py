"""Verb against verb on one job, as data: who wins, and what the loser gets.

Worker A has claimed one job and begun its effect. The first verb (a row) has run in a transaction
that is still open when the second one (a column) is called; then the first commits. A cell says
what the second one returns, with `…` in front when it had to wait for the first one's transaction.
The row `(none)` says what a verb gets alone. When the first one rolls back, that is what the second
one gets, too. `force` is cancel(force => true); claim is another worker's, the rest are A's or an
operator's.

`test_verb_by_verb.py` plays every cell; `markdown` renders the tables for `sql/README.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

NONE: Final = "(none)"
"""The row of a table that says what each verb gets when no other runs."""

WAITS: Final = "…"
"""In front of what a verb returned that waited for the other one's transaction."""


@dataclass(frozen=True, slots=True)
class Table:
    """What the second verb gets: `cells[first][second]`, for a job of A in one state."""

    title: str
    expired: bool
    cells: Mapping[str, Mapping[str, str]]


def read(text: str) -> Mapping[str, Mapping[str, str]]:
    """Read a table drawn with `|`; its first line names the second verbs."""
    lines = [[cell.strip() for cell in line.split("|")] for line in text.strip().splitlines()]
    seconds = lines[0][1:]
    return {line[0]: dict(zip(seconds, line[1:], strict=True)) for line in lines[1:]}


LEASE_CURRENT: Final = read("""
first         | claim  | renew    | renew_many | complete   | fail       | release
(none)        | 0 rows | renewed  | renewed    | completed  | scheduled  | ready
claim         | 0 rows | renewed  | renewed    | completed  | scheduled  | ready
renew         | 0 rows | …renewed | busy       | …completed | …scheduled | …ready
renew_many    | 0 rows | …renewed | busy       | …completed | …scheduled | …ready
complete      | 0 rows | …0 rows  | busy       | …completed | …0 rows    | …0 rows
fail          | 0 rows | …0 rows  | busy       | …0 rows    | …0 rows    | …0 rows
release       | 0 rows | …0 rows  | busy       | …0 rows    | …0 rows    | …0 rows
require_lease | 0 rows | renewed  | renewed    | …completed | …scheduled | …ready
begin_effect  | 0 rows | renewed  | renewed    | …completed | …scheduled | …ready
end_effect    | 0 rows | renewed  | renewed    | …completed | …scheduled | …ready
cancel        | 0 rows | …stop    | busy       | …completed | …cancelled | …cancelled
force         | 0 rows | …0 rows  | busy       | …0 rows    | …0 rows    | …0 rows
evict         | 0 rows | …0 rows  | busy       | …completed | …scheduled | …ready
""")

LEASE_CURRENT_2: Final = read("""
first         | require_lease | begin_effect | end_effect | cancel     | force      | evict
(none)        | current       | fresh        | done       | running    | cancelled  | expired
claim         | current       | fresh        | done       | running    | cancelled  | expired
renew         | current       | fresh        | done       | …running   | …cancelled | busy
renew_many    | current       | fresh        | done       | …running   | …cancelled | busy
complete      | …TB001        | …0 rows      | …done      | …completed | …completed | busy
fail          | …TB001        | …0 rows      | …done      | …cancelled | …cancelled | busy
release       | …TB001        | …0 rows      | …done      | …cancelled | …cancelled | busy
require_lease | current       | fresh        | done       | running    | …cancelled | busy
begin_effect  | current       | …fresh       | …done      | running    | …cancelled | busy
end_effect    | current       | …done        | …done      | running    | …cancelled | busy
cancel        | current       | fresh        | done       | …running   | …cancelled | busy
force         | …TB001        | …0 rows      | …done      | …cancelled | …cancelled | busy
evict         | …current      | …0 rows      | …done      | …cancelled | …cancelled | busy
""")

LEASE_LAPSED: Final = read("""
first         | claim  | renew   | complete   | fail       | require_lease | end_effect | cancel
(none)        | leased | 0 rows  | completed  | scheduled  | current       | done       | cancelled
claim         | 0 rows | …0 rows | …0 rows    | …0 rows    | …TB001        | …done      | …running
renew         | 0 rows | …0 rows | …completed | …scheduled | current       | done       | …cancelled
complete      | 0 rows | …0 rows | …completed | …0 rows    | …TB001        | …done      | …completed
fail          | 0 rows | …0 rows | …0 rows    | …0 rows    | …TB001        | …done      | …cancelled
require_lease | 0 rows | 0 rows  | …completed | …scheduled | current       | done       | …cancelled
end_effect    | 0 rows | 0 rows  | …completed | …scheduled | current       | …done      | …cancelled
cancel        | 0 rows | …0 rows | …0 rows    | …0 rows    | …TB001        | …done      | …cancelled
""")

TABLES: Final = (
    Table("The lease of A is current", expired=False, cells=LEASE_CURRENT),
    Table("The lease of A is current, continued", expired=False, cells=LEASE_CURRENT_2),
    Table("The lease of A has lapsed, nobody has claimed again", expired=True, cells=LEASE_LAPSED),
)


def markdown(table: Table) -> str:
    """Render one table: its title, a blank line, the rows; no newline at the end."""
    seconds = list(table.cells[NONE])
    lines = [
        "| first \\ second | " + " | ".join(f"`{verb}`" for verb in seconds) + " |",
        "|---" * (len(seconds) + 1) + "|",
    ]
    for first, cells in table.cells.items():
        title = first if first == NONE else f"`{first}`"
        lines.append(f"| {title} | " + " | ".join(cells[verb] for verb in seconds) + " |")
    return f"{table.title}:\n\n" + "\n".join(lines)
