"""A cancellation ends: what is sent under its name after that is decoded.

It only adds: processes of the release before run on this schema. Their cancellations end after 24 hours, which they do
not look at.
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, DateTime, text

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; what was asked for before ends 24 hours from now."""
    told = "Jobs that are sent later are not cancelled"
    ends = Column("ends_at", DateTime(timezone=True), server_default=text("now() + interval '24 hours'"), nullable=False, comment=told)
    op.add_column("cancellations", ends)
    op.execute(f"INSERT INTO code_revisions VALUES ('{revision}')")


def downgrade() -> None:
    """Drop it."""
    op.drop_column("cancellations", "ends_at")
    op.execute(f"DELETE FROM code_revisions WHERE revision = '{revision}'")
