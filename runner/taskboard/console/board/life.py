"""A job's life in order of time, of what is stored about it: its row, its effects, its incidents.

Nothing is filled in. What happens in the ordinary course leaves no trace but its last: of all
claims the last one, of all renewals the present deadline.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

Row = dict[str, Any]

# What incidents are called, and how they look.
INCIDENTS = {
    "write_refused": ("A write was refused", "bad"),
    "lease_lapsed": ("A lease lapsed", "bad"),
    "job_held": ("Held: an outcome is unknown", "held"),
    "evidence_arrived": ("Late evidence about an effect", "good"),
    "job_exhausted": ("Given up", "bad"),
    "job_resolved": ("Resolved by a person", "act"),
    "job_retried": ("Retried by a person", "act"),
    "job_cancelled": ("Cancelled", "act"),
    "cancel_requested": ("Asked to stop", "act"),
    "worker_evicted": ("Worker evicted", "act"),
    "queue_paused": ("Queue paused", "act"),
    "queue_resumed": ("Queue resumed", "act"),
    "queue_limited": ("Queue limited", "act"),
}
ENDS = {"completed": "good", "failed": "bad", "cancelled": "act"}
NOT_KEPT = (
    "Kept are the last claim, the present deadline, effects, and what went wrong or what people"
    " did. Not kept: when earlier attempts were claimed and ended, unless a lease lapsed, and each"
    " single renewal."
)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that has happened, or, if `ahead`, is to happen unless something else does."""

    at: datetime
    title: str
    detail: str = ""
    who: str = ""
    tone: str = ""
    ahead: bool = False


def events(job: Row, effects: list[Row], incidents: list[Row], now: datetime) -> list[Event]:
    """Put all that is known of a job in order."""
    found = list(of_job(job, now))
    for effect in effects:
        found += of_effect(effect)
    for incident in incidents:
        title, tone = INCIDENTS.get(incident["what"], (incident["what"], ""))
        worker = incident["worker"]
        who = f"of {worker}" if worker else f"by login {incident['by_role']}"
        found.append(Event(incident["happened_at"], title, incident["detail"] or "", who, tone))
    return sorted(found, key=lambda event: event.at)


def of_job(job: Row, now: datetime) -> list[Event]:
    """Make events of the dates in a job's own row."""
    found = [Event(job["created_at"], "Enqueued", f"{job['kind']} in {job['queue']}")]
    if job["run_at"] - job["created_at"] > timedelta(seconds=1):
        at = job["run_at"]
        found.append(Event(at, "Due", "the time that was asked for", ahead=at > now))
    if job["claimed_at"]:
        detail = f"attempt {job['attempt']}"
        if job["lapsed_by"]:
            detail += f", taken over from {job['lapsed_by']}, whose lease had lapsed"
        who = f"by {job['worker']}" if job["worker"] else ""
        found.append(Event(job["claimed_at"], "Claimed, the last time", detail, who))
    if job["cancel_requested_at"]:
        found.append(
            Event(job["cancel_requested_at"], "Stop requested", "until the next renewal", "", "act")
        )
    if job["claimable_at"]:
        at, state = job["claimable_at"], job["state"]
        title = {
            "running": "The lease ends, unless it is renewed",
            "expired": "The lease has ended: anybody may claim",
            "scheduled": "May be claimed",
        }.get(state)
        if title:
            found.append(Event(at, title, ahead=at > now, tone="bad" if state == "expired" else ""))
    if job["finished_at"]:
        state = job["state"]
        who = f"by {job['worker']}" if job["worker"] else ""
        found.append(Event(job["finished_at"], state.capitalize(), "", who, ENDS[state]))
    return found


def of_effect(effect: Row) -> list[Event]:
    """Make events of a step that an attempt began."""
    name = f"Effect {effect['step']}"
    attempt = f"attempt {effect['attempt']}"
    begun = Event(effect["begun_at"], f"{name} begun", attempt, "", "effect")
    if effect["ended_at"] is None:
        return [begun]
    done = effect["state"] == "done"
    said = "took place" if done else "did not happen"
    tone = "good" if done else "bad"
    return [begun, Event(effect["ended_at"], f"{name} {said}", attempt, "", tone)]
