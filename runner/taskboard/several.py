"""Several databases for one runner: the shards of a queue that has outgrown one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from psycopg.conninfo import conninfo_to_dict

from taskboard.settings import ENVIRONMENT, Settings, SettingsError


def load(environ: Mapping[str, str] = os.environ, **arguments: Any) -> list[Settings]:
    """Read settings for each of the databases that are named; raises SettingsError.

    Several are URLs with white space between; the direct ways beside poolers, if there are any,
    stand in the same order.
    """
    urls, ways = (environ.get(ENVIRONMENT[n], "").split() for n in ("database_url", "listen_url"))
    if len(urls) < 2 or not all("://" in url for url in urls):
        return [Settings.load(environ, **arguments)]
    if ways and len(ways) != len(urls):
        raise SettingsError(
            f"TASKBOARD_LISTEN_URL names {len(ways)} databases, TASKBOARD_DATABASE_URL {len(urls)}",
            "give one for each, in the same order, or none",
        )
    return [
        Settings.load(environ, **arguments, database_url=url, listen_url=way or None)
        for url, way in zip(urls, ways or [""] * len(urls), strict=True)
    ]


def name_of(settings: Settings, at: int) -> str:
    """Name one of several in the log; an address is nobody's business there."""
    return f"{at}/{conninfo_to_dict(settings.database_url).get('dbname', '')}"
