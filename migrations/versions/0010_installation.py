"""Which Kafka a database belongs to, and an id of the database, which its workers show in their consumer group.

It only adds: processes of the release before run on this schema, and note nothing.
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, DateTime, PrimaryKeyConstraint, Text, Uuid, text

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

BEFORE = "grant_to_roles_before_0010"
COMMENT = "COMMENT ON FUNCTION grant_to_roles() IS 'Makes the group roles, if the caller may, and grants them their rights; returns the roles that are missing'"

GRANTS = f"""
CREATE FUNCTION grant_to_roles() RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    missing text[] := {BEFORE}();
BEGIN
    IF cardinality(missing) = 0 THEN
        GRANT SELECT ON installation TO alphaloop_worker, alphaloop_scheduler, alphaloop_reader;
        GRANT UPDATE (kafka_cluster, kafka_prefix, noted_at) ON installation TO alphaloop_worker, alphaloop_scheduler;
    END IF;
    RETURN missing;
END
$$
"""


def upgrade() -> None:
    """Make the table with its row, and grant the roles what they need."""
    op.create_table(
        "installation",
        Column("id", Uuid(), server_default=text("gen_random_uuid()"), nullable=False, comment="Id of the database, in the client.id of its workers; a new one when another Kafka is adopted"),
        Column("kafka_cluster", Text(), comment="Id of the Kafka cluster, noted by the first process; null before"),
        Column("kafka_prefix", Text(), comment="kafka.prefix of its topics and groups; null before"),
        Column("noted_at", DateTime(timezone=True), comment="When the two were noted or adopted; null before"),
        PrimaryKeyConstraint("id", name=op.f("pk_installation")),
        comment="One row: the Kafka that this database belongs to",
    )
    op.execute("INSERT INTO installation DEFAULT VALUES")
    op.execute(f"ALTER FUNCTION grant_to_roles() RENAME TO {BEFORE}")
    op.execute(GRANTS)
    op.execute(COMMENT)
    op.execute(f"COMMENT ON FUNCTION {BEFORE}() IS 'The part of grant_to_roles() about the tables before revision 0010'")
    op.execute("SELECT grant_to_roles()")
    op.execute(f"INSERT INTO code_revisions VALUES ('{revision}')")


def downgrade() -> None:
    """Drop it."""
    op.execute("DROP FUNCTION grant_to_roles()")
    op.execute(f"ALTER FUNCTION {BEFORE}() RENAME TO grant_to_roles")
    op.execute(COMMENT)
    op.drop_table("installation")
    op.execute(f"DELETE FROM code_revisions WHERE revision = '{revision}'")
