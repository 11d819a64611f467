"""Every table, in SQLAlchemy Core, with a comment a column. The migrations build exactly these.

Importing this package loads all of them into `metadata`; the migrations repeat the comments, because a migration must
not change when a table does.
"""

from __future__ import annotations
from alphaloop.tables.decided import decision_snapshots
from alphaloop.tables.drift import drift_event_states
from alphaloop.tables.drift import drift_events
from alphaloop.tables.drift import drift_memories
from alphaloop.tables.drift import drift_positions
from alphaloop.tables.drift import incidents
from alphaloop.tables.drift import notification_sinks
from alphaloop.tables.drift import notifications
from alphaloop.tables.drift import probe_texts
from alphaloop.tables.evidence import acceptance_checkpoints
from alphaloop.tables.evidence import acceptance_daily
from alphaloop.tables.evidence import acceptance_hourly
from alphaloop.tables.evidence import acceptance_state
from alphaloop.tables.evidence import cost_profiles
from alphaloop.tables.evidence import decisions
from alphaloop.tables.evidence import decode_runs
from alphaloop.tables.evidence import evidence_rows
from alphaloop.tables.evidence import exploration_budgets
from alphaloop.tables.evidence import ledger_ids
from alphaloop.tables.jobs import cancellations
from alphaloop.tables.jobs import code_revisions
from alphaloop.tables.jobs import jobs
from alphaloop.tables.jobs import leader_leases
from alphaloop.tables.jobs import leader_terms
from alphaloop.tables.jobs import outbox
from alphaloop.tables.jobs import redrives
from alphaloop.tables.jobs import server_identities
from alphaloop.tables.jobs import stored_texts
from alphaloop.tables.jobs import workers
from alphaloop.tables.measuring import draft_revisions
from alphaloop.tables.measuring import probe_prompts
from alphaloop.tables.measuring import probe_runs
from alphaloop.tables.measuring import probe_sets
from alphaloop.tables.measuring import reports
from alphaloop.tables.measuring import schedule_runs
from alphaloop.tables.metadata import metadata
from alphaloop.tables.switchback import expectation_pairs
from alphaloop.tables.switchback import switchback_slices
from alphaloop.tables.switchback import task_speedups


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
