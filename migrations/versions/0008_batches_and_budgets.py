"""Runs say which batch they were decoded in and what their draft lengths allowed; saved-up budgets outlive a restart.

Processes of the revision before leave the new columns null, and keep their budgets to themselves. Comments name the
module in which reasons are defined now.
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import ARRAY, BigInteger, Column, DateTime, Double, Text, Uuid, text

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

#: Table → what the comment of its column `reason` says, and said.
REASONS = {
    "decode_runs": ("Why this mode: alphaloop.deciding.decision.Reason", "Why this mode: alphaloop.policy.Reason"),
    "decisions": ("alphaloop.deciding.decision.Reason", "alphaloop.policy.Reason"),
}
VIEW = ("One word: alphaloop.deciding.decision.Reason", "One word: alphaloop.policy.Reason")


def upgrade() -> None:
    """Columns, a table, comments."""
    op.add_column(
        "decode_runs",
        Column("decode_batch_id", Uuid(), comment="Jobs decided and decoded together; null in rows of old"),
    )
    op.add_column(
        "decode_runs",
        Column(
            "chances",
            ARRAY(BigInteger()),
            comment="Rounds in which this position was asked for with all before it accepted; null in rows of old",
        ),
    )
    op.create_table(
        "exploration_budgets",
        Column("task", Text(), nullable=False, primary_key=True, comment="Kind of prompt"),
        Column("target_revision", Text(), nullable=False, primary_key=True, comment="Hash of the target's weights"),
        Column("device", Text(), nullable=False, primary_key=True, comment="What decodes it"),
        Column("sampling_bucket", Text(), nullable=False, primary_key=True, comment="Sampling settings it is for"),
        Column("balance", Double(), nullable=False, comment="Tokens that exploration may still be expected to lose"),
        Column("accrued", Double(), nullable=False, comment="Tokens of credit so far"),
        Column("spent", Double(), nullable=False, comment="Tokens spent so far"),
        Column(
            "changed_at",
            DateTime(timezone=True),
            nullable=False,
            server_default=text("now()"),
            comment="When a worker last changed it",
        ),
        comment="What a task may still lose to exploration: one budget for all workers, kept over restarts",
    )
    _name_reasons(now=0)


def downgrade() -> None:
    """What was saved up goes, and so does what runs say of their batch."""
    _name_reasons(now=1)
    op.drop_table("exploration_budgets")
    op.drop_column("decode_runs", "chances")
    op.drop_column("decode_runs", "decode_batch_id")


def _name_reasons(now: int) -> None:
    for table, comments in REASONS.items():
        op.alter_column(
            table, "reason", existing_type=Text(), existing_nullable=False, comment=comments[now],
            existing_comment=comments[1 - now],
        )
    op.execute(text(f"COMMENT ON COLUMN decision_log.reason IS '{VIEW[now]}'"))
