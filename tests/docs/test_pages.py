"""All pages: what they link to is there, and no block is of a kind that nothing runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.transcript import blocks

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("[a-z]*/*.md"), *ROOT.glob("sql/*/*.md")]
)
# By language: where blocks of it may stand, as a test of this folder runs or compares them there.
RUN = {
    "psql": {"README.md", "sql/TUTORIAL.md"},
    "sh": {"README.md"},
    "console": {"runner/OPERATIONS.md"},
    "python": {"README.md", "runner/README.md", "runner/BOARD.md"},
    "sql": {"README.md", "sql/SECURITY.md", "sql/shards/README.md"},
    "mermaid": {"sql/README.md"},
    "": {"README.md", "runner/README.md", "sql/shards/README.md"},  # drawings
}


def anchors(page: Path) -> set[str]:
    """The anchors that the forge makes of headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_links_to_is_there(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        found = (page.parent / name).resolve() if name else page
        if not found.exists() or (anchor and anchor not in anchors(found)):
            broken.append(target)
    assert broken == []


def test_each_block_is_of_a_kind_and_in_a_place_that_a_test_runs() -> None:
    stray = {
        (str(page.relative_to(ROOT)), block.language)
        for page in PAGES for block in blocks(page)
        if str(page.relative_to(ROOT)) not in RUN.get(block.language, set())
    }  # fmt: skip
    assert stray == set()


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
            ahead += [(page.parent / one).resolve() for one in links if "://" not in one]
    assert {str(page.relative_to(ROOT)) for page in set(PAGES) - reached} <= {"CHANGELOG.md"}
