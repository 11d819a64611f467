"""Jobs, their claims and outcomes, and what still has to be published."""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    ARRAY,
    BigInteger,
    CheckConstraint,
    Column,
    Identity,
    Index,
    Integer,
    LargeBinary,
    Table,
    Text,
    text,
)
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
    Column("attempt", Integer, nullable=False, comment="Number of the claim, from 1; only grows: the fencing token"),
    Column(
        "num_crashes",
        Integer,
        nullable=False,
        server_default=text("0"),
        comment="Claims that ended without an outcome and were not given back: the worker died or lost its lease",
    ),
    Column(
        "num_failures",
        Integer,
        nullable=False,
        server_default=text("0"),
        comment="Times that the job itself failed and was to be tried again",
    ),
    Column("owner", Text, comment="Worker that holds the claim; null once it was given back or the job ended"),
    instant("lease_expires_at", "When the claim may be taken over; null once the job ended", nullable=True),
    instant("created_at", "First claim", server_default=NOW),
    instant("finished_at", "When the outcome was recorded", nullable=True),
    # json, not jsonb: the recorded bytes are re-emitted as they are, and a text may hold the character NUL.
    Column("outcome", JSON, comment="The Result message, byte for byte as published"),
    Column(
        "headers",
        JSON,
        comment="Headers that the job's message hands on to its result; null before the outcome and without any",
    ),
    Column(
        "refused_outcome",
        JSON,
        comment="The Result that Kafka refused before it was published; outcome is the failure that replaced it",
    ),
    CheckConstraint("status IN ('running','succeeded','failed','expired','cancelled')", name="status"),
    CheckConstraint("(status = 'running') = (outcome IS NULL)", name="outcome_when_ended"),
    # Retention goes by it: a job ends after it was created, so this index finds what ended long ago.
    Index("ix_jobs_created_at", "created_at"),
    # Only a BRIN index may be on a column that the outcome sets: since PostgreSQL 16 it leaves the update HOT.
    Index(
        "ix_jobs_finished_at",
        "finished_at",
        postgresql_using="brin",
        postgresql_with={"pages_per_range": 32, "autosummarize": True},
    ),
    Index("ix_jobs_batch_id", "batch_id", postgresql_where=text("batch_id IS NOT NULL")),
    # Few jobs are in them, and neither renewal nor outcome changes what they are on.
    Index("ix_jobs_tried_again", "created_at", postgresql_where=text("num_failures > 0")),
    Index("ix_jobs_refused", "created_at", postgresql_where=text("refused_outcome IS NOT NULL")),
    # No other index on what renewal and outcome change, and room in each page for the outcomes of the jobs that are
    # claimed there, which are longer than the claims: neither then touches an index (HOT). The outcomes fill the room.
    postgresql_with={"fillfactor": 15},
    comment="One row a job: claim, then the one recorded outcome",
)

#: Written in the transaction of outcomes and deleted when the broker has acknowledged all its messages.
outbox: Final = Table(
    "outbox",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True, comment="Order of recording"),
    Column("topic", Text, nullable=False, comment="Where they go"),
    Column(
        "job_ids",
        ARRAY(Text),
        nullable=False,
        comment="The jobs of one transaction: Kafka keys; their rows have the values",
    ),
    Column("owner", Text, comment="Worker that recorded them and publishes them first"),
    instant("created_at", "When they were recorded", server_default=NOW),
    instant("relayed_at", "When a worker last took them over to publish them", nullable=True),
    instant("set_aside_at", "When Kafka had refused them for good; null them again to publish them", nullable=True),
    Column("set_aside_because", Text, comment="Why Kafka refused them"),
    comment="Outcomes whose results the broker has not acknowledged yet: one row for each transaction that "
    "recorded them",
)

stored_texts: Final = Table(
    "stored_texts",
    metadata,
    Column("url", Text, primary_key=True, comment="Where the text lies: a folder or an object store"),
    Column("job_id", Text, nullable=False, comment="The job whose text it is"),
    instant("stored_at", "When the result was recorded that refers to it", server_default=NOW),
    comment="Texts of results that were too large for Kafka; deleted after their jobs",
)

redrives: Final = Table(
    "redrives",
    metadata,
    Column("topic", Text, primary_key=True, comment="Where the dead letter lies"),
    Column("partition", Integer, primary_key=True, autoincrement=False, comment="Its partition"),
    Column("offset", BigInteger, primary_key=True, autoincrement=False, comment="Its offset"),
    Column(
        "written_at_ms",
        BigInteger,
        primary_key=True,
        autoincrement=False,
        comment="Its timestamp in ms since 1970, because offsets begin again in a topic made anew; 0 without one",
    ),
    Column("job_id", Text, nullable=False, comment="The job that it became"),
    instant("redriven_at", "When the broker had acknowledged that job", server_default=NOW),
    comment="Dead letters that `alphaloop dlq redrive` sent again",
)

cancellations: Final = Table(
    "cancellations",
    metadata,
    Column("job_id", Text, primary_key=True, comment="The job to cancel, perhaps not seen yet"),
    instant("requested_at", "When the request was read", server_default=NOW),
    Index("ix_cancellations_requested_at", "requested_at"),
    comment="Requests from the control topic; a job that ended before is not changed",
)
