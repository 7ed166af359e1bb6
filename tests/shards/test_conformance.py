"""The conformance kit, played with a proxy in the place of a database."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import clients.kit
from clients.kit import play_script, play_worker
from shards.sharded import Sharded

pytestmark = pytest.mark.wide

HERE = Path(clients.kit.__file__).parent
# What is lost across shards, and nothing else.
LOST = {
    "require_lease raises TB001 and the transaction rolls back": "got [{",  # it has happened
    "many jobs are enqueued, renewed and completed in one call each": "expected",  # no row locked
    "a claim above read committed is refused and says so": "got {",  # the shard's own level counts
    "a listener is woken by somebody else's enqueue": "42883",  # nothing to listen to
}


def test_a_client_passes_the_kit_through_the_proxy_but_for_what_is_lost(sharded: Sharded) -> None:
    client = f"{sys.executable} {HERE}/python/client.py"
    outcomes = {one.name: one.fault for one in play_script(client, sharded.proxy)}
    faults = {name: fault for name, fault in outcomes.items() if fault}
    assert faults.keys() == LOST.keys(), faults
    assert all(LOST[name] in fault for name, fault in faults.items()), faults
    assert len(outcomes) > 25


def test_a_worker_passes_the_kit_through_the_proxy(sharded: Sharded) -> None:
    outcomes = play_worker(f"{sys.executable} {HERE}/python/worker.py", sharded.proxy)
    assert {one.name: one.fault for one in outcomes if one.fault} == {}
