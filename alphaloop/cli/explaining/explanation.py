"""Gathers what a decision rests on, now or at an earlier moment, and takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from alphaloop.acceptance import EvidenceKey, prompt_bucket
from alphaloop.cli.explaining.measured import Measured, measured
from alphaloop.cli.explaining.sources import Evidence, evidence
from alphaloop.cost import CostTable
from alphaloop.deciding.decision import Decision, DecisionContext, DraftSetting
from alphaloop.deciding.evidence_snapshot import EvidenceSnapshot, Place
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.inference import splits_by_segment
from alphaloop.deciding.objective import Aim, Objective
from alphaloop.deciding.policy import decide
from alphaloop.errors import AlphaloopError
from alphaloop.settings import Settings, TaskSettings
from alphaloop.store.acceptance_state import AcceptanceStateStore
from alphaloop.store.costs import CostStore
from alphaloop.store.database import Database
from alphaloop.store.decisions import DecisionChange, DecisionLog
from alphaloop.store.drafts import DraftRegistry, DraftStatus
from alphaloop.store.engines import EngineStore, MeasuredEngine
from alphaloop.store.past import PastStore
from alphaloop.store.traffic import TrafficStore

NUM_CHANGES: Final = 5
#: Nothing is explored without a budget, whatever is drawn.
_NO_EXPLORATION: Final = 1.0


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked: a batch of a task, at a moment; `is_now` says that the moment is the present."""

    task: str
    segment: str
    batch: int
    sampling_bucket: str
    at: datetime
    is_now: bool


@dataclass(frozen=True, slots=True)
class Explanation:
    """The decision that a worker would take, and what it rests on."""

    question: Question
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
    window: timedelta  #: that `measured` looks back
    explore_share: float  #: the budget for exploration and control
    changes: Sequence[DecisionChange]


def explain_task(database: Database, settings: Settings, question: Question) -> Explanation:
    """Decide as a worker on the engine that was calibrated last would.

    Raises AlphaloopError before the first calibration.
    """
    engines = EngineStore(database).measured()
    if not engines:
        raise AlphaloopError("no worker has measured its device yet", hint="start one with `alphaloop up`")
    engine, task, at = engines[0], question.task, question.at
    drafters = serving(DraftRegistry(database), settings, engine.target_revision, at)
    revisions = {drafter.name: drafter.revision for drafter in drafters}
    costs = CostStore(database).load(engine.host, engine.device, engine.engine, engine.target_revision, revisions)
    snapshot = _snapshot(database, settings, engine, revisions, question)
    limits, log = settings.policy.limits(), DecisionLog(database)
    context = _context(snapshot, drafters, settings.tasks.get(task) or TaskSettings(), question)
    bucket = prompt_bucket(round(context.prompt_tokens or 0))
    wanted = EvidenceKey(
        task, engine.target_revision, engine.engine, question.sampling_bucket, bucket, question.segment
    )
    found = {
        drafter.name: evidence(
            snapshot,
            wanted,
            drafter,
            at,
            limits,
            is_split=splits_by_segment(snapshot.leaves(Place(task, drafter.name, drafter.revision), at)),
        )
        for drafter in drafters
    }
    where = task, engine.target_revision, engine.device, question.sampling_bucket
    incumbent = log.last_choice(*where, until=at)
    posteriors = {name: its.posterior for name, its in found.items()}
    window = timedelta(days=settings.worker.history_days)
    ways = TrafficStore(database).ways(
        task, engine.target_revision, engine.engine, engine.device, question.sampling_bucket, at - window, at
    )
    return Explanation(
        question=question,
        engine=engine,
        context=context,
        prompt_bucket=bucket,
        drafters=drafters,
        evidence=found,
        segments=frozenset(snapshot.segments(task)),
        costs=costs,
        incumbent=incumbent,
        decision=decide(posteriors, drafters, costs, context, limits, incumbent=incumbent),
        measured=measured(ways),
        window=window,
        explore_share=settings.policy.explore_share,
        changes=log.latest(task, NUM_CHANGES, until=at),
    )


def serving(registry: DraftRegistry, settings: Settings, target_revision: str, at: datetime) -> list[DrafterState]:
    """The configured drafters as they were last registered for this target by then.

    Of a status only the last change is kept, so one that changed since `at` counts as it was registered: fit.
    """
    newest = {
        draft.drafter: draft
        for draft in registry.all()
        if draft.target_revision == target_revision
        and draft.registered_at <= at
        and draft.status is not DraftStatus.CANDIDATE
    }
    unfit = (DraftStatus.STALE, DraftStatus.RETIRED)
    return [
        drafter.state(name, draft.draft_revision, is_stale=draft.status in unfit and draft.status_changed_at <= at)
        for name, drafter in settings.models.drafters.items()
        if (draft := newest.get(name)) is not None
    ]


def _snapshot(
    database: Database, settings: Settings, engine: MeasuredEngine, revisions: Mapping[str, str], question: Question
) -> EvidenceSnapshot:
    half_life = timedelta(days=settings.worker.history_half_life_days)
    if question.is_now:
        rows = AcceptanceStateStore(database).look(engine.target_revision, engine.engine, revisions).rows
        return EvidenceSnapshot(half_life, {row.key: row.evidence for row in rows})
    past = PastStore(database).evidence_by_key(
        engine.target_revision, engine.engine, question.at, half_life, task=question.task
    )
    return EvidenceSnapshot(half_life, past)


def _context(
    snapshot: EvidenceSnapshot, drafters: Sequence[DrafterState], task: TaskSettings, question: Question
) -> DecisionContext:
    """The batch as a worker would ask about it: jobs as they usually are in the task."""
    usual = snapshot.lengths(question.task, drafters, question.at)
    alike = snapshot.lengths(question.task, drafters, question.at, question.sampling_bucket)
    limit = float(task.max_tokens)
    return DecisionContext(
        task=question.task,
        batch=question.batch,
        expected_tokens=limit if usual.output_tokens is None else min(limit, usual.output_tokens),
        draw=_NO_EXPLORATION,
        decoding=task.decoding,
        prompt_tokens=alike.prompt_tokens or usual.prompt_tokens,
        objective=objective_of(task),
        control_jobs=snapshot.lengths(question.task, (), question.at).jobs,
        known_output_jobs=usual.jobs,
    )


def objective_of(task: TaskSettings) -> Objective:
    """The task's own target; deadlines belong to jobs."""
    if task.target_time_per_token_ms is not None:
        return Objective(Aim.TIME_PER_TOKEN, task.target_time_per_token_ms)
    if task.target_time_to_first_token_ms is not None:
        return Objective(Aim.TIME_TO_FIRST_TOKEN, task.target_time_to_first_token_ms)
    return Objective()
