"""Files and batches of OpenAI's API, its keys, and the audit of who did what."""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger, CheckConstraint, Column, DateTime, Identity, Integer, LargeBinary, PrimaryKeyConstraint, Text, text
from sqlalchemy.dialects.postgresql import ARRAY, JSON

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

INSTANT = DateTime(timezone=True)
NOW = text("clock_timestamp()")
BEFORE = "grant_to_roles_before_0004"
STATUSES = "'validating','failed','in_progress','finalizing','completed','expired','cancelling','cancelled'"

# What the roles had before, and then these tables. A scheduler makes no keys, and a reader sees no digest of one.
GRANTS = f"""
CREATE FUNCTION grant_to_roles() RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    missing text[] := {BEFORE}();
BEGIN
    IF cardinality(missing) = 0 THEN
        GRANT SELECT, UPDATE (last_used_at) ON api_keys TO alphaloop_scheduler;
        GRANT SELECT, INSERT, UPDATE, DELETE ON api_files, api_batches TO alphaloop_scheduler;
        GRANT SELECT, INSERT, DELETE ON audit TO alphaloop_scheduler;
        -- Locking a row needs the right to update a column.
        GRANT UPDATE (id) ON audit TO alphaloop_scheduler;
        GRANT SELECT ON audit TO alphaloop_reader;
        GRANT SELECT (id, name, prefix, segment, tasks, created_at, expires_at, last_used_at, revoked_at) ON api_keys TO alphaloop_reader;
        GRANT SELECT (id, key_name, segment, task, endpoint, completion_window, input_file_id, output_file_id, error_file_id, status,
            num_total, num_sent, num_invalid, num_completed, num_failed, created_at, expires_at, look_at, in_progress_at, finalizing_at,
            completed_at, failed_at, expired_at, cancelling_at, cancelled_at) ON api_batches TO alphaloop_reader;
        GRANT SELECT (id, key_name, purpose, num_bytes, created_at, expires_at) ON api_files TO alphaloop_reader;
    END IF;
    RETURN missing;
END
$$
"""


def upgrade() -> None:
    """Make the tables, and grant the roles what they need of them."""
    create_keys()
    create_files()
    create_batches()
    create_audit()
    op.execute(f"ALTER FUNCTION grant_to_roles() RENAME TO {BEFORE}")
    op.execute(GRANTS)
    op.execute("COMMENT ON FUNCTION grant_to_roles() IS 'Makes the group roles, if the caller may, and grants them their rights; returns the roles that are missing'")
    op.execute(f"COMMENT ON FUNCTION {BEFORE}() IS 'The part of grant_to_roles() about the tables of revision 0003'")
    op.execute("SELECT grant_to_roles()")
    op.execute(f"INSERT INTO code_revisions VALUES ('{revision}')")


def downgrade() -> None:
    """Drop them with their rows."""
    op.execute("DROP FUNCTION grant_to_roles()")
    op.execute(f"ALTER FUNCTION {BEFORE}() RENAME TO grant_to_roles")
    for table in ("audit", "api_batches", "api_files", "api_keys"):
        op.drop_table(table)
    op.execute(f"DELETE FROM code_revisions WHERE revision = '{revision}'")


def create_keys() -> None:
    """Who may use the API."""
    op.create_table(
        "api_keys",
        Column("id", BigInteger(), Identity(always=True), nullable=False, comment="Order in which they were made"),
        Column("name", Text(), nullable=False, comment="Owner of files and batches; a new key of this name takes them over"),
        Column("prefix", Text(), nullable=False, comment="First characters of the key, to tell it by"),
        Column("digest", LargeBinary(), nullable=False, comment="SHA-256 of the key, which itself is not stored"),
        Column("segment", Text(), nullable=False, comment="Segment of every job that is sent with it"),
        Column("tasks", ARRAY(Text()), nullable=False, comment="Tasks that it may send jobs to; empty: all"),
        Column("created_at", INSTANT, server_default=NOW, nullable=False, comment="When it was made"),
        Column("expires_at", INSTANT, comment="From when on it is refused; null: never"),
        Column("last_used_at", INSTANT, comment="When it was used last, to a minute"),
        Column("revoked_at", INSTANT, comment="When it was revoked; from then on it is refused"),
        PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        comment="One row a key of the API for files and batches",
    )
    op.create_index("uq_api_keys_digest", "api_keys", ["digest"], unique=True)
    op.create_index("uq_api_keys_not_revoked", "api_keys", ["name"], unique=True, postgresql_where=text("revoked_at IS NULL"))


def create_files() -> None:
    """What was uploaded, and what batches wrote."""
    op.create_table(
        "api_files",
        Column("id", Text(), nullable=False, comment="As the API names it"),
        Column("key_name", Text(), nullable=False, comment="Name of the key that it belongs to"),
        Column("filename", Text(), nullable=False, comment="On the machine that it came from"),
        Column("purpose", Text(), nullable=False, comment="batch: uploaded; batch_output: written by a batch"),
        Column("num_bytes", BigInteger(), nullable=False, comment="Its length"),
        Column("parts", JSON(), nullable=False, comment="Where its content lies: references into the claim-check store; null: a file of the data folder"),
        Column("created_at", INSTANT, server_default=NOW, nullable=False, comment="When it was uploaded or written"),
        Column("expires_at", INSTANT, nullable=False, comment="When it is deleted"),
        CheckConstraint("purpose IN ('batch','batch_output')", name=op.f("ck_api_files_purpose")),
        PrimaryKeyConstraint("id", name=op.f("pk_api_files")),
        comment="One row a file of the API",
    )
    op.create_index("ix_api_files_key_name_created_at", "api_files", ["key_name", "created_at", "id"])
    op.create_index("ix_api_files_expires_at", "api_files", ["expires_at"])


def create_batches() -> None:
    """What becomes of an uploaded file."""
    op.create_table(
        "api_batches",
        Column("id", Text(), nullable=False, comment="As the API names it; batch_id of its jobs"),
        Column("key_name", Text(), nullable=False, comment="Name of the key that it belongs to"),
        Column("segment", Text(), nullable=False, comment="Segment of its jobs"),
        Column("task", Text(), comment="Task of lines that name none; null: each has to name one"),
        Column("tasks", ARRAY(Text()), nullable=False, comment="Tasks that lines may name; empty: all"),
        Column("endpoint", Text(), nullable=False, comment="What all lines must ask for"),
        Column("completion_window", Text(), nullable=False, comment="As it was asked for"),
        Column("metadata", JSON(), nullable=False, comment="The caller's own; null without"),
        Column("input_file_id", Text(), nullable=False, comment="File with its requests"),
        Column("output_file_id", Text(), comment="File with the requests that have a text; null before the end, and without any"),
        Column("error_file_id", Text(), comment="File with the other requests; null before the end, and without any"),
        Column("status", Text(), nullable=False, comment="OpenAI's word for where it stands"),
        Column("errors", JSON(), nullable=False, comment="Why it failed; null if it did not"),
        Column("num_total", Integer(), server_default=text("0"), nullable=False, comment="Lines with text"),
        Column("num_sent", Integer(), server_default=text("0"), nullable=False, comment="Of these, how many Kafka has or were wrong: who goes on begins behind them"),
        Column("num_invalid", Integer(), server_default=text("0"), nullable=False, comment="Of these, how many were wrong and not sent"),
        Column("num_completed", Integer(), server_default=text("0"), nullable=False, comment="Requests with a text, when it was looked at last"),
        Column("num_failed", Integer(), server_default=text("0"), nullable=False, comment="Requests that ended without one"),
        Column("created_at", INSTANT, server_default=NOW, nullable=False, comment="When it was asked for"),
        Column("expires_at", INSTANT, nullable=False, comment="Deadline of its jobs"),
        Column("look_at", INSTANT, server_default=NOW, nullable=False, comment="When a scheduler looks at it next"),
        Column("in_progress_at", INSTANT, comment="When its lines were counted"),
        Column("finalizing_at", INSTANT, comment="When its files began to be written"),
        Column("completed_at", INSTANT, comment="When it completed"),
        Column("failed_at", INSTANT, comment="When it failed as a whole"),
        Column("expired_at", INSTANT, comment="When it was found over before all of it was done"),
        Column("cancelling_at", INSTANT, comment="When its cancellation was asked for"),
        Column("cancelled_at", INSTANT, comment="When it was cancelled"),
        CheckConstraint(f"status IN ({STATUSES})", name=op.f("ck_api_batches_status")),
        PrimaryKeyConstraint("id", name=op.f("pk_api_batches")),
        comment="One row a batch of the API",
    )
    op.create_index("ix_api_batches_key_name_created_at", "api_batches", ["key_name", "created_at", "id"])
    op.create_index("ix_api_batches_input_file_id", "api_batches", ["input_file_id"])
    op.create_index(
        "ix_api_batches_open", "api_batches", ["look_at"],
        postgresql_where=text("status IN ('validating','in_progress','finalizing','cancelling')"),
    )


def create_audit() -> None:
    """Who did what."""
    op.create_table(
        "audit",
        Column("id", BigInteger(), Identity(always=True), nullable=False, comment="Order of the actions"),
        Column("at", INSTANT, server_default=NOW, nullable=False, comment="When it was done"),
        Column("by_kind", Text(), nullable=False, comment="login of the console, key of the API, or command"),
        Column("by", Text(), nullable=False, comment="Name of the login, of the key, or of the account that typed the command"),
        Column("action", Text(), nullable=False, comment="What was done, in one word"),
        Column("subject", Text(), nullable=False, comment="To what: an id, a name, or a choice of dead letters"),
        Column("address", Text(), comment="Where the request came from: the last proxy's address behind one; null of a command"),
        CheckConstraint("by_kind IN ('login','key','command')", name=op.f("ck_audit_by_kind")),
        PrimaryKeyConstraint("id", name=op.f("pk_audit")),
        comment="One row an action of a person or a program on the console, its API or its keys",
    )
    op.create_index("ix_audit_at", "audit", ["at"])
