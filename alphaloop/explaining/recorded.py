"""A recorded decision as an explanation: its own evidence, costs, incumbent and moment, not those of today."""

from __future__ import annotations

from datetime import timedelta

from alphaloop.deciding.job_facts import JobFacts
from alphaloop.deciding.recorded import groups_of, session_of
from alphaloop.explaining.explanation import NUM_CHANGES, ExplainRequest, Explanation, RecordedAs, engine_of
from alphaloop.explaining.measured import measured
from alphaloop.explaining.sources import evidence
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from alphaloop.store.decisions import DecisionLog
from alphaloop.store.past_decisions import RecordedDecisions
from alphaloop.store.switchback import ExpectationStore, SwitchbackStore
from alphaloop.store.task_figures import figures_of
from alphaloop.store.traffic import TrafficStore


def explain_recorded(
    database: Database,
    settings: Settings,
    past: RecordedDecisions,
    *,
    segment: str = "",
    prompt_bucket: str | None = None,
) -> Explanation:
    """The only decision of `past`, for its jobs of that segment and prompt length; for most of its jobs without them.

    Raises NotReproducible where part of its inputs is not stored any more.
    """
    (record,) = past.records
    inputs, facts, restored = past.inputs(record), past.facts(record), past.restored(record)
    groups = groups_of(inputs, restored)
    group = max(groups, key=lambda its: (_is_meant(inputs.jobs[its[0]], segment, prompt_bucket), len(its)))
    jobs = [inputs.jobs[index] for index in group]
    session, task, at = session_of(inputs, facts, restored), record.task, record.decided_at
    wanted = session.evidence_key(inputs.subject, jobs)
    window = timedelta(days=settings.worker.history_days)
    ways = TrafficStore(database).ways(
        task, facts.target_revision, facts.engine, facts.device, record.sampling_bucket, at - window, at
    )
    return Explanation(
        request=ExplainRequest(task, wanted.segment, record.num_running, record.sampling_bucket, at, is_now=False),
        engine=engine_of(database, facts, record.decided_at),
        context=session.context(
            inputs.subject,
            inputs.jobs,
            inputs.rules,
            num_running=inputs.num_running,
            now=at,
            conditions=inputs.conditions,
        ),
        prompt_bucket=wanted.prompt_bucket,
        drafters=inputs.drafters,
        evidence={
            drafter.name: evidence(restored.evidence, restored.posteriors, wanted, drafter, at, facts.limits)
            for drafter in inputs.drafters
        },
        segments=frozenset(restored.evidence.segments(task)),
        costs=inputs.costs,
        incumbent=inputs.incumbent,
        decision=past.decide(record)[group[0]],
        measured=measured(SwitchbackStore(database).at(task, at), ways, ExpectationStore(database).shown(at, task)),
        figures=figures_of(database, task, at),
        window=window,
        explore_share=facts.limits.explore_share,
        changes=DecisionLog(database).latest(task, NUM_CHANGES, until=at),
        recorded=RecordedAs(record.decision_id, record.num_jobs, len(groups), facts.host, past.is_reproduced(record)),
    )


def _is_meant(job: JobFacts, segment: str, prompt_bucket: str | None) -> int:
    """How well a group's job fits what is asked for."""
    return (job.segment == segment) * bool(segment) + (job.prompt_bucket == prompt_bucket)
