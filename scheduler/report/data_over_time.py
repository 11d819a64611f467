"""The parts of the report that tell of a task over time: its acceptance, and expected beside measured speed-ups."""

from __future__ import annotations

from pydantic import AwareDatetime, Field

from scheduler.report.part import Estimate, Part


class ExpectationPoint(Part):
    """An expected speed-up, and the one that was measured over the same rounds."""

    expected: Estimate = Field(description="As it was shown and decided on: mean over the rounds.")
    measured: Estimate
    is_held: bool = Field(description="Whether the expected interval holds the measured speed-up.")
    covers_from: AwareDatetime = Field(description="When the first slice began.")
    covers_to: AwareDatetime = Field(description="When the last slice began.")


class ExpectationLine(Part):
    """How reliable expected speed-ups of a drafter in a task were in the last 7 days: a row of expectation_now."""

    task: str
    drafter: str
    num_pairs: int = Field(description="Expectations that were compared with a measured speed-up, at most 32.")
    num_held: int = Field(description="Of these, intervals that hold it; 95 % of them should.")
    ratio: float = Field(description="Measured over expected, geometric mean; below 1, expectations are too good.")
    ratio_bounds: tuple[float, float] | None = Field(description="Its 95 % bounds; null with one pair.")
    min_num_draft_tokens: int = Field(description="Smallest k that was used.")
    max_num_draft_tokens: int = Field(description="Largest k that was used.")
    mean_running: float = Field(description="The load: sequences of all tasks in a round.")
    points: tuple[ExpectationPoint, ...] = Field(description="Oldest first.")


class HistoryPoint(Part):
    """α_1 over one stretch of time, or of the probes of one run."""

    start: AwareDatetime
    num_jobs: int = Field(description="Jobs of traffic, or probes.")
    alpha_1: Estimate


class RevisionMark(Part):
    """When something behind the acceptance of a task was new."""

    at: AwareDatetime = Field(description="The first job or probe under it.")
    changed: tuple[str, ...] = Field(description="What differs from before: target, draft, engine.")


class TaskHistory(Part):
    """α_1 of a task with one drafter over time, under every revision."""

    drafter: str
    step_s: float = Field(description="Length of a stretch of traffic; a stretch without a job has no point.")
    traffic: tuple[HistoryPoint, ...] = Field((), description="Oldest first.")
    probes: tuple[HistoryPoint, ...] = Field((), description="A point a run, oldest first.")
    revisions: tuple[RevisionMark, ...] = Field((), description="Oldest first.")
