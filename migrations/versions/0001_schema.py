"""The whole schema, read from the files of SQL in the folder 0001: each is one subject, and they run in this order.

They do not change after a release: a later revision brings about what alphaloop.tables says by then.
"""

from __future__ import annotations

from pathlib import Path

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

SUBJECTS = ("functions", "jobs", "evidence", "decisions", "measuring", "switchback", "running", "api", "views", "roles")

# One partition a day from yesterday to a week ahead; the later ones come from alphaloop.store.housekeeping. There is no
# default partition: rows in it would stand in the way of every partition made after them.
FIRST_PARTITIONS = """
SELECT make_partitions(ARRAY(SELECT (now() AT TIME ZONE 'UTC')::date + n FROM generate_series(-1, 7) AS n))
"""

def upgrade() -> None:
    """Create everything."""
    for subject in SUBJECTS:
        run_script(subject)
    op.execute(FIRST_PARTITIONS)


def downgrade() -> None:
    """Drop everything."""
    run_script("drop")


def run_script(subject: str) -> None:
    """The statements of one file."""
    op.execute((Path(__file__).with_name(revision) / f"{subject}.sql").read_text(encoding="utf-8"))
