"""A decision keeps one snapshot. Processes of the release before record decisions otherwise, so they have to end first."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSON

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

INSTANT = sa.DateTime(timezone=True)
STATE_KEY = {
    "target_revision": "Hash of the target's weights",
    "engine": "Decoding library, version and dtype",
    "drafter": "Name of the drafter; empty for vanilla",
    "draft_revision": "Revision of the drafter; empty for vanilla",
    "task": "Kind of prompt",
    "segment": "Caller's label; empty without one",
    "sampling_bucket": "Sampling settings that share a history",
    "prompt_bucket": "Prompt lengths that share a history",
}
#: What the function that grants rights says before, and after.
GRANTS = (
    ("decision_records, decision_inputs, decisions TO", "decision_snapshots, decisions TO"),
    ("acceptance_daily, acceptance_checkpoints, drift_events,", "acceptance_daily, drift_events,"),
    ("acceptance_checkpoints, decisions, probe_runs,", "decisions, probe_runs,"),
    ("acceptance_daily, acceptance_state, acceptance_checkpoints,\n", "acceptance_daily, acceptance_state,\n"),
)
#: Names of code that moved, and leadership by lease alone: what is commented on, before, now.
COMMENTS = (
    (
        "COLUMN acceptance_state.evidence",
        "alphaloop.deciding.key_evidence.KeyEvidence, packed: the view evidence_now unpacks it",
        "alphaloop.deciding.evidence.KeyEvidence, packed: the view evidence_now unpacks it",
    ),
    (
        "COLUMN task_speedups.verdict",
        "alphaloop.switchback.speedup.Verdict",
        "alphaloop.experiment.estimate.Verdict",
    ),
    (
        "TABLE leader_leases",
        "Who leads behind a pooler in transaction mode, where no session keeps an advisory lock",
        "Who leads, and until when",
    ),
)
#: A table has the partitions of the days that the others have.
PARTITIONS = """
SELECT make_partitions(ARRAY(
    SELECT to_date(right(child.relname, 8), 'YYYYMMDD')
    FROM pg_inherits AS i JOIN pg_class AS child ON child.oid = i.inhrelid JOIN pg_class AS parent ON parent.oid = i.inhparent
    WHERE parent.relname = 'decode_runs' AND parent.relnamespace = current_schema()::regnamespace
))
"""


def upgrade() -> None:
    """What was recorded of decisions before is dropped: nothing reads it any more."""
    op.drop_table("decision_records")
    op.drop_table("decision_inputs")
    op.drop_table("acceptance_checkpoints")
    op.create_table(
        "decision_snapshots",
        sa.Column("decided_at", INSTANT, nullable=False, comment="The moment of the decision, by the clock of the worker"),
        sa.Column("decision_id", sa.Uuid(), nullable=False, comment="As decode_runs.decode_batch_id of its jobs"),
        sa.Column("task", sa.Text(), nullable=False, comment="Kind of prompt"),
        sa.Column("sampling_bucket", sa.Text(), nullable=False, comment="Sampling settings of the jobs"),
        sa.Column("num_running", sa.Integer(), nullable=False, comment="Sequences of a round, these jobs among them"),
        sa.Column(
            "snapshot",
            JSON(),
            nullable=False,
            comment="alphaloop.deciding.snapshot: evidence, costs, budget and limits, and what was decided",
        ),
        sa.PrimaryKeyConstraint("decided_at", "decision_id", name=op.f("pk_decision_snapshots")),
        postgresql_partition_by="RANGE (decided_at)",
        comment="One row a decision: what it was taken from, and its outcome; at most 4 KiB",
    )
    op.create_index("ix_decision_snapshots_task_decided_at", "decision_snapshots", ["task", "decided_at"])
    op.execute(PARTITIONS)
    for about, _, now in COMMENTS:
        op.execute(f"COMMENT ON {about} IS '{now}'")
    grant(dict(GRANTS))
    op.execute("INSERT INTO code_revisions VALUES ('0003')")
    op.execute("DELETE FROM code_revisions WHERE revision = '0002'")


def downgrade() -> None:
    """The tables of before come back, empty."""
    for about, before, _ in COMMENTS:
        op.execute(f"COMMENT ON {about} IS '{before}'")
    op.execute("DELETE FROM code_revisions WHERE revision = '0003'")
    op.execute("INSERT INTO code_revisions VALUES ('0002')")
    op.drop_table("decision_snapshots")
    op.create_table(
        "acceptance_checkpoints",
        sa.Column("taken_at", INSTANT, nullable=False, comment="When it was copied"),
        *(
            sa.Column(name, sa.Text(), nullable=False, server_default=sa.text("''"), comment=comment)
            for name, comment in STATE_KEY.items()
        ),
        sa.Column("as_of", INSTANT, nullable=False, comment="When the last of its jobs ended"),
        sa.Column("num_jobs", sa.BigInteger(), nullable=False, comment="Jobs ever added"),
        sa.Column("evidence", sa.LargeBinary(), nullable=False, comment="KeyEvidence, packed"),
        sa.Column("last_ledger_id", sa.BigInteger(), nullable=False, comment="The last row of the ledger that was added"),
        sa.PrimaryKeyConstraint(*STATE_KEY, "taken_at", name=op.f("pk_acceptance_checkpoints")),
        postgresql_with={"toast_tuple_target": 8160},
        comment="Daily copies of rows of acceptance_state that changed",
    )
    op.create_index("ix_acceptance_checkpoints_taken_at", "acceptance_checkpoints", ["taken_at"])
    op.execute("ALTER TABLE acceptance_checkpoints ALTER COLUMN evidence SET STORAGE EXTERNAL")
    for statement in script("0001_decided.sql", end=";\n"):
        op.execute(statement)
    op.execute(PARTITIONS)
    grant({})


def grant(replaced: dict[str, str]) -> None:
    """Define the function that grants rights as the first release did, with these parts replaced; and call it."""
    (statement,) = (its for its in script("0001_roles.sql", end=";\n\n") if "CREATE FUNCTION grant_to_roles" in its)
    for before, after in replaced.items():
        assert before in statement, before
        statement = statement.replace(before, after)
    op.execute(statement.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION"))
    op.execute("SELECT grant_to_roles()")


def script(name: str, *, end: str) -> list[str]:
    """The statements of a file beside this one."""
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return [statement.strip() for statement in text.split(end) if statement.strip()]
