"""Which drafters a run has trained anew."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from alphaloop.deciding.goodput import DrafterState
from alphaloop.settings.models import HeadsDrafterSettings, LookupDrafterSettings, ModelSettings
from alphaloop.store.decision_inputs import DraftStatus
from alphaloop.store.refreshes import Refresh, RefreshReason, RefreshState
from alphaloop.store.workers import SeenWorker, WorkerLoad
from scheduler.refreshing import COOL_DOWN, DueRefresh, due_refreshes
from tests.fixtures.deciding import SETUP

NOW = datetime(2026, 1, 8, tzinfo=UTC)
MODELS = ModelSettings(
    drafters={"heads": HeadsDrafterSettings(source="drafts/heads"), "lookup": LookupDrafterSettings()}
)
HEADS = ("heads", "h1", "target-1")
NEW = DueRefresh("heads", "target-1", "h1", RefreshReason.NEW_TARGET)
STALE = replace(NEW, reason=RefreshReason.DRAFT_STALE)
ENDED = Refresh(
    id=1,
    drafter="heads",
    target_revision="target-1",
    parent_draft_revision="h1",
    reason=RefreshReason.NEW_TARGET,
    state=RefreshState.FAILED,
    attempt=1,
    lease_owner=None,
    lease_expires_at=None,
    device_s=0.0,
    figures=None,
    sentence="",
    candidate_name="heads-2",
    candidate_revision="h2",
    location="file:///drafts/h2",
    opened_at=NOW - 2 * COOL_DOWN,
    changed_at=NOW - COOL_DOWN,
)


def worker(trained_for: str, *, name: str = "heads", silence_s: float = 1.0) -> SeenWorker:
    setup = replace(SETUP, drafters=(DrafterState(name, "h1", 4, trained_for=trained_for),))
    load = WorkerLoad("w", "cpu", "a-target", 1, 0, 0, {}, setup=setup)
    return SeenWorker(load, NOW, NOW, timedelta(seconds=silence_s))


def due(
    seen: SeenWorker, *known: Refresh, status: DraftStatus = DraftStatus.ACTIVE, candidate: DraftStatus | None = None
) -> list[DueRefresh]:
    statuses = {HEADS: status} | ({("heads-2", "h2", "target-1"): candidate} if candidate else {})
    return list(due_refreshes(MODELS, [seen, seen], statuses, known, NOW))


def test_heads_are_trained_for_a_target_that_they_were_not_trained_for() -> None:
    assert due(worker("target-0")) == [NEW], "once, however many workers serve it"
    assert due(worker("target-1")) == []
    assert due(worker("")) == [], "their files do not say what they were trained for"
    assert due(worker("target-0", silence_s=60)) == [], "no worker serves it now"
    assert due(worker("target-0", name="lookup")) == [], "it has no weights"
    assert due(worker("target-0"), status=DraftStatus.RETIRED) == []


def test_a_stale_draft_is_trained_anew_whatever_it_was_trained_for() -> None:
    assert due(worker("target-1"), status=DraftStatus.STALE) == [STALE]
    assert due(worker("target-0"), status=DraftStatus.STALE) == [STALE]


@pytest.mark.parametrize("status", [DraftStatus.ACTIVE, DraftStatus.STALE])
@pytest.mark.parametrize("state", [RefreshState.WAITING, RefreshState.TRAINING, RefreshState.TRIAL])
def test_there_is_one_at_a_time(status: DraftStatus, state: RefreshState) -> None:
    assert due(worker("target-0"), replace(ENDED, state=state), status=status) == []
    assert due(worker("target-0"), replace(ENDED, state=state, target_revision="target-2"), status=status) != []


def test_a_day_lies_between_two() -> None:
    assert due(worker("target-0"), ENDED) == [NEW]
    assert due(worker("target-0"), replace(ENDED, changed_at=NOW - COOL_DOWN + timedelta(seconds=1))) == []


@pytest.mark.parametrize("state", [RefreshState.REJECTED, RefreshState.CANCELLED])
def test_what_would_give_the_same_result_is_not_tried_again(state: RefreshState) -> None:
    ended = replace(ENDED, state=state)
    assert due(worker("target-0"), ended) == []
    assert due(worker("target-0"), replace(ended, parent_draft_revision="h0")) == [NEW], "other weights were tried"
    assert due(worker("target-0"), ended, status=DraftStatus.STALE) == [STALE], "there are other texts by now"


def test_a_kept_candidate_serves_until_it_no_longer_fits() -> None:
    kept = replace(ENDED, state=RefreshState.KEPT)
    assert due(worker("target-0"), kept, candidate=DraftStatus.ACTIVE) == []
    assert due(worker("target-0"), kept, status=DraftStatus.STALE, candidate=DraftStatus.ACTIVE) == []
    assert due(worker("target-0"), kept, status=DraftStatus.STALE, candidate=DraftStatus.STALE) == [STALE]
    assert due(worker("target-0"), kept, candidate=DraftStatus.RETIRED) == [NEW]
