"""What decisions were taken from, so that each one can be taken again."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Column, Index, Integer, PrimaryKeyConstraint, Table, Text, Uuid
from sqlalchemy.dialects.postgresql import JSON

from alphaloop.tables.metadata import instant, metadata

#: Partitioned by day, dropped by retention.
decision_snapshots: Final = Table(
    "decision_snapshots",
    metadata,
    instant("decided_at", "The moment of the decision, by the clock of the worker"),
    Column("decision_id", Uuid, nullable=False, comment="As decode_runs.decode_batch_id of its jobs"),
    Column("task", Text, nullable=False, comment="Kind of prompt"),
    Column("sampling_bucket", Text, nullable=False, comment="Sampling settings of the jobs"),
    Column("num_running", Integer, nullable=False, comment="Sequences of a round, these jobs among them"),
    Column(
        "snapshot",
        JSON,
        nullable=False,
        comment="alphaloop.deciding.snapshot: evidence, costs, budget and limits, and what was decided",
    ),
    PrimaryKeyConstraint("decided_at", "decision_id"),
    Index("ix_decision_snapshots_task_decided_at", "task", "decided_at"),
    postgresql_partition_by="RANGE (decided_at)",
    comment="One row a decision: what it was taken from, and its outcome; at most 4 KiB",
)
