"""What is wrong with the address of a database, told without any of it: it may hold a password."""

from __future__ import annotations

import psycopg
from psycopg.conninfo import conninfo_to_dict

HINT = (
    "write postgresql://user:password@host:5432/database; in a password, / ? # @ : % are written"
    " %2F %3F %23 %40 %3A %25"
)


def fault(url: str) -> tuple[str, str] | None:
    """Say what is wrong with an address, and what helps; None where it can be tried."""
    # As libpq reads it: the login ends at the first @, whose place is before the first slash.
    place, _, path = url.partition("://")[2].partition("/")
    if place.count("@") > 1:
        return "has an @ in its password: write %40", HINT
    if "@" in path.partition("?")[0]:
        return "has a / in its password, or an @ in its path: write %2F, or %40", HINT
    try:
        ports = str(conninfo_to_dict(url).get("port", "")).split(",")
    except psycopg.Error:  # its text would show the password
        return "cannot be read as a PostgreSQL URL", HINT
    if not all(port == "" or (port.isdecimal() and 0 < int(port) < 65536) for port in ports):
        return "has a port that is no number from 1 to 65535", HINT
    return None
