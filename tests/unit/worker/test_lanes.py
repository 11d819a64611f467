"""Lanes: what must not share a decision is in another lane."""

from __future__ import annotations

from typing import Any

from alphaloop.messages import Body, Decoding, Job, Purpose
from worker.admission import LaneKey, lane_of
from worker.engine import Sampling


def lane_with(temperature: float = 0.0, switched_off: str = "", **fields: Any) -> LaneKey:
    """The lane of a job that differs from a plain one in these fields."""
    job = Job.model_construct(**{"job_id": "j", "task": "code", "body": Body(prompt="x"), **fields})
    return lane_of(job, Sampling(max_tokens=8, temperature=temperature), switched_off)


def test_what_does_not_change_the_decision_does_not_change_the_lane() -> None:
    assert lane_with() == lane_with(custom_id="other", priority=3, segment="gold")


def test_what_changes_the_decision_changes_the_lane() -> None:
    lanes = {
        lane_with(),
        lane_with(temperature=0.7),
        lane_with(switched_off="tenant-*"),
        lane_with(task="sql"),
        lane_with(decoding=Decoding.VANILLA),
        lane_with(purpose=Purpose.CONTROL),
        lane_with(probe_drafter="lookup"),
        lane_with(probe_drafter="lookup", probe_num_draft_tokens=3),
    }
    assert len(lanes) == 8
