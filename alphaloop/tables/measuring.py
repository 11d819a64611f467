"""Probes, drafts and their revisions, scheduled runs and reports."""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
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

from alphaloop.tables.metadata import column, instant, metadata

probe_sets: Final = Table(
    "probe_sets",
    metadata,
    column("task", Text, "Kind of prompt", primary_key=True),
    column("version", Text, "Hash of its prompts and k: a changed set is another set", primary_key=True),
    column("num_draft_tokens", Integer, "k of its probes, whatever k is in force"),
    column("source", Text, "file, or traffic: drawn from jobs with the task's consent"),
    column("is_active", Boolean, "Whether it is the set in use"),
    instant("created_at", "When it was registered first", default="now()"),
    CheckConstraint("source IN ('file','traffic')", name="source"),
    CheckConstraint("num_draft_tokens > 0", name="num_draft_tokens"),
    Index("uq_probe_sets_active", "task", unique=True, postgresql_where=text("is_active")),
    comment="Versions of a task's fixed prompts, on which α is measured again",
)

probe_prompts: Final = Table(
    "probe_prompts",
    metadata,
    column("task", Text, "Kind of prompt", primary_key=True),
    column("version", Text, "Version of the probe set", primary_key=True),
    column("position", Integer, "Number of the prompt, from 0", primary_key=True, autoincrement=False),
    column("prompt_id", Text, "Hash of the body: the same prompt in another version"),
    column("body", JSONB, "Body of the probe job, in OpenAI's form"),
    ForeignKeyConstraint(["task", "version"], ["probe_sets.task", "probe_sets.version"], ondelete="CASCADE"),
    comment="The prompts of a probe set",
)

probe_runs: Final = Table(
    "probe_runs",
    metadata,
    column("job_id", Text, "The probe or control job", primary_key=True),
    column("schedule_id", Text, "The scheduled run that sent it"),
    instant("scheduled_for", "That run's time"),
    column("task", Text, "Kind of prompt"),
    column("probe_set", Text, "Version of the probe set"),
    column("position", Integer, "Number of the prompt in it"),
    column("prompt_id", Text, "Hash of the prompt's body, by which versions are compared"),
    column("purpose", Text, "probe or control"),
    column("drafter", Text, "What a probe measures; null for a control", nullable=True),
    column("num_draft_tokens", Integer, "k of a probe, or of what a control scores", nullable=True),
    column(
        "scored_drafters",
        ARRAY(Text),
        "Drafters scored on a control's text, without decoding it with them",
        default="'{}'",
    ),
    column("payload_sha256", LargeBinary, "SHA-256 of what was sent: a job with another payload is no probe"),
    instant("sent_at", "When it was handed to Kafka", nullable=True),
    instant("compared_at", "When a probe's text was compared with its control's; null before", nullable=True),
    Index("ix_probe_runs_scheduled_for_task", "scheduled_for", "task"),
    comment="Every probe and control sent; joins decode_runs by job_id",
)

draft_revisions: Final = Table(
    "draft_revisions",
    metadata,
    column("drafter", Text, "Name of the drafter", primary_key=True),
    column("draft_revision", Text, "Its revision", primary_key=True),
    column("target_revision", Text, "The target it drafts for", primary_key=True),
    column("parent_revision", Text, "Revision it was trained from", nullable=True),
    column("trained_on", Text, "What it was trained on", nullable=True),
    column("figures", JSONB, "What it was measured to do on held-out text; null if never judged", nullable=True),
    column(
        "is_scorable", Boolean, "Whether one pass over a greedy text gives the counts of decoding it", default="false"
    ),
    column("status", Text, "candidate, active, stale or retired"),
    column("status_reason", Text, "Why it has this status", default="''"),
    instant("registered_at", "When it was first seen", default="now()"),
    instant("status_changed_at", "When it got this status", default="now()"),
    CheckConstraint("status IN ('candidate','active','stale','retired')", name="status"),
    comment="Drafts and whether they are fit to serve",
)

schedule_runs: Final = Table(
    "schedule_runs",
    metadata,
    column("id", BigInteger, "Order", Identity(always=True), primary_key=True),
    column("schedule_id", Text, "What ran"),
    instant("scheduled_for", "The time it was due"),
    column("owner", Text, "Leader that ran it"),
    instant("started_at", "When it started", default="now()"),
    instant("finished_at", "When it ended; null while running or if it died", nullable=True),
    column("outcome", JSONB, "What it did, in counts; or the error", nullable=True),
    UniqueConstraint("schedule_id", "scheduled_for"),
    comment="One row a due run, inserted first: the database decides that a run happens once",
)

reports: Final = Table(
    "reports",
    metadata,
    column("id", BigInteger, "Order", Identity(always=True), primary_key=True),
    instant("created_at", "When", default="now()"),
    instant("covers_from", "Start of what it covers"),
    instant("covers_to", "End of what it covers"),
    column("summary", Text, "The first line"),
    column("content", JSONB, "The report as data"),
    column("text", Text, "The report for a terminal"),
    column("html", Text, "The report as one self-contained page"),
    Index("ix_reports_created_at", "created_at"),
    comment="Every report that was made",
)
