"""What the drift test remembers between two runs."""

from __future__ import annotations

from typing import Final

from sqlalchemy import BigInteger, Column, Integer, Table, Text
from sqlalchemy.dialects.postgresql import JSONB

from alphaloop.tables.metadata import instant, metadata

drift_positions: Final = Table(
    "drift_positions",
    metadata,
    Column("task", Text, primary_key=True, comment="Kind of prompt"),
    instant("decoded_at", "The last job that the drift test has read of this task: when it was decoded"),
    Column("ledger_id", BigInteger, nullable=False, comment="And its place among jobs of the same moment"),
    comment="How far the drift test has read, by task",
)

drift_memories: Final = Table(
    "drift_memories",
    metadata,
    Column("task", Text, primary_key=True, comment="Kind of prompt"),
    Column("target_revision", Text, primary_key=True, comment="Hash of the target's weights"),
    Column("engine", Text, primary_key=True, comment="Decoding library, version and dtype"),
    Column("sampling_bucket", Text, primary_key=True, comment="Sampling settings that share a history"),
    Column("drafter", Text, primary_key=True, comment="Name of the drafter"),
    Column("draft_revision", Text, primary_key=True, comment="Its revision"),
    Column("version", Integer, nullable=False, comment="Form of `document`; another one is learned anew"),
    Column("document", JSONB, nullable=False, comment="Reference, running sums and windows: scheduler.drift.memory"),
    instant("last_decoded_at", "When the stream's last job was decoded"),
    instant("norm_since", "When its level was accepted: jobs from before are forgotten; null otherwise", nullable=True),
    comment="What the drift test remembers of a stream, so that a run reads only new jobs",
)
