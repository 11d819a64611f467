"""Every table, in SQLAlchemy Core, with a comment a column. The migrations build exactly these."""

from __future__ import annotations

from alphaloop.tables.evidence import acceptance_daily, acceptance_hourly, cost_profiles, decisions, decode_runs
from alphaloop.tables.jobs import cancellations, jobs, outbox
from alphaloop.tables.measuring import draft_revisions, drift_events, probe_runs, probe_sets, reports, schedule_runs
from alphaloop.tables.metadata import metadata
from alphaloop.tables.state import acceptance_state, exploration_budgets

__all__ = [
    "acceptance_daily",
    "acceptance_hourly",
    "acceptance_state",
    "cancellations",
    "cost_profiles",
    "decisions",
    "decode_runs",
    "draft_revisions",
    "drift_events",
    "exploration_budgets",
    "jobs",
    "metadata",
    "outbox",
    "probe_runs",
    "probe_sets",
    "reports",
    "schedule_runs",
]
