"""${message}."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
${imports if imports else ""}
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}


def upgrade() -> None:
    """Expand first: processes of the version before must go on working."""
    ${upgrades if upgrades else "pass"}
    # A migration that takes something away also deletes the revisions of the releases that still use it.
    op.execute("INSERT INTO code_revisions VALUES (${repr(up_revision)})")


def downgrade() -> None:
    """Undo."""
    op.execute("DELETE FROM code_revisions WHERE revision = ${repr(up_revision)}")
    ${downgrades if downgrades else "pass"}
