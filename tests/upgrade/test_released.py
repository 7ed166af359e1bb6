"""What has been released is never edited."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import taskboard


def complaints(folder: Path) -> list[str]:
    """Hold a folder of migrations against its list of released ones."""
    listed = (folder / "released.sha256").read_text().splitlines()
    released = dict(reversed(line.split("  ", 1)) for line in listed if not line.startswith("#"))
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.glob("[0-9]*.sql")
    }
    wrong = [f"{name} is gone" for name in released.keys() - found.keys()]
    wrong += [f"{n} was edited" for n in released.keys() & found.keys() if released[n] != found[n]]
    last = max(released, default="")
    wrong += [f"{n} comes before {last}" for n in found.keys() - released.keys() if n < last]
    return sorted(wrong)


def test_no_released_migration_was_edited_removed_or_preceded() -> None:
    assert complaints(taskboard.MIGRATIONS) == []


def test_an_edit_of_a_released_migration_is_noticed(tmp_path: Path) -> None:
    for name in ("0001_a.sql", "0002_b.sql", "0004_d.sql"):
        (tmp_path / name).write_text(f"select '{name}';\n")
    lines = [
        f"{hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()}  {name}"
        for name in ("0001_a.sql", "0002_b.sql", "0004_d.sql")
    ]
    (tmp_path / "released.sha256").write_text("\n".join(["# As sha256sum prints them.", *lines]))
    (tmp_path / "0005_e.sql").touch()
    assert complaints(tmp_path) == []
    (tmp_path / "0002_b.sql").write_text("select '0002_b.sql' ;\n")
    (tmp_path / "0004_d.sql").unlink()
    (tmp_path / "0003_c.sql").touch()
    assert complaints(tmp_path) == [
        "0002_b.sql was edited", "0003_c.sql comes before 0004_d.sql", "0004_d.sql is gone",
    ]  # fmt: skip


def test_migrations_have_numbers_of_their_own() -> None:
    numbers = [re.match(r"\d{4}(?=_)", path.name) for path in taskboard.MIGRATIONS.glob("*.sql")]
    assert all(numbers) and len({match[0] for match in numbers if match}) == len(numbers)
