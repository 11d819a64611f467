"""Equal work is done once: which job's text answers an equal job, and which jobs were answered so."""

from __future__ import annotations

from pathlib import Path

from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add only: processes of the revision before go on working, and decode every job."""
    run_script("reuse")
    op.execute("INSERT INTO code_revisions VALUES ('0014')")


def downgrade() -> None:
    """Undo."""
    op.execute("DELETE FROM code_revisions WHERE revision = '0014'")
    run_script("drop")


def run_script(subject: str) -> None:
    """The statements of one file."""
    op.execute((Path(__file__).with_name(revision) / f"{subject}.sql").read_text(encoding="utf-8"))
