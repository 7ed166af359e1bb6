"""What the tests from end to end share with those of the runner: harness and Stripe proxy."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "runner"))


@pytest.fixture(scope="session")
def upstream() -> Iterator[str]:
    """The base URL of localstripe, which knows charges but nothing of idempotency."""
    from stripe_proxy import localstripe

    with localstripe() as url:
        yield url
