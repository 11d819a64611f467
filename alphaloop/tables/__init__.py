"""Every table, in SQLAlchemy Core, with a comment a column. The migrations build exactly these.

Importing this package loads all of them into `metadata`; the migrations repeat the comments, because a migration must
not change when a table does.
"""

from __future__ import annotations

from alphaloop.tables.decided import decision_snapshots
from alphaloop.tables.drift import (
    drift_event_states,
    drift_events,
    drift_memories,
    drift_positions,
    incidents,
    notification_sinks,
    notifications,
    probe_texts,
)
from alphaloop.tables.evidence import (
    acceptance_daily,
    acceptance_hourly,
    acceptance_state,
    cost_profiles,
    decisions,
    decode_runs,
    evidence_rows,
    exploration_budgets,
    ledger_ids,
)
from alphaloop.tables.jobs import (
    cancellations,
    code_revisions,
    jobs,
    leader_leases,
    leader_terms,
    outbox,
    redrives,
    server_identities,
    stored_texts,
    workers,
)
from alphaloop.tables.measuring import draft_revisions, probe_prompts, probe_runs, probe_sets, reports, schedule_runs
from alphaloop.tables.metadata import metadata
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
