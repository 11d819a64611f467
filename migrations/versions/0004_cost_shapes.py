"""Costs at several contexts, costs of prompts, and what real rounds made of them.

What is stored was measured with 256 tokens before each sequence. The key grows, so a row of the old shape still goes in
with the defaults; processes of the revision before neither read nor write costs once they have started, and refuse to
start on this revision.
"""

from __future__ import annotations

from typing import Any

from alembic import op
from sqlalchemy import BigInteger, Column, DateTime, Double, Integer, Text, text
from sqlalchemy.types import TypeEngine

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

OLD_KEY = ("device", "engine", "target_revision", "drafter", "draft_revision", "batch", "width")
COMMENTS: dict[str, tuple[TypeEngine[Any], str, str]] = {
    "width": (
        Integer(),
        "Target positions a sequence: k + 1",
        "Target positions a sequence, k + 1; of a prefill, the prompt's tokens",
    ),
    "median_ms": (Double(), "Median milliseconds", "Median milliseconds, as measured"),
}


def upgrade() -> None:
    """Add the columns, then let the key hold them."""
    added: tuple[Column[Any], ...] = (
        Column("context", Integer(), server_default=text("256"), nullable=False, comment="Tokens before, a sequence"),
        Column("kind", Text(), server_default=text("'round'"), nullable=False, comment="round or prefill"),
        Column(
            "correction",
            Double(),
            server_default=text("1"),
            nullable=False,
            comment="What real rounds took, over median_ms",
        ),
        Column(
            "num_corrections",
            BigInteger(),
            server_default=text("0"),
            nullable=False,
            comment="Real rounds of about this shape behind the correction",
        ),
        Column("corrected_at", DateTime(timezone=True), comment="When the correction was last stored; null if never"),
    )
    for column in added:
        op.add_column("cost_profiles", column)
    op.create_check_constraint(op.f("ck_cost_profiles_kind"), "cost_profiles", "kind IN ('round','prefill')")
    op.create_check_constraint(op.f("ck_cost_profiles_correction"), "cost_profiles", "correction > 0")
    op.drop_constraint(op.f("pk_cost_profiles"), "cost_profiles", type_="primary")
    op.create_primary_key(op.f("pk_cost_profiles"), "cost_profiles", [*OLD_KEY, "context", "kind"])
    for name, (kind, before, now) in COMMENTS.items():
        op.alter_column("cost_profiles", name, existing_type=kind, comment=now, existing_comment=before)


def downgrade() -> None:
    """Keep what the old shape can hold: rounds at the context that was the only one."""
    op.execute("DELETE FROM cost_profiles WHERE kind <> 'round' OR context <> 256")
    op.drop_constraint(op.f("pk_cost_profiles"), "cost_profiles", type_="primary")
    op.create_primary_key(op.f("pk_cost_profiles"), "cost_profiles", list(OLD_KEY))
    for name in ("correction", "kind"):
        op.drop_constraint(op.f(f"ck_cost_profiles_{name}"), "cost_profiles", type_="check")
    for name in ("corrected_at", "num_corrections", "correction", "kind", "context"):
        op.drop_column("cost_profiles", name)
    for name, (kind, before, now) in COMMENTS.items():
        op.alter_column("cost_profiles", name, existing_type=kind, comment=before, existing_comment=now)
