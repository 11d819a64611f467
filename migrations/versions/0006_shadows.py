"""The hours and days say that they hold shadows too: counts of a drafter on texts that it did not decode.

A process of the revision before adds none; where it takes the mean length of a task's texts, it counts those twice that
it finds.
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import Text, column, delete
from sqlalchemy import table as table_of

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

TABLES = {"acceptance_hourly": "hour", "acceptance_daily": "day"}
MODE = "vanilla or speculative"
MODE_NOW = "vanilla, speculative, or shadow: a drafter's counts on texts that it did not decode"


def upgrade() -> None:
    """Comments only: the key holds any mode."""
    for table, bucket in TABLES.items():
        op.alter_column(
            table, "mode", existing_type=Text(), existing_nullable=False, comment=MODE_NOW, existing_comment=MODE
        )
        op.create_table_comment(
            table,
            f"Counts and sums of decode_runs by {bucket}, and those of shadows: never rates",
            existing_comment=f"Counts and sums of decode_runs by {bucket}: never rates",
        )


def downgrade() -> None:
    """A process of the revision before does not know shadows: they go."""
    for table, bucket in TABLES.items():
        op.execute(delete(table_of(table)).where(column("mode") == "shadow"))
        op.alter_column(
            table, "mode", existing_type=Text(), existing_nullable=False, comment=MODE, existing_comment=MODE_NOW
        )
        op.create_table_comment(
            table,
            f"Counts and sums of decode_runs by {bucket}: never rates",
            existing_comment=f"Counts and sums of decode_runs by {bucket}, and those of shadows: never rates",
        )
