"""Which versions are upgraded from and to."""

from __future__ import annotations

import pytest

from upgrade.versions import ROOT, earlier

EARLIER = earlier()


def pytest_report_header() -> str:
    why = "no other migrations than these" if (ROOT / ".git").exists() else "a history of git"
    found = f"commit {EARLIER[:7]}" if EARLIER else f"made up only (there is no commit with {why})"
    return f"upgrades from: {found}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "upgrade" in metafunc.fixturenames:
        kinds = ["from the commit before", "to a release to come"]
        metafunc.parametrize("upgrade", kinds if EARLIER else kinds[1:], indirect=True)
