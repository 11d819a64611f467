"""How many texts a decoded job has: each of them has a prefill, in which nothing is drafted.

It only adds: processes of the release before run on this schema, and say one text of each job.
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, Integer, text

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    told = "Texts of the job, each with a prefill; 1 of those recorded before revision 0007"
    op.add_column("decode_runs", Column("num_texts", Integer(), server_default=text("1"), nullable=False, comment=told))
    op.execute(f"INSERT INTO code_revisions VALUES ('{revision}')")


def downgrade() -> None:
    """Drop it."""
    op.drop_column("decode_runs", "num_texts")
    op.execute(f"DELETE FROM code_revisions WHERE revision = '{revision}'")
