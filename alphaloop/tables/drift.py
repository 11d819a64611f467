"""Drift events, and what became of each."""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Identity,
    Index,
    Integer,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from alphaloop.tables.metadata import NOW, instant, metadata

CAUSES: Final = (
    "traffic_changed",
    "mix_shift",
    "draft_stale",
    "bad_draft",
    "setup_changed",
    "fault",
    "too_little_evidence",
)
STATES: Final = ("opened", "explained", "confirmed", "acknowledged", "closed", "reopened")


def _one_of(column: str, values: tuple[str, ...]) -> str:
    return f"{column} IN ({','.join(repr(value) for value in values)})"


drift_events: Final = Table(
    "drift_events",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True, comment="Order"),
    Column("task", Text, nullable=False, comment="Kind of prompt"),
    Column("drafter", Text, nullable=False, comment="Drafter whose acceptance moved"),
    Column("draft_revision", Text, nullable=False, comment="Its revision"),
    Column("target_revision", Text, nullable=False, comment="Hash of the target's weights"),
    Column("cause", Text, nullable=False, comment="One of the seven causes of docs/concepts/drift.md"),
    Column("verdict", Text, nullable=False, comment="What was found, in sentences for the owner"),
    Column("action", Text, nullable=False, comment="What the owner may do"),
    Column("evidence", JSONB, nullable=False, comment="Counts, intervals and times, of traffic and of probes"),
    Column("lost_tokens_per_s", Double, comment="What it costs to do nothing; null where that is not known"),
    instant("began_after", "The change lies between this moment", nullable=True),
    instant("began_before", "and this one", nullable=True),
    instant("opened_at", "When it was found", server_default=NOW),
    instant("raised_at", "When it was found last: opened or reopened", server_default=NOW),
    instant("confirmed_at", "When later evidence agreed; null before", nullable=True),
    instant("acknowledged_at", "When somebody took note of it; null before", nullable=True),
    Column("acknowledged_by", Text, comment="Who did"),
    Column("note", Text, comment="What they said"),
    instant("closed_at", "When it was over; null while open", nullable=True),
    Column("closed_because", Text, comment="The evidence that it was over, or that its level was accepted"),
    instant("accepted_at", "When its owner took the new level for the norm; null otherwise", nullable=True),
    Column("num_reopened", Integer, nullable=False, server_default=text("0"), comment="Times that it came back"),
    CheckConstraint("closed_at IS NULL OR closed_at >= opened_at", name="closed_after_opened"),
    CheckConstraint("(closed_at IS NULL) = (closed_because IS NULL)", name="closed_with_reason"),
    CheckConstraint("accepted_at IS NULL OR closed_at IS NOT NULL", name="accepted_is_closed"),
    CheckConstraint(_one_of("cause", CAUSES), name="cause"),
    # One open event a cause: the run that finds the same fall again changes it.
    Index("uq_drift_events_open", "task", "drafter", "cause", unique=True, postgresql_where=text("closed_at IS NULL")),
    comment="Drift found, its cause, what it costs, and when it was over",
)

drift_event_states: Final = Table(
    "drift_event_states",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True, comment="Order"),
    Column(
        "event_id",
        BigInteger,
        ForeignKey("drift_events.id", ondelete="CASCADE"),
        nullable=False,
        comment="The event that it is about",
    ),
    instant("at", "When", server_default=NOW),
    Column("state", Text, nullable=False, comment="opened, explained, confirmed, acknowledged, closed or reopened"),
    Column("cause", Text, nullable=False, comment="Its cause from then on"),
    Column("sentence", Text, nullable=False, comment="What was found, or said, then"),
    Column("actor", Text, nullable=False, comment="Who acknowledged it; scheduler otherwise"),
    Column("evidence", JSONB, comment="The evidence of that moment; null of an acknowledgement"),
    CheckConstraint(_one_of("state", STATES), name="state"),
    Index("ix_drift_event_states_event_id", "event_id"),
    comment="What became of every drift event: a row each time its state changed",
)
