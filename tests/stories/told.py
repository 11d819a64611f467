"""What the last report must say of the four stories, and what it says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from alphaloop.store.decision_inputs import DraftRevision, DraftStatus
from alphaloop.store.drift import DriftEvent, KnownIncident
from scheduler.causes import Cause
from tests.stories.prompts import CHANGED, DRAFTED, DROPPED, WORN

LOOKUP, SMALL = "lookup", "small"
_RIGHT: Final = {
    (CHANGED, LOOKUP): {Cause.TRAFFIC_CHANGED},
    (WORN, LOOKUP): {Cause.FAULT},
}


@dataclass(frozen=True, slots=True)
class Story:
    """One story: what it must end as, and what was told of it."""

    name: str
    expected: str
    told: str
    is_right: bool


def judge_stories(
    events: Sequence[DriftEvent],
    incidents: Sequence[KnownIncident],
    drafts: Sequence[DraftRevision],
    report: Mapping[str, Any],
    target: str,
) -> list[Story]:
    """The four stories, and a fifth line for whatever else was named. `target` is the second target's revision."""
    stale = [e for e in _about(events, DRAFTED, SMALL) if e.cause == Cause.DRAFT_STALE and e.closed_at is None]
    is_out = any(d.drafter == SMALL and d.target_revision == target and d.status is DraftStatus.STALE for d in drafts)
    moved = [e for e in _about(events, CHANGED, LOOKUP) if e.cause == Cause.TRAFFIC_CHANGED and e.closed_at is None]
    faults = [e for e in _about(events, WORN, LOOKUP) if e.cause == Cause.FAULT]
    wrong = [one for one in incidents if one.found.task == DROPPED]
    shown = {(line["task"], line["drafter"], line["cause"]) for line in report["drift"]}
    changes = " ".join(line["sentence"] for line in report["changes"]["lines"])
    return [
        Story(
            "changed target",
            "draft_stale, the draft stale",
            _told(_about(events, DRAFTED, SMALL)) + (", the draft stale" if is_out else ", the draft in use"),
            bool(stale) and is_out and (DRAFTED, SMALL, Cause.DRAFT_STALE) in shown,
        ),
        Story(
            "code becomes tales",
            "traffic_changed",
            _told(_about(events, CHANGED, LOOKUP)),
            bool(moved) and (CHANGED, LOOKUP, Cause.TRAFFIC_CHANGED) in shown,
        ),
        Story(
            "dropped token",
            "an incident",
            ", ".join(f"{one.found.kind}, {one.found.drafter}" for one in wrong) or "nothing",
            any(one.found.drafter == LOOKUP for one in wrong)
            and any(line["task"] == DROPPED for line in report["incidents"]),
        ),
        Story(
            "worn engine, healed by a restart",
            "fault",
            _told(_about(events, WORN, LOOKUP)),
            bool(faults) and ((WORN, LOOKUP, Cause.FAULT) in shown or f"{WORN}, {LOOKUP}: flag" in changes),
        ),
        _others(events, incidents),
    ]


def _others(events: Sequence[DriftEvent], incidents: Sequence[KnownIncident]) -> Story:
    """Nothing else may be named, but that the new target fits the drafts less in other tasks too."""
    named = [
        event
        for event in events
        if event.cause != Cause.DRAFT_STALE
        and event.cause not in _RIGHT.get((event.subject.task, event.subject.drafter), set())
    ]
    strange = [one for one in incidents if one.found.task != DROPPED]
    told = _told(named) if named or not strange else ""
    told += ", ".join(f"{one.found.kind} in {one.found.task}" for one in strange)
    return Story("nothing else", "nothing", told, not named and not strange)


def _about(events: Sequence[DriftEvent], task: str, drafter: str) -> list[DriftEvent]:
    return [e for e in events if (e.subject.task, e.subject.drafter) == (task, drafter)]


def _told(events: Sequence[DriftEvent]) -> str:
    return ", ".join(f"{e.subject.task}/{e.subject.drafter} {e.cause} {e.state}" for e in events) or "nothing"
