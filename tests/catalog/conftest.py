"""One installed database for all tests that only look at it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support import Connection, Databases, session


@pytest.fixture(scope="module")
def installed(databases: Databases, template: str) -> Iterator[Connection]:
    """The owner's session in a database that the tests of a file leave as it is."""
    with session(databases.server.dsn(databases.create(template)), "installed") as conn:
        yield conn
