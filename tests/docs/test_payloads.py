"""The payloads of the built-in kinds: the page names every part, and what is shown is taken."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from taskboard.handlers import Job
from taskboard.mail import FIELD, MailSettings, compose
from taskboard.stripe_calls import OPERATIONS, read_payload

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "runner/README.md").read_text()
SECTION = PAGE.partition("## Payloads of the built-in kinds")[2].partition("\n## ")[0]
SHOWN = re.compile(r"(?:enqueue(?:\('| )(email|stripe)(?:',)?|\\set (charge)) '(\{.*?\})'")
SERVER = MailSettings.from_url("smtp://127.0.0.1", "Shop <shop@example.com>, ann@example.com")


def take(kind: str, payload: Any) -> None:
    """Do with a payload what its handler does first; raises what that would."""
    minute = timedelta(minutes=1)
    job = Job(uuid4(), "default", kind, payload, 1, 20, 0, minute, minute)
    compose(job, SERVER) if kind == "email" else read_payload(job)


def test_each_field_of_a_mail_is_named_and_its_example_is_taken() -> None:
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| `(.+?)` \| [^|]+ \|$", SECTION, re.M)
    fields = {name: json.loads(example) for name, example in rows}
    assert [*fields] == FIELD.pattern.split("|")
    take("email", fields)
    take("email", {"to": fields["to"]})


def test_each_operation_is_named_and_the_example_is_taken() -> None:
    assert {*re.findall(r"`([a-z_]+\.[a-z]+)`", SECTION)} == {*OPERATIONS}
    for example in re.findall(r"`(\{\"operation.*?\})`", SECTION):
        take("stripe", json.loads(example))


@pytest.mark.parametrize("name", ["README.md", "runner/OPERATIONS.md"])
def test_what_is_enqueued_for_a_built_in_kind_is_taken_by_its_handler(name: str) -> None:
    shown = SHOWN.findall((ROOT / name).read_text())
    assert shown
    for kind, other, payload in shown:
        take(kind or other, json.loads(payload))


def test_the_readme_leads_to_them_near_its_top() -> None:
    top = "\n".join((ROOT / "README.md").read_text().splitlines()[:15])
    assert "(runner/README.md#payloads-of-the-built-in-kinds)" in top
