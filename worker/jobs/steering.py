"""How each sequence drafts, as far as that is not settled by its decision: the interface between loop and experiment.

`RoundSteering` sets drafter and k before each round. `RequestSteering` is for engines whose requests stay as they were
admitted: it says how a job is admitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from alphaloop.deciding.policy import Decision, DraftSetting, Reason
from alphaloop.messages import Purpose
from alphaloop.switchback.slices import Slice
from worker.engine import Step
from worker.jobs.running import RunningJobs
from worker.lanes import LaneKey

#: Reasons of decisions that were free to speculate. Only their sequences take part in the experiment.
_ON_TRIAL: Final = frozenset({Reason.FASTER, Reason.ON_TARGET, Reason.NO_HISTORY, Reason.UNCERTAIN, Reason.NOT_FASTER})


@dataclass(frozen=True, slots=True)
class TaskSlice:
    """A slice with the sampling bucket whose sequences it is about."""

    sampling_bucket: str
    slice: Slice


class Steering(Protocol):
    """The loop's thread owns it.

    A *subject* of the experiment is the set of sequences of one task and one sampling bucket that were free to
    speculate and do so with one drafter.
    """

    def begin(self, job_id: str, lane: LaneKey, decision: Decision, running: RunningJobs) -> DraftSetting:
        """How the engine is to admit a job that starts now beside others."""

    def steer(self, running: RunningJobs) -> None:
        """Before each step: set how every sequence drafts, where that may change."""

    def observe(self, step: Step) -> list[TaskSlice]:
        """Count the step that ran; returns the slices that ended with it."""

    def close(self) -> list[TaskSlice]:
        """End all slices and return them: when the worker ends, or when a step failed."""


def is_free(lane: LaneKey, decision: Decision) -> bool:
    """Whether jobs of the lane with this decision may take part in the experiment."""
    return lane.purpose == Purpose.TRAFFIC.value and decision.reason in _ON_TRIAL


def subject_of(lane: LaneKey) -> str:
    """The subject's name, "TASK BUCKET": a task's name has no space."""
    return f"{lane.task} {lane.sampling_bucket}"


def by_sampling_bucket(slices: Sequence[Slice]) -> list[TaskSlice]:
    """The slices of subjects as those of tasks."""
    found = []
    for one in slices:
        task, _, sampling_bucket = one.task.partition(" ")
        found.append(TaskSlice(sampling_bucket, replace(one, task=task)))
    return found
