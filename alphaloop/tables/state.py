"""What is remembered of every evidence key: the sums that decisions rest on, faded and added up with every outcome."""

from __future__ import annotations

from typing import Final

from sqlalchemy import BigInteger, Column, Index, LargeBinary, PrimaryKeyConstraint, Table

from alphaloop.tables.metadata import evidence_key, instant, metadata

#: Wide keys first: a worker reads the rows of its own target, engine and drafts, and of nothing else.
KEY: Final = (
    "target_revision", "engine", "drafter", "draft_revision", "gate", "task", "segment", "sampling_bucket",
    "prompt_bucket",
)  # fmt: skip

acceptance_state: Final = Table(
    "acceptance_state",
    metadata,
    *evidence_key(),
    instant("as_of", "When the last of its jobs ended: the moment at which the sums weigh"),
    Column("num_jobs", BigInteger, nullable=False, comment="Jobs ever added"),
    Column(
        "memory",
        LargeBinary,
        nullable=False,
        comment="alphaloop.deciding.evidence.Memory, packed: the view evidence_now unpacks it",
    ),
    Column(
        "changed_in", BigInteger, nullable=False, comment="Transaction that changed it last: who was not seen is newer"
    ),
    PrimaryKeyConstraint(*KEY),
    Index("ix_acceptance_state_changed_in", "changed_in"),
    # Rows of long drafts stay in their page: read in bulk, and of numbers that do not compress.
    postgresql_with={"toast_tuple_target": 8160},
    comment="Sums over the jobs of an evidence key, which fade: what a task's next decision rests on",
)
