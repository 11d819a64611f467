"""The ledger of evidence: one row for every job and drafter counted. All other evidence is a fold of it."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    Index,
    Integer,
    PrimaryKeyConstraint,
    Sequence,
    Table,
    Text,
    Uuid,
    text,
)

from alphaloop.tables.metadata import counts_by_position, evidence_key, instant, metadata

#: One sequence for both tables: their rows have one order.
ledger_ids: Final = Sequence("ledger_ids", metadata=metadata)


def _ledger_position() -> list[Column[Any]]:
    return [
        instant("decoded_at", "When the job's last token was decoded"),
        Column("ledger_id", BigInteger, nullable=False, comment="Order of recording in both tables of the ledger"),
        Column(
            "recorded_in", BigInteger, nullable=False, comment="Smallest ledger_id of the same transaction: its name"
        ),
        instant("recorded_at", "When that transaction recorded it, by the clock of the database"),
        Column("job_id", Text, nullable=False, comment="The job"),
    ]


def _counts() -> list[Column[Any]]:
    return [
        Column("rounds", BigInteger, nullable=False, comment="Target passes that yielded tokens, prefill included"),
        Column("num_empty_rounds", BigInteger, nullable=False, comment="Rounds in which nothing was proposed"),
        Column("num_cropped", BigInteger, nullable=False, comment="rounds + accepted - tokens"),
        counts_by_position("proposed", "Rounds in which at least this many tokens were proposed"),
        counts_by_position("trials", "Rounds in which this position was tested"),
        counts_by_position("accepts", "Of the trials, accepted"),
        counts_by_position(
            "chances", "Rounds in which this position was asked for, all before accepted; empty where k never changed"
        ),
    ]


#: One row a decoded job, partitioned by day; partitions are made ahead and dropped by retention.
decode_runs: Final = Table(
    "decode_runs",
    metadata,
    *_ledger_position(),
    Column("attempt", Integer, nullable=False, comment="The claim that decoded it"),
    Column("purpose", Text, nullable=False, comment="traffic, probe or control"),
    *evidence_key(),
    Column(
        "is_evidence",
        Boolean,
        nullable=False,
        comment="Whether acceptance_state holds these counts; not of a control, nor where a drafted row says more",
    ),
    Column("mode", Text, nullable=False, comment="vanilla or speculative"),
    Column("num_draft_tokens", Integer, nullable=False, comment="k, the draft length asked for; 0 is vanilla"),
    Column("reason", Text, nullable=False, comment="Why this mode: alphaloop.deciding.decision.Reason"),
    Column("device", Text, nullable=False, comment="What decoded it"),
    *_counts(),
    Column("num_prompt_tokens", BigInteger, nullable=False, comment="Tokens of the prompt"),
    Column("num_tokens", BigInteger, nullable=False, comment="Tokens generated"),
    Column(
        "is_cut",
        Boolean,
        nullable=False,
        server_default=text("false"),
        comment="Whether a limit ended the text, which says only how long it is at least",
    ),
    Column("batch_size", Integer, nullable=False, comment="Most sequences that shared a step with it"),
    Column("queue_s", Double, nullable=False, comment="Seconds from the Kafka timestamp to the start of decoding"),
    Column("time_to_first_token_s", Double, comment="Seconds from the start of decoding"),
    Column("wall_s", Double, nullable=False, comment="Seconds of decoding"),
    Column(
        "device_s", Double, nullable=False, comment="Share of the engine's seconds: each step's divided by its batch"
    ),
    Column("decode_batch_id", Uuid, nullable=False, comment="The same for jobs that were decided together"),
    PrimaryKeyConstraint("decoded_at", "ledger_id"),
    CheckConstraint("num_tokens = rounds + array_sum(accepts) - num_cropped", name="tokens_add_up"),
    CheckConstraint("array_ge(proposed, trials) AND array_ge(trials, accepts)", name="counts_ordered"),
    Index("ix_decode_runs_decoded_at", "decoded_at", postgresql_using="brin"),
    Index("ix_decode_runs_task_purpose_decoded_at", "task", "purpose", "decoded_at"),
    Index("ix_decode_runs_job_id", "job_id"),
    postgresql_partition_by="RANGE (decoded_at)",
    comment="One row a decoded job: counts by draft position under the key of all evidence",
)

#: Partitioned and dropped with decode_runs.
evidence_rows: Final = Table(
    "evidence_rows",
    metadata,
    *_ledger_position(),
    *evidence_key(),
    Column(
        "source",
        Text,
        nullable=False,
        comment="shadow: scored on a text that others decoded; scored: on a control's text, for a probe; "
        "shared_weights: counted in rounds of a drafter with the same weights; drafted: of a drafter that decoded, its "
        "rounds alone or scored at its longest drafts",
    ),
    Column("is_whole", Boolean, nullable=False, comment="Of whole rounds; only these shadows are in the hourly sums"),
    Column("num_draft_tokens", Integer, nullable=False, comment="k of the counts"),
    *_counts(),
    Column("num_prompt_tokens", BigInteger, nullable=False, comment="Tokens of the prompt"),
    Column("num_output_tokens", BigInteger, nullable=False, comment="Tokens of the whole text"),
    Column(
        "is_cut",
        Boolean,
        comment="The same of a row that counts for the job's length; null where another row of the job does",
    ),
    PrimaryKeyConstraint("decoded_at", "ledger_id"),
    CheckConstraint("source IN ('shadow','scored','shared_weights','drafted')", name="source"),
    CheckConstraint("array_ge(proposed, trials) AND array_ge(trials, accepts)", name="counts_ordered"),
    Index("ix_evidence_rows_task_decoded_at", "task", "decoded_at"),
    Index("ix_evidence_rows_scored_job_id", "job_id", postgresql_where=text("source = 'scored'")),
    postgresql_partition_by="RANGE (decoded_at)",
    comment="Counts that a job gave of drafters beside its own: a row each",
)
