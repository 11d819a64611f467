"""When the stories are told rightly, from made events."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from alphaloop.measurements import DriftSubject
from alphaloop.store.decision_inputs import DraftRevision, DraftStatus
from alphaloop.store.drift import DriftEvent, EventContent, Incident, IncidentKind, KnownIncident
from tests.stories.prompts import CHANGED, DRAFTED, DROPPED, WORN
from tests.stories.told import LOOKUP, SMALL, Story, judge_stories

NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)
TARGET = "second"
RIGHT = ((DRAFTED, SMALL, "draft_stale"), (CHANGED, LOOKUP, "traffic_changed"), (WORN, LOOKUP, "fault"))


def event(task: str, drafter: str, cause: str) -> DriftEvent:
    content = EventContent(DriftSubject(task, drafter, "r", TARGET), cause, "told", "act", {}, None, None, None)
    return DriftEvent(1, content, NOW, NOW, None, None, None, None, None, None, 0)


def incident(task: str) -> KnownIncident:
    found = Incident(IncidentKind.WRONG_TEXT, task, LOOKUP, "r", TARGET, "engine", ("job",), "told", {})
    return KnownIncident(1, found, NOW)


def judged(*named: tuple[str, str, str], wrong: tuple[str, ...] = (DROPPED,), status: str = "stale") -> list[Story]:
    report: dict[str, Any] = {
        "drift": [{"task": task, "drafter": drafter, "cause": cause} for task, drafter, cause in named],
        "changes": {"lines": []},
        "incidents": [{"task": task} for task in wrong],
    }
    draft = DraftRevision(SMALL, "r", TARGET, DraftStatus(status), "told", NOW, NOW)
    return judge_stories([event(*one) for one in named], [incident(task) for task in wrong], [draft], report, TARGET)


@pytest.mark.parametrize("also", [(), ((WORN, SMALL, "draft_stale"),)], ids=["alone", "in other tasks too"])
def test_four_rightly_named_stories_are_right(also: tuple[tuple[str, str, str], ...]) -> None:
    assert all(story.is_right for story in judged(*RIGHT, *also))


@pytest.mark.parametrize("number", range(3))
def test_a_story_that_is_not_told_is_wrong(number: int) -> None:
    stories = judged(*(one for i, one in enumerate(RIGHT) if i != number))
    assert sum(not story.is_right for story in stories) == 1


@pytest.mark.parametrize("cause", ["too_little_evidence", "fault", "mix_shift"])
def test_another_cause_is_wrong_and_named(cause: str) -> None:
    stories = judged(RIGHT[0], (CHANGED, LOOKUP, cause), RIGHT[2])
    assert [story.name for story in stories if not story.is_right] == ["code becomes tales", "nothing else"]
    assert cause in stories[-1].told


def test_a_draft_that_stays_in_use_is_wrong() -> None:
    assert [story.name for story in judged(*RIGHT, status="active") if not story.is_right] == ["changed target"]


def test_an_incident_elsewhere_or_none_at_all_is_wrong() -> None:
    assert [story.name for story in judged(*RIGHT, wrong=()) if not story.is_right] == ["dropped token"]
    assert [story.name for story in judged(*RIGHT, wrong=(DROPPED, CHANGED)) if not story.is_right] == ["nothing else"]
