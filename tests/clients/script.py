"""Plays the cases of script.json with clients, and tells in which step one answered wrongly."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from psycopg import Connection
from psycopg.rows import dict_row

from clients.client import Client, Silent

SCRIPT = json.loads((Path(__file__).parent / "script.json").read_text())
COLUMNS: dict[str, list[str]] = SCRIPT["columns"]
CASES: dict[str, list[dict[str, Any]]] = {case["name"]: case["steps"] for case in SCRIPT["cases"]}
YES, NO = (True, 1, "1", "t", "true"), (False, 0, "0", "f", "false")
PATIENCE = 30.0  # seconds for what comes by itself


class Wrong(AssertionError):
    """A step was not answered as the script says."""


class Play:
    """One case: its clients, its queue, and what was remembered."""

    def __init__(self, kit: Connection[Any], client: Callable[[str], Client], queue: str) -> None:
        self._kit, self._client = kit, client
        self.known = {"queue": queue, "worker": f"w-{uuid4()}"}
        self.known |= {"page": "0123456789" * 1_000, "long": "0123456789" * 100_000}

    def play(self, steps: list[dict[str, Any]]) -> None:
        for number, step in enumerate(steps, 1):
            try:
                for _ in range(step.get("times", 1)):
                    self._play(step)
            except (Wrong, Silent) as exc:
                raise Wrong(f"step {number}, {headline(step)}: {exc}") from exc

    def _play(self, step: Mapping[str, Any]) -> None:
        if "until" in step:
            self._until(self.fill(step["job"]), step["until"])
        elif "until_true" in step:
            self._until_true(step)
        elif "look" in step:
            with self._kit.cursor(row_factory=dict_row) as cursor:
                found = cursor.execute(self.fill(step["look"])).fetchall()
            self._compare(step, {"rows": found})
        elif "wait" in step:
            client = self._client(step["as"])
            client.send({"wait": step["wait"]})
            self._play(step["meanwhile"])
            self._compare(step, client.answer())
        else:
            self._compare(step, self._client(step["as"]).ask(self._request(step)))

    def _request(self, step: Mapping[str, Any]) -> dict[str, Any]:
        if "run" in step:
            return {"run": step["run"]}
        return {"call": step["call"], "args": self.fill(step["args"])}

    def _until(self, job: str, state: str) -> None:
        """Wait for a state by the database's clock: no client looks at one of its own."""
        deadline, seen = time.monotonic() + PATIENCE, ""
        while seen != state:
            if time.monotonic() > deadline:
                raise Wrong(f"the job is {seen} for {PATIENCE:g} s")
            time.sleep(0.005)
            ((seen,),) = self._kit.execute("select state from taskboard.job(%s)", [job]).fetchall()

    def _until_true(self, step: Mapping[str, Any]) -> None:
        call, deadline = step["until_true"], time.monotonic() + PATIENCE
        request = {"call": call, "args": self.fill(step["args"])}
        while True:
            found = self._client(step["as"]).ask(request)
            if any(row.get(call) in YES for row in found.get("rows") or []):
                return
            if "rows" not in found or time.monotonic() > deadline:
                raise Wrong(f"expected true, got {short(found)}")
            time.sleep(0.05)

    def _compare(self, step: Mapping[str, Any], found: dict[str, Any]) -> None:
        if "notified" in step:
            if found.get("notified") is not step["notified"]:
                raise Wrong(f"expected to be notified, got {short(found)}")
        elif "error" in step:
            if (found.get("error") or {}).get("sqlstate") != step["error"]:
                raise Wrong(f"expected error {step['error']}, got {short(found)}")
        elif not is_rows(found.get("rows")):
            raise Wrong(f"expected rows, got {short(found)}")
        elif "rows" in step:
            self._compare_rows(step, found["rows"])
        self._keep(step, found)

    def _compare_rows(self, step: Mapping[str, Any], found: list[dict[str, Any]]) -> None:
        expected = self.fill(step["rows"])
        for row in found if "call" in step else ():
            if set(row) != set(COLUMNS[step["call"]]):
                raise Wrong(f"expected columns {COLUMNS[step['call']]}, got {list(row)}")
        pairs = list(zip(expected, found, strict=False))
        if step.get("any_order"):
            key = next(iter(expected[0]))
            by = {str(row[key]): row for row in found}
            pairs = [(row, by.get(str(row[key]), {})) for row in expected]
        if len(expected) != len(found) or not all(fits(want, row) for want, row in pairs):
            raise Wrong(f"expected {amount(expected)}, got {amount(found)}")

    def _keep(self, step: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        for name, place in step.get("keep", {}).items():
            number, _, column = place.rpartition(".")
            self.known[name] = str(found["rows"][int(number or 0)][column])

    def fill(self, value: Any) -> Any:
        """Put what is known in the place of $names."""
        if isinstance(value, str):
            return re.sub(r"\$(\w+)", lambda m: self.known.get(m[1], m[0]), value)
        if isinstance(value, dict):
            return {name: self.fill(one) for name, one in value.items()}
        return [self.fill(one) for one in value] if isinstance(value, list) else value


def fits(expected: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Whether a row has all that is expected of it."""
    return all(name in row and same(value, row[name]) for name, value in expected.items())


def same(expected: Any, found: Any) -> bool:
    """Whether a client's value is the expected one: as JSON has it, or as a text."""
    match expected:
        case {"not": other}:
            return found is not None and not same(other, found)
        case {"json": document}:
            return exact(document) in (exact(found), canonical(found))
        case None:
            return found is None
        case bool():
            return found in (YES if expected else NO)
        case "<uuid>":
            return is_uuid(found)
        case "<time>":
            return isinstance(found, str) and bool(re.match(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d", found))
        case "<text>":
            return isinstance(found, str) and found != ""
    return str(expected) == str(found)


def exact(document: Any) -> str:
    """A document by which two can be told apart to the last digit."""
    return json.dumps(document, sort_keys=True)


def canonical(text: Any) -> str | None:
    """The same of a document that came as a text."""
    try:
        return exact(json.loads(text))
    except (TypeError, ValueError):
        return None


def is_rows(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(row, dict) for row in found)


def is_uuid(found: Any) -> bool:
    try:
        return str(UUID(found)) == found
    except (TypeError, ValueError, AttributeError):
        return False


def headline(step: Mapping[str, Any]) -> str:
    kinds = ("call", "run", "until_true", "wait", "until", "look")
    return f"{step.get('as', 'the kit')}: {next(step[kind] for kind in kinds if kind in step)}"


def amount(rows: list[Any]) -> str:
    return short(rows) if rows else "zero rows"


def short(found: Any) -> str:
    text = json.dumps(found, ensure_ascii=False, default=str)
    return text if len(text) <= 400 else f"{text[:400]} …"
