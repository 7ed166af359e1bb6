"""Reads the fenced blocks of a Markdown file and plays its psql transcripts again."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
PROMPT, MORE = "taskboard=> ", "taskboard-> "
UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
INSTANT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?(?:[+-]\d\d(?::?\d\d)?)?")
SPAN = re.compile(r"(?<![\d:])\d\d:\d\d:\d\d(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block: its language and its text."""

    language: str
    text: str


@dataclass(frozen=True, slots=True)
class Step:
    """One statement of a transcript and the output that the document shows below it."""

    statement: str
    output: str


def blocks(document: Path) -> list[Block]:
    """Find the fenced blocks of a document, in order."""
    return [Block(*found) for found in FENCE.findall(document.read_text())]


def steps(block: Block) -> list[Step]:
    """Split a psql block; lines of `-- …` before a prompt are narration."""
    found: list[tuple[list[str], list[str]]] = []
    for line in block.text.splitlines():
        if line.startswith(PROMPT):
            found.append(([line.removeprefix(PROMPT)], []))
        elif line.startswith(MORE):
            found[-1][0].append(line.removeprefix(MORE))
        elif not line.startswith("-- "):
            found[-1][1].append(line)
    return [Step("\n".join(statement), "\n".join(output)) for statement, output in found]


def play(psql: str, dsn: str, transcript: list[Step]) -> list[str]:
    """Run the statements in one session; answer the output of each, errors among it."""
    mark = "--- end of step ---"
    script = "".join(f"{step.statement}\n\\echo {mark}\n" for step in transcript)
    done = subprocess.run(
        [psql, "-X", "-q", "-v", "VERBOSITY=default", dsn], input=script, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60, check=True,
    )  # fmt: skip
    return done.stdout.split(f"{mark}\n")[:-1]


def normal(text: str) -> str:
    """Blank out what differs from run to run: ids by order, dates, durations, widths."""
    seen: dict[str, str] = {}
    text = UUID.sub(lambda m: seen.setdefault(m[0], f"<id {len(seen) + 1}>"), text)
    text = SPAN.sub("<span>", INSTANT.sub("<instant>", text))
    text = re.sub(r"-{2,}", "--", re.sub(r"[ \t]+", " ", text))
    return "\n".join(line for line in map(str.strip, text.splitlines()) if line)
