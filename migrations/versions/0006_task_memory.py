"""The memory of tasks: results that look-up searches. Drawn probes say which job they come from, so that it can be erased.

It only adds: processes of the release before run on this schema.
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger, CheckConstraint, Column, DateTime, Identity, Integer, LargeBinary, PrimaryKeyConstraint, Text, text

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

INSTANT = DateTime(timezone=True)
BEFORE = "grant_to_roles_before_0006"

# A worker remembers and forgets, a scheduler forgets unread. Tokens are text, so a reader sees none.
GRANTS = f"""
CREATE FUNCTION grant_to_roles() RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    missing text[] := {BEFORE}();
BEGIN
    IF cardinality(missing) = 0 THEN
        GRANT SELECT, INSERT, UPDATE ON remembered_results TO alphaloop_worker;
        GRANT SELECT (id, task, segment, target_revision, job_id, batch_id, num_tokens, recorded_at, forgotten_at, changed_in)
            ON remembered_results TO alphaloop_scheduler, alphaloop_reader;
        GRANT UPDATE, DELETE ON remembered_results TO alphaloop_scheduler;
    END IF;
    RETURN missing;
END
$$
"""


def upgrade() -> None:
    """Make the table and the columns, and grant the roles what they need."""
    op.create_table(
        "remembered_results",
        Column("id", BigInteger(), Identity(always=True), nullable=False, comment="Order in which they were recorded, nearly"),
        Column("task", Text(), nullable=False, comment="Task of the job"),
        Column("segment", Text(), nullable=False, comment="Segment of the job; empty without"),
        Column("target_revision", Text(), nullable=False, comment="Hash of weights, config and tokenizer of the model whose tokens they are"),
        Column("job_id", Text(), nullable=False, comment="Job whose result it is"),
        Column("batch_id", Text(), comment="Batch of the job; null without"),
        Column("num_tokens", Integer(), nullable=False, comment="Tokens of the text, also after it is forgotten"),
        Column("token_ids", LargeBinary(), comment="The text: ids of 4 bytes, low byte first, compressed with zlib; null when forgotten"),
        Column("recorded_at", INSTANT, server_default=text("now()"), nullable=False, comment="When the outcome was recorded"),
        Column("forgotten_at", INSTANT, comment="When it was erased, or had to make room; null: look-up searches it"),
        Column("changed_in", BigInteger(), server_default=text("pg_current_xact_id()::text::bigint"), nullable=False, comment="Transaction that wrote or forgot it: workers read what changed"),
        CheckConstraint("(token_ids IS NULL) = (forgotten_at IS NOT NULL)", name=op.f("ck_remembered_results_forgotten")),
        PrimaryKeyConstraint("id", name=op.f("pk_remembered_results")),
        comment="One row a result that look-up searches: the texts of tasks whose memory is on, never prompts",
    )
    op.create_index("ix_remembered_results_target_revision_task", "remembered_results", ["target_revision", "task", "id"])
    op.create_index("ix_remembered_results_changed_in", "remembered_results", ["changed_in"])
    op.create_index("ix_remembered_results_job_id", "remembered_results", ["job_id"])
    op.create_index("ix_remembered_results_recorded_at", "remembered_results", ["recorded_at"], postgresql_where=text("forgotten_at IS NULL"))
    op.add_column("probe_prompts", Column("job_id", Text(), comment="Job that it was drawn from; null where a person chose it, or it was drawn before revision 0006"))
    op.add_column("probe_prompts", Column("segment", Text(), comment="Segment of that job; null without"))
    op.execute(f"ALTER FUNCTION grant_to_roles() RENAME TO {BEFORE}")
    op.execute(GRANTS)
    op.execute("COMMENT ON FUNCTION grant_to_roles() IS 'Makes the group roles, if the caller may, and grants them their rights; returns the roles that are missing'")
    op.execute(f"COMMENT ON FUNCTION {BEFORE}() IS 'The part of grant_to_roles() about the tables before revision 0006'")
    op.execute("SELECT grant_to_roles()")
    op.execute(f"INSERT INTO code_revisions VALUES ('{revision}')")


def downgrade() -> None:
    """Drop them with what they hold."""
    op.execute("DROP FUNCTION grant_to_roles()")
    op.execute(f"ALTER FUNCTION {BEFORE}() RENAME TO grant_to_roles")
    op.execute("COMMENT ON FUNCTION grant_to_roles() IS 'Makes the group roles, if the caller may, and grants them their rights; returns the roles that are missing'")
    op.drop_column("probe_prompts", "segment")
    op.drop_column("probe_prompts", "job_id")
    op.drop_table("remembered_results")
    op.execute(f"DELETE FROM code_revisions WHERE revision = '{revision}'")
