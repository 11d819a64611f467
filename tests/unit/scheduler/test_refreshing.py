"""Which drafters a run has trained anew, and how trials end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from alphaloop.acceptance import Interval
from alphaloop.deciding.goodput import DrafterState
from alphaloop.experiment.figures import TaskSpeedup, task_speedup
from alphaloop.explaining.refreshing import mean_gain, trial_gains
from alphaloop.settings.models import (
    HeadsDrafterSettings,
    HybridDrafterSettings,
    LookupDrafterSettings,
    ModelSettings,
)
from alphaloop.store.decision_inputs import DraftStatus
from alphaloop.store.refreshes import Refresh, RefreshReason, RefreshState
from alphaloop.store.workers import SeenWorker, WorkerLoad
from scheduler.refreshing import (
    COOL_DOWN,
    MOST_JOBS,
    DueRefresh,
    EndedTrial,
    due_refreshes,
    ended_trials,
    replaced_parents,
)
from tests.fixtures.deciding import SETUP
from tests.fixtures.runs import block_rows, subject

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


BOTH = HybridDrafterSettings(sources=("lookup", "heads"), most_tokens={"heads": 2})
WITH_HYBRID = MODELS.model_copy(update={"drafters": {**MODELS.drafters, "both": BOTH}})
TRIAL = replace(ENDED, state=RefreshState.TRIAL)
SLICES = [row.slice for row in block_rows(subject(), NOW, 2)]


def rival(drafter: str, against: str, gain: float, *, task: str = "code", width: float = 0.02) -> TaskSpeedup:
    of = replace(subject(task, drafter=drafter), target_revision="target-1")
    computed = task_speedup(of, SLICES, NOW, against)
    return replace(computed, speedup=Interval(gain, gain * (1 - width), gain * (1 + width)))


def ended(
    speedups: Sequence[TaskSpeedup],
    choices: Mapping[str, str | None],
    num_jobs: int = 0,
    *,
    status: DraftStatus = DraftStatus.ACTIVE,
) -> list[EndedTrial]:
    known = [ENDED, TRIAL]
    return list(ended_trials(WITH_HYBRID, known, {HEADS: status}, speedups, choices, lambda refresh: num_jobs))


def test_a_trial_is_decided_by_its_gain_over_all_tasks_or_by_its_jobs() -> None:
    assert ended([], {"code": "heads-2"}) == []
    assert ended([rival("heads-2", "heads", 1.01)], {"code": "heads-2"}) == [], "its interval holds 1"
    (kept,) = ended([rival("heads-2", "heads", 1.1)], {"sql": None, "code": "heads-2"}, num_jobs=40)
    assert (kept.refresh, kept.state) == (TRIAL, RefreshState.KEPT)
    assert kept.sentence == "code uses it after 40 jobs; 1.10× [1.08 1.12] over heads"
    (rejected,) = ended([], {"code": "heads"}, num_jobs=MOST_JOBS)
    assert (rejected.state, rejected.sentence) == (RefreshState.REJECTED, "no task uses it after 2,000 jobs")


def test_the_parent_on_trial_and_hybrids_that_ask_either_count_too() -> None:
    slower = [rival("heads", "heads-2", 1.2, task="sql"), rival("both-2", "both", 0.9)]
    (rejected,) = ended(slower, {"code": "both"})
    assert rejected.state is RefreshState.REJECTED
    gains = trial_gains(WITH_HYBRID, TRIAL, slower)
    assert {task: round(gain.speedup.mean, 3) for task, gain in gains.items()} == {"code": 0.9, "sql": 0.833}
    assert gains["sql"].speedup.low < gains["sql"].speedup.mean < gains["sql"].speedup.high
    (kept,) = ended([rival("both-2", "both", 1.2)], {"code": "both-2"})
    assert kept.state is RefreshState.KEPT
    for unlike in (rival("heads-2", "lookup", 1.2), rival("heads-3", "heads-2", 1.2)):
        assert ended([unlike], {"code": "heads-2"}) == [], "these are no pair of this trial"
    elsewhere = rival("heads-2", "heads", 1.2)
    elsewhere = replace(elsewhere, subject=replace(elsewhere.subject, target_revision="target-2"))
    assert ended([elsewhere], {"code": "heads-2"}) == []


def test_beside_a_stale_parent_a_candidate_is_compared_with_vanilla() -> None:
    faster = [rival("heads-2", "", 1.3), rival("both-2", "", 1.2, task="sql"), rival("lookup", "", 0.5)]
    assert ended(faster, {"code": "heads-2"}) == [], "the parent drafts, so it is what the candidate is compared with"
    (kept,) = ended(faster, {"code": "heads-2"}, status=DraftStatus.STALE)
    assert kept.sentence == "code uses it after 0 jobs; 1.25× [1.23 1.27] over vanilla"
    compared = [*faster, rival("heads-2", "heads", 0.9)]
    (rejected,) = ended(compared, {"code": "lookup"}, status=DraftStatus.STALE)
    assert rejected.sentence == "no task uses it after 0 jobs; 0.90× [0.88 0.92] over heads", "while it still drafted"


def test_the_mean_gain_of_tasks_is_as_wide_as_what_it_rests_on() -> None:
    gains = trial_gains(
        WITH_HYBRID, TRIAL, [rival("heads-2", "heads", 1.1, task=task) for task in ("a", "b", "c", "d")]
    )
    mean = mean_gain(gains.values())
    assert mean is not None
    assert mean.mean == pytest.approx(1.1)
    assert math.log(mean.high / mean.mean) == pytest.approx(math.log(1.02) / 2), "four equal and independent ones"
    assert mean_gain([]) is None


def test_a_candidate_that_no_worker_could_load_is_rejected_with_the_reason() -> None:
    unloaded = replace(TRIAL, sentence="not loaded: no memory")
    (rejected,) = ended_trials(MODELS, [unloaded], {}, [], {"code": "heads"}, lambda refresh: MOST_JOBS)
    assert rejected.sentence == "no task uses it after 2,000 jobs; not loaded: no memory"


@pytest.mark.parametrize(
    ("changes", "statuses", "choices", "is_retired"),
    [
        ({}, {}, {"code": "heads-2"}, True),
        ({}, {}, {"code": "heads-2", "sql": "heads"}, False),
        ({}, {}, {"code": "both"}, False),
        ({"changed_at": NOW - COOL_DOWN + timedelta(seconds=1)}, {}, {"code": "heads-2"}, False),
        ({"state": RefreshState.REJECTED}, {}, {}, False),
        ({}, {"heads-2": DraftStatus.STALE}, {}, False),
        ({}, {"heads-2": DraftStatus.CANDIDATE}, {}, False),
        ({}, {"heads": DraftStatus.RETIRED}, {}, False),
        ({}, {"heads": DraftStatus.STALE}, {"code": "heads-2"}, True),
    ],
)
def test_a_parent_is_retired_a_day_after_no_task_needs_it(
    changes: dict[str, Any], statuses: dict[str, DraftStatus], choices: dict[str, str], is_retired: bool
) -> None:
    known = {
        HEADS: statuses.get("heads", DraftStatus.ACTIVE),
        ("heads-2", "h2", "target-1"): statuses.get("heads-2", DraftStatus.ACTIVE),
    }
    kept = replace(ENDED, **{"state": RefreshState.KEPT, **changes})
    found = list(replaced_parents(WITH_HYBRID, [kept], known, choices, NOW))
    assert found == ([(HEADS, "no task uses it since heads-2 was kept")] if is_retired else [])
