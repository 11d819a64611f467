"""Which notifications were sent where."""

from __future__ import annotations

from typing import Final

from sqlalchemy import BigInteger, CheckConstraint, Column, ForeignKey, Integer, Table, Text

from alphaloop.tables.metadata import NOW, instant, metadata

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
