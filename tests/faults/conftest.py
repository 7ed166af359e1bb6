"""Faults need servers that can be killed: our own, whatever server the other tests run on."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def programs(request: pytest.FixtureRequest) -> str:
    """What `--postgres` says, if it names programs; else `auto`."""
    choice: str = request.config.getoption("--postgres")
    return "auto" if choice == "docker" or "=" in choice or "://" in choice else choice
