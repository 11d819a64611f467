"""An explanation: what a decision is taken from, the decision, and what was measured; of now, or of a snapshot."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID

from alphaloop.acceptance import Z95, EvidenceKey, Interval
from alphaloop.as_decoded import NextJob
from alphaloop.costs import CostTable
from alphaloop.deciding.decision import Decision, DecisionContext, DraftSetting, IncumbentKey
from alphaloop.deciding.evidence import HALF_LIFE, EvidenceSnapshot, EvidenceSums, Place
from alphaloop.deciding.expectation_error import ExpectationErrors
from alphaloop.deciding.goodput import DrafterState, marked_stale
from alphaloop.deciding.inference import PairPosterior, Posteriors, infer
from alphaloop.deciding.job_facts import EngineConditions, JobFacts, Subject
from alphaloop.deciding.policy import Group
from alphaloop.deciding.posterior import Posterior, fitted, logistic
from alphaloop.deciding.session import DecisionSession
from alphaloop.deciding.snapshot import SessionFacts, Snapshot
from alphaloop.errors import AlphaloopError
from alphaloop.experiment.figures import Reliability, TaskSpeedup, by_drafter, reliability
from alphaloop.experiment.wording import judged, own_of
from alphaloop.probe_plan import DEADLINE
from alphaloop.server_identity import SERVERS
from alphaloop.settings import Settings, TaskSettings
from alphaloop.store.database import Database
from alphaloop.store.decision_inputs import (
    UNFIT,
    AcceptanceStateStore,
    CostStore,
    CostSubject,
    DraftRegistry,
    DraftRevision,
    DraftStatus,
    MeasuredEngine,
)
from alphaloop.store.decisions import BudgetSubject, DecisionChange, DecisionLog, StoredSnapshot
from alphaloop.store.drift import DriftEventStore
from alphaloop.store.switchback import ExpectationStore, SwitchbackStore
from alphaloop.store.task_figures import WINDOW, TaskFigures, figures_of, recent_tasks, task_figures
from alphaloop.store.traffic import JobSums, TrafficStore
from alphaloop.store.workers import WorkerStore, running


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of a task: its speed-up, and the jobs of `HISTORY` like those that are asked about."""

    speedup: TaskSpeedup | None  #: None where no slice of the task was recorded in the last day
    explored: JobSums
    all: JobSums
    expectations: Sequence[Reliability] = ()  #: of the task's drafters that were compared


@dataclass(frozen=True, slots=True)
class Borrowed:
    """Shares of the precision of α_1, adding up to 1: how much each source narrowed the posterior."""

    same_jobs: float  #: of this task, sampling, prompt length and segment
    same_task: float  #: the task's other jobs
    other_tasks: float
    assumed: float  #: the prior of a drafter without evidence


@dataclass(frozen=True, slots=True)
class Evidence:
    """The posterior of one drafter, and the counts that it comes from."""

    posterior: Posterior
    acceptance: tuple[Interval | None, ...]  #: α_i; None at positions that the task's jobs did not test, unlike others
    borrowed: Borrowed | None  #: None of a past decision
    seen: EvidenceSums  #: of the whole task, weighted
    jobs_alike: float  #: weighted jobs of those with the same key
    is_split: bool  #: whether segments differ beyond chance
    tested: tuple[float, ...]  #: weighted trials at each position of `acceptance`


def acceptance(posterior: Posterior) -> tuple[Interval, ...]:
    """α_i with 95 % bounds: those of s_i = reach_i · α_i, over reach_i, which is at least s_i."""
    profile, intervals = posterior.profile, []
    for m, b, own, reach in zip(profile.mean, profile.loading, profile.own_var, posterior.reach, strict=True):
        wide = Z95 * math.sqrt(b * b * profile.common_var + own)
        mean, low, high = (min(1.0, logistic(m + d) / max(reach, logistic(m))) for d in (0.0, -wide, wide))
        intervals.append(Interval(mean, low, high))
    return tuple(intervals)


def _borrowed(
    worker: AsAWorker, key: EvidenceKey, posterior: Posterior, drafter: DrafterState, now: datetime
) -> Borrowed:
    """From the precision of logit s_1 as sources are added: the prior, other tasks, this task, jobs of this key."""
    key = replace(key, drafter=drafter.name, draft_revision=drafter.revision)
    pair, unknown = worker.posteriors.pair(drafter, now), PairPosterior.of_drafter(drafter)
    leaves = worker.snapshot.leaves(Place(key.task, drafter.name, drafter.revision), now)
    others = {leaf: evidence for leaf, evidence in leaves.items() if leaf != key}
    stages = (unknown.for_a_task(), pair.for_a_task(), infer(others, key, drafter.max_draft_tokens, pair), posterior)
    precisions: list[float] = []
    for stage in stages:
        profile = stage.profile
        precision = 1 / (profile.loading[0] ** 2 * profile.common_var + profile.own_var[0])
        # A source that shows that groups differ more than the prior says narrows nothing.
        precisions.append(max(precision, precisions[-1] if precisions else 0.0))
    nothing, tasks, task, all_of_it = precisions
    return Borrowed(
        (all_of_it - task) / all_of_it, (task - tasks) / all_of_it, (tasks - nothing) / all_of_it, nothing / all_of_it
    )


NUM_CHANGES: Final = 5
#: How far back `alphaloop explain` and `alphaloop replay` read jobs.
HISTORY: Final = timedelta(days=14)
_NOT_STORED: Final = UUID(int=0)


@dataclass(frozen=True, slots=True)
class ExplainRequest:
    """What is asked: a job of a task while `batch` sequences run, at a moment; `is_now`: the moment is the present.

    A batch of 0 means as many as a worker decodes at once.
    """

    task: str
    segment: str
    batch: int
    sampling_bucket: str
    at: datetime
    is_now: bool
    form_bucket: str = ""

    @property
    def kind(self) -> str:
        """The sampling settings and, where the jobs are no plain text, the form, in words."""
        return f"{self.sampling_bucket}, {self.form_bucket}" if self.form_bucket else self.sampling_bucket


@dataclass(frozen=True, slots=True)
class WhatRuns:
    """What decides and decodes, as the workers say of themselves; as the settings here say where no worker runs."""

    engine: MeasuredEngine
    drafters: Sequence[DrafterState]
    explore_share: float
    half_life: timedelta  #: of evidence
    num_slots: int  #: settings by running sequences that a decision has; 0 where a job is decoded as it was admitted
    batch: int  #: jobs that a worker decodes at once
    ended: Mapping[str, str]  #: drafters that the workers no longer ask, each with what it cannot serve and why
    num_workers: int  #: that run this; 0: no worker was heard of lately, or none says what it runs
    num_others: int  #: workers that run something else
    target: str | None = None  #: whose workers these are; None where one target decodes all

    @property
    def sentence(self) -> str:
        """Whose decision it is."""
        if not self.num_workers:
            return (
                "No worker says what it runs: this is what one with the settings here would decide, on the engine that "
                "was measured last."
            )
        of = f" of {self.target}" if self.target else ""
        workers = f"1 worker{of} runs" if self.num_workers == 1 else f"{self.num_workers} workers{of} run"
        others = f", and {self.num_others} more something else" if self.num_others else ""
        return f"{workers} this{others}."


@dataclass(frozen=True, slots=True)
class RecordedAs:
    """A decision that a worker took."""

    decision_id: UUID
    num_jobs: int  #: that were decided together
    num_groups: int  #: of jobs that differ in segment, prompt length or form
    host: str
    is_reproduced: bool  #: taken again, it is the decision that was recorded
    is_whole: bool  #: whether its snapshot holds everything that it was taken from


@dataclass(frozen=True, slots=True)
class Explanation:
    """The decision that a worker would take, and its inputs."""

    request: ExplainRequest
    engine: MeasuredEngine
    context: DecisionContext
    prompt_bucket: str
    drafters: Sequence[DrafterState]
    evidence: Mapping[str, Evidence]
    segments: frozenset[str]  #: of which there is evidence
    costs: CostTable
    incumbent: DraftSetting | None
    decision: Decision
    measured: Measured
    figures: TaskFigures  #: of the whole task in the day before, which every screen shows
    explore_share: float  #: what exploration may cost
    changes: Sequence[DecisionChange]
    recorded: RecordedAs | None = None  #: None: the decision that a worker would take
    fleet: WhatRuns | None = None  #: who would take it; None of a recorded decision

    @property
    def next_job(self) -> NextJob:
        """The decision, as other screens show it."""
        return judged(_next_job(self.decision, self.request, self.engine.target_revision), self.measured.speedup)

    @property
    def own_speedup(self) -> TaskSpeedup | None:
        """The measured speed-up, if it is that of what the decision chose."""
        return own_of(self.next_job, self.measured.speedup)


class AsAWorker:
    """Decides as the workers that run now would; where none runs, by these settings. Reads what tasks share once."""

    def __init__(self, database: Database, settings: Settings, at: datetime, target: str | None = None) -> None:
        """`target`: only its workers count. Raises AlphaloopError as `what_runs` does."""
        self.fleet = fleet = what_runs(database, settings, at, target)
        self._tasks, self._at, engine = settings.tasks, at, fleet.engine
        revisions = {drafter.name: drafter.revision for drafter in fleet.drafters}
        where = CostSubject(engine.host, engine.device, engine.engine, engine.target_revision, revisions)
        self.costs: Final = CostStore(database).load(where)
        pairs = ExpectationStore(database).newest(engine.target_revision, engine.engine, engine.device, until=at)
        rows = AcceptanceStateStore(database).read(engine.target_revision, engine.engine, revisions).rows
        errors = ExpectationErrors(fleet.half_life, pairs)
        self.snapshot = EvidenceSnapshot(fleet.half_life, {row.key: row.evidence for row in rows}, errors)
        self._log = DecisionLog(database)
        self.posteriors = Posteriors(self.snapshot)

    def asked(self, request: ExplainRequest) -> ExplainRequest:
        """The request with the workers' batch size where it gives none."""
        return replace(request, batch=request.batch or self.fleet.batch)

    def decide(self, request: ExplainRequest) -> Snapshot:
        """The decision for a typical job of the request's task, at a batch that `asked` has filled in."""
        engine, bucket, batch, at = self.fleet.engine, request.sampling_bucket, request.batch, self._at
        subject = BudgetSubject(request.task, engine.target_revision, engine.device, bucket)
        last = self._log.last_choice(subject, until=at, running=batch)
        snapshots: list[Snapshot] = []
        session = DecisionSession(
            engine.target_revision,
            engine.engine,
            self.posteriors,
            choices=_LastChoice(last),
            budgets=None,
            costs=lambda: self.costs,
            drafters=lambda: self.fleet.drafters,
            num_slots=self.fleet.num_slots,
            note=snapshots.append,
        )
        rules = (self._tasks.get(request.task) or TaskSettings()).rules()
        usual, alike = (
            self.snapshot.lengths(request.task, self.fleet.drafters, at, sampling_bucket=name)
            for name in (None, bucket)
        )
        lengths = alike if alike.prompt_tokens else usual
        limit = lengths.limit or rules.max_tokens
        job = JobFacts(lengths.prompt_tokens, limit, request.segment, form_bucket=request.form_bucket)
        conditions = EngineConditions(None, self.fleet.ended)
        session.decide(
            Subject(request.task, bucket),
            [job],
            rules,
            num_running=batch,
            now=at,
            conditions=conditions,
            decision_id=_NOT_STORED,
        )
        return snapshots[0]


def usual_request(figures: TaskFigures, at: datetime, *, is_now: bool, segment: str = "") -> ExplainRequest:
    """What is asked where nothing else is: the load, sampling settings and form that most of the task's traffic had.

    Without traffic in the day before, as many as a worker decodes at once, greedy decoding, and plain text.
    """
    seen = figures.decoded
    batch, bucket = (0, "greedy") if seen is None else (seen.running, seen.sampling_bucket)
    form = seen.form_bucket if seen else ""
    return ExplainRequest(figures.task, segment, batch, bucket, at, is_now=is_now, form_bucket=form)


def next_jobs(
    database: Database, settings: Settings, figures: Iterable[TaskFigures], at: datetime
) -> dict[str, NextJob]:
    """By task, what a worker would decide of the next job at the load of the day, as `explain` shows it.

    Tasks for which `what_runs` raises are left out.
    """
    by_target: dict[str | None, list[TaskFigures]] = {}
    for task in figures:
        by_target.setdefault(settings.bindings.target_of(task.task), []).append(task)
    coming = {}
    for target, tasks in by_target.items():
        try:
            worker = AsAWorker(database, settings, at, target)
        except AlphaloopError:
            continue
        for task in tasks:
            request = worker.asked(usual_request(task, at, is_now=True))
            decision = worker.decide(request).decisions[0]
            coming[task.task] = _next_job(decision, request, worker.fleet.engine.target_revision)
    return coming


def _next_job(decision: Decision, request: ExplainRequest, target_revision: str) -> NextJob:
    return NextJob(
        mode=decision.mode.value,
        drafter=decision.drafter,
        num_draft_tokens=decision.num_draft_tokens,
        reason=decision.reason.value,
        explanation=decision.explanation,
        running=request.batch,
        sampling_bucket=request.sampling_bucket,
        form_bucket=request.form_bucket,
        revisions=(target_revision, decision.draft_revision or ""),
        expected_low=decision.chosen.speedup_low if decision.chosen else None,
    )


def tasks_now(database: Database, settings: Settings, window: timedelta = WINDOW) -> list[TaskFigures]:
    """Every task with a job in the window before now, by name: what was done, and what its next job would do.

    The next job is decided at the load of the last day, whatever the window.
    """
    tasks, now = recent_tasks(database, window), datetime.now(UTC)
    of_day: Mapping[str, TaskFigures] = {task.task: task for task in tasks}
    if window != WINDOW:
        of_day = task_figures(database)
    coming = next_jobs(database, settings, [of_day.get(task.task, TaskFigures(task.task)) for task in tasks], now)
    for task in tasks:
        if (chosen := coming.get(task.task)) is not None:
            task.next_job = judged(chosen, task.measured)
    return tasks


def explain_task(database: Database, settings: Settings, request: ExplainRequest) -> Explanation:
    """Decide as the workers of the task's target do that run now; where none runs, as one with these settings would.

    Raises AlphaloopError as `what_runs` does.
    """
    task, at = request.task, request.at
    worker = AsAWorker(database, settings, at, settings.bindings.target_of(task))
    request = worker.asked(request)
    fleet, snapshot = worker.fleet, worker.decide(request)
    engine, (group,) = fleet.engine, snapshot.groups
    key = EvidenceKey(
        task,
        engine.target_revision,
        engine.engine,
        request.sampling_bucket,
        prompt_bucket=group.prompt_bucket,
        segment=group.segment,
        form_bucket=group.form_bucket,
    )
    decision, share = snapshot.decisions[0], fleet.explore_share
    explanation = _explanation(database, snapshot, group, request, engine, decision=decision, explore_share=share)
    return replace(
        explanation,
        evidence={
            drafter.name: replace(
                explanation.evidence[drafter.name],
                borrowed=_borrowed(worker, key, group.posteriors[drafter.name], drafter, at),
                is_split=worker.posteriors.splits_by_segment(task, [drafter], at),
            )
            for drafter in fleet.drafters
        },
        segments=frozenset(worker.snapshot.segments(task)),
        fleet=fleet,
    )


def _explanation(
    database: Database,
    past: Snapshot,
    group: Group,
    request: ExplainRequest,
    engine: MeasuredEngine,
    *,
    decision: Decision,
    explore_share: float,
) -> Explanation:
    """What a decision was taken from, and what was measured by then."""
    task, bucket, at, speedups = request.task, request.sampling_bucket, request.at, SwitchbackStore(database)
    where = task, engine.target_revision, engine.engine, engine.device
    explored, every = TrafficStore(database).explored_of(*where, bucket, request.form_bucket, at - HISTORY, at)
    pairs = by_drafter(ExpectationStore(database).shown(at, task)).values()
    return Explanation(
        request=request,
        engine=engine,
        context=past.context,
        prompt_bucket=group.prompt_bucket,
        drafters=[drafter for drafter in past.drafters if drafter.name in group.posteriors],
        evidence={name: _evidence(past, group, name) for name in group.posteriors},
        segments=frozenset(of_past.segment for of_past in past.groups),
        costs=past.costs,
        incumbent=past.incumbent,
        decision=decision,
        measured=Measured(
            speedups.shown(at).get(task) if request.is_now else speedups.at(task, at),
            explored,
            every,
            [reliability(of_drafter) for of_drafter in pairs],
        ),
        figures=figures_of(database, task, None if request.is_now else at),
        explore_share=explore_share,
        changes=DecisionLog(database).latest(task, NUM_CHANGES, until=at),
    )


def what_runs(database: Database, settings: Settings, at: datetime, target: str | None = None) -> WhatRuns:
    """What the fleet runs, or its workers of one target: engine, drafters and batch, from the workers' own rows.

    `settings` are those of this machine: they stand in where no worker says what it runs, unless several targets are
    named. Drafters are stale as they were flagged by `at`. Raises AlphaloopError where no worker runs and none has
    measured its device, and where no worker of the target runs.
    """
    seen = running(WorkerStore(database).seen(), target)
    if seen is None:
        if target is not None and len(settings.bindings.targets) > 1:
            raise AlphaloopError(f"no worker of {target} runs, so none would decide", hint="start one")
        return _configured(database, settings, at)
    facts, drafters = seen.setup.facts, []
    registered = {
        (draft.drafter, draft.draft_revision): draft
        for draft in DraftRegistry(database).all()
        if draft.target_revision == facts.target_revision
    }
    for drafter in seen.setup.drafters:
        draft = registered.get((drafter.name, drafter.revision))
        if draft is None or draft.registered_at <= at:
            drafters.append(drafter)
    return WhatRuns(
        engine=engine_of(database, facts, at),
        drafters=marked_stale(
            drafters, lambda drafter: _is_unfit(registered.get((drafter.name, drafter.revision)), at)
        ),
        explore_share=facts.explore_share,
        half_life=facts.half_life,
        num_slots=facts.num_slots,
        batch=seen.num_slots,
        ended={**seen.setup.ended, **_waiting(database, facts)},
        num_workers=seen.num_workers,
        num_others=seen.num_others,
        target=target,
    )


def _waiting(database: Database, facts: SessionFacts) -> dict[str, str]:
    """Drafters of inference servers that are used for probes alone, until these answer an alarm."""
    if not facts.device.startswith(SERVERS):
        return {}
    alarms = DriftEventStore(database).unanswered(facts.target_revision, DEADLINE)
    return {alarm.subject.drafter: alarm.what_waits for alarm in alarms}


def engine_of(database: Database, facts: SessionFacts, at: datetime) -> MeasuredEngine:
    """The engine of a worker; if its calibration is gone, or not done yet, `at` stands for its moment."""
    key = facts.host, facts.device, facts.engine, facts.target_revision
    measured = {(m.host, m.device, m.engine, m.target_revision): m for m in CostStore(database).measured()}
    return measured.get(key) or MeasuredEngine(*key, at, ())


def _configured(database: Database, settings: Settings, at: datetime) -> WhatRuns:
    engines = CostStore(database).measured()
    if not engines:
        raise AlphaloopError("no worker has measured its device yet", hint="start one with `alphaloop up`")
    batch = settings.worker.batch_size
    return WhatRuns(
        engine=engines[0],
        drafters=serving(DraftRegistry(database), settings, engines[0].target_revision, at),
        explore_share=settings.policy.explore_share,
        half_life=HALF_LIFE,
        num_slots=batch if settings.models.target.engine == "own" else 0,
        batch=batch,
        ended={},
        num_workers=0,
        num_others=0,
    )


def serving(registry: DraftRegistry, settings: Settings, target_revision: str, at: datetime) -> list[DrafterState]:
    """The configured drafters as they were last registered for this target by then.

    Only the last change of a status is stored, so a drafter whose status changed after `at` counts as active.
    """
    newest = {
        draft.drafter: draft
        for draft in registry.all()
        if draft.target_revision == target_revision
        and draft.registered_at <= at
        and draft.status is not DraftStatus.CANDIDATE
    }
    registered = [
        settings.models.drafter_state(name, draft.draft_revision)
        for name in settings.models.drafter_names
        if (draft := newest.get(name)) is not None
    ]
    return marked_stale(registered, lambda drafter: _is_unfit(newest[drafter.name], at))


def _is_unfit(draft: DraftRevision | None, at: datetime) -> bool:
    return draft is not None and draft.status in UNFIT and draft.status_changed_at <= at


class _LastChoice:
    """A read-only choice log that holds the last choice at that time."""

    def __init__(self, setting: DraftSetting | None) -> None:
        self.setting = setting

    def last_choice(self, task: str, sampling_bucket: str) -> DraftSetting | None:
        return self.setting

    def record(self, key: IncumbentKey, decision: Decision) -> bool:
        return True


def explain_recorded(
    database: Database,
    stored: StoredSnapshot,
    *,
    segment: str = "",
    prompt_bucket: str | None = None,
    form_bucket: str | None = None,
) -> Explanation:
    """The decision, for its jobs of that segment, prompt length and form; for most of its jobs without them."""
    past, facts = stored.snapshot, stored.facts
    meant = segment, prompt_bucket, form_bucket
    number, group = max(enumerate(past.groups), key=lambda pair: (_is_meant(pair[1], *meant), pair[1].num_jobs))
    again, at, subject = past.decide(), past.decided_at, past.subject
    where = subject.task, group.segment, past.context.num_running, subject.sampling_bucket
    request = ExplainRequest(*where, at, is_now=False, form_bucket=group.form_bucket)
    explanation = _explanation(
        database,
        past,
        group,
        request,
        engine_of(database, facts, at),
        decision=(again if past.is_whole else past.decisions)[number],
        explore_share=facts.explore_share,
    )
    return replace(
        explanation,
        recorded=RecordedAs(
            past.decision_id,
            past.context.num_jobs,
            len(past.groups),
            facts.host,
            past.is_reproduced(again),
            past.is_whole,
        ),
    )


def _evidence(past: Snapshot, group: Group, drafter: str) -> Evidence:
    posterior = group.posteriors[drafter]
    seen = past.seen.get(drafter) or EvidenceSums(past.decided_at)
    expected = acceptance(posterior)
    tested = fitted(seen.trials, len(expected))
    shown = tuple(alpha if trials or not any(tested) else None for alpha, trials in zip(expected, tested, strict=True))
    return Evidence(
        posterior,
        shown,
        borrowed=None,
        seen=seen,
        jobs_alike=group.alike.get(drafter, 0.0),
        is_split=past.is_split,
        tested=tested,
    )


def _is_meant(group: Group, segment: str, prompt_bucket: str | None, form_bucket: str | None) -> int:
    """How well a group fits what is asked for."""
    buckets = (group.prompt_bucket == prompt_bucket) + (group.form_bucket == form_bucket)
    return (group.segment == segment) * bool(segment) + buckets
