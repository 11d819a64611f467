"""What a draft was measured to do before it serves."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "draft_revisions",
        sa.Column("figures", JSONB, comment="What it was measured to do on held-out text; null if never judged"),
    )


def downgrade() -> None:
    op.drop_column("draft_revisions", "figures")
