"""What is remembered of every evidence key, a view that unpacks it, and notices when drafts or drift change.

Rows are added by processes of this revision. Their first one fills the table from acceptance_hourly, which a migration
cannot do as well: how fast evidence fades is a setting, and the arithmetic is alphaloop.deciding.evidence's.
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger, Column, DateTime, LargeBinary, PrimaryKeyConstraint, Text, text

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

KEY = {
    "task": "Kind of prompt",
    "segment": "Caller's label; empty without one",
    "target_revision": "Hash of the target's weights",
    "drafter": "Name of the drafter; empty for vanilla",
    "draft_revision": "Revision of the drafter; empty for vanilla",
    "gate": "Confidence gate that ends drafts early; empty without one",
    "engine": "Decoding library, version and dtype",
    "sampling_bucket": "Sampling settings that share a history",
    "prompt_bucket": "Prompt lengths that share a history",
}
PRIMARY_KEY = (
    "target_revision", "engine", "drafter", "draft_revision", "gate", "task", "segment", "sampling_bucket",
    "prompt_bucket",
)

# Sums are never negative, so the sign bit of a double is 0, and its bits are a bigint's.
UNPACK = """
    CREATE FUNCTION unpack_doubles(packed bytea) RETURNS float8[]
        LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
        RETURN ARRAY(
            SELECT CASE WHEN bits < 4503599627370496 THEN 0::float8 ELSE
                (1 + (bits & 4503599627370495)::float8 / 4503599627370496::float8)
                    * power(2::float8, ((bits >> 52) - 1023)::float8) END
            FROM generate_series(0, length(packed) / 8 - 1) AS n,
                LATERAL (SELECT ('x' || encode(substring(packed FROM 8 * n + 1 FOR 8), 'hex'))::bit(64)::bigint AS bits)
            ORDER BY n
        )
"""

# Eight sums, then nine by position, of all jobs; then the same of those that came lately.
VIEW = """
    CREATE VIEW evidence_now AS
    SELECT
        task, segment, drafter, draft_revision, gate, sampling_bucket, prompt_bucket, target_revision, engine, as_of,
        num_jobs,
        sums[1] AS jobs,
        sums[1 + half] AS jobs_lately,
        sums[3] AS rounds,
        sums[6] / nullif(sums[1], 0) AS mean_output_tokens,
        sums[9 + 2 * positions:8 + 3 * positions] AS trials,
        sums[9 + 3 * positions:8 + 4 * positions] AS accepts,
        sums[9 + half + 2 * positions:8 + half + 3 * positions] AS trials_lately,
        sums[9 + half + 3 * positions:8 + half + 4 * positions] AS accepts_lately
    FROM acceptance_state,
        LATERAL (SELECT unpack_doubles(evidence) AS sums) AS unpacked,
        LATERAL (SELECT cardinality(sums) / 2 AS half, (cardinality(sums) / 2 - 8) / 9 AS positions) AS lengths
"""
VIEW_COMMENTS = {
    **KEY,
    "as_of": "When the last of its jobs ended",
    "num_jobs": "Jobs ever added",
    "jobs": "Jobs as they weigh at as_of, each less the older it is",
    "jobs_lately": "The same, each less also by the jobs that came after it: about the last two dozen",
    "rounds": "Rounds, prefills left out",
    "mean_output_tokens": "Tokens of a job",
    "trials": "By position: rounds in which it was tested",
    "accepts": "By position: of the trials, accepted",
    "trials_lately": "trials of the jobs that came lately",
    "accepts_lately": "accepts of the jobs that came lately",
}

NOTIFY = """
    CREATE FUNCTION tell_drafts_changed() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN PERFORM pg_notify('alphaloop_drafts', ''); RETURN NULL; END $$
"""
WATCHED = {
    "draft_revisions": "AFTER INSERT OR DELETE OR TRUNCATE OR UPDATE OF status ON draft_revisions",
    "drift_events": "AFTER INSERT OR DELETE OR TRUNCATE OR UPDATE OF closed_at ON drift_events",
}


def upgrade() -> None:
    """Create everything."""
    instant = DateTime(timezone=True)
    op.create_table(
        "acceptance_state",
        *(Column(name, Text(), server_default=text("''"), nullable=False, comment=told) for name, told in KEY.items()),
        Column(
            "as_of",
            instant,
            nullable=False,
            comment="When the last of its jobs ended: the moment at which the sums weigh",
        ),
        Column("num_jobs", BigInteger(), nullable=False, comment="Jobs ever added"),
        Column(
            "evidence",
            LargeBinary(),
            nullable=False,
            comment="alphaloop.deciding.evidence.Memory, packed: the view evidence_now unpacks it",
        ),
        Column(
            "changed_in",
            BigInteger(),
            nullable=False,
            comment="Transaction that changed it last: who was not seen is newer",
        ),
        PrimaryKeyConstraint(*PRIMARY_KEY, name=op.f("pk_acceptance_state")),
        postgresql_with={"toast_tuple_target": 8160},
        comment="Sums over the jobs of an evidence key, which fade: what a task's next decision rests on",
    )
    op.execute("ALTER TABLE acceptance_state ALTER COLUMN evidence SET STORAGE EXTERNAL")
    op.create_index("ix_acceptance_state_changed_in", "acceptance_state", ["changed_in"])
    op.execute(UNPACK)
    op.execute(
        "COMMENT ON FUNCTION unpack_doubles(bytea) IS 'Numbers that are not negative, packed as big-endian doubles'"
    )
    op.execute(VIEW)
    op.execute("COMMENT ON VIEW evidence_now IS 'What decisions rest on: of every key of evidence, sums in which a job weighs the less the older it is'")
    for name, told in VIEW_COMMENTS.items():
        op.execute(f"COMMENT ON COLUMN evidence_now.{name} IS '{told.replace(chr(39), 2 * chr(39))}'")
    op.execute(NOTIFY)
    for table, when in WATCHED.items():
        op.execute(f"CREATE TRIGGER {table}_changed {when} FOR EACH STATEMENT EXECUTE FUNCTION tell_drafts_changed()")


def downgrade() -> None:
    """Drop everything. The hours remain, from which the table is filled again."""
    for table in WATCHED:
        op.execute(f"DROP TRIGGER {table}_changed ON {table}")
    op.execute("DROP FUNCTION tell_drafts_changed()")
    op.execute("DROP VIEW evidence_now")
    op.execute("DROP FUNCTION unpack_doubles(bytea)")
    op.drop_table("acceptance_state")
