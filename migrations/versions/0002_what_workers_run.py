"""What workers run: the revision of their target, and what they decide with."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Expand first: processes of the version before must go on working."""
    op.add_column(
        "workers",
        sa.Column("target_revision", sa.Text(), comment="Hash of the target's weights; null of an earlier release"),
    )
    op.add_column(
        "workers",
        sa.Column(
            "setup",
            sa.JSON(),
            comment="alphaloop.store.workers.WorkerSetup: engine, host, limits, drafters; null of an earlier release",
        ),
    )
    op.add_column(
        "workers",
        sa.Column(
            "sampling_defaults",
            sa.Text(),
            nullable=False,
            server_default="",
            comment="What its model suggests for sampling and whether jobs take it, in words; empty: nothing",
        ),
    )
    op.execute("INSERT INTO code_revisions VALUES ('0002')")


def downgrade() -> None:
    """Undo."""
    op.execute("DELETE FROM code_revisions WHERE revision = '0002'")
    op.drop_column("workers", "sampling_defaults")
    op.drop_column("workers", "setup")
    op.drop_column("workers", "target_revision")
