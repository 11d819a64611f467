"""A change of choice keeps the figures it was made on: what was expected of it and of its rival, and the counts.

Costs and sums are overwritten as they change, so afterwards nothing else could tell. Processes of the revision before
leave the columns null.
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, Double, Integer, Text, text
from sqlalchemy.dialects.postgresql import ARRAY

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

COLUMNS = (
    ("tokens_per_round", Double(), "Expected of the new choice; null where nothing was weighed"),
    ("round_ms", Double(), "Expected milliseconds of such a round"),
    ("speedup", Double(), "Expected goodput over vanilla"),
    ("speedup_low", Double(), "Lower 95 % bound"),
    ("speedup_high", Double(), "Upper 95 % bound"),
    ("rival_drafter", Text(), "Of the best other alternative; null for vanilla"),
    ("rival_num_draft_tokens", Integer(), "Its k; null where there was none"),
    ("rival_speedup", Double(), "Its expected goodput over vanilla"),
    ("rival_speedup_low", Double(), "Lower 95 % bound"),
    ("rival_speedup_high", Double(), "Upper 95 % bound"),
    (
        "jobs",
        Double(),
        "Jobs remembered of the drafter in the task, as they weighed; the rival's, if vanilla was chosen",
    ),
    ("trials", ARRAY(Double()), "Theirs, by position, as they weighed"),
    ("accepts", ARRAY(Double()), "Of the trials, accepted"),
)

VIEW = """
    CREATE OR REPLACE VIEW decision_log AS
    SELECT
        decided_at,
        task,
        CASE WHEN from_mode IS NULL THEN NULL
             WHEN from_mode = 'vanilla' THEN 'vanilla'
             ELSE from_drafter || ' k=' || from_num_draft_tokens END AS was,
        CASE WHEN to_mode = 'vanilla' THEN 'vanilla'
             ELSE to_drafter || ' k=' || to_num_draft_tokens END AS became,
        reason,
        explanation,
        sampling_bucket,
        batch,
        target_revision,
        device,
        owner{more}
    FROM decisions
    ORDER BY decided_at DESC, id DESC
"""
MORE = """,
        speedup,
        speedup_low,
        speedup_high,
        CASE WHEN rival_num_draft_tokens IS NULL THEN NULL
             WHEN rival_drafter IS NULL THEN 'vanilla'
             ELSE rival_drafter || ' k=' || rival_num_draft_tokens END AS rival,
        rival_speedup,
        jobs,
        ARRAY(SELECT a / nullif(n, 0) FROM unnest(accepts, trials) WITH ORDINALITY AS p(a, n, i) ORDER BY i) AS alpha"""
SAID = {
    "decided_at": "When",
    "task": "Kind of prompt",
    "was": "Choice before; null for the first",
    "became": "Choice from then on",
    "reason": "One word: alphaloop.policy.Reason",
    "explanation": "The reason with its figures",
    "sampling_bucket": "Sampling settings it applies to",
    "batch": "Batch size it was decided at",
    "target_revision": "Hash of the target's weights",
    "device": "Where it applies",
    "owner": "Worker that decided",
}
SAID_MORE = {
    "speedup": "Goodput over vanilla that was expected of the new choice",
    "speedup_low": "Lower 95 % bound",
    "speedup_high": "Upper 95 % bound",
    "rival": "The best other alternative",
    "rival_speedup": "What was expected of it",
    "jobs": "Jobs behind it, as they weighed",
    "alpha": "By position: accepted of what was tested",
}


def upgrade() -> None:
    """Columns, and what people read of them."""
    for name, kind, comment in COLUMNS:
        op.add_column("decisions", Column(name, kind, comment=comment))
    _make_view(MORE, {**SAID, **SAID_MORE})


def downgrade() -> None:
    """The figures go."""
    op.execute(text("DROP VIEW decision_log"))
    for name, _, _ in reversed(COLUMNS):
        op.drop_column("decisions", name)
    _make_view("", SAID)


def _make_view(more: str, said: dict[str, str]) -> None:
    op.execute(text(VIEW.format(more=more)))
    op.execute(text("COMMENT ON VIEW decision_log IS 'When a task''s choice changed, newest first'"))
    for name, comment in said.items():
        comment = comment.replace("'", "''")
        op.execute(text(f"COMMENT ON COLUMN decision_log.{name} IS '{comment}'"))
