"""W3C trace context, as a job's headers carry it from enqueue to its handler.

What is malformed counts as absent, as the standard has it: it is never a reason for a job to fail.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Version, trace, parent, flags; a later version than 00 may say more behind them.
PARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]*)?"
)
MEMBER = re.compile(r"[a-z0-9][a-z0-9_\-*/@]{0,255}=[ -+\--<>-~]{0,255}[!-+\--<>-~]")
MOST, MEMBERS_MOST = 512, 32  # characters; members of a list


def context(headers: Mapping[str, Any]) -> dict[str, str]:
    """Answer `traceparent`, and with it `tracestate`, as far as they are well formed."""
    parent, state = headers.get("traceparent"), headers.get("tracestate")
    if not isinstance(parent, str) or not is_parent(parent):
        return {}
    if not isinstance(state, str) or not is_state(state):
        return {"traceparent": parent}
    return {"traceparent": parent, "tracestate": state}


def is_parent(text: str) -> bool:
    found = PARENT.fullmatch(text[: MOST + 1])
    return found is not None and len(text) <= MOST and (found[1] != "00" or found[2] is None)


def is_state(text: str) -> bool:
    members = [member.strip(" \t") for member in text.split(",")]
    keys = [member.partition("=")[0] for member in members if member]
    return (
        0 < len(text) <= MOST
        and 0 < len(keys) <= MEMBERS_MOST
        and len(keys) == len(set(keys))
        and all(MEMBER.fullmatch(member) for member in members if member)
    )
