"""What workers run, and which texts a limit cut. Processes of the release before cannot read the evidence any more."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

#: Bytes of one packed sum, and how many sums that are one number each stood before those by position.
DOUBLE, NUM_BEFORE = 8, 7
#: By release: numbers before the sums by position, what the mean length divides by, and what its comment says.
VIEWS = {
    "0001": (7, "sums[1]", "Mean output tokens of a job"),
    "0002": (
        9,
        "sums[9]",
        "Output tokens of the texts counted here over those of them that ended by themselves: a limit cut the others; null without any",
    ),
}


def upgrade() -> None:
    """The evidence is written anew, so every process of the release before has to end first."""
    for column in (
        sa.Column("target_revision", sa.Text(), comment="Hash of the target's weights; null of an earlier release"),
        sa.Column(
            "setup",
            sa.JSON(),
            comment="alphaloop.store.workers.WorkerSetup: engine, host, limits, drafters; null of an earlier release",
        ),
        sa.Column(
            "sampling_defaults",
            sa.Text(),
            nullable=False,
            server_default="",
            comment="What its model suggests for sampling and whether jobs take it, in words; empty: nothing",
        ),
    ):
        op.add_column("workers", column)
    op.add_column(
        "decode_runs",
        sa.Column(
            "is_cut",
            sa.Boolean(),
            nullable=False,
            server_default=sa.text("false"),
            comment="Whether a limit ended the text, which says only how long it is at least",
        ),
    )
    op.add_column(
        "evidence_rows",
        sa.Column(
            "is_cut",
            sa.Boolean(),
            comment="The same of a row that counts for the job's length; null where another row of the job does",
        ),
    )
    for table in ("acceptance_hourly", "acceptance_daily"):
        op.add_column(
            table,
            sa.Column(
                "num_cut",
                sa.BigInteger(),
                nullable=False,
                server_default=sa.text("0"),
                comment="Of the jobs, texts that a limit ended; shadows have none",
            ),
        )
    # Of texts that were stored before, none is known to be cut: as many texts, and as many ends, as there are jobs.
    head, jobs = NUM_BEFORE * DOUBLE, f"substring(evidence FROM {{start}} FOR {DOUBLE})"
    rewrite(
        " || ".join(
            f"substring(evidence FROM {start} FOR {head}) || {jobs.format(start=start)} || {jobs.format(start=start)} "
            f"|| substring(evidence FROM {start} + {head} FOR length(evidence) / 2 - {head})"
            for start in ("1", "1 + length(evidence) / 2")
        )
    )
    create_view("0002")
    op.execute("INSERT INTO code_revisions VALUES ('0002')")
    op.execute("DELETE FROM code_revisions WHERE revision = '0001'")


def downgrade() -> None:
    """Undo."""
    op.execute("DELETE FROM code_revisions WHERE revision = '0002'")
    op.execute("INSERT INTO code_revisions VALUES ('0001')")
    create_view("0001")
    head, added = NUM_BEFORE * DOUBLE, 2 * DOUBLE
    rewrite(
        " || ".join(
            f"substring(evidence FROM {start} FOR {head}) "
            f"|| substring(evidence FROM {start} + {head + added} FOR length(evidence) / 2 - {head + added})"
            for start in ("1", "1 + length(evidence) / 2")
        )
    )
    for table in ("acceptance_daily", "acceptance_hourly"):
        op.drop_column(table, "num_cut")
    for table in ("evidence_rows", "decode_runs"):
        op.drop_column(table, "is_cut")
    for column in ("sampling_defaults", "setup", "target_revision"):
        op.drop_column("workers", column)


def rewrite(evidence: str) -> None:
    """Set the packed sums of every row that has some to this expression."""
    for table in ("acceptance_state", "acceptance_checkpoints"):
        op.execute(f"UPDATE {table} SET evidence = {evidence} WHERE length(evidence) > 0")  # noqa: S608


def create_view(release: str) -> None:
    """The view over the packed sums, as a release packs them."""
    numbers, ends, comment = VIEWS[release]

    def array(index: int, half: str = "") -> str:
        low, high = (f"{at} {half}" for at in (numbers + 1, numbers))
        return f"sums[{low} + {index} * positions:{high} + {index + 1} * positions]"

    op.execute(f"""
        CREATE OR REPLACE VIEW evidence_now AS
        SELECT
            task, segment, drafter, draft_revision, sampling_bucket, prompt_bucket, target_revision, engine, as_of,
            num_jobs,
            sums[1] AS jobs,
            sums[1 + half] AS recent_jobs,
            sums[3] AS rounds,
            sums[6] / nullif({ends}, 0) AS mean_output_tokens,
            {array(2)} AS trials,
            {array(3)} AS accepts,
            {array(2, "+ half")} AS recent_trials,
            {array(3, "+ half")} AS recent_accepts
        FROM acceptance_state,
            LATERAL (SELECT unpack_doubles(evidence) AS sums) AS unpacked,
            LATERAL (
                SELECT cardinality(sums) / 2 AS half, (cardinality(sums) / 2 - {numbers}) / 7 AS positions
            ) AS lengths
    """)  # noqa: S608
    op.execute(f"COMMENT ON COLUMN evidence_now.mean_output_tokens IS '{comment}'")
