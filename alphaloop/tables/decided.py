"""What decisions were taken from, so that each one can be taken again."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Index, Integer, PrimaryKeyConstraint, Table, Text, Uuid
from sqlalchemy.dialects.postgresql import JSON

from alphaloop.tables.metadata import column, instant, metadata

#: Partitioned by day, dropped by retention.
decision_snapshots: Final = Table(
    "decision_snapshots",
    metadata,
    instant("decided_at", "The moment of the decision, by the clock of the worker"),
    column("decision_id", Uuid, "As decode_runs.decode_batch_id of its jobs"),
    column("task", Text, "Kind of prompt"),
    column("sampling_bucket", Text, "Sampling settings of the jobs"),
    column("num_running", Integer, "Sequences of a round, these jobs among them"),
    column(
        "snapshot",
        JSON,
        "alphaloop.deciding.snapshot: evidence, costs, budget and limits, and what was decided",
    ),
    PrimaryKeyConstraint("decided_at", "decision_id"),
    Index("ix_decision_snapshots_task_decided_at", "task", "decided_at"),
    postgresql_partition_by="RANGE (decided_at)",
    comment="One row a decision: what it was taken from, and its outcome; at most 4 KiB",
)
