"""Runners killed around mails and charges: each happens once, or as often as the record says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from faults.boundary import NOTICED, trial


def test_killed_around_mails_and_charges_and_each_is_made_as_often_as_recorded(
    dsn: str, tmp_path: Path
) -> None:
    found = trial(dsn, "", 1, crashes=8, seconds=60, log=tmp_path / "log", lives_for=1.2)
    print(found)
    assert found.wrong == []
    # The trial was one.
    assert len(found.died) > 2 and found.world.charges() and found.world.mails


@pytest.mark.wide
@pytest.mark.parametrize("what", NOTICED)
def test_counts_show_what_is_wrong_with(
    what: str, new_database: Callable[..., str], template: str, tmp_path: Path
) -> None:
    dsn = new_database(template)
    found = trial(dsn, what, seed=1, crashes=1000, seconds=60, log=tmp_path / "log")
    print(found)
    assert found.wrong
