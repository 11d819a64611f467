"""Drift events and their history, the memory of the drift test, exactness incidents, and notifications."""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    ARRAY,
    REAL,
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


drift_positions: Final = Table(
    "drift_positions",
    metadata,
    Column("task", Text, primary_key=True, comment="Kind of prompt"),
    instant("decoded_at", "The last job that the drift test has read of this task: when it was decoded"),
    Column("ledger_id", BigInteger, nullable=False, comment="And its place among jobs of the same moment"),
    comment="How far the drift test has read, by task",
)

drift_memories: Final = Table(
    "drift_memories",
    metadata,
    Column("task", Text, primary_key=True, comment="Kind of prompt"),
    Column("target_revision", Text, primary_key=True, comment="Hash of the target's weights"),
    Column("engine", Text, primary_key=True, comment="Decoding library, version and dtype"),
    Column("sampling_bucket", Text, primary_key=True, comment="Sampling settings that share a history"),
    Column("drafter", Text, primary_key=True, comment="Name of the drafter"),
    Column("draft_revision", Text, primary_key=True, comment="Its revision"),
    Column("version", Integer, nullable=False, comment="Form of `document`; another one is learned anew"),
    Column("document", JSONB, nullable=False, comment="Reference, running sums and windows: scheduler.drift.memory"),
    instant("last_decoded_at", "When the stream's last job was decoded"),
    instant("norm_since", "When its level was accepted: jobs from before are forgotten; null otherwise", nullable=True),
    comment="What the drift test remembers of a stream, so that a run reads only new jobs",
)


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


notification_sinks: Final = Table(
    "notification_sinks",
    metadata,
    Column("name", Text, primary_key=True, comment="Service, and a hash of the address"),
    instant("known_since", "When it was configured first; nothing older is sent to it", server_default=NOW),
    comment="The addresses that get notifications",
)

notifications: Final = Table(
    "notifications",
    metadata,
    Column(
        "sink",
        Text,
        ForeignKey("notification_sinks.name", ondelete="CASCADE"),
        primary_key=True,
        comment="Where it is sent",
    ),
    Column("kind", Text, primary_key=True, comment="drift, incident_opened, incident_closed or report"),
    Column("source_id", BigInteger, primary_key=True, comment="id in drift_event_states, incidents or reports"),
    Column("num_attempts", Integer, nullable=False, comment="Times that sending was begun"),
    instant("attempted_at", "When it was begun last"),
    instant("sent_at", "When the service took it; null before", nullable=True),
    Column("failure", Text, comment="Why the last attempt failed; null before, and where the process died in it"),
    CheckConstraint("kind IN ('drift','incident_opened','incident_closed','report')", name="kind"),
    CheckConstraint("num_attempts > 0", name="num_attempts"),
    comment="Attempts to tell people; what has no row was not tried yet",
)
