"""The inputs of decisions: evidence by key, which fades and grows with every outcome, and exploration budgets."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import BigInteger, Column, Double, Index, LargeBinary, PrimaryKeyConstraint, Table, Text

from alphaloop.tables.metadata import NOW, evidence_key, instant, metadata

#: Wide keys first: a worker reads the rows of its own target, engine and drafts, and of nothing else.
KEY: Final = (
    "target_revision",
    "engine",
    "drafter",
    "draft_revision",
    "task",
    "segment",
    "sampling_bucket",
    "prompt_bucket",
)


def _sums() -> list[Column[Any]]:
    return [
        instant("as_of", "When the last of its jobs ended. The weights of the sums hold at this moment"),
        Column("num_jobs", BigInteger, nullable=False, comment="Jobs ever added"),
        Column(
            "evidence",
            LargeBinary,
            nullable=False,
            comment="alphaloop.deciding.evidence.KeyEvidence, packed: the view evidence_now unpacks it",
        ),
        Column("last_ledger_id", BigInteger, nullable=False, comment="The last row of the ledger that was added"),
    ]


# Rows of long drafts stay in their page, because they are read in bulk and do not compress.
_IN_PAGE: Final = {"toast_tuple_target": 8160}

acceptance_state: Final = Table(
    "acceptance_state",
    metadata,
    *evidence_key(),
    *_sums(),
    Column(
        "changed_in",
        BigInteger,
        nullable=False,
        comment="Transaction that changed the row last; readers ask for newer ones",
    ),
    PrimaryKeyConstraint(*KEY),
    # BRIN, because every outcome changes the column: the update then stays in its page and touches no other index.
    Index(
        "ix_acceptance_state_changed_in",
        "changed_in",
        postgresql_using="brin",
        postgresql_with={"pages_per_range": 4, "autosummarize": True},
    ),
    postgresql_with={**_IN_PAGE, "fillfactor": 50},
    comment="Sums over the jobs of an evidence key, which fade: what a task's next decision rests on",
)

exploration_budgets: Final = Table(
    "exploration_budgets",
    metadata,
    Column("task", Text, primary_key=True, comment="Kind of prompt"),
    Column("target_revision", Text, primary_key=True, comment="Hash of the target's weights"),
    Column("device", Text, primary_key=True, comment="What decodes it"),
    Column("sampling_bucket", Text, primary_key=True, comment="Sampling settings it is for"),
    Column("balance", Double, nullable=False, comment="Tokens that exploration may still be expected to lose"),
    Column("accrued", Double, nullable=False, comment="Tokens of credit so far"),
    Column("spent", Double, nullable=False, comment="Tokens spent so far"),
    instant("changed_at", "When a worker last changed it", server_default=NOW),
    comment="What a task may still lose to exploration: one budget for all workers, kept over restarts",
)
