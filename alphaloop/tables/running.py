"""What runs on this schema: which code may, which scheduler leads, what each worker does, and which servers decode."""

from __future__ import annotations

from typing import Final

from sqlalchemy import ARRAY, JSON, BigInteger, Column, Double, Integer, PrimaryKeyConstraint, Table, Text

from alphaloop.tables.metadata import NOW, instant, metadata

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
