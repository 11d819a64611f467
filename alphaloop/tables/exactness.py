"""The watch over exactness: the tokens of probes and controls, and the incidents found."""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    ARRAY,
    REAL,
    BigInteger,
    CheckConstraint,
    Column,
    Double,
    Identity,
    Index,
    Integer,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from alphaloop.tables.metadata import NOW, instant, metadata

probe_texts: Final = Table(
    "probe_texts",
    metadata,
    Column("job_id", Text, primary_key=True, comment="The probe or control"),
    instant("decoded_at", "When its last token was decoded"),
    Column("token_ids", ARRAY(Integer), nullable=False, comment="The tokens of its text"),
    Column("finish_reason", Text, nullable=False, comment="stop or length"),
    Column("max_tokens", Integer, nullable=False, comment="Most tokens that were asked for"),
    Column(
        "second_ids", ARRAY(Integer), nullable=False, comment="By token, the target's second choice; empty: unknown"
    ),
    Column("gaps", ARRAY(REAL), nullable=False, comment="By token, how far the second choice's logit lies behind"),
    Column("near_tie", Double, nullable=False, comment="Gap up to which rounding in the engine's dtype may swap two"),
    Index("ix_probe_texts_decoded_at", "decoded_at"),
    comment="What a probe and its control generated, to be compared; never the tokens of traffic",
)

incidents: Final = Table(
    "incidents",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True, comment="Order"),
    Column("kind", Text, nullable=False, comment="wrong_text, cut_short or wrong_counts"),
    Column("task", Text, nullable=False, comment="Kind of prompt"),
    Column("drafter", Text, nullable=False, comment="Drafter whose text is wrong; empty: the vanilla one"),
    Column("draft_revision", Text, nullable=False, comment="Its revision; empty for vanilla"),
    Column("target_revision", Text, nullable=False, comment="Hash of the target's weights"),
    Column("engine", Text, nullable=False, comment="Decoding library, version and dtype"),
    Column("job_ids", ARRAY(Text), nullable=False, comment="The jobs that show it"),
    Column("evidence", JSONB, nullable=False, comment="Where the first of them went wrong"),
    Column("sentence", Text, nullable=False, comment="One sentence for the owner"),
    instant("opened_at", "When it was found", server_default=NOW),
    instant("acknowledged_at", "When somebody took note of it", nullable=True),
    Column("acknowledged_by", Text, comment="Who took note of it"),
    Column("note", Text, comment="What they do about it"),
    instant("closed_at", "When later probes were right; null while open", nullable=True),
    CheckConstraint("kind IN ('wrong_text','cut_short','wrong_counts')", name="kind"),
    CheckConstraint("closed_at IS NULL OR closed_at >= opened_at", name="closed_after_opened"),
    # The same fault on more prompts is the same incident.
    Index(
        "uq_incidents_open",
        "kind",
        "task",
        "drafter",
        "draft_revision",
        "target_revision",
        "engine",
        unique=True,
        postgresql_where=text("closed_at IS NULL"),
    ),
    comment="Proofs that the engine did not do what it promises: text that differs beyond a near-tie, or wrong counts",
)
