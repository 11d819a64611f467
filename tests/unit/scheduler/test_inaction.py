"""What a fall costs while nobody acts: from measured speed-ups, else from what is expected, else not known."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import pytest

from alphaloop.acceptance import Interval
from alphaloop.switchback.speedup import Verdict
from alphaloop.switchback.task_speedup import Subject, TaskSpeedup
from scheduler.causes import Cause, DriftFinding
from scheduler.counts import SettingInForce
from scheduler.drift.watching import State
from scheduler.events import TaskPace, lost_tokens_per_s
from tests.fixtures.causes import SUBJECT, day, jobs

FELL = DriftFinding(SUBJECT, Cause.FAULT, "It fell.", "Look.", day(8), day(9), jobs(), None, None)
SPECULATIVE = SettingInForce("speculative", "small", 3, "faster", "")
VANILLA = SettingInForce("vanilla", None, 0, "not_faster", "")


def speedup(mean: float, since: datetime, drafter: str = "small") -> TaskSpeedup:
    subject = Subject("code", "greedy", "target-1", "engine-1", "host", "cpu", drafter, "draft-1")
    bounds = Interval(mean, mean - 0.1, mean + 0.1)
    return TaskSpeedup(
        subject,
        min_num_draft_tokens=3,
        max_num_draft_tokens=3,
        mean_running=4.0,
        mean_context=200.0,
        num_tokens=1000,
        sequence_s=10.0,
        num_blocks=12,
        num_control_rounds=100,
        control_share=0.05,
        speedup=bounds,
        verdict=Verdict.FASTER,
        covers_from=since,
        covers_to=since,
        computed_at=since,
    )


def test_measured_speed_ups_are_taken_where_both_are_known() -> None:
    pace = TaskPace(100.0, SPECULATIVE, speedup(1.8, day(7)), speedup(1.2, day(9.5)))
    assert lost_tokens_per_s(FELL, pace) == pytest.approx(50.0)


def test_a_task_that_is_vanilla_now_loses_the_whole_speed_up() -> None:
    assert lost_tokens_per_s(FELL, TaskPace(100.0, VANILLA, speedup(1.8, day(7)), None)) == pytest.approx(80.0)


@pytest.mark.parametrize("now", [None, speedup(1.2, day(8.5)), speedup(1.2, day(9.5), "lookup")])
def test_the_expected_speed_ups_stand_in_for_one_that_was_not_measured_since(now: TaskSpeedup | None) -> None:
    before, after = (sum(alpha**i for i in range(4)) for alpha in (0.7, 0.5))
    found = lost_tokens_per_s(FELL, TaskPace(100.0, SPECULATIVE, speedup(1.8, day(7)), now))
    assert found == pytest.approx(100 * (before / after - 1))


@pytest.mark.parametrize(
    "pace",
    [
        TaskPace(0.0, SPECULATIVE, None, None),
        TaskPace(100.0, None, None, None),
        TaskPace(100.0, VANILLA, None, None),
        TaskPace(100.0, replace(SPECULATIVE, drafter="lookup"), speedup(1.8, day(7), "lookup"), None),
    ],
)
def test_thin_evidence_is_not_known(pace: TaskPace) -> None:
    assert lost_tokens_per_s(FELL, pace) is None


def test_a_rise_costs_nothing() -> None:
    rose = replace(FELL, traffic=jobs(State.ROSE, (0.2, 0.15, 0.25)))
    assert lost_tokens_per_s(rose, TaskPace(100.0, SPECULATIVE, None, None)) == 0.0
