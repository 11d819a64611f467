"""Every table, in SQLAlchemy Core: columns and their types, keys and indexes, which is what statements need.

The migrations build the tables, and say the rest: what each column means (`\\d+ jobs` in psql shows it), defaults,
checks, how full pages are. `alembic check` compares what is here with what they build, and a migration does not change
when this does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from sqlalchemy import (
    REAL,
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Double,
    ForeignKeyConstraint,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Sequence,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSON, JSONB
from sqlalchemy.schema import SchemaItem

metadata: Final = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def _columns(kind: Any, *names: str, nullable: bool = False) -> list[Column[Any]]:
    """Columns of one type; every row has a value of each unless they are `nullable`."""
    return [Column(name, kind, nullable=nullable) for name in names]


def _instants(*names: str, nullable: bool = False) -> list[Column[Any]]:
    """Points in time with their zone."""
    return _columns(DateTime(timezone=True), *names, nullable=nullable)


def _numbered() -> list[Column[Any]]:
    """The key of a table whose rows are numbered in their order."""
    return [Column("id", BigInteger, Identity(always=True))]


def _table(
    name: str, key: Iterable[str], *parts: Iterable[SchemaItem], days_by: str | None = None, **options: Any
) -> Table:
    """A table with this primary key; with `days_by`, partitioned by the days of that column and dropped by them."""
    if days_by is not None:
        options["postgresql_partition_by"] = f"RANGE ({days_by})"
    return Table(name, metadata, *(item for part in parts for item in part), PrimaryKeyConstraint(*key), **options)


def _index(name: str, *columns: str, where: str | None = None, unique: bool = False, brin: bool = False) -> list[Index]:
    given: dict[str, Any] = {"postgresql_using": "brin"} if brin else {}
    if where is not None:
        given["postgresql_where"] = text(where)
    return [Index(name, *columns, unique=unique, **given)]


#: One integer a draft position, first position first; empty when nothing was proposed.
_COUNTS: Final = ARRAY(BigInteger, as_tuple=True)

#: One row a job, not partitioned, because the primary key guarantees one outcome a job. `outcome` is json, not jsonb:
#: the recorded bytes are sent again as they are, and a text may hold the character NUL.
jobs: Final = _table(
    "jobs",
    ["job_id"],
    _columns(Text, "job_id", "task", "segment", "purpose", "status"),
    _columns(Text, "custom_id", "batch_id", "owner", nullable=True),
    _columns(LargeBinary, "payload_sha256"),
    _columns(Integer, "attempt", "num_crashes", "num_failures"),
    _instants("created_at"),
    _instants("lease_expires_at", "finished_at", nullable=True),
    _columns(JSON, "outcome", "headers", "refused_outcome", nullable=True),
    # Retention goes by it: a job ends after it was created, so this index finds what ended long ago.
    _index("ix_jobs_created_at", "created_at"),
    # Only a BRIN index may be on a column that the outcome sets: since PostgreSQL 16 it leaves the update HOT. No other
    # index is on what renewal and outcome change, and each page has room for the outcomes of the jobs that are claimed
    # there (fillfactor), which are longer than the claims.
    _index("ix_jobs_finished_at", "finished_at", brin=True),
    _index("ix_jobs_batch_id", "batch_id", where="batch_id IS NOT NULL"),
    # Few jobs are in them, and neither renewal nor outcome changes what they are on.
    _index("ix_jobs_tried_again", "created_at", where="num_failures > 0"),
    _index("ix_jobs_refused", "created_at", where="refused_outcome IS NOT NULL"),
)

#: Written in the transaction of outcomes and deleted when the broker has acknowledged all its messages.
outbox: Final = _table(
    "outbox",
    ["id"],
    _numbered(),
    _columns(Text, "topic"),
    _columns(ARRAY(Text), "job_ids"),
    _columns(Text, "owner", "set_aside_because", nullable=True),
    _instants("created_at"),
    _instants("relayed_at", "set_aside_at", nullable=True),
)

stored_texts: Final = _table("stored_texts", ["url"], _columns(Text, "url", "job_id"), _instants("stored_at"))

redrives: Final = _table(
    "redrives",
    ["topic", "partition", "offset", "written_at_ms"],
    _columns(Text, "topic", "job_id"),
    _columns(Integer, "partition"),
    _columns(BigInteger, "offset", "written_at_ms"),
    _instants("redriven_at"),
)

cancellations: Final = _table(
    "cancellations",
    ["job_id"],
    _columns(Text, "job_id"),
    _instants("requested_at", "ends_at"),
    _index("ix_cancellations_requested_at", "requested_at"),
)

#: A migration that only adds inserts its own revision; one that removes something also deletes the rows of the
#: releases that still use it.
code_revisions: Final = _table("code_revisions", ["revision"], _columns(Text, "revision"))

#: One row, made by the migration.
_id, _kafka = _columns(Uuid, "id"), _columns(Text, "kafka_cluster", "kafka_prefix", nullable=True)
installation: Final = _table("installation", ["id"], _id, _kafka, _instants("noted_at", nullable=True))

leader_terms: Final = _table(
    "leader_terms", ["role"], _columns(Text, "role"), _columns(BigInteger, "term"), _instants("began_at")
)

leader_leases: Final = _table("leader_leases", ["role"], _columns(Text, "role", "owner"), _instants("expires_at"))

api_keys: Final = _table(
    "api_keys",
    ["id"],
    _numbered(),
    _columns(Text, "name", "prefix", "segment"),
    _columns(LargeBinary, "digest"),
    _columns(ARRAY(Text, as_tuple=True), "tasks"),
    _instants("created_at"),
    _instants("expires_at", "last_used_at", "revoked_at", nullable=True),
    _index("uq_api_keys_digest", "digest", unique=True),
    _index("uq_api_keys_not_revoked", "name", where="revoked_at IS NULL", unique=True),
)

#: Files and batches of OpenAI's API belong to the name of a key. Columns of json hold its null where there is nothing.
api_files: Final = _table(
    "api_files",
    ["id"],
    _columns(Text, "id", "key_name", "filename", "purpose"),
    _columns(BigInteger, "num_bytes"),
    _columns(JSON, "parts"),
    _instants("created_at", "expires_at"),
    _index("ix_api_files_key_name_created_at", "key_name", "created_at", "id"),
    _index("ix_api_files_expires_at", "expires_at"),
)

api_batches: Final = _table(
    "api_batches",
    ["id"],
    _columns(Text, "id", "key_name", "segment", "endpoint", "completion_window", "input_file_id", "status"),
    _columns(Text, "task", "output_file_id", "error_file_id", nullable=True),
    _columns(ARRAY(Text, as_tuple=True), "tasks"),
    _columns(JSON, "metadata", "errors", "by_status"),
    _columns(JSON, "used", nullable=True),
    _columns(Integer, "output_kept_s", nullable=True),
    _columns(Integer, "num_total", "num_sent", "num_invalid", "num_completed", "num_failed"),
    _instants("created_at", "expires_at", "look_at"),
    _instants("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", nullable=True),
    _instants("cancelling_at", "cancelled_at", nullable=True),
    _index("ix_api_batches_key_name_created_at", "key_name", "created_at", "id"),
    _index("ix_api_batches_input_file_id", "input_file_id"),
    _index("ix_api_batches_created_at", "created_at", "id"),
    _index(
        "ix_api_batches_open",
        "look_at",
        where="status IN ('validating','in_progress','finalizing','cancelling')",
    ),
)

#: Batches that did not come through the API; those of a producer from the first claim of one of their jobs on.
batches: Final = _table(
    "batches",
    ["id"],
    _columns(Text, "id", "source"),
    _columns(Text, "by", "name", "task", nullable=True),
    _columns(BigInteger, "num_bytes", nullable=True),
    _columns(Integer, "num_total", "num_invalid"),
    _columns(JSON, "by_status"),
    _columns(Boolean, "is_open"),
    _instants("created_at"),
    _instants("counted_at", nullable=True),
    _index("ix_batches_created_at", "created_at", "id"),
    _index("ix_batches_open", "id", where="is_open"),
)

#: What was said of the ends of batches, and what came; a row stays as it was said.
promised_ends: Final = _table(
    "promised_ends",
    ["batch_id", "promised_at"],
    _columns(Text, "batch_id"),
    _instants("promised_at"),
    _columns(Integer, "num_total", "num_open"),
    _instants("ends_at", "earliest_at", "latest_at", "ended_at", nullable=True),
    _columns(Double, "median_s", "sd_s", nullable=True),
    _columns(Text, "why", nullable=True),
    _index("ix_promised_ends_promised_at", "promised_at"),
    _index("ix_promised_ends_ended_at", "ended_at", where="ended_at IS NOT NULL"),
)

#: Every batch that has ended, each time that it ended: one whose dead letters are sent again ends anew.
ended_batches: Final = _table(
    "ended_batches",
    ["id"],
    _numbered(),
    _columns(Text, "batch_id"),
    _instants("created_at", "ended_at"),
    _columns(Text, "state"),
    _columns(JSON, "by_status"),
    _columns(Integer, "num_failed"),
    _instants("promised_at", "ends_at", "earliest_at", "latest_at", nullable=True),
    [UniqueConstraint("batch_id", "ended_at")],
    _index("ix_ended_batches_ended_at", "ended_at"),
)

#: Deadlines of batches that will be missed with the workers that run.
lacks: Final = _table(
    "lacks",
    ["id"],
    _numbered(),
    _columns(Text, "target", "segment"),
    _instants("opened_at", "said_at"),
    _columns(Double, "said_late"),
    _instants("foreseen_at"),
    _columns(Integer, "num_due", "num_late", "num_workers"),
    _columns(Integer, "num_enough", nullable=True),
    _instants("until_at"),
    _columns(Text, "sentence"),
    _instants("closed_at", nullable=True),
    _columns(Text, "closed_because", nullable=True),
    _index("uq_lacks_open", "target", "segment", where="closed_at IS NULL", unique=True),
    _index("ix_lacks_said_at", "said_at"),
)

audit: Final = _table(
    "audit",
    ["id"],
    _numbered(),
    _instants("at"),
    _columns(Text, "by_kind", "by", "action", "subject"),
    _columns(Text, "address", nullable=True),
    _index("ix_audit_at", "at"),
)

#: One row a worker, which the worker itself writes every few seconds and deletes when it ends.
workers: Final = _table(
    "workers",
    ["owner"],
    _columns(Text, "owner", "device", "target", "sampling_defaults"),
    _columns(Text, "target_revision", nullable=True),
    _columns(Integer, "num_slots", "num_waiting", "num_held"),
    _columns(ARRAY(Text), "job_ids"),
    _columns(ARRAY(BigInteger), "num_tokens"),
    _columns(Double, "tokens_per_s", nullable=True),
    _instants("started_at", "seen_at"),
    _columns(JSON, "setup", nullable=True),
)

#: A row is a life of a server between two changes. Old rows stay: a model that comes back gets its history back.
server_identities: Final = _table(
    "server_identities",
    ["endpoint", "first_seen_at"],
    _columns(Text, "endpoint", "target_revision", "engine"),
    _instants("first_seen_at", "last_seen_at"),
    _columns(Text, "changed", nullable=True),
    _columns(JSON, "identity"),
)

#: alphaloop.acceptance.EvidenceKey; empty text where a part does not apply.
_EVIDENCE_KEY: Final = (
    *("task", "segment", "target_revision", "drafter", "draft_revision", "engine"),
    *("sampling_bucket", "prompt_bucket", "form_bucket"),
)
#: The same, wide keys first: a worker reads the rows of its own target, engine and drafts, and of nothing else.
KEY: Final = (
    *("target_revision", "engine", "drafter", "draft_revision"),
    *("task", "segment", "sampling_bucket", "prompt_bucket", "form_bucket"),
)

#: One sequence for both tables of the ledger: their rows have one order.
ledger_ids: Final = Sequence("ledger_ids", metadata=metadata)


def _counted() -> list[Column[Any]]:
    """A row of the ledger: its place, and counts of a job under an evidence key."""
    return [
        *_instants("decoded_at", "recorded_at"),
        *_columns(BigInteger, "ledger_id", "recorded_in"),
        *_columns(Text, "job_id", *_EVIDENCE_KEY),
        *_columns(BigInteger, "rounds", "num_empty_rounds", "num_cropped", "num_forced", "num_prompt_tokens"),
        *_columns(_COUNTS, "proposed", "trials", "accepts", "chances"),
        *_columns(Integer, "num_draft_tokens"),
    ]


#: One row a decoded job.
decode_runs: Final = _table(
    "decode_runs",
    ["decoded_at", "ledger_id"],
    _counted(),
    _columns(Integer, "attempt", "batch_size", "num_texts"),
    _columns(Text, "purpose", "mode", "reason", "device"),
    _columns(Boolean, "is_evidence", "is_cut"),
    # For jobs whose rounds several proposers shared: by proposer, its trials and accepts. No sum of the counts above.
    _columns(JSONB, "proposers", nullable=True),
    _columns(BigInteger, "num_tokens"),
    _columns(Double, "queue_s", "wall_s", "device_s"),
    _columns(Double, "time_to_first_token_s", nullable=True),
    _columns(Uuid, "decode_batch_id"),
    _columns(Text, "target"),
    _columns(Text, "batch_id", nullable=True),
    _index("ix_decode_runs_decoded_at", "decoded_at", brin=True),
    _index("ix_decode_runs_task_purpose_decoded_at", "task", "purpose", "decoded_at"),
    _index("ix_decode_runs_job_id", "job_id"),
    _index("ix_decode_runs_batch_id", "batch_id", where="batch_id IS NOT NULL"),
    days_by="decoded_at",
)

#: A row for each drafter that a job gave counts of beside its own.
evidence_rows: Final = _table(
    "evidence_rows",
    ["decoded_at", "ledger_id"],
    _counted(),
    _columns(Text, "source"),
    _columns(Boolean, "is_whole"),
    _columns(BigInteger, "num_output_tokens"),
    _columns(Boolean, "is_cut", nullable=True),
    _index("ix_evidence_rows_task_decoded_at", "task", "decoded_at"),
    _index("ix_evidence_rows_scored_job_id", "job_id", where="source = 'scored'"),
    days_by="decoded_at",
)

acceptance_state: Final = _table(
    "acceptance_state",
    KEY,
    _columns(Text, *_EVIDENCE_KEY),
    _instants("as_of"),
    _columns(BigInteger, "num_jobs", "last_ledger_id", "changed_in"),
    _columns(LargeBinary, "evidence"),
    # BRIN, because every outcome changes the column: the update then stays in its page and touches no other index.
    _index("ix_acceptance_state_changed_in", "changed_in", brin=True),
)

exploration_budgets: Final = _table(
    "exploration_budgets",
    ["task", "target_revision", "device", "sampling_bucket"],
    _columns(Text, "task", "target_revision", "device", "sampling_bucket"),
    _columns(Double, "balance", "accrued", "spent"),
    _instants("changed_at"),
)


def _rollup(name: str) -> Table:
    """Sums over the jobs of an hour or a day."""
    return _table(
        name,
        ["bucket", *_EVIDENCE_KEY, "purpose", "mode", "num_draft_tokens"],
        _instants("bucket"),
        _columns(Text, *_EVIDENCE_KEY, "purpose", "mode"),
        _columns(Integer, "num_draft_tokens"),
        _columns(BigInteger, "num_jobs", "rounds", "num_empty_rounds", "num_cropped", "num_forced"),
        _columns(BigInteger, "num_prompt_tokens"),
        _columns(BigInteger, "num_tokens", "num_cut", "rounds_sq", "tokens_sq", "rounds_tokens"),
        _columns(_COUNTS, "proposed", "trials", "accepts", "trials_sq", "accepts_sq", "accepts_trials"),
        _columns(Double, "wall_s", "device_s"),
        _index(f"ix_{name}_task_bucket", "task", "bucket"),
    )


acceptance_hourly: Final = _rollup("acceptance_hourly")
acceptance_daily: Final = _rollup("acceptance_daily")

_SHAPE: Final = ("host", "device", "engine", "target_revision", "drafter", "draft_revision")
cost_profiles: Final = _table(
    "cost_profiles",
    [*_SHAPE, "batch", "width", "context", "kind"],
    _columns(Text, *_SHAPE, "kind"),
    _columns(Integer, "batch", "width", "context", "num_samples"),
    _columns(Double, "median_ms", "correction", "correction_variance"),
    _columns(BigInteger, "num_corrections"),
    _instants("measured_at"),
    _instants("corrected_at", nullable=True),
)

decisions: Final = _table(
    "decisions",
    ["id"],
    _numbered(),
    _instants("decided_at"),
    _columns(Text, "task", "target_revision", "device", "sampling_bucket"),
    _columns(Integer, "batch", "to_num_draft_tokens"),
    _columns(Text, "from_mode", "from_drafter", "to_drafter", nullable=True),
    _columns(Integer, "from_num_draft_tokens", nullable=True),
    _columns(Text, "to_mode", "reason", "explanation", "owner"),
    # What the choice was made on; null if no alternatives were compared.
    _columns(Double, "tokens_per_round", "round_ms", "speedup", "speedup_low", "speedup_high", nullable=True),
    _columns(Text, "rival_drafter", nullable=True),
    _columns(Integer, "rival_num_draft_tokens", nullable=True),
    _columns(Double, "rival_speedup", "rival_speedup_low", "rival_speedup_high", "jobs", nullable=True),
    _columns(ARRAY(Double, as_tuple=True), "trials", "accepts", nullable=True),
    _index("ix_decisions_task_decided_at", "task", "decided_at"),
    _index("ix_decisions_decided_at", "decided_at", "id"),
)

#: What decisions were taken from, so that each one can be taken again.
decision_snapshots: Final = _table(
    "decision_snapshots",
    ["decided_at", "decision_id"],
    _instants("decided_at"),
    _columns(Uuid, "decision_id"),
    _columns(Text, "task", "sampling_bucket"),
    _columns(Integer, "num_running"),
    _columns(JSON, "snapshot"),
    _index("ix_decision_snapshots_task_decided_at", "task", "decided_at"),
    days_by="decided_at",
)

probe_sets: Final = _table(
    "probe_sets",
    ["task", "version"],
    _columns(Text, "task", "version", "source"),
    _columns(Integer, "num_draft_tokens"),
    _columns(Boolean, "is_active"),
    _instants("created_at"),
    _index("uq_probe_sets_active", "task", where="is_active", unique=True),
)

probe_prompts: Final = _table(
    "probe_prompts",
    ["task", "version", "position"],
    _columns(Text, "task", "version", "prompt_id"),
    _columns(Integer, "position"),
    _columns(JSONB, "body"),
    _columns(Text, "job_id", "segment", nullable=True),
    [ForeignKeyConstraint(["task", "version"], ["probe_sets.task", "probe_sets.version"], ondelete="CASCADE")],
)

#: Every probe and control that was sent; joins decode_runs by job_id.
probe_runs: Final = _table(
    "probe_runs",
    ["job_id"],
    _columns(Text, "job_id", "schedule_id", "task", "probe_set", "prompt_id", "purpose"),
    _instants("scheduled_for"),
    _columns(Integer, "position"),
    _columns(Text, "drafter", nullable=True),
    _columns(Integer, "num_draft_tokens", nullable=True),
    _columns(ARRAY(Text), "scored_drafters"),
    _columns(LargeBinary, "payload_sha256"),
    _instants("sent_at", "compared_at", nullable=True),
    _index("ix_probe_runs_scheduled_for_task", "scheduled_for", "task"),
)

#: What a probe and its control generated, to be compared; never the tokens of traffic.
probe_texts: Final = _table(
    "probe_texts",
    ["job_id"],
    _columns(Text, "job_id", "finish_reason"),
    _instants("decoded_at"),
    _columns(Integer, "max_tokens"),
    _columns(ARRAY(Integer), "token_ids", "second_ids"),
    _columns(ARRAY(REAL), "gaps"),
    _columns(Double, "near_tie"),
    _index("ix_probe_texts_decoded_at", "decoded_at"),
)

#: The texts of a task's results that look-up searches, as tokens of the target; never prompts. A row that is forgotten
#: stays for a day without its tokens, so that every worker learns of it.
remembered_results: Final = _table(
    "remembered_results",
    ["id"],
    _numbered(),
    _columns(Text, "task", "segment", "target_revision", "job_id"),
    _columns(Text, "batch_id", nullable=True),
    _columns(Integer, "num_tokens"),
    _columns(LargeBinary, "token_ids", nullable=True),
    _instants("recorded_at"),
    _instants("forgotten_at", nullable=True),
    _columns(BigInteger, "changed_in"),
    _index("ix_remembered_results_target_revision_task", "target_revision", "task", "id"),
    _index("ix_remembered_results_changed_in", "changed_in"),
    _index("ix_remembered_results_job_id", "job_id"),
    _index("ix_remembered_results_recorded_at", "recorded_at", where="forgotten_at IS NULL"),
)

#: The text of such a job answers equal ones: it stays in `jobs.outcome`, and a key has the newest job alone.
reusable_results: Final = _table(
    "reusable_results",
    ["reuse_key"],
    _columns(LargeBinary, "reuse_key"),
    _columns(Text, "job_id"),
    _instants("decoded_at"),
    _index("ix_reusable_results_decoded_at", "decoded_at"),
)

#: One row a job that was answered so.
reused_results: Final = _table(
    "reused_results",
    ["job_id"],
    _columns(Text, "job_id", "source_job_id", "task", "segment"),
    _instants("decoded_at", "reused_at"),
    _index("ix_reused_results_source_job_id", "source_job_id"),
    _index("ix_reused_results_reused_at", "reused_at"),
)

draft_revisions: Final = _table(
    "draft_revisions",
    ["drafter", "draft_revision", "target_revision"],
    _columns(Text, "drafter", "draft_revision", "target_revision", "status", "status_reason"),
    _columns(Text, "trained_for", "parent_revision", "trained_on", nullable=True),
    _columns(JSONB, "figures", nullable=True),
    _columns(Boolean, "is_scorable"),
    _instants("registered_at", "status_changed_at"),
)

#: Each time that a drafter was, or is to be, trained anew for a target.
refreshes: Final = _table(
    "refreshes",
    ["id"],
    _numbered(),
    _columns(Text, "drafter", "target_revision", "parent_draft_revision", "reason", "state", "sentence"),
    _columns(Integer, "attempt"),
    _columns(Text, "lease_owner", "candidate_name", "candidate_revision", "location", nullable=True),
    _instants("lease_expires_at", nullable=True),
    _columns(Double, "device_s"),
    _columns(JSONB, "figures", nullable=True),
    _instants("opened_at", "changed_at"),
    _index(
        "uq_refreshes_open",
        *("drafter", "target_revision"),
        where="state IN ('waiting','training','trial')",
        unique=True,
    ),
    _index("ix_refreshes_changed_at", "changed_at"),
)

#: Jobs whose prompts a refresh trained or judged with; no texts.
refresh_prompts: Final = _table(
    "refresh_prompts",
    ["refresh_id", "job_id"],
    _columns(BigInteger, "refresh_id"),
    _columns(Text, "job_id", "prompt_id", "segment"),
    _columns(Boolean, "is_held_out"),
    _instants("ended_at"),
    _instants("erased_at", nullable=True),
    [ForeignKeyConstraint(["refresh_id"], ["refreshes.id"], ondelete="CASCADE")],
    _index("ix_refresh_prompts_job_id", "job_id"),
)

#: One row a due run, inserted first: the database decides that a run happens once.
schedule_runs: Final = _table(
    "schedule_runs",
    ["id"],
    _numbered(),
    _columns(Text, "schedule_id", "owner"),
    _instants("scheduled_for", "started_at"),
    _instants("finished_at", nullable=True),
    _columns(JSONB, "outcome", nullable=True),
    [UniqueConstraint("schedule_id", "scheduled_for")],
)

reports: Final = _table(
    "reports",
    ["id"],
    _numbered(),
    _instants("created_at", "covers_from", "covers_to"),
    _columns(Text, "summary", "text", "html"),
    _columns(JSONB, "content"),
    _index("ix_reports_created_at", "created_at"),
)

drift_events: Final = _table(
    "drift_events",
    ["id"],
    _numbered(),
    _columns(Text, "task", "drafter", "draft_revision", "target_revision", "cause", "verdict", "action"),
    _columns(JSONB, "evidence"),
    _columns(Double, "lost_tokens_per_s", nullable=True),
    _instants("opened_at", "raised_at"),
    _instants("began_after", "began_before", "confirmed_at", "acknowledged_at", nullable=True),
    _instants("closed_at", "accepted_at", nullable=True),
    _columns(Text, "acknowledged_by", "note", "closed_because", nullable=True),
    _columns(Integer, "num_reopened"),
    # One open event a cause: the run that finds the same fall again changes it.
    _index("uq_drift_events_open", "task", "drafter", "cause", where="closed_at IS NULL", unique=True),
)

#: What became of every drift event: a row each time its state changed.
drift_event_states: Final = _table(
    "drift_event_states",
    ["id"],
    _numbered(),
    _columns(BigInteger, "event_id"),
    _instants("at"),
    _columns(Text, "state", "cause", "sentence", "actor"),
    _columns(JSONB, "evidence", nullable=True),
    [ForeignKeyConstraint(["event_id"], ["drift_events.id"], ondelete="CASCADE")],
    _index("ix_drift_event_states_event_id", "event_id"),
)

#: How far the drift test has read, by task.
drift_positions: Final = _table(
    "drift_positions", ["task"], _columns(Text, "task"), _instants("decoded_at"), _columns(BigInteger, "ledger_id")
)

#: What the drift test remembers of a stream, so that a run reads only new jobs.
_STREAM: Final = (
    *("task", "target_revision", "engine", "sampling_bucket", "form_bucket"),
    *("drafter", "draft_revision"),
)
drift_memories: Final = _table(
    "drift_memories",
    _STREAM,
    _columns(Text, *_STREAM),
    _columns(Integer, "version"),
    _columns(JSONB, "document"),
    _instants("last_decoded_at"),
    _instants("norm_since", nullable=True),
)

_FAULT: Final = ("kind", "task", "drafter", "draft_revision", "target_revision", "engine")
#: Proofs that the engine did not do what it promises.
incidents: Final = _table(
    "incidents",
    ["id"],
    _numbered(),
    _columns(Text, *_FAULT, "sentence"),
    _columns(ARRAY(Text, as_tuple=True), "job_ids"),
    _columns(JSONB, "evidence"),
    _instants("opened_at"),
    _instants("acknowledged_at", "closed_at", nullable=True),
    _columns(Text, "acknowledged_by", "note", nullable=True),
    # The same fault on more prompts is the same incident.
    _index("uq_incidents_open", *_FAULT, where="closed_at IS NULL", unique=True),
)

notification_sinks: Final = _table("notification_sinks", ["name"], _columns(Text, "name"), _instants("known_since"))

#: Attempts to tell people; what has no row was not tried yet.
notifications: Final = _table(
    "notifications",
    ["sink", "kind", "source_id"],
    _columns(Text, "sink", "kind"),
    _columns(BigInteger, "source_id"),
    _columns(Integer, "num_attempts"),
    _instants("attempted_at"),
    _instants("sent_at", nullable=True),
    _columns(Text, "failure", nullable=True),
    [ForeignKeyConstraint(["sink"], ["notification_sinks.name"], ondelete="CASCADE")],
)

#: alphaloop.experiment.figures.SpeedupSubject.
SUBJECT: Final = (
    *("task", "sampling_bucket", "target_revision", "engine", "host", "device"),
    *("drafter", "draft_revision"),
)

#: Rounds of a task in one arm of the switchback experiment, added up.
switchback_slices: Final = _table(
    "switchback_slices",
    ["started_at", "block_id", "phase", "drafter", "num_draft_tokens"],
    _instants("started_at"),
    _columns(Text, "block_id", "phase", *SUBJECT, "owner"),
    [Column("against", Text, nullable=False, server_default="")],
    _columns(Integer, "num_draft_tokens"),
    _columns(BigInteger, "num_rounds", "num_sequence_rounds", "num_tokens", "num_proposed", "sum_running"),
    _columns(BigInteger, "num_prompt_rounds", "num_prompt_sequence_rounds", "num_prompt_tokens"),
    _columns(Double, "sequence_s", "sum_context", "prompt_sequence_s", "expected_sequence_s", "expected_vanilla_s"),
    _columns(Double, "expected_low_s", "expected_high_s", "uncorrected_vanilla_s", "model_sd_s", "sum_elsewhere"),
    _index("ix_switchback_slices_task_started_at", "task", "started_at"),
    days_by="started_at",
)


def _measured() -> list[Column[Any]]:
    """What speed-ups and pairs say of the slices that they come from."""
    return [
        *_columns(Text, *SUBJECT),
        *_columns(Integer, "min_num_draft_tokens", "max_num_draft_tokens"),
        *_columns(Double, "mean_running"),
        *_columns(BigInteger, "num_blocks"),
        *_instants("covers_from", "covers_to", "computed_at"),
    ]


def _compared() -> list[Column[Any]]:
    """A speed-up, and what it rests on."""
    return [
        *_measured(),
        *_columns(Double, "mean_context", "sequence_s", "control_share"),
        *_columns(BigInteger, "num_tokens", "num_control_rounds"),
        *_columns(Double, "speedup", "speedup_low", "speedup_high", nullable=True),
        *_columns(Text, "verdict"),
    ]


#: The measured speed-up of each subject over vanilla, over the last day of its slices.
task_speedups: Final = _table("task_speedups", SUBJECT, _compared())

#: The same over the drafter that `against` names, where one of the two is on trial.
rival_speedups: Final = _table("rival_speedups", [*SUBJECT, "against"], _columns(Text, "against"), _compared())

#: Expected and measured speed-up of a subject over the same rounds, a row for every eight blocks or more.
expectation_pairs: Final = _table(
    "expectation_pairs",
    [*SUBJECT, "covers_from"],
    _measured(),
    _columns(Double, "expected", "expected_low", "expected_high", "uncorrected", "model_sd"),
    _columns(Double, "speedup", "speedup_low", "speedup_high"),
    _index("ix_expectation_pairs_computed_at", "computed_at"),
)
