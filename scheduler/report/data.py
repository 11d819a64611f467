"""The report as data: what goes to `drift-reports` and into Postgres. docs/reference/report.md explains it."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from alphaloop.acceptance import Interval
from alphaloop.as_decoded import AtLoad, Decoded, NextJob
from alphaloop.experiment.estimate import Verdict
from alphaloop.probe_plan import Why
from alphaloop.store.drift import EventState, IncidentKind
from alphaloop.store.refreshes import RefreshReason, RefreshState
from alphaloop.store.spending import SpentBy
from scheduler.causes import Cause
from scheduler.probing import Watched


class ReportPart(BaseModel):
    """Part of the report; made of anything with attributes of the same names too."""

    model_config = ConfigDict(frozen=True, extra="forbid", from_attributes=True)

    @classmethod
    def of(cls, *parts: object, **more: object) -> Self:
        """Its fields from the attributes of `parts`, of which the first that has one counts, and from `more`."""
        fields = {name: getattr(part, name) for part in parts[::-1] for name in cls.model_fields if hasattr(part, name)}
        return cls.model_validate(fields | more)


class ExpectationPoint(ReportPart):
    """An expected speed-up, and the one that was measured over the same rounds."""

    expected: Interval = Field(description="As it was shown and decided on: mean over the rounds.")
    measured: Interval
    is_held: bool = Field(description="Whether the expected interval holds the measured speed-up.")
    covers_from: AwareDatetime = Field(description="When the first slice began.")
    covers_to: AwareDatetime = Field(description="When the last slice began.")


class ExpectationLine(ReportPart):
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


class HistoryPoint(ReportPart):
    """α_1 over one stretch of time, or of the probes of one run."""

    start: AwareDatetime
    num_jobs: int = Field(description="Jobs of traffic, or probes.")
    alpha_1: Interval


class RevisionMark(ReportPart):
    """When a target, draft or engine that a task is decoded with was new."""

    at: AwareDatetime = Field(description="The first job or probe under it.")
    changed: tuple[str, ...] = Field(description="What differs from before: target, draft, engine.")


class TaskHistory(ReportPart):
    """α_1 of a task with one drafter over time, under every revision."""

    drafter: str
    step_s: float = Field(description="Length of a stretch of traffic; a stretch without a job has no point.")
    traffic: tuple[HistoryPoint, ...] = Field((), description="Oldest first.")
    probes: tuple[HistoryPoint, ...] = Field((), description="A point a run, oldest first.")
    revisions: tuple[RevisionMark, ...] = Field((), description="Oldest first.")


class MeasuredLine(ReportPart):
    """The measured speed-up of a task, by the switchback experiment: a row of the view task_speedup_now."""

    drafter: str = Field(description="The drafter that decoded most of the task's speculated text.")
    revisions: tuple[str, str] | None = Field(None, description="Of target and draft.")
    speedup: Interval | None = Field(description="Over vanilla; null before there are eight blocks.")
    verdict: Verdict
    min_num_draft_tokens: int = Field(description="Smallest k that was used.")
    max_num_draft_tokens: int = Field(description="Largest k that was used.")
    mean_running: float = Field(description="The load: sequences of all tasks in a round.")
    mean_context: float = Field(description="Tokens of context a sequence.")
    num_blocks: int = Field(description="Control slices with the treatment before and after.")
    num_control_rounds: int = Field(description="Vanilla rounds in them.")
    control_share: float = Field(description="Of seconds times sequences, those in control slices.")
    tokens_per_s: float | None = Field(description="Tokens a second of one running sequence, as it drafts.")
    vanilla_tokens_per_s: float | None = Field(description="The same of vanilla rounds, by the speed-up.")
    covers_from: AwareDatetime = Field(description="When the first slice began.")
    covers_to: AwareDatetime = Field(description="When the last slice began.")
    computed_at: AwareDatetime = Field(description="When it was computed.")


class DecodedLine(ReportPart):
    """How the traffic of a task was decoded in the last day."""

    num_jobs: int = Field(description="Jobs that were decoded.")
    num_rounds: int = Field(description="Rounds of single jobs, without prefills.")
    num_drafted_rounds: int = Field(description="Of them, those in which a drafter was asked for a token.")
    drafted_share: float | None = Field(description="Share of the rounds that drafted; null without a round.")
    by_load: tuple[AtLoad, ...] = Field(description="By the most sequences that ran beside a job.")
    drafters: tuple[str, ...] = Field(description="Drafters that were asked.")
    num_draft_tokens: tuple[int, int] | None = Field(
        description="Smallest and largest of the jobs' k, each the longest of its rounds; null where none drafted."
    )
    running: int = Field(description="The usual load: half of the rounds had at most so many sequences.")
    sampling_bucket: str = Field(description="Sampling settings of most of the jobs.")
    form_bucket: str = Field("", description="What their texts had to match, tools, images; empty for plain text.")


class CostLine(ReportPart):
    """What the traffic of a task took in the last day, and what that costs."""

    num_jobs: int = Field(description="Jobs that were decoded in the last day.")
    num_tokens: int = Field(description="Tokens that they generated.")
    device_s: float = Field(description="Device seconds that they took.")
    cost: float | None = Field(None, description="What these cost; null without a price.")
    per_1000_jobs: float | None = Field(description="Cost of 1,000 such jobs; null without a price or a job.")
    per_million_tokens: float | None = Field(description="Cost of a million such tokens; null likewise.")
    saved: Interval | None = Field(description="Cost of saved_device_s; null without a price or a verdict.")


class TaskLine(ReportPart):
    """One task: how it was decoded, what its next job would do and why, and what that brings."""

    task: str
    target: str | None = Field(None, description="What decodes it; null where one target decodes all.")
    not_served: str | None = Field(
        None, description="Why nobody took its jobs at the run; null where somebody did, or there is one target."
    )
    num_jobs: int = Field(description="Traffic jobs of the last day, of every status.")
    num_probes: int = Field(0, description="Probes of the last day.")
    num_controls: int = Field(0, description="Controls of probes of the last day.")
    decoded: DecodedLine | None = Field(None, description="How its traffic was decoded; null where none was.")
    mode: Literal["speculative", "vanilla"] | None = Field(
        description="What the next job would do at next_running; null where nobody can say."
    )
    next_running: int | None = Field(
        None, description="The usual load of the last day; null: mode is the last choice logged, at whatever load."
    )
    next_revisions: tuple[str, str] | None = Field(None, description="Of its target and its draft; null likewise.")
    next_expected_low: float | None = Field(
        None, description="Lower bound of the speed-up expected of it; null where nothing was weighed."
    )
    drafter: str | None = Field(description="The next job's drafter, else the one with most evidence.")
    num_draft_tokens: int = Field(description="The next job's k; 0 is vanilla.")
    reason: str = Field(description="Why the next job would be decoded so, as screens say it.")
    explanation: str = ""
    num_speculative_jobs: int = Field(description="Jobs of the last day behind the acceptance figures.")
    acceptance_from: Literal["traffic", "probes"] | None = None
    acceptance_drafter: str | None = Field(None, description="Whose acceptance it is.")
    sampling_buckets: tuple[str, ...] = Field((), description="Sampling settings that the figures pool.")
    form_bucket: str = Field("", description="Form of the jobs behind the acceptance figures; empty for plain text.")
    alpha_counted: str = Field("", description="How, where a server did not report what was tested at each position.")
    alpha_1: Interval | None = Field(None, description="Acceptance of the first drafted token.")
    alpha: Interval | None = Field(None, description="Pooled over positions; read it with its k.")
    alpha_num_draft_tokens: tuple[int, ...] = Field(
        (), description="The k of the jobs behind alpha, each the longest that a round was allowed."
    )
    measured: MeasuredLine | None = Field(None, description="Null where the last day has no slice of the task.")
    saved_device_s: Interval | None = Field(
        None, description="Saved in the slices of the measured speed-up; below 0 lost; null without a verdict."
    )
    num_saved_passes: int = Field(
        0, description="Target passes of single sequences that traffic of the last day was spared."
    )
    cost: CostLine | None = Field(None, description="Null where the last day has no job of the task.")

    @property
    def done(self) -> Decoded | None:
        """How its traffic was decoded, for the words that every screen uses."""
        return None if self.decoded is None else Decoded.of_json(self.decoded.model_dump())

    @property
    def next_job(self) -> NextJob | None:
        """What its next job would do, likewise."""
        if self.mode is None:
            return None
        drafter = self.drafter if self.mode == "speculative" else None
        kind = ("", "") if self.decoded is None else (self.decoded.sampling_bucket, self.decoded.form_bucket)
        return NextJob(
            *(self.mode, drafter, self.num_draft_tokens, self.reason, self.explanation, self.next_running),
            *kind,
            self.next_revisions,
            self.next_expected_low,
        )


class DriftLine(ReportPart):
    """Drift that is not over."""

    id: int = Field(description="Number of the event, for `alphaloop drift`.")
    task: str
    drafter: str
    draft_revision: str
    cause: Cause
    state: EventState
    verdict: str
    action: str = Field(description="What may be done.")
    lost_tokens_per_s: float | None = Field(description="What it costs to do nothing; null where that is not known.")
    opened_at: AwareDatetime
    num_reopened: int = Field(0, description="Times that it came back.")
    acknowledged_by: str | None = None


class DraftLine(ReportPart):
    """A draft revision and whether it is fit to serve."""

    drafter: str
    draft_revision: str
    target_revision: str
    status: str
    status_reason: str
    status_changed_at: AwareDatetime

    @property
    def name(self) -> str:
        """As sentences call it."""
        return f"{self.drafter} {self.draft_revision} for target {self.target_revision}"


class RefreshReport(ReportPart):
    """A drafter that is, or was, trained anew: tokens a round before it, without it and with it."""

    drafter: str
    target_revision: str
    parent_draft_revision: str
    reason: RefreshReason
    state: RefreshState
    in_words: str = Field(description="Why it is in this state.")
    before: float | None = Field(description="Tokens a round under the target that the drafter was trained for.")
    stale: float | None = Field(description="Tokens a round of the old weights under this target, on held-out texts.")
    after: float | None = Field(description="The same of the new weights.")
    gain: str = Field(description="After over stale, with its 95 % interval; empty before it is known.")
    rates: str = Field(description="All of these in words.")
    candidate_name: str | None
    candidate_revision: str | None
    device_s: float = Field(description="Seconds that trainers took.")
    opened_at: AwareDatetime
    changed_at: AwareDatetime


class ProbeLine(ReportPart):
    """Probes of a task and drafter."""

    task: str
    drafter: str
    num_draft_tokens: int
    num_probes: int = Field(description="Prompts that are decoded with the drafter.")
    num_scored: int = Field(0, description="Prompts on whose control's text it is scored, without decoding.")
    last_probed: AwareDatetime | None
    why: Why = Field(description="Why it is measured: an alarm, something new, or age.")
    device_s: float = Field(description="Device seconds that it is expected to take.")
    at_stake_device_s: float = Field(description="Expected device seconds of traffic since a change nobody checked.")


class IncidentLine(ReportPart):
    """An incident that is not over: the engine did not do what it promises."""

    kind: IncidentKind
    task: str
    drafter: str = Field(description="Empty: the vanilla decoding.")
    engine: str
    sentence: str
    num_jobs: int = Field(description="Probes and controls that show it.")
    opened_at: AwareDatetime


class LackLine(ReportPart):
    """Deadlines of batches that will be missed, because a target has too few workers."""

    target: str
    segment: str = Field(description="Empty: of requests without one.")
    opened_at: AwareDatetime
    foreseen_at: AwareDatetime = Field(description="When the numbers were computed last.")
    num_due: int = Field(description="Requests whose deadlines come within a day.")
    num_late: int = Field(description="Of these, expected to miss them.")
    num_workers: int = Field(description="Workers of the target that ran.")
    num_enough: int | None = Field(description="Workers that are enough; null: not known.")
    until_at: AwareDatetime = Field(description="The last of the deadlines.")
    sentence: str = Field(description="The same in words.")


class ChangeKind(StrEnum):
    """What a change is about, the most serious first."""

    INCIDENT = "incident"
    FLAG = "flag"  #: a drift event was opened, confirmed, acknowledged, closed or reopened
    SERVER = "server"  #: an inference server came back with another model, version or arithmetic
    DRAFT = "draft"  #: a draft revision is new, or its status changed
    CHOICE = "choice"  #: a task is decoded in another way
    SPEEDUP = "speedup"  #: a measured speed-up became known, is no longer known, or has another verdict


class ChangeLine(ReportPart):
    """One change since the last report."""

    kind: ChangeKind
    about: str = Field(description="The task; of a draft the drafter, of a server its endpoint.")
    sentence: str


class Changes(ReportPart):
    """What changed since the last report."""

    since: AwareDatetime | None = Field(None, description="When that was made; null without one to compare with.")
    lines: tuple[ChangeLine, ...] = Field((), description="The most serious kind first.")


class SpentLine(ReportPart):
    """What the jobs of a segment, key or batch took in the last day."""

    by: SpentBy
    name: str
    num_jobs: int
    num_tokens: int
    device_s: float
    cost: float | None


class GapLine(ReportPart):
    """A time in which no run ended well, so that nothing was tested and no probe was sent."""

    begins: AwareDatetime = Field(description="The start of the run before.")
    ends: AwareDatetime = Field(description="The start of the run after.")


class DriftReport(ReportPart):
    """What one run of the scheduler found."""

    object: Literal["alphaloop.report"] = "alphaloop.report"
    created_at: AwareDatetime
    covers_from: AwareDatetime
    covers_to: AwareDatetime
    headline: str
    last_decoded_at: AwareDatetime | None = Field(None, description="When the newest job of traffic was decoded.")
    next_due: AwareDatetime | None = Field(None, description="When the next run is due; by then this report is old.")
    changes: Changes = Field(default_factory=Changes)
    tasks: tuple[TaskLine, ...] = ()
    drift: tuple[DriftLine, ...] = ()
    opened: int = Field(0, description="Drift events that this run opened or reopened.")
    closed: int = Field(0, description="Drift events that this run closed.")
    probes: tuple[ProbeLine, ...] = Field((), description="Sent by this run.")
    probes_waiting: tuple[ProbeLine, ...] = Field((), description="Due, and held back by the budget.")
    probe_budget_device_s: float = 0.0
    probe_spent_device_s: float = Field(0.0, description="Device seconds of probes and controls in the last day.")
    device_s: float = Field(0.0, description="Device seconds of all jobs in the last day.")
    cost: float | None = Field(None, description="What these cost; null: no price is set.")
    probe_cost: float | None = Field(None, description="Of it, that of probes and controls.")
    currency: str = Field("", description="Of all amounts.")
    spending: tuple[SpentLine, ...] = Field(
        (), description="By segment, key and batch: the ten of each with the most device time."
    )
    gaps: tuple[GapLine, ...] = Field((), description="Without measurement, oldest first.")
    num_due: int = Field(0, description="(task, drafter) pairs without fresh evidence, sent or not.")
    num_probe_sets: int = Field(0, description="Tasks that have a probe set.")
    incidents: tuple[IncidentLine, ...] = Field((), description="Not over.")
    lacks: tuple[LackLine, ...] = Field((), description="Deadlines that will be missed, as far as foreseen.")
    exactness: Watched = Field(Watched(), description="Probes that this run compared with their controls.")
    drafts: tuple[DraftLine, ...] = ()
    refreshes: tuple[RefreshReport, ...] = Field((), description="Open, or changed lately.")
    expectations: tuple[ExpectationLine, ...] = Field((), description="Expected beside measured speed-ups.")
    history: dict[str, TaskHistory] = Field(default_factory=dict, description="By task.")
