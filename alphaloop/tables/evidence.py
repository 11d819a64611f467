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

from alphaloop.tables.metadata import NOW, counts_by_position, evidence_key, instant, metadata

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
        Column("num_jobs", BigInteger, nullable=False, comment="Jobs ever added"),
        Column(
            "evidence",
            LargeBinary,
            nullable=False,
            comment="alphaloop.deciding.evidence.KeyEvidence, packed: the view evidence_now unpacks it",
        ),
        Column("last_ledger_id", BigInteger, nullable=False, comment="The last row of the ledger that was added"),
    ]


# Rows of long drafts stay in their page, because they are read in bulk and do not compress.
_IN_PAGE: Final = {"toast_tuple_target": 8160}

acceptance_state: Final = Table(
    "acceptance_state",
    metadata,
    *evidence_key(),
    *_evidence_columns(),
    Column(
        "changed_in",
        BigInteger,
        nullable=False,
        comment="Transaction that changed the row last; readers ask for newer ones",
    ),
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
    Column("task", Text, primary_key=True, comment="Kind of prompt"),
    Column("target_revision", Text, primary_key=True, comment="Hash of the target's weights"),
    Column("device", Text, primary_key=True, comment="What decodes it"),
    Column("sampling_bucket", Text, primary_key=True, comment="Sampling settings it is for"),
    Column("balance", Double, nullable=False, comment="Tokens that exploration may still be expected to lose"),
    Column("accrued", Double, nullable=False, comment="Tokens of credit so far"),
    Column("spent", Double, nullable=False, comment="Tokens spent so far"),
    instant("changed_at", "When a worker last changed it", server_default=NOW),
    comment="What a task may still lose to exploration: one budget for all workers, kept over restarts",
)


def _rollup(name: str, bucket: str) -> Table:
    return Table(
        name,
        metadata,
        instant("bucket", f"Start of the {bucket}, UTC", primary_key=True),
        *evidence_key(primary_key=True),
        Column("purpose", Text, primary_key=True, comment="traffic, probe or control"),
        Column(
            "mode",
            Text,
            primary_key=True,
            comment="vanilla, speculative, or shadow: a drafter's counts on texts that it did not decode",
        ),
        Column("num_draft_tokens", Integer, primary_key=True, comment="k; 0 is vanilla"),
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
        *(Column(n, BigInteger, nullable=False, server_default=text("0"), comment=c) for n, c in whole.items()),
        *(counts_by_position(n, c) for n, c in by_position.items()),
        *(Column(n, Double, nullable=False, server_default=text("0"), comment=c) for n, c in seconds.items()),
    ]


acceptance_hourly: Final = _rollup("acceptance_hourly", "hour")
acceptance_daily: Final = _rollup("acceptance_daily", "day")

cost_profiles: Final = Table(
    "cost_profiles",
    metadata,
    Column("host", Text, primary_key=True, comment="Machine that was measured"),
    Column("device", Text, primary_key=True, comment="What was measured on it"),
    Column("engine", Text, primary_key=True, comment="Decoding library, version and dtype"),
    Column("target_revision", Text, primary_key=True, comment="Hash of the target's weights"),
    Column(
        "drafter", Text, primary_key=True, comment="Empty: the target's pass; else the time of this drafter's proposal"
    ),
    Column("draft_revision", Text, primary_key=True, comment="Empty for the target"),
    Column("batch", Integer, primary_key=True, comment="Sequences; on servers, requests in flight at one of them"),
    Column(
        "width",
        Integer,
        primary_key=True,
        comment="Target positions a sequence, k + 1; of a prefill, the prompt's tokens",
    ),
    Column("context", Integer, primary_key=True, server_default=text("256"), comment="Tokens before, a sequence"),
    Column(
        "kind",
        Text,
        primary_key=True,
        server_default=text("'round'"),
        comment="round, prefill, or served: a whole round on a server",
    ),
    Column("median_ms", Double, nullable=False, comment="Median milliseconds, as measured"),
    Column("num_samples", Integer, nullable=False, comment="Timings behind the median"),
    instant("measured_at", "When", server_default=NOW),
    Column(
        "correction",
        Double,
        nullable=False,
        server_default=text("1"),
        comment="What real rounds took, over median_ms",
    ),
    Column(
        "num_corrections",
        BigInteger,
        nullable=False,
        server_default=text("0"),
        comment="Real rounds of about this shape behind the correction",
    ),
    Column(
        "correction_variance",
        Double,
        nullable=False,
        server_default=text("0"),
        comment="Variance of ln(correction)",
    ),
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
        Column("tokens_per_round", Double, comment="Expected of the new choice; null if no alternatives were compared"),
        Column("round_ms", Double, comment="Expected milliseconds of such a round"),
        Column("speedup", Double, comment="Expected goodput over vanilla"),
        Column("speedup_low", Double, comment="Lower 95 % bound"),
        Column("speedup_high", Double, comment="Upper 95 % bound"),
        Column("rival_drafter", Text, comment="Drafter of the best other alternative; null for vanilla"),
        Column("rival_num_draft_tokens", Integer, comment="Its k; null where there was none"),
        Column("rival_speedup", Double, comment="Its expected goodput over vanilla"),
        Column("rival_speedup_low", Double, comment="Lower 95 % bound"),
        Column("rival_speedup_high", Double, comment="Upper 95 % bound"),
        Column(
            "jobs",
            Double,
            comment="Jobs of the drafter in the task, weighted by age; of the rival's drafter, if vanilla was chosen",
        ),
        Column("trials", ARRAY(Double), comment="Weighted trials of these jobs, by position"),
        Column("accepts", ARRAY(Double), comment="Weighted accepts of these jobs, by position"),
    ]


decisions: Final = Table(
    "decisions",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True, comment="Order"),
    instant("decided_at", "When the choice changed", server_default=NOW),
    Column("task", Text, nullable=False, comment="Kind of prompt"),
    Column("target_revision", Text, nullable=False, comment="Hash of the target's weights"),
    Column("device", Text, nullable=False, comment="Where it applies"),
    Column("sampling_bucket", Text, nullable=False, comment="Sampling settings it applies to"),
    Column("batch", Integer, nullable=False, comment="Batch size it was decided at"),
    Column("from_mode", Text, comment="Before; null for the first decision"),
    Column("from_drafter", Text, comment="Before"),
    Column("from_num_draft_tokens", Integer, comment="Before"),
    Column("to_mode", Text, nullable=False, comment="Now"),
    Column("to_drafter", Text, comment="Now; null for vanilla"),
    Column("to_num_draft_tokens", Integer, nullable=False, comment="Now; 0 for vanilla"),
    Column("reason", Text, nullable=False, comment="alphaloop.deciding.decision.Reason"),
    Column("explanation", Text, nullable=False, comment="The reason in words, with its figures"),
    Column("owner", Text, nullable=False, comment="Worker that decided"),
    *_figures(),
    Index("ix_decisions_task_decided_at", "task", "decided_at"),
    Index("ix_decisions_decided_at", "decided_at", "id"),
    comment="When a task's choice changed, from what to what, and why; exploration and forced modes are not choices",
)
