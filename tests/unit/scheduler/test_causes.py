"""Causes: each row of the table, and sentences with their figures."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from alphaloop.acceptance import Interval
from alphaloop.measurements import DriftSubject
from scheduler.causes import Cause, explain
from scheduler.cusum import Drift
from scheduler.paired import PromptPair
from scheduler.staleness import ProbeComparison

AT = datetime(2026, 1, 1, tzinfo=UTC)
SUBJECT = DriftSubject("code", "lookup", "draft-1", "target-1")
FELL = Drift(True, -1, 6.4, 6.4, 120, 24, 1000, 800, 200, 110, 1)
STEADY = replace(FELL, is_alarm=False, direction=0, statistic=1.0)
PROBES = ProbeComparison(
    SUBJECT, (PromptPair(20, 16, 20, 16),) * 4, Interval(0.0, -0.02, 0.02), AT, AT, False, "engine-1", "engine-1"
)
PROBES_DOWN = replace(PROBES, pairs=(PromptPair(20, 16, 20, 10),) * 4, change=Interval(-0.3, -0.35, -0.25))


def test_nothing_moved() -> None:
    assert explain(SUBJECT, STEADY, PROBES, probes_fell=False) is None
    assert explain(SUBJECT, None, None, probes_fell=False) is None


def test_traffic_moved_and_probes_are_steady() -> None:
    finding = explain(SUBJECT, FELL, PROBES, probes_fell=False)
    assert finding is not None
    assert finding.cause is Cause.TRAFFIC_CHANGED
    assert finding.verdict == (
        "Acceptance of lookup on code fell from 80% to 55% over the last 24 jobs. On the fixed probe prompts it is "
        "steady (0.80 then, 0.80 now): the jobs have changed, not the draft."
    )
    assert finding.evidence["flagged_by"] == "traffic"


def test_traffic_moved_and_nothing_is_known_of_probes() -> None:
    finding = explain(SUBJECT, replace(FELL, direction=1), None, probes_fell=False)
    assert finding is not None
    assert finding.cause is Cause.UNEXPLAINED
    assert "rose" in finding.verdict


@pytest.mark.parametrize("traffic", [None, STEADY, FELL])
def test_probes_down_after_a_new_target_mean_a_stale_draft(traffic: Drift | None) -> None:
    finding = explain(SUBJECT, traffic, replace(PROBES_DOWN, target_changed=True), probes_fell=True)
    assert finding is not None
    assert finding.cause is Cause.DRAFT_STALE
    assert "50% of its first tokens accepted instead of 80%" in finding.verdict
    assert finding.evidence["flagged_by"] == "probes"
    assert finding.evidence["probes"]["num_prompts"] == 4


def test_probes_down_without_a_new_target_are_unexplained() -> None:
    finding = explain(SUBJECT, None, PROBES_DOWN, probes_fell=True)
    assert finding is not None
    assert finding.cause is Cause.UNEXPLAINED
    assert "suspect the engine" in finding.verdict


def test_an_engine_change_is_named() -> None:
    finding = explain(SUBJECT, None, replace(PROBES_DOWN, engine_after="engine-2"), probes_fell=True)
    assert finding is not None
    assert "from engine-1 to engine-2" in finding.verdict
