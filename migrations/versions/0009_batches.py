"""Batches of every producer, and what became of the requests of each.

It only adds: processes of the release before run on this schema. What they change of a batch of the API while both run
is read from its older columns.
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger, Boolean, CheckConstraint, Column, DateTime, Integer, PrimaryKeyConstraint, Text, text
from sqlalchemy.dialects.postgresql import JSON

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

INSTANT = DateTime(timezone=True)
NOW = text("clock_timestamp()")
NOTHING = text("'{}'")
BEFORE = "grant_to_roles_before_0009"
COUNTED = "Its requests by what became of them, when they were counted last; a request that was sent again counts once"

# Whoever submits a batch notes it with the rights of a worker; a scheduler counts it.
GRANTS = f"""
CREATE FUNCTION grant_to_roles() RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    missing text[] := {BEFORE}();
BEGIN
    IF cardinality(missing) = 0 THEN
        GRANT SELECT, INSERT, UPDATE ON batches TO alphaloop_worker;
        GRANT SELECT, INSERT, UPDATE, DELETE ON batches TO alphaloop_scheduler;
        GRANT SELECT ON batches TO alphaloop_reader;
        GRANT SELECT (by_status, used, output_kept_s) ON api_batches TO alphaloop_reader;
    END IF;
    RETURN missing;
END
$$
"""


def upgrade() -> None:
    """Add the table, with the batches of the jobs that are there, and the column."""
    op.create_table(
        "batches",
        Column("id", Text(), nullable=False, comment="batch_id of its jobs"),
        Column("source", Text(), nullable=False, comment="command: alphaloop batch submit; console: uploaded there; kafka: any other producer"),
        Column("by", Text(), comment="Account or login that submitted it; null of any other producer's"),
        Column("name", Text(), comment="Name of its file; null without one"),
        Column("task", Text(), comment="Task of lines that name none; null without a file"),
        Column("num_bytes", BigInteger(), comment="Length of its file; null without one"),
        Column("num_total", Integer(), server_default=text("0"), nullable=False, comment="Lines with text of its file; 0: not known"),
        Column("num_invalid", Integer(), server_default=text("0"), nullable=False, comment="Of these, how many were wrong and not sent"),
        Column("by_status", JSON(), server_default=NOTHING, nullable=False, comment=COUNTED),
        Column("is_open", Boolean(), server_default=text("true"), nullable=False, comment="Whether it is to be counted again"),
        Column("created_at", INSTANT, server_default=NOW, nullable=False, comment="When it was submitted, or a worker claimed its first job"),
        Column("counted_at", INSTANT, comment="When it was counted last"),
        CheckConstraint("source IN ('command','console','kafka')", name=op.f("ck_batches_source")),
        PrimaryKeyConstraint("id", name=op.f("pk_batches")),
        comment="One row a batch that did not come through the API",
    )
    op.create_index("ix_batches_created_at", "batches", ["created_at", "id"])
    op.create_index("ix_batches_open", "batches", ["id"], postgresql_where=text("is_open"))
    op.add_column("api_batches", Column("by_status", JSON(), server_default=NOTHING, nullable=False, comment=COUNTED))
    op.add_column("api_batches", Column("used", JSON(), comment="Tokens of its texts: input, output, reasoning; null until it has ended"))
    op.add_column("api_batches", Column("output_kept_s", Integer(), comment="Seconds for which its files are kept; null: as long as any other"))
    op.create_index("ix_api_batches_created_at", "api_batches", ["created_at", "id"])
    op.execute(
        "INSERT INTO batches (id, source, created_at) SELECT batch_id, 'kafka', min(created_at) FROM jobs "
        "WHERE batch_id IS NOT NULL AND NOT EXISTS (SELECT FROM api_batches WHERE id = batch_id) GROUP BY batch_id"
    )
    op.execute(f"ALTER FUNCTION grant_to_roles() RENAME TO {BEFORE}")
    op.execute(GRANTS)
    op.execute("COMMENT ON FUNCTION grant_to_roles() IS 'Makes the group roles, if the caller may, and grants them their rights; returns the roles that are missing'")
    op.execute(f"COMMENT ON FUNCTION {BEFORE}() IS 'The part of grant_to_roles() about the tables of earlier revisions'")
    op.execute("SELECT grant_to_roles()")
    op.execute(f"INSERT INTO code_revisions VALUES ('{revision}')")


def downgrade() -> None:
    """Drop the table and the column."""
    op.execute("DROP FUNCTION grant_to_roles()")
    op.execute(f"ALTER FUNCTION {BEFORE}() RENAME TO grant_to_roles")
    op.drop_index("ix_api_batches_created_at", "api_batches")
    op.drop_column("api_batches", "output_kept_s")
    op.drop_column("api_batches", "used")
    op.drop_column("api_batches", "by_status")
    op.drop_table("batches")
    op.execute(f"DELETE FROM code_revisions WHERE revision = '{revision}'")
