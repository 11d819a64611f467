"""Probes, drafts and their revisions, scheduled runs and reports."""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ForeignKeyConstraint,
    Identity,
    Index,
    Integer,
    LargeBinary,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from alphaloop.tables.metadata import NOW, instant, metadata

probe_sets: Final = Table(
    "probe_sets",
    metadata,
    Column("task", Text, primary_key=True, comment="Kind of prompt"),
    Column("version", Text, primary_key=True, comment="Hash of its prompts and k: a changed set is another set"),
    Column("num_draft_tokens", Integer, nullable=False, comment="k of its probes, whatever k is in force"),
    Column("source", Text, nullable=False, comment="file, or traffic: drawn from jobs with the task's consent"),
    Column("is_active", Boolean, nullable=False, comment="Whether it is the set in use"),
    instant("created_at", "When it was registered first", server_default=NOW),
    CheckConstraint("source IN ('file','traffic')", name="source"),
    CheckConstraint("num_draft_tokens > 0", name="num_draft_tokens"),
    Index("uq_probe_sets_active", "task", unique=True, postgresql_where=text("is_active")),
    comment="Versions of a task's fixed prompts, on which α is measured again",
)

probe_prompts: Final = Table(
    "probe_prompts",
    metadata,
    Column("task", Text, primary_key=True, comment="Kind of prompt"),
    Column("version", Text, primary_key=True, comment="Version of the probe set"),
    Column("position", Integer, primary_key=True, autoincrement=False, comment="Number of the prompt, from 0"),
    Column("prompt_id", Text, nullable=False, comment="Hash of the body: the same prompt in another version"),
    Column("body", JSONB, nullable=False, comment="Body of the probe job, in OpenAI's form"),
    ForeignKeyConstraint(["task", "version"], ["probe_sets.task", "probe_sets.version"], ondelete="CASCADE"),
    comment="The prompts of a probe set",
)

probe_runs: Final = Table(
    "probe_runs",
    metadata,
    Column("job_id", Text, primary_key=True, comment="The probe or control job"),
    Column("schedule_id", Text, nullable=False, comment="The scheduled run that sent it"),
    instant("scheduled_for", "That run's time"),
    Column("task", Text, nullable=False, comment="Kind of prompt"),
    Column("probe_set", Text, nullable=False, comment="Version of the probe set"),
    Column("position", Integer, nullable=False, comment="Number of the prompt in it"),
    Column("prompt_id", Text, nullable=False, comment="Hash of the prompt's body, by which versions are compared"),
    Column("purpose", Text, nullable=False, comment="probe or control"),
    Column("drafter", Text, comment="What a probe measures; null for a control"),
    Column("num_draft_tokens", Integer, comment="k of a probe, or of what a control scores"),
    Column(
        "scored_drafters",
        ARRAY(Text),
        nullable=False,
        server_default=text("'{}'"),
        comment="Drafters scored on a control's text, without decoding it with them",
    ),
    Column(
        "payload_sha256",
        LargeBinary,
        nullable=False,
        comment="SHA-256 of what was sent: a job with another payload is no probe",
    ),
    instant("sent_at", "When it was handed to Kafka", nullable=True),
    instant("compared_at", "When a probe's text was compared with its control's; null before", nullable=True),
    Index("ix_probe_runs_scheduled_for_task", "scheduled_for", "task"),
    comment="Every probe and control sent; joins decode_runs by job_id",
)

draft_revisions: Final = Table(
    "draft_revisions",
    metadata,
    Column("drafter", Text, primary_key=True, comment="Name of the drafter"),
    Column("draft_revision", Text, primary_key=True, comment="Its revision"),
    Column("target_revision", Text, primary_key=True, comment="The target it drafts for"),
    Column("parent_revision", Text, comment="Revision it was trained from"),
    Column("trained_on", Text, comment="What it was trained on"),
    Column("figures", JSONB, comment="What it was measured to do on held-out text; null if never judged"),
    Column(
        "is_scorable",
        Boolean,
        nullable=False,
        server_default=text("false"),
        comment="Whether one pass over a greedy text gives the counts of decoding it",
    ),
    Column("status", Text, nullable=False, comment="candidate, active, stale or retired"),
    Column("status_reason", Text, nullable=False, server_default=text("''"), comment="Why it has this status"),
    instant("registered_at", "When it was first seen", server_default=NOW),
    instant("status_changed_at", "When it got this status", server_default=NOW),
    CheckConstraint("status IN ('candidate','active','stale','retired')", name="status"),
    comment="Drafts and whether they are fit to serve",
)

schedule_runs: Final = Table(
    "schedule_runs",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True, comment="Order"),
    Column("schedule_id", Text, nullable=False, comment="What ran"),
    instant("scheduled_for", "The time it was due"),
    Column("owner", Text, nullable=False, comment="Leader that ran it"),
    instant("started_at", "When it started", server_default=NOW),
    instant("finished_at", "When it ended; null while running or if it died", nullable=True),
    Column("outcome", JSONB, comment="What it did, in counts; or the error"),
    UniqueConstraint("schedule_id", "scheduled_for"),
    comment="One row a due run, inserted first: the database decides that a run happens once",
)

reports: Final = Table(
    "reports",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True, comment="Order"),
    instant("created_at", "When", server_default=NOW),
    instant("covers_from", "Start of what it covers"),
    instant("covers_to", "End of what it covers"),
    Column("summary", Text, nullable=False, comment="The first line"),
    Column("content", JSONB, nullable=False, comment="The report as data"),
    Column("text", Text, nullable=False, comment="The report for a terminal"),
    Column("html", Text, nullable=False, comment="The report as one self-contained page"),
    Index("ix_reports_created_at", "created_at"),
    comment="Every report that was made",
)
