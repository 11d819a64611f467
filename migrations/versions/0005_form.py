"""The form of jobs joins the key of all evidence; forced tokens, and counts by proposer.

Rows that are stored are of plain text. A process of an earlier release names the columns of the old keys where it adds
to a row, so it cannot run on this schema: stop it first.
"""

from __future__ import annotations

from pathlib import Path

from alembic import op
from sqlalchemy import BigInteger, Column, Text, text
from sqlalchemy.dialects.postgresql import JSONB

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

EARLIER = "'0003', '0004'"
FORM = "What the text has to match (json, regex, choice, grammar), then tools, images; empty for plain text"
FORCED = "Tokens that were the only ones allowed at their place; they are taken without a trial"
VIEWS = ("task_alpha_now", "evidence_now")
LEDGER = ("decode_runs", "evidence_rows")
ROLLUPS = ("acceptance_hourly", "acceptance_daily")
#: Tables with the key of evidence, or a part of it, in their primary key: its columns before this revision.
OF_KEY = "task, segment, target_revision, drafter, draft_revision, engine, sampling_bucket, prompt_bucket"
KEYS = {
    "acceptance_state": "target_revision, engine, drafter, draft_revision, task, segment, sampling_bucket, prompt_bucket",
    **dict.fromkeys(ROLLUPS, f"bucket, {OF_KEY}, purpose, mode, num_draft_tokens"),
    "drift_memories": "task, target_revision, engine, sampling_bucket, drafter, draft_revision",
}
TOKENS = "num_tokens = rounds + array_sum(accepts) - num_cropped"


def upgrade() -> None:
    """Add the columns, and make the keys, the check and the views anew."""
    for view in VIEWS:
        op.execute(f"DROP VIEW {view}")
    for table in (*LEDGER, *KEYS):
        op.add_column(table, Column("form_bucket", Text(), server_default=text("''"), nullable=False, comment=FORM))
    for table in (*LEDGER, *ROLLUPS):
        op.add_column(table, Column("num_forced", BigInteger(), server_default=text("0"), nullable=False, comment=FORCED))
        op.execute(f"COMMENT ON COLUMN {table}.num_cropped IS 'rounds + accepted + forced - tokens'")
    op.execute("COMMENT ON COLUMN evidence_rows.num_output_tokens IS 'Tokens of the whole text, without forced ones'")
    told = "Where several proposers shared the job's rounds: by proposer, trials and accepts by position; no sum of the counts beside it"
    op.add_column("decode_runs", Column("proposers", JSONB(), comment=told))
    for table, key in KEYS.items():
        replace_key(table, f"{key}, form_bucket")
    replace_check(f"{TOKENS} + num_forced")
    run_script("0005_views.sql")
    op.execute("SELECT grant_to_roles()")
    op.execute(f"DELETE FROM code_revisions WHERE revision IN ({EARLIER})")
    op.execute(f"INSERT INTO code_revisions VALUES ('{revision}')")


def downgrade() -> None:
    """Drop the columns, and the rows that cannot be told apart without them."""
    for view in VIEWS:
        op.execute(f"DROP VIEW {view}")
    for table in LEDGER:
        op.execute(f"DELETE FROM {table} WHERE form_bucket <> '' OR num_forced > 0")
    for table, key in KEYS.items():
        op.execute(f"DELETE FROM {table} WHERE form_bucket <> ''")
        replace_key(table, key)
    replace_check(TOKENS)
    op.drop_column("decode_runs", "proposers")
    op.execute("COMMENT ON COLUMN evidence_rows.num_output_tokens IS 'Tokens of the whole text'")
    for table in (*LEDGER, *ROLLUPS):
        op.execute(f"COMMENT ON COLUMN {table}.num_cropped IS 'rounds + accepted - tokens'")
        op.drop_column(table, "num_forced")
    for table in (*LEDGER, *KEYS):
        op.drop_column(table, "form_bucket")
    run_script("0003_views.sql", only=VIEWS)
    op.execute("SELECT grant_to_roles()")
    op.execute(f"DELETE FROM code_revisions WHERE revision = '{revision}'")
    op.execute(f"INSERT INTO code_revisions SELECT unnest(ARRAY[{EARLIER}])")


def replace_key(table: str, columns: str) -> None:
    """Make these columns the primary key."""
    op.execute(f"ALTER TABLE {table} DROP CONSTRAINT pk_{table}, ADD CONSTRAINT pk_{table} PRIMARY KEY ({columns})")


def replace_check(condition: str) -> None:
    """Check the rows of decode_runs by it, the stored ones too: where they are many, this takes most of the time."""
    name = op.f("ck_decode_runs_tokens_add_up")
    op.execute(f"ALTER TABLE decode_runs DROP CONSTRAINT {name}, ADD CONSTRAINT {name} CHECK ({condition})")


def run_script(name: str, *, only: tuple[str, ...] = ()) -> None:
    """The statements of a file beside this one, each of which ends a line; `only` those that name one of these."""
    script = Path(__file__).with_name(name).read_text(encoding="utf-8")
    for statement in script.split(";\n"):
        if statement.strip() and (not only or any(f" {view}" in statement for view in only)):
            op.execute(statement.strip())
