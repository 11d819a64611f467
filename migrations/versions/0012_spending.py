"""Device time by target and batch: what jobs cost."""

from __future__ import annotations

from pathlib import Path

from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add only: processes of the revision before go on working, and their rows name neither target nor batch."""
    run_script("spending")
    op.execute("INSERT INTO code_revisions VALUES ('0012')")


def downgrade() -> None:
    """Undo."""
    op.execute("DELETE FROM code_revisions WHERE revision = '0012'")
    run_script("drop")


def run_script(subject: str) -> None:
    """The statements of one file."""
    op.execute((Path(__file__).with_name(revision) / f"{subject}.sql").read_text(encoding="utf-8"))
