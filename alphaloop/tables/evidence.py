"""Sums of the ledger by hour and day, the costs of devices, and the decisions."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Double,
    Identity,
    Index,
    Integer,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY

from alphaloop.tables.metadata import NOW, counts_by_position, evidence_key, instant, metadata


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
