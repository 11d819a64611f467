"""Drift events and their history, the memory of the drift test, exactness incidents, and notifications."""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    REAL,
    BigInteger,
    CheckConstraint,
    Double,
    ForeignKey,
    Identity,
    Index,
    Integer,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from alphaloop.tables.metadata import column, instant, metadata

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
    column("id", BigInteger, "Order", Identity(always=True), primary_key=True),
    column("task", Text, "Kind of prompt"),
    column("drafter", Text, "Drafter whose acceptance moved"),
    column("draft_revision", Text, "Its revision"),
    column("target_revision", Text, "Hash of the target's weights"),
    column("cause", Text, "One of the seven causes of docs/concepts/drift.md"),
    column("verdict", Text, "What was found, in sentences for the owner"),
    column("action", Text, "What the owner may do"),
    column("evidence", JSONB, "Counts, intervals and times, of traffic and of probes"),
    column("lost_tokens_per_s", Double, "What it costs to do nothing; null where that is not known", nullable=True),
    instant("began_after", "The change lies between this moment", nullable=True),
    instant("began_before", "and this one", nullable=True),
    instant("opened_at", "When it was found", default="now()"),
    instant("raised_at", "When it was found last: opened or reopened", default="now()"),
    instant("confirmed_at", "When later evidence agreed; null before", nullable=True),
    instant("acknowledged_at", "When somebody took note of it; null before", nullable=True),
    column("acknowledged_by", Text, "Who did", nullable=True),
    column("note", Text, "What they said", nullable=True),
    instant("closed_at", "When it was over; null while open", nullable=True),
    column("closed_because", Text, "The evidence that it was over, or that its level was accepted", nullable=True),
    instant("accepted_at", "When its owner took the new level for the norm; null otherwise", nullable=True),
    column("num_reopened", Integer, "Times that it came back", default="0"),
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
    column("id", BigInteger, "Order", Identity(always=True), primary_key=True),
    column("event_id", BigInteger, "The event that it is about", ForeignKey("drift_events.id", ondelete="CASCADE")),
    instant("at", "When", default="now()"),
    column("state", Text, "opened, explained, confirmed, acknowledged, closed or reopened"),
    column("cause", Text, "Its cause from then on"),
    column("sentence", Text, "What was found, or said, then"),
    column("actor", Text, "Who acknowledged it; scheduler otherwise"),
    column("evidence", JSONB, "The evidence of that moment; null of an acknowledgement", nullable=True),
    CheckConstraint(_one_of("state", STATES), name="state"),
    Index("ix_drift_event_states_event_id", "event_id"),
    comment="What became of every drift event: a row each time its state changed",
)


drift_positions: Final = Table(
    "drift_positions",
    metadata,
    column("task", Text, "Kind of prompt", primary_key=True),
    instant("decoded_at", "The last job that the drift test has read of this task: when it was decoded"),
    column("ledger_id", BigInteger, "And its place among jobs of the same moment"),
    comment="How far the drift test has read, by task",
)

drift_memories: Final = Table(
    "drift_memories",
    metadata,
    column("task", Text, "Kind of prompt", primary_key=True),
    column("target_revision", Text, "Hash of the target's weights", primary_key=True),
    column("engine", Text, "Decoding library, version and dtype", primary_key=True),
    column("sampling_bucket", Text, "Sampling settings that share a history", primary_key=True),
    column("drafter", Text, "Name of the drafter", primary_key=True),
    column("draft_revision", Text, "Its revision", primary_key=True),
    column("version", Integer, "Form of `document`; another one is learned anew"),
    column("document", JSONB, "Reference, running sums and windows: scheduler.drift.memory"),
    instant("last_decoded_at", "When the stream's last job was decoded"),
    instant("norm_since", "When its level was accepted: jobs from before are forgotten; null otherwise", nullable=True),
    comment="What the drift test remembers of a stream, so that a run reads only new jobs",
)


probe_texts: Final = Table(
    "probe_texts",
    metadata,
    column("job_id", Text, "The probe or control", primary_key=True),
    instant("decoded_at", "When its last token was decoded"),
    column("token_ids", ARRAY(Integer), "The tokens of its text"),
    column("finish_reason", Text, "stop or length"),
    column("max_tokens", Integer, "Most tokens that were asked for"),
    column("second_ids", ARRAY(Integer), "By token, the target's second choice; empty: unknown"),
    column("gaps", ARRAY(REAL), "By token, how far the second choice's logit lies behind"),
    column("near_tie", Double, "Gap up to which rounding in the engine's dtype may swap two"),
    Index("ix_probe_texts_decoded_at", "decoded_at"),
    comment="What a probe and its control generated, to be compared; never the tokens of traffic",
)

incidents: Final = Table(
    "incidents",
    metadata,
    column("id", BigInteger, "Order", Identity(always=True), primary_key=True),
    column("kind", Text, "wrong_text, cut_short or wrong_counts"),
    column("task", Text, "Kind of prompt"),
    column("drafter", Text, "Drafter whose text is wrong; empty: the vanilla one"),
    column("draft_revision", Text, "Its revision; empty for vanilla"),
    column("target_revision", Text, "Hash of the target's weights"),
    column("engine", Text, "Decoding library, version and dtype"),
    column("job_ids", ARRAY(Text, as_tuple=True), "The jobs that show it"),
    column("evidence", JSONB, "Where the first of them went wrong"),
    column("sentence", Text, "One sentence for the owner"),
    instant("opened_at", "When it was found", default="now()"),
    instant("acknowledged_at", "When somebody took note of it", nullable=True),
    column("acknowledged_by", Text, "Who took note of it", nullable=True),
    column("note", Text, "What they do about it", nullable=True),
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
    column("name", Text, "Service, and a hash of the address", primary_key=True),
    instant("known_since", "When it was configured first; nothing older is sent to it", default="now()"),
    comment="The addresses that get notifications",
)

notifications: Final = Table(
    "notifications",
    metadata,
    column(
        "sink", Text, "Where it is sent", ForeignKey("notification_sinks.name", ondelete="CASCADE"), primary_key=True
    ),
    column("kind", Text, "drift, incident_opened, incident_closed or report", primary_key=True),
    column("source_id", BigInteger, "id in drift_event_states, incidents or reports", primary_key=True),
    column("num_attempts", Integer, "Times that sending was begun"),
    instant("attempted_at", "When it was begun last"),
    instant("sent_at", "When the service took it; null before", nullable=True),
    column(
        "failure", Text, "Why the last attempt failed; null before, and where the process died in it", nullable=True
    ),
    CheckConstraint("kind IN ('drift','incident_opened','incident_closed','report')", name="kind"),
    CheckConstraint("num_attempts > 0", name="num_attempts"),
    comment="Attempts to tell people; what has no row was not tried yet",
)
