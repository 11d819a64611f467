"""A draft leaves the decision when it does not fit, and comes back by evidence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alphaloop.store.drafts import DraftStatus
from scheduler.causes import Judged
from scheduler.events import status_changes
from scheduler.probe_history import ProbeHistory, ProbeSetup
from tests.fixtures.causes import FIRST, MARGIN, evidence, history, measured

TARGET_2 = replace(FIRST, target_revision="target-2")
STATUS_2 = ("small", "draft-1", "target-2")
HIGH, LOW = [16, 15, 17, 16, 15, 16], [8, 7, 9, 8, 7, 8]


def judged(probes: ProbeHistory) -> Judged:
    found = evidence(probes=probes)
    subject = replace(found.subject, task=probes.task)
    return Judged(replace(found, subject=subject), (), (), tuple(probes.steps()))


@pytest.mark.parametrize(
    ("status", "accepts", "becomes"),
    [
        (DraftStatus.ACTIVE, LOW, DraftStatus.STALE),
        (DraftStatus.ACTIVE, [15, 14, 16, 15, 14, 15], None),  # a flag, but no reason to do without it
        (DraftStatus.STALE, LOW, None),
        (DraftStatus.STALE, [10, 16, 11, 16, 15, 14], None),  # not shown to be back
        (DraftStatus.STALE, HIGH, DraftStatus.ACTIVE),
        (DraftStatus.RETIRED, LOW, None),
    ],
)
def test_a_status_changes_by_evidence(status: DraftStatus, accepts: list[int], becomes: DraftStatus | None) -> None:
    one = judged(history(measured(0, HIGH), measured(1, LOW, TARGET_2), measured(2, accepts, TARGET_2)))
    found = status_changes([one], {STATUS_2: status}, 0.1)
    assert [change.status for change in found] == ([becomes] if becomes else [])


def test_a_worse_new_draft_is_stale_from_its_first_probes() -> None:
    new = ProbeSetup("target-1", "draft-2", "engine-1")
    one = judged(history(measured(0, HIGH), measured(1, LOW, new)))
    (change,) = status_changes([one], {("small", "draft-2", "target-1"): DraftStatus.ACTIVE}, 0.1)
    assert (change.draft_revision, change.status) == ("draft-2", DraftStatus.STALE)
    assert change.reason == "alpha_1 fell by 0.40 (0.40 to 0.40) on 6 probe prompts of 1 task"


@pytest.mark.parametrize(
    "after", [FIRST, replace(FIRST, engine="engine-2"), ProbeSetup("target-2", "draft-1", "engine-2")]
)
def test_a_fault_or_another_engine_makes_no_draft_stale(after: ProbeSetup) -> None:
    one = judged(history(measured(0, HIGH), measured(1, LOW, after)))
    draft = ("small", after.draft_revision, after.target_revision)
    assert status_changes([one], {draft: DraftStatus.ACTIVE}, 0.1) == []


def test_a_status_is_judged_over_all_tasks() -> None:
    def task(name: str, accepts: list[int]) -> Judged:
        return judged(history(measured(0, HIGH, task=name), measured(1, accepts, TARGET_2, task=name), task=name))

    statuses = {STATUS_2: DraftStatus.ACTIVE}
    many = [task("code", [12] * 6), *(task(name, HIGH) for name in ("sql", "rag", "math", "chat"))]
    assert status_changes(many, statuses, 0.1) == []
    assert len(status_changes(many[:1], statuses, 0.1)) == 1


def test_nothing_is_known_of_a_draft_that_was_measured_once() -> None:
    assert (
        status_changes(
            [judged(history(measured(0, LOW)))], {("small", "draft-1", "target-1"): DraftStatus.ACTIVE}, MARGIN
        )
        == []
    )
