"""Deadlines that will be missed with the workers that run, and the ends of batches."""

from __future__ import annotations

from pathlib import Path

from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add only: processes of the revision before go on working."""
    run_script("lacks")
    op.execute("INSERT INTO code_revisions VALUES ('0015')")


def downgrade() -> None:
    """Undo."""
    op.execute("DELETE FROM code_revisions WHERE revision = '0015'")
    run_script("drop")


def run_script(subject: str) -> None:
    """The statements of one file."""
    op.execute((Path(__file__).with_name(revision) / f"{subject}.sql").read_text(encoding="utf-8"))
