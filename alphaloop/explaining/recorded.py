"""A past decision as an explanation: from its snapshot, not by the evidence and the costs of today."""

from __future__ import annotations

from datetime import timedelta

from alphaloop.deciding.evidence import EvidenceSums
from alphaloop.deciding.groups import Group
from alphaloop.deciding.snapshot import Snapshot
from alphaloop.explaining.explanation import NUM_CHANGES, ExplainRequest, Explanation, RecordedAs, engine_of
from alphaloop.explaining.measured import measured
from alphaloop.explaining.sources import Evidence, acceptance
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from alphaloop.store.decisions import DecisionLog
from alphaloop.store.expectations import ExpectationStore
from alphaloop.store.snapshots import StoredSnapshot
from alphaloop.store.switchback import SwitchbackStore
from alphaloop.store.task_figures import figures_of
from alphaloop.store.traffic import TrafficStore


def explain_recorded(
    database: Database,
    settings: Settings,
    stored: StoredSnapshot,
    *,
    segment: str = "",
    prompt_bucket: str | None = None,
) -> Explanation:
    """The decision, for its jobs of that segment and prompt length; for most of its jobs without them."""
    past, facts = stored.snapshot, stored.facts
    number, group = max(
        enumerate(past.groups), key=lambda one: (_is_meant(one[1], segment, prompt_bucket), one[1].num_jobs)
    )
    again = past.decide(facts.limits)
    task, bucket, at = past.subject.task, past.subject.sampling_bucket, past.decided_at
    window = timedelta(days=settings.worker.history_days)
    ways = TrafficStore(database).ways(task, facts.target_revision, facts.engine, facts.device, bucket, at - window, at)
    return Explanation(
        request=ExplainRequest(task, group.segment, past.context.num_running, bucket, at, is_now=False),
        engine=engine_of(database, facts, at),
        context=past.context,
        prompt_bucket=group.prompt_bucket,
        drafters=[drafter for drafter in past.drafters if drafter.name in group.posteriors],
        evidence={name: _evidence(past, group, name) for name in group.posteriors},
        segments=frozenset(one.segment for one in past.groups),
        costs=past.costs,
        incumbent=past.incumbent,
        decision=(again if past.is_whole else past.decisions)[number],
        measured=measured(SwitchbackStore(database).at(task, at), ways, ExpectationStore(database).shown(at, task)),
        figures=figures_of(database, task, at),
        window=window,
        explore_share=facts.limits.explore_share,
        changes=DecisionLog(database).latest(task, NUM_CHANGES, until=at),
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
    return Evidence(posterior, acceptance(posterior), None, seen, group.alike.get(drafter, 0.0), past.is_split)


def _is_meant(group: Group, segment: str, prompt_bucket: str | None) -> int:
    """How well a group fits what is asked for."""
    return (group.segment == segment) * bool(segment) + (group.prompt_bucket == prompt_bucket)
