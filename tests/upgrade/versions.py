"""Other versions of Taskboard, each a folder with sql/, migrations/ and runner/, to upgrade from
and to: the last one before this, by the history of git, and a release to come, which is made up."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import taskboard

ROOT = Path(__file__).parents[2]
PARTS = ("sql", "migrations", "runner")
NUMBERED = re.compile(r"/\d[^/]*\.sql$")


@dataclass(frozen=True, slots=True)
class Version:
    """One version in a folder; its programs run as processes of their own."""

    name: str
    folder: Path

    @property
    def number(self) -> str:
        text = (self.folder / "sql/01_version.sql").read_text(encoding="utf-8")
        return text.partition("select '")[2].partition("'")[0]

    def start(self, dsn: str, *arguments: str, log: Path, **environment: str) -> Program:
        """Start `taskboard …` of this version; what it says goes to the file `log`."""
        paths = [str(self.folder / "runner"), str(Path(__file__).parent), *filter(None, sys.path)]
        with log.open("w") as out:
            return Program(log, subprocess.Popen(
                [sys.executable, "-m", "taskboard", *arguments], stdout=out, stderr=out,
                env=os.environ | environment | {
                    "PYTHONPATH": os.pathsep.join(paths), "TASKBOARD_DATABASE_URL": dsn,
                },
            ))  # fmt: skip

    def run(self, dsn: str, *arguments: str, log: Path, within: float = 90) -> Program:
        """Run `taskboard …` of this version to its end."""
        with ended(self.start(dsn, *arguments, log=log)) as program:
            program.popen.wait(within)
        return program


@dataclass(frozen=True, slots=True)
class Program:
    """A process, and the file with what it said."""

    log: Path
    popen: subprocess.Popen[bytes]

    @property
    def said(self) -> str:
        return self.log.read_text()

    @property
    def code(self) -> int | None:
        return self.popen.poll()


@contextmanager
def ended(program: Program) -> Iterator[Program]:
    """See to it that a process is gone when the block is."""
    try:
        yield program
    finally:
        program.popen.kill()
        program.popen.wait()


def this(folder: Path) -> Version:
    """The version under test."""
    for part in PARTS:
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    return Version("this version", folder)


def earlier(most: int) -> list[str]:
    """Find the newest commits with other functions, and no other migrations, than those here.

    None where there is no history (an archive of the sources), or none that this can upgrade:
    until the first release, a migration may still change.
    """
    if not (ROOT / ".git").exists():
        return []
    found: list[str] = []
    newer = here = contents(ROOT)
    for commit in git("rev-list", "--max-count=100", "HEAD", "--", "sql").decode().split():
        with tarfile.open(fileobj=BytesIO(git("archive", commit, *PARTS[:2]))) as archive:
            there = {
                member.name: file.read()
                for member in archive
                if NUMBERED.search(member.name) and (file := archive.extractfile(member))
            }
        if any(here.get(n) != text for n, text in there.items() if n.startswith("migrations")):
            break
        if there != newer:
            found.append(commit)
            newer = there
        if len(found) == most:
            break
    return found


def from_git(commit: str, folder: Path) -> Version:
    """Take a commit's version out of the history."""
    with tarfile.open(fileobj=BytesIO(git("archive", commit, *PARTS))) as archive:
        archive.extractall(folder, filter="data")
    return Version(f"commit {commit[:7]}", folder)


def git(*arguments: str) -> bytes:
    # The folder may be somebody else's, as in a container.
    command = ["git", "-c", "safe.directory=*", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout


def contents(folder: Path) -> dict[str, bytes]:
    found = (path for part in PARTS[:2] for path in (folder / part).glob("[0-9]*.sql"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def later(folder: Path) -> Version:
    """Make up the next release, with each kind of step that migrations/README.md allows.

    A column more in a table that is written all the time, an index built beside the work, a verb
    with another argument, a result with another column.
    """
    made = this(folder)
    major, minor, _ = taskboard.version().split(".")
    edit(made, "sql/01_version.sql", (f"'{taskboard.version()}'", f"'{major}.{int(minor) + 1}.0'"))
    (folder / "migrations/9001_tag.sql").write_text(
        "alter table taskboard.jobs add column if not exists tag text not null default 'none';\n"
        "insert into taskboard.migrations (name) values ('9001_tag') on conflict do nothing;\n"
    )
    (folder / "migrations/9002_tag_index.sql").write_text(
        "-- transactional: false\n"
        "drop index concurrently if exists taskboard.jobs_tag;\n"  # half of one, from a failed try
        "create index concurrently jobs_tag on taskboard.jobs (tag);\n"
        "insert into taskboard.migrations (name) values ('9002_tag_index')"
        " on conflict do nothing;\n"
    )
    edit(
        made, "sql/install.sql",
        ("\\ir 00_dictionary.sql\n", "\\ir ../migrations/9001_tag.sql\n\\ir 00_dictionary.sql\n"),
        ("\ncommit;\n", "\ncommit;\n\\ir ../migrations/9002_tag_index.sql\n"),
    )  # fmt: skip
    dictionary = folder / "sql/00_dictionary.sql"
    dictionary.write_text(
        f"{dictionary.read_text()}\ncomment on column taskboard.jobs.tag is 'A word.';\n"
    )
    # An argument more is another function: the one before it goes, in the same transaction.
    edit(
        made, "sql/00_dropped.sql",
        ("    from (values\n",
         "    from (values\n      ('release(uuid, uuid, interval)', 'taskboard.given_back'),\n"),
    )  # fmt: skip
    edit(
        made, "sql/32_release.sql",
        ("delay interval default null)", "delay interval default null, reason text default null)"),
        ("release(uuid, uuid, interval) is", "release(uuid, uuid, interval, text) is"),
    )  # fmt: skip
    # A column more in a result: as well.
    edit(
        made, "sql/20_claim.sql",
        ("create or replace function taskboard.claim(",
         "do $$\nbegin\n"
         "  if not exists (select from pg_attribute as a where a.attname = 'tag'\n"
         "    and a.attrelid = 'taskboard.claimed'::regclass)\n  then\n"
         "    alter type taskboard.claimed add attribute tag text;\n  end if;\nend\n$$;\n"
         "create or replace function taskboard.claim("),
        ("j.run_at, j.created_at;", "j.run_at, j.created_at, j.tag;"),
    )  # fmt: skip
    return Version("a release to come", folder)


def edit(version: Version, file: str, *changes: tuple[str, str]) -> None:
    path = version.folder / file
    text = path.read_text(encoding="utf-8")
    for old, new in changes:
        assert text.count(old) == 1, f"{file} has this {text.count(old)} times, not once: {old}"
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
