"""The ledger of evidence, everything that is folded from it, the costs of devices, and the log of choices.

The ledger has one row for every job and drafter counted. acceptance_state and the sums by hour and day are folds of it.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    Identity,
    Index,
    Integer,
    LargeBinary,
    PrimaryKeyConstraint,
    Sequence,
    Table,
    Text,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY

from alphaloop.tables.metadata import column, counts_by_position, evidence_key, instant, metadata

#: One sequence for both tables: their rows have one order.
ledger_ids: Final = Sequence("ledger_ids", metadata=metadata)


def _ledger_position() -> list[Column[Any]]:
    return [
        instant("decoded_at", "When the job's last token was decoded"),
        column("ledger_id", BigInteger, "Order of recording in both tables of the ledger"),
        column("recorded_in", BigInteger, "Smallest ledger_id of the same transaction: its name"),
        instant("recorded_at", "When that transaction recorded it, by the clock of the database"),
        column("job_id", Text, "The job"),
    ]


def _counts() -> list[Column[Any]]:
    return [
        column("rounds", BigInteger, "Target passes that yielded tokens, prefill included"),
        column("num_empty_rounds", BigInteger, "Rounds in which nothing was proposed"),
        column("num_cropped", BigInteger, "rounds + accepted - tokens"),
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
    column("attempt", Integer, "The claim that decoded it"),
    column("purpose", Text, "traffic, probe or control"),
    *evidence_key(),
    column(
        "is_evidence",
        Boolean,
        "Whether acceptance_state holds these counts; not of a control, nor where a drafted row says more",
    ),
    column("mode", Text, "vanilla or speculative"),
    column("num_draft_tokens", Integer, "k, the draft length asked for; 0 is vanilla"),
    column("reason", Text, "Why this mode: alphaloop.deciding.decision.Reason"),
    column("device", Text, "What decoded it"),
    *_counts(),
    column("num_prompt_tokens", BigInteger, "Tokens of the prompt"),
    column("num_tokens", BigInteger, "Tokens generated"),
    column(
        "is_cut", Boolean, "Whether a limit ended the text, which says only how long it is at least", default="false"
    ),
    column("batch_size", Integer, "Most sequences that shared a step with it"),
    column("queue_s", Double, "Seconds from the Kafka timestamp to the start of decoding"),
    column("time_to_first_token_s", Double, "Seconds from the start of decoding", nullable=True),
    column("wall_s", Double, "Seconds of decoding"),
    column("device_s", Double, "Share of the engine's seconds: each step's divided by its batch"),
    column("decode_batch_id", Uuid, "The same for jobs that were decided together"),
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
    column(
        "source",
        Text,
        "shadow: scored on a text that others decoded; scored: on a control's text, for a probe; "
        "shared_weights: counted in rounds of a drafter with the same weights; drafted: of a drafter that decoded, its "
        "rounds alone or scored at its longest drafts",
    ),
    column("is_whole", Boolean, "Of whole rounds; only these shadows are in the hourly sums"),
    column("num_draft_tokens", Integer, "k of the counts"),
    *_counts(),
    column("num_prompt_tokens", BigInteger, "Tokens of the prompt"),
    column("num_output_tokens", BigInteger, "Tokens of the whole text"),
    column(
        "is_cut",
        Boolean,
        "The same of a row that counts for the job's length; null where another row of the job does",
        nullable=True,
    ),
    PrimaryKeyConstraint("decoded_at", "ledger_id"),
    CheckConstraint("source IN ('shadow','scored','shared_weights','drafted')", name="source"),
    CheckConstraint("array_ge(proposed, trials) AND array_ge(trials, accepts)", name="counts_ordered"),
    Index("ix_evidence_rows_task_decoded_at", "task", "decoded_at"),
    Index("ix_evidence_rows_scored_job_id", "job_id", postgresql_where=text("source = 'scored'")),
    postgresql_partition_by="RANGE (decoded_at)",
    comment="Counts that a job gave of drafters beside its own: a row each",
)


#: Wide keys first: a worker reads the rows of its own target, engine and drafts, and of nothing else.
KEY: Final = (
    "target_revision",
    "engine",
    "drafter",
    "draft_revision",
    "task",
    "segment",
    "sampling_bucket",
    "prompt_bucket",
)


def _evidence_columns() -> list[Column[Any]]:
    return [
        instant("as_of", "When the last of its jobs ended. The weights of the sums hold at this moment"),
        column("num_jobs", BigInteger, "Jobs ever added"),
        column(
            "evidence", LargeBinary, "alphaloop.deciding.evidence.KeyEvidence, packed: the view evidence_now unpacks it"
        ),
        column("last_ledger_id", BigInteger, "The last row of the ledger that was added"),
    ]


# Rows of long drafts stay in their page, because they are read in bulk and do not compress.
_IN_PAGE: Final = {"toast_tuple_target": 8160}

acceptance_state: Final = Table(
    "acceptance_state",
    metadata,
    *evidence_key(),
    *_evidence_columns(),
    column("changed_in", BigInteger, "Transaction that changed the row last; readers ask for newer ones"),
    PrimaryKeyConstraint(*KEY),
    # BRIN, because every outcome changes the column: the update then stays in its page and touches no other index.
    Index(
        "ix_acceptance_state_changed_in",
        "changed_in",
        postgresql_using="brin",
        postgresql_with={"pages_per_range": 4, "autosummarize": True},
    ),
    postgresql_with={**_IN_PAGE, "fillfactor": 50},
    comment="Sums over the jobs of an evidence key, which fade: what a task's next decision rests on",
)

exploration_budgets: Final = Table(
    "exploration_budgets",
    metadata,
    column("task", Text, "Kind of prompt", primary_key=True),
    column("target_revision", Text, "Hash of the target's weights", primary_key=True),
    column("device", Text, "What decodes it", primary_key=True),
    column("sampling_bucket", Text, "Sampling settings it is for", primary_key=True),
    column("balance", Double, "Tokens that exploration may still be expected to lose"),
    column("accrued", Double, "Tokens of credit so far"),
    column("spent", Double, "Tokens spent so far"),
    instant("changed_at", "When a worker last changed it", default="now()"),
    comment="What a task may still lose to exploration: one budget for all workers, kept over restarts",
)


def _rollup(name: str, bucket: str) -> Table:
    return Table(
        name,
        metadata,
        instant("bucket", f"Start of the {bucket}, UTC", primary_key=True),
        *evidence_key(primary_key=True),
        column("purpose", Text, "traffic, probe or control", primary_key=True),
        column(
            "mode",
            Text,
            "vanilla, speculative, or shadow: a drafter's counts on texts that it did not decode",
            primary_key=True,
        ),
        column("num_draft_tokens", Integer, "k; 0 is vanilla", primary_key=True),
        *_sums(),
        Index(f"ix_{name}_task_bucket", "task", "bucket"),
        comment=f"Counts and sums of decode_runs by {bucket}, and those of shadows in evidence_rows: never rates",
    )


def _sums() -> list[Column[Any]]:
    whole = {
        "num_jobs": "Jobs",
        "rounds": "Rounds, prefills among them",
        "num_empty_rounds": "Rounds without a proposal",
        "num_cropped": "rounds + accepted - tokens",
        "num_prompt_tokens": "Tokens of prompts",
        "num_tokens": "Tokens generated",
        "num_cut": "Of the jobs, texts that a limit ended; shadows have none",
        "rounds_sq": "Sum over jobs of rounds², for the variance over jobs",
        "tokens_sq": "Sum over jobs of tokens²",
        "rounds_tokens": "Sum over jobs of rounds · tokens",
    }
    by_position = {
        "proposed": "Rounds in which at least this many tokens were proposed",
        "trials": "Rounds in which this position was tested",
        "accepts": "Of the trials, accepted",
        "trials_sq": "Sum over jobs of trials²",
        "accepts_sq": "Sum over jobs of accepts²",
        "accepts_trials": "Sum over jobs of accepts · trials",
    }
    seconds = {"wall_s": "Seconds of decoding", "device_s": "Engine seconds"}
    return [
        *(column(n, BigInteger, c, default="0") for n, c in whole.items()),
        *(counts_by_position(n, c) for n, c in by_position.items()),
        *(column(n, Double, c, default="0") for n, c in seconds.items()),
    ]


acceptance_hourly: Final = _rollup("acceptance_hourly", "hour")
acceptance_daily: Final = _rollup("acceptance_daily", "day")

cost_profiles: Final = Table(
    "cost_profiles",
    metadata,
    column("host", Text, "Machine that was measured", primary_key=True),
    column("device", Text, "What was measured on it", primary_key=True),
    column("engine", Text, "Decoding library, version and dtype", primary_key=True),
    column("target_revision", Text, "Hash of the target's weights", primary_key=True),
    column("drafter", Text, "Empty: the target's pass; else the time of this drafter's proposal", primary_key=True),
    column("draft_revision", Text, "Empty for the target", primary_key=True),
    column("batch", Integer, "Sequences; on servers, requests in flight at one of them", primary_key=True),
    column("width", Integer, "Target positions a sequence, k + 1; of a prefill, the prompt's tokens", primary_key=True),
    column("context", Integer, "Tokens before, a sequence", primary_key=True, default="256"),
    column("kind", Text, "round, prefill, or served: a whole round on a server", primary_key=True, default="'round'"),
    column("median_ms", Double, "Median milliseconds, as measured"),
    column("num_samples", Integer, "Timings behind the median"),
    instant("measured_at", "When", default="now()"),
    column("correction", Double, "What real rounds took, over median_ms", default="1"),
    column("num_corrections", BigInteger, "Real rounds of about this shape behind the correction", default="0"),
    column("correction_variance", Double, "Variance of ln(correction)", default="0"),
    instant("corrected_at", "When the correction was last stored; null if never", nullable=True),
    CheckConstraint("median_ms > 0", name="median_ms"),
    CheckConstraint("correction > 0", name="correction"),
    CheckConstraint("correction_variance >= 0", name="correction_variance"),
    CheckConstraint("kind IN ('round','prefill','served')", name="kind"),
    comment="What a round costs on a device of a machine",
)


def _figures() -> list[Column[Any]]:
    """What a choice was made on; null if no alternatives were compared."""
    return [
        column(
            "tokens_per_round",
            Double,
            "Expected of the new choice; null if no alternatives were compared",
            nullable=True,
        ),
        column("round_ms", Double, "Expected milliseconds of such a round", nullable=True),
        column("speedup", Double, "Expected goodput over vanilla", nullable=True),
        column("speedup_low", Double, "Lower 95 % bound", nullable=True),
        column("speedup_high", Double, "Upper 95 % bound", nullable=True),
        column("rival_drafter", Text, "Drafter of the best other alternative; null for vanilla", nullable=True),
        column("rival_num_draft_tokens", Integer, "Its k; null where there was none", nullable=True),
        column("rival_speedup", Double, "Its expected goodput over vanilla", nullable=True),
        column("rival_speedup_low", Double, "Lower 95 % bound", nullable=True),
        column("rival_speedup_high", Double, "Upper 95 % bound", nullable=True),
        column(
            "jobs",
            Double,
            "Jobs of the drafter in the task, weighted by age; of the rival's drafter, if vanilla was chosen",
            nullable=True,
        ),
        column("trials", ARRAY(Double, as_tuple=True), "Weighted trials of these jobs, by position", nullable=True),
        column("accepts", ARRAY(Double, as_tuple=True), "Weighted accepts of these jobs, by position", nullable=True),
    ]


decisions: Final = Table(
    "decisions",
    metadata,
    column("id", BigInteger, "Order", Identity(always=True), primary_key=True),
    instant("decided_at", "When the choice changed", default="now()"),
    column("task", Text, "Kind of prompt"),
    column("target_revision", Text, "Hash of the target's weights"),
    column("device", Text, "Where it applies"),
    column("sampling_bucket", Text, "Sampling settings it applies to"),
    column("batch", Integer, "Batch size it was decided at"),
    column("from_mode", Text, "Before; null for the first decision", nullable=True),
    column("from_drafter", Text, "Before", nullable=True),
    column("from_num_draft_tokens", Integer, "Before", nullable=True),
    column("to_mode", Text, "Now"),
    column("to_drafter", Text, "Now; null for vanilla", nullable=True),
    column("to_num_draft_tokens", Integer, "Now; 0 for vanilla"),
    column("reason", Text, "alphaloop.deciding.decision.Reason"),
    column("explanation", Text, "The reason in words, with its figures"),
    column("owner", Text, "Worker that decided"),
    *_figures(),
    Index("ix_decisions_task_decided_at", "task", "decided_at"),
    Index("ix_decisions_decided_at", "decided_at", "id"),
    comment="When a task's choice changed, from what to what, and why; exploration and forced modes are not choices",
)
