"""Every verb of the command but run and enqueue: for people, never imported by the worker.

`verbs.py` is the table of verbs and their SQL; `verb.py` runs a row of it. `doctor.py`,
`uninstall.py`, `upcoming.py`, `lines.py` and `shards.py` are the commands that are more than one
call.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from io import TextIOWrapper
from typing import Any

# Of the command's name, the function, a summary and an example.
AddCommand = Callable[[str, Any, str, str], argparse.ArgumentParser]


def register(command: AddCommand) -> None:
    """Add the console's commands to the command line."""
    from taskboard.console.verbs import VERBS

    for verb in VERBS:
        sub = command(verb.name, partial(_run, verb), verb.summary, verb.example)
        for flags, options in verb.arguments:
            sub.add_argument(*flags, **options)
        sub.add_argument("--json", action="store_true", help="print JSON")
        sub.add_argument("--show-sql", action="store_true", help="print the SQL, do nothing")


def _run(verb: Any, arguments: argparse.Namespace) -> int:
    from importlib import import_module

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # whatever this terminal can show
    module = import_module(f"taskboard.console.{verb.module}")
    code: int = module.run(verb, arguments)
    return code
