"""Reads `console` blocks of a Markdown file and runs their commands again, in one shell."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from docs.transcript import Step, blocks

PROMPT, MORE, MARK = "$ ", "> ", "--- end of command ---"


def commands(document: Path) -> list[Step]:
    """Find the commands of a document, and the output that it shows below each."""
    found: list[tuple[list[str], list[str]]] = []
    for block in blocks(document):
        for line in block.text.splitlines() if block.language == "console" else ():
            if line.startswith(PROMPT):
                found.append(([line.removeprefix(PROMPT)], []))
            elif line.startswith(MORE) and not found[-1][1]:
                found[-1][0].append(line.removeprefix(MORE))
            else:
                found[-1][1].append(line)
    return [Step("\n".join(command), "\n".join(output)) for command, output in found]


def run(steps: list[Step], folder: Path, environment: Mapping[str, str]) -> list[str]:
    """Run commands in a folder; answer the output of each, of both streams."""
    script = "".join(f"{step.statement}\necho '{MARK}'\n" for step in steps)
    done = subprocess.run(
        ["bash", "-u"], cwd=folder, env=environment, input=script, text=True, timeout=120,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True,
    )  # fmt: skip
    return done.stdout.split(f"{MARK}\n")[:-1]


def squeezed(text: str) -> str:
    """Leave out what differs in width, and empty lines."""
    return "\n".join(re.sub(r" +", " ", line).strip() for line in text.splitlines() if line.strip())
