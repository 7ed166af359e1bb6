"""Which versions are upgraded from and to."""

from __future__ import annotations

import pytest

from upgrade.versions import ROOT, earlier

EARLIER = earlier(4)


def pytest_report_header() -> str:
    found = ", ".join(f"commit {commit[:7]}" for commit in EARLIER)
    there = (ROOT / ".git").exists()
    why = "each commit before has other migrations" if there else "no history of git here"
    return f"upgrades from: {found or f'versions made up from this one ({why})'}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "upgrade" in metafunc.fixturenames:
        kinds = ["from the commit before", "to a release to come"]
        metafunc.parametrize("upgrade", kinds if EARLIER else kinds[1:], indirect=True)
    if "commit" in metafunc.fixturenames:
        # Without a history, this version over itself.
        metafunc.parametrize("commit", EARLIER or [""])
