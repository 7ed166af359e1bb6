"""A release: one version, a changelog that knows it, and packages that work by themselves."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import taskboard
from support import Connection, rows
from taskboard.cli import main
from taskboard.localpg import temporary_folder

ROOT = Path(__file__).parents[1]
SECTIONS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Upgrade notes"}


def test_one_version_is_shown_everywhere(
    db: Connection, capsys: pytest.CaptureFixture[str]
) -> None:
    version = taskboard.version()
    assert rows(db, "select taskboard.version()") == [(version,)]
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"taskboard {version}\n"
    patterns = ("*.toml", "runner/**/*.py", "sql/*.sql")
    stated = [
        path for pattern in patterns for path in ROOT.glob(pattern)
        if re.search(rf"[\"']{re.escape(version)}[\"']", path.read_text())
    ]  # fmt: skip
    assert stated == [ROOT / "sql/01_version.sql"]


def test_the_changelog_begins_with_this_version_and_each_has_upgrade_notes() -> None:
    _, *parts = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    titles = [part.partition("\n")[0] for part in parts]
    assert titles[0] == "[Unreleased]"
    assert re.match(rf"\[{re.escape(taskboard.version())}\]( - \d{{4}}-\d\d-\d\d)?$", titles[1])
    for title, part in zip(titles, parts, strict=True):
        sections = re.findall(r"^### (.+)$", part, re.M)
        assert set(sections) <= SECTIONS, title
        # What changes something says what an upgrade to it locks.
        if sections:
            notes = part.partition("### Upgrade notes")[2]
            assert "lock" in notes, title


@pytest.mark.wide
def test_packages_that_build_makes_are_complete_and_work_in_an_empty_folder(dsn: str) -> None:
    home = temporary_folder()
    environment = {k: v for k, v in os.environ.items() if k.startswith("PIP_") or k == "PATH"}
    environment |= {"HOME": str(home), "TASKBOARD_DATABASE_URL": dsn}

    def run(*command: str | Path) -> str:
        done = subprocess.run(
            command, cwd=home, env=environment, check=False, text=True, capture_output=True,
            timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    try:
        for name in ("tools", "installed"):
            run(sys.executable, "-m", "venv", home / name)
        run(home / "tools/bin/pip", "install", "-q", "build")
        # The wheel is made of the sdist, which so has all that it needs.
        run(home / "tools/bin/python", "-m", "build", "--outdir", home / "dist", ROOT)
        version = taskboard.version()
        (wheel,), (source,) = home.glob("dist/*.whl"), home.glob("dist/*.tar.gz")
        assert f"-{version}-" in wheel.name and source.name.endswith(f"-{version}.tar.gz")
        with zipfile.ZipFile(wheel) as archive:
            packed = set(archive.namelist())
        with tarfile.open(source) as archive_of_sources:
            sources = {name.partition("/")[2] for name in archive_of_sources.getnames()}
        ours = [path for part in ("sql", "migrations") for path in ROOT.glob(f"{part}/*.*")]
        for path in ours:
            name = str(path.relative_to(ROOT))
            assert name in sources and f"taskboard/{name}" in packed, name
        assert {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"} <= sources
        run(home / "installed/bin/pip", "install", "-q", wheel)
        program = home / "installed/bin/taskboard"
        assert run(program, "--version") == f"taskboard {version}\n"
        assert run(program, "migrate") == f"taskboard {version}: already up to date\n"
        job_id = run(program, "enqueue", "k").strip()
        assert job_id in run(program, "jobs", "--json")
    finally:
        shutil.rmtree(home)
