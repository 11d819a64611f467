"""Every table, in SQLAlchemy Core, with a comment a column. The migrations build exactly these."""

from __future__ import annotations

from alphaloop.tables.decided import decision_snapshots
from alphaloop.tables.drift import drift_event_states, drift_events
from alphaloop.tables.drift_memory import drift_memories, drift_positions
from alphaloop.tables.evidence import acceptance_daily, acceptance_hourly, cost_profiles, decisions
from alphaloop.tables.exactness import incidents, probe_texts
from alphaloop.tables.jobs import cancellations, jobs, outbox, redrives, stored_texts
from alphaloop.tables.ledger import decode_runs, evidence_rows, ledger_ids
from alphaloop.tables.measuring import (
    draft_revisions,
    probe_prompts,
    probe_runs,
    probe_sets,
    reports,
    schedule_runs,
)
from alphaloop.tables.metadata import metadata
from alphaloop.tables.notifications import notification_sinks, notifications
from alphaloop.tables.running import code_revisions, leader_leases, leader_terms, server_identities, workers
from alphaloop.tables.state import acceptance_state, exploration_budgets
from alphaloop.tables.switchback import expectation_pairs, switchback_slices, task_speedups

__all__ = [
    "acceptance_daily",
    "acceptance_hourly",
    "acceptance_state",
    "cancellations",
    "code_revisions",
    "cost_profiles",
    "decision_snapshots",
    "decisions",
    "decode_runs",
    "draft_revisions",
    "drift_event_states",
    "drift_events",
    "drift_memories",
    "drift_positions",
    "evidence_rows",
    "expectation_pairs",
    "exploration_budgets",
    "incidents",
    "jobs",
    "leader_leases",
    "leader_terms",
    "ledger_ids",
    "metadata",
    "notification_sinks",
    "notifications",
    "outbox",
    "probe_prompts",
    "probe_runs",
    "probe_sets",
    "probe_texts",
    "redrives",
    "reports",
    "schedule_runs",
    "server_identities",
    "stored_texts",
    "switchback_slices",
    "task_speedups",
    "workers",
]
