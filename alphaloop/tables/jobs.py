"""Jobs, their claims and outcomes, and what still has to be published."""

from __future__ import annotations

from typing import Final

from sqlalchemy import BigInteger, CheckConstraint, Column, Identity, Index, Integer, LargeBinary, Table, Text, text
from sqlalchemy.dialects.postgresql import JSON

from alphaloop.tables.metadata import NOW, instant, metadata

#: One row a job, not partitioned, because the primary key guarantees one outcome a job.
jobs: Final = Table(
    "jobs",
    metadata,
    Column("job_id", Text, primary_key=True, comment="The producer's, or derived from where the message lies"),
    Column("payload_sha256", LargeBinary, nullable=False, comment="Tells a redelivery from a conflict"),
    Column("task", Text, nullable=False, comment="Kind of prompt"),
    Column("segment", Text, nullable=False, server_default=text("''"), comment="Caller's label; empty without one"),
    Column("custom_id", Text, comment="The caller's own name for the job"),
    Column("batch_id", Text, comment="The caller's group of jobs"),
    Column("purpose", Text, nullable=False, comment="traffic, probe or control"),
    Column("status", Text, nullable=False, comment="running, then one of succeeded, failed, expired, cancelled"),
    Column("attempt", Integer, nullable=False, comment="Number of the claim, from 1: the fencing token"),
    Column("owner", Text, comment="Worker that holds the claim; null once the job ended"),
    instant("lease_expires_at", "When the claim may be taken over; null once the job ended", nullable=True),
    instant("created_at", "First claim", server_default=NOW),
    instant("finished_at", "When the outcome was recorded", nullable=True),
    # json, not jsonb: the recorded bytes are re-emitted as they are, and a text may hold the character NUL.
    Column("outcome", JSON, comment="The Result message, byte for byte as published"),
    CheckConstraint("status IN ('running','succeeded','failed','expired','cancelled')", name="status"),
    CheckConstraint("(status = 'running') = (outcome IS NULL)", name="outcome_when_ended"),
    Index("ix_jobs_task_created_at", "task", "created_at"),
    Index("ix_jobs_batch_id", "batch_id", postgresql_where=text("batch_id IS NOT NULL")),
    # No index on what a renewal changes, and room in each page: renewals then touch no index (HOT).
    postgresql_with={"fillfactor": 75},
    comment="One row a job: claim, then the one recorded outcome",
)

#: Written in the outcome's transaction and deleted when the broker has acknowledged the message.
outbox: Final = Table(
    "outbox",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True, comment="Order of recording"),
    Column("topic", Text, nullable=False, comment="Where it goes"),
    Column("key", LargeBinary, comment="Kafka key"),
    Column("value", LargeBinary, nullable=False, comment="Kafka value"),
    # json, because headers may repeat a producer's NUL.
    Column("headers", JSON, nullable=False, server_default=text("'{}'"), comment="Kafka headers, text to text"),
    Column("owner", Text, comment="Worker that recorded it and publishes it first"),
    instant("created_at", "When it was recorded", server_default=NOW),
    comment="Messages recorded with an outcome and not yet acknowledged by the broker",
)

cancellations: Final = Table(
    "cancellations",
    metadata,
    Column("job_id", Text, primary_key=True, comment="The job to cancel, perhaps not seen yet"),
    instant("requested_at", "When the request was read", server_default=NOW),
    comment="Requests from the control topic; a job that ended before is not changed",
)
