"""Each client of this folder passes the whole kit, with no more rights than its roles have."""

from __future__ import annotations

from pathlib import Path

import pytest

from clients.kit import run
from clients.languages import LANGUAGES

WIDE = ("bash", "node")


def marks(language: str) -> list[pytest.MarkDecorator]:
    if language == "python":
        return []
    return [pytest.mark.wide if language in WIDE else pytest.mark.languages]


@pytest.mark.parametrize(
    "language", [pytest.param(name, marks=marks(name)) for name in LANGUAGES]
)  # fmt: skip
def test_a_client_and_a_worker_in_each_language_pass_the_kit(
    language: str, url: str, tmp_path: Path
) -> None:
    client, worker = LANGUAGES[language].made(tmp_path)
    outcomes = run(client, worker, url)
    assert {one.name: one.fault for one in outcomes if one.fault} == {}
    assert len(outcomes) > 30
