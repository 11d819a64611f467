"""Jobs, their claims and outcomes, what still has to be published, and the processes and servers that run."""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    ARRAY,
    BigInteger,
    CheckConstraint,
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

from alphaloop.tables.metadata import column, instant, metadata

#: One row a job, not partitioned, because the primary key guarantees one outcome a job.
jobs: Final = Table(
    "jobs",
    metadata,
    column("job_id", Text, "The producer's, or derived from where the message lies", primary_key=True),
    column("payload_sha256", LargeBinary, "Tells a redelivery from a conflict"),
    column("task", Text, "Kind of prompt"),
    column("segment", Text, "Caller's label; empty without one", default="''"),
    column("custom_id", Text, "The caller's own name for the job", nullable=True),
    column("batch_id", Text, "The caller's group of jobs", nullable=True),
    column("purpose", Text, "traffic, probe or control"),
    column("status", Text, "running, then one of succeeded, failed, expired, cancelled"),
    column("attempt", Integer, "Number of the claim, from 1; only grows: the fencing token"),
    column(
        "num_crashes",
        Integer,
        "Claims that ended without an outcome and were not given back: the worker died or lost its lease",
        default="0",
    ),
    column("num_failures", Integer, "Times that the job itself failed and was to be tried again", default="0"),
    column("owner", Text, "Worker that holds the claim; null once it was given back or the job ended", nullable=True),
    instant("lease_expires_at", "When the claim may be taken over; null once the job ended", nullable=True),
    instant("created_at", "First claim", default="now()"),
    instant("finished_at", "When the outcome was recorded", nullable=True),
    # json, not jsonb: the recorded bytes are re-emitted as they are, and a text may hold the character NUL.
    column("outcome", JSON, "The Result message, byte for byte as published", nullable=True),
    column(
        "headers",
        JSON,
        "Headers that the job's message hands on to its result; null before the outcome and without any",
        nullable=True,
    ),
    column(
        "refused_outcome",
        JSON,
        "The Result that Kafka refused before it was published; outcome is the failure that replaced it",
        nullable=True,
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
    column("id", BigInteger, "Order of recording", Identity(always=True), primary_key=True),
    column("topic", Text, "Where they go"),
    column("job_ids", ARRAY(Text), "The jobs of one transaction: Kafka keys; their rows have the values"),
    column("owner", Text, "Worker that recorded them and publishes them first", nullable=True),
    instant("created_at", "When they were recorded", default="now()"),
    instant("relayed_at", "When a worker last took them over to publish them", nullable=True),
    instant("set_aside_at", "When Kafka had refused them for good; null them again to publish them", nullable=True),
    column("set_aside_because", Text, "Why Kafka refused them", nullable=True),
    comment="Outcomes whose results the broker has not acknowledged yet: one row for each transaction that "
    "recorded them",
)

stored_texts: Final = Table(
    "stored_texts",
    metadata,
    column("url", Text, "Where the text lies: a folder or an object store", primary_key=True),
    column("job_id", Text, "The job whose text it is"),
    instant("stored_at", "When the result was recorded that refers to it", default="now()"),
    comment="Texts of results that were too large for Kafka; deleted after their jobs",
)

redrives: Final = Table(
    "redrives",
    metadata,
    column("topic", Text, "Where the dead letter lies", primary_key=True),
    column("partition", Integer, "Its partition", primary_key=True, autoincrement=False),
    column("offset", BigInteger, "Its offset", primary_key=True, autoincrement=False),
    column(
        "written_at_ms",
        BigInteger,
        "Its timestamp in ms since 1970, because offsets begin again in a topic made anew; 0 without one",
        primary_key=True,
        autoincrement=False,
    ),
    column("job_id", Text, "The job that it became"),
    instant("redriven_at", "When the broker had acknowledged that job", default="now()"),
    comment="Dead letters that `alphaloop dlq redrive` sent again",
)

cancellations: Final = Table(
    "cancellations",
    metadata,
    column("job_id", Text, "The job to cancel, perhaps not seen yet", primary_key=True),
    instant("requested_at", "When the request was read", default="now()"),
    Index("ix_cancellations_requested_at", "requested_at"),
    comment="Requests from the control topic; a job that ended before is not changed",
)


#: A migration that only adds inserts its own revision; one that removes something also deletes the rows of the
#: releases that still use it.
code_revisions: Final = Table(
    "code_revisions",
    metadata,
    column("revision", Text, "The newest schema revision that such a release knows", primary_key=True),
    comment="Which releases can run on the schema as it is now; the oldest of them is the oldest code that can",
)

leader_terms: Final = Table(
    "leader_terms",
    metadata,
    column("role", Text, "What is led: scheduler", primary_key=True),
    column("term", BigInteger, "Number of the leader, from 1"),
    instant("began_at", "When it began to lead", default="now()"),
    comment="Who leads now, by number: a leader of an earlier term can write nothing any more",
)

leader_leases: Final = Table(
    "leader_leases",
    metadata,
    column("role", Text, "What is led: scheduler", primary_key=True),
    column("owner", Text, "Process that leads"),
    instant("expires_at", "When another may lead, unless it is renewed"),
    comment="Who leads, and until when",
)

#: One row a worker, which the worker itself writes every few seconds and deletes when it ends.
workers: Final = Table(
    "workers",
    metadata,
    column("owner", Text, "Process: jobs.owner of what it holds", primary_key=True),
    column("device", Text, "What decodes"),
    column("target", Text, "Model that it serves"),
    column("num_slots", Integer, "Jobs that it can decode at once"),
    column("num_waiting", Integer, "Jobs that it has taken from Kafka and does not decode yet"),
    column("num_held", Integer, "Jobs that it has claimed and whose outcome is not recorded"),
    column("job_ids", ARRAY(Text), "Jobs that it decodes"),
    column("num_tokens", ARRAY(BigInteger), "Tokens so far of each of job_ids"),
    column("tokens_per_s", Double, "Tokens a second since it said so before; null the first time", nullable=True),
    column(
        "sampling_defaults",
        Text,
        "What its model suggests for sampling and whether jobs take it, in words; empty: nothing",
        default="''",
    ),
    instant("started_at", "When it said something first", default="now()"),
    instant("seen_at", "When it said this", default="now()"),
    column("target_revision", Text, "Hash of the target's weights; null of an earlier release", nullable=True),
    column(
        "setup",
        JSON,
        "alphaloop.store.workers.WorkerSetup: engine, host, limits, drafters; null of an earlier release",
        nullable=True,
    ),
    postgresql_with={"fillfactor": 50},
    comment="What each worker is doing, as it said last",
)

#: A row is a life of a server between two changes. Old rows stay: a model that comes back gets its history back.
server_identities: Final = Table(
    "server_identities",
    metadata,
    column("endpoint", Text, "Its name in the settings"),
    instant("first_seen_at", "When a worker first found it so", default="now()"),
    instant("last_seen_at", "When a worker last found it so", default="now()"),
    column("target_revision", Text, "What evidence calls its model"),
    column("engine", Text, "What evidence calls the server and its arithmetic"),
    column("changed", Text, "What is other than in the row before, in words; null in the first row", nullable=True),
    column("identity", JSON, "alphaloop.server_identity.ServerIdentity: names, answers to prompts"),
    PrimaryKeyConstraint("endpoint", "first_seen_at"),
    comment="What inference servers were, by their names and by their answers to a fixed set of prompts",
)
