"""What decisions were taken from, so that each one can be taken again; dropped with the ledger that they refer to."""

from __future__ import annotations

from typing import Final

from sqlalchemy import CheckConstraint, Column, Index, Integer, PrimaryKeyConstraint, Table, Text, Uuid
from sqlalchemy.dialects.postgresql import JSON

from alphaloop.tables.metadata import instant, metadata

#: Partitioned by day, dropped by retention.
decision_records: Final = Table(
    "decision_records",
    metadata,
    instant("decided_at", "The moment of the decision, by the clock of the worker"),
    Column("decision_id", Uuid, nullable=False, comment="As decode_runs.decode_batch_id of its jobs"),
    Column("session_id", Uuid, nullable=False, comment="Decision session of a worker; names its decision_inputs"),
    Column("task", Text, nullable=False, comment="Kind of prompt"),
    Column("sampling_bucket", Text, nullable=False, comment="Sampling settings of the jobs"),
    Column("num_running", Integer, nullable=False, comment="Sequences of a round, these jobs among them"),
    Column("num_jobs", Integer, nullable=False, comment="Jobs that were decided together"),
    Column(
        "inputs",
        JSON,
        nullable=False,
        comment="Jobs, rules, conditions, incumbent, budget; numbers of decision_inputs: session, costs, posteriors, "
        "splits",
    ),
    Column("outcome", JSON, nullable=False, comment="What was decided for each group of jobs"),
    PrimaryKeyConstraint("decided_at", "decision_id"),
    Index("ix_decision_records_task_decided_at", "task", "decided_at"),
    postgresql_partition_by="RANGE (decided_at)",
    comment="One row a decision: its inputs, by value or by number, and its outcome",
)

#: Partitioned and dropped with decision_records.
decision_inputs: Final = Table(
    "decision_inputs",
    metadata,
    instant("used_at", "The first decision of the day that used it"),
    Column("session_id", Uuid, nullable=False, comment="Decision session that used it"),
    Column("number", Integer, nullable=False, comment="Name within the session"),
    Column(
        "kind",
        Text,
        nullable=False,
        comment="session: engine, limits, drafters; cost_basis: measured costs; costs: their corrections at a moment; "
        "pair, posterior, split: evidence by positions in the ledger (ledger_id)",
    ),
    Column("content", JSON, nullable=False, comment="The input itself: alphaloop.store.input_codec"),
    PrimaryKeyConstraint("session_id", "number", "used_at"),
    CheckConstraint("kind IN ('session','cost_basis','costs','pair','posterior','split')", name="kind"),
    postgresql_partition_by="RANGE (used_at)",
    comment="Inputs that many decisions share, stored once a day by each session that uses them",
)
