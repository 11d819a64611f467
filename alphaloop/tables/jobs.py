"""Jobs, their claims and outcomes, what still has to be published, and the processes and servers that run."""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    ARRAY,
    BigInteger,
    CheckConstraint,
    Column,
    Double,
    Identity,
    Index,
    Integer,
    LargeBinary,
    PrimaryKeyConstraint,
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


#: A migration that only adds inserts its own revision; one that removes something also deletes the rows of the
#: releases that still use it.
code_revisions: Final = Table(
    "code_revisions",
    metadata,
    Column("revision", Text, primary_key=True, comment="The newest schema revision that such a release knows"),
    comment="Which releases can run on the schema as it is now; the oldest of them is the oldest code that can",
)

leader_terms: Final = Table(
    "leader_terms",
    metadata,
    Column("role", Text, primary_key=True, comment="What is led: scheduler"),
    Column("term", BigInteger, nullable=False, comment="Number of the leader, from 1"),
    instant("began_at", "When it began to lead", server_default=NOW),
    comment="Who leads now, by number: a leader of an earlier term can write nothing any more",
)

leader_leases: Final = Table(
    "leader_leases",
    metadata,
    Column("role", Text, primary_key=True, comment="What is led: scheduler"),
    Column("owner", Text, nullable=False, comment="Process that leads"),
    instant("expires_at", "When another may lead, unless it is renewed"),
    comment="Who leads, and until when",
)

#: One row a worker, which the worker itself writes every few seconds and deletes when it ends.
workers: Final = Table(
    "workers",
    metadata,
    Column("owner", Text, primary_key=True, comment="Process: jobs.owner of what it holds"),
    Column("device", Text, nullable=False, comment="What decodes"),
    Column("target", Text, nullable=False, comment="Model that it serves"),
    Column("num_slots", Integer, nullable=False, comment="Jobs that it can decode at once"),
    Column("num_waiting", Integer, nullable=False, comment="Jobs that it has taken from Kafka and does not decode yet"),
    Column("num_held", Integer, nullable=False, comment="Jobs that it has claimed and whose outcome is not recorded"),
    Column("job_ids", ARRAY(Text), nullable=False, comment="Jobs that it decodes"),
    Column("num_tokens", ARRAY(BigInteger), nullable=False, comment="Tokens so far of each of job_ids"),
    Column("tokens_per_s", Double, comment="Tokens a second since it said so before; null the first time"),
    Column(
        "sampling_defaults",
        Text,
        nullable=False,
        server_default="",
        comment="What its model suggests for sampling and whether jobs take it, in words; empty: nothing",
    ),
    instant("started_at", "When it said something first", server_default=NOW),
    instant("seen_at", "When it said this", server_default=NOW),
    Column("target_revision", Text, comment="Hash of the target's weights; null of an earlier release"),
    Column(
        "setup",
        JSON,
        comment="alphaloop.store.workers.WorkerSetup: engine, host, limits, drafters; null of an earlier release",
    ),
    postgresql_with={"fillfactor": 50},
    comment="What each worker is doing, as it said last",
)

#: A row is a life of a server between two changes. Old rows stay: a model that comes back gets its history back.
server_identities: Final = Table(
    "server_identities",
    metadata,
    Column("endpoint", Text, nullable=False, comment="Its name in the settings"),
    instant("first_seen_at", "When a worker first found it so", server_default=NOW),
    instant("last_seen_at", "When a worker last found it so", server_default=NOW),
    Column("target_revision", Text, nullable=False, comment="What evidence calls its model"),
    Column("engine", Text, nullable=False, comment="What evidence calls the server and its arithmetic"),
    Column("changed", Text, comment="What is other than in the row before, in words; null in the first row"),
    Column(
        "identity",
        JSON,
        nullable=False,
        comment="alphaloop.server_identity.ServerIdentity: names, answers to prompts",
    ),
    PrimaryKeyConstraint("endpoint", "first_seen_at"),
    comment="What inference servers were, by their names and by their answers to a fixed set of prompts",
)
