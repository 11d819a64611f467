"""The switchback experiment: slices of rounds, and the speed-up that follows from them."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Double,
    Index,
    Integer,
    PrimaryKeyConstraint,
    Table,
    Text,
)

from alphaloop.tables.metadata import column, instant, metadata

#: The columns of alphaloop.experiment.figures.SpeedupSubject.
SUBJECT: Final = (
    "task",
    "sampling_bucket",
    "target_revision",
    "engine",
    "host",
    "device",
    "drafter",
    "draft_revision",
)


def _subject() -> list[Column[Any]]:
    parts = {
        "task": "Kind of prompt",
        "sampling_bucket": "Sampling settings of the sequences",
        "target_revision": "Hash of the target's weights",
        "engine": "Decoding library, version and dtype",
        "host": "Machine that decoded",
        "device": "What decoded on it",
        "drafter": "Drafter of the treatment",
        "draft_revision": "Its revision",
    }
    return [column(name, Text, comment) for name, comment in parts.items()]


#: Partitioned by day, dropped by retention.
switchback_slices: Final = Table(
    "switchback_slices",
    metadata,
    instant("started_at", "When its first round began"),
    column("block_id", Text, "The same for slices that are compared with each other"),
    column("phase", Text, "control is vanilla; between, before and after are the treatment"),
    *_subject(),
    column("num_draft_tokens", Integer, "k of the treatment"),
    column("num_rounds", BigInteger, "Rounds in which no prompt was read"),
    column("num_sequence_rounds", BigInteger, "Sum over these rounds of the task's sequences"),
    column("num_tokens", BigInteger, "Tokens that these sequences put out"),
    column("num_proposed", BigInteger, "Draft tokens that the target read for them"),
    column("sequence_s", Double, "Sum over these rounds of seconds times the task's sequences"),
    column("sum_running", BigInteger, "Sum over all rounds of the sequences of all tasks"),
    column("sum_context", Double, "Sum over all rounds of the mean tokens of context"),
    column("num_prompt_rounds", BigInteger, "Rounds in which a prompt was read"),
    column("num_prompt_sequence_rounds", BigInteger, "num_sequence_rounds of these"),
    column("num_prompt_tokens", BigInteger, "num_tokens of these"),
    column("prompt_sequence_s", Double, "sequence_s of these"),
    *(
        column(name, Double, comment)
        for name, comment in (
            ("expected_sequence_s", "Sum over all rounds of seconds times sequences with an expected speed-up"),
            ("expected_vanilla_s", "The same times that speed-up: what vanilla rounds were expected to take"),
            ("expected_low_s", "The same times its lower 95 % bound"),
            ("expected_high_s", "The same times its upper 95 % bound"),
            ("uncorrected_vanilla_s", "The same times the speed-up before earlier measurements corrected it"),
            ("model_sd_s", "The same times the standard deviation of the logarithm of that"),
        )
    ),
    column(
        "sum_elsewhere",
        Double,
        "Sum over all rounds of requests at other endpoints than the task's; 0 of a device",
        default="0",
    ),
    column("owner", Text, "Worker that decoded them"),
    PrimaryKeyConstraint("started_at", "block_id", "phase", "drafter", "num_draft_tokens"),
    CheckConstraint("phase IN ('between','before','control','after')", name="phase"),
    Index("ix_switchback_slices_task_started_at", "task", "started_at"),
    postgresql_partition_by="RANGE (started_at)",
    comment="Rounds of a task in one arm of the switchback experiment, added up",
)

task_speedups: Final = Table(
    "task_speedups",
    metadata,
    *_subject(),
    column("min_num_draft_tokens", Integer, "Smallest k of the treatment"),
    column("max_num_draft_tokens", Integer, "Largest k of the treatment"),
    column("mean_running", Double, "Sequences of all tasks a round, of the treatment"),
    column("mean_context", Double, "Tokens of context a sequence, of the treatment"),
    column("num_tokens", BigInteger, "Tokens that the treatment put out"),
    column("sequence_s", Double, "Seconds times sequences that this took"),
    column("num_blocks", BigInteger, "Control slices with the treatment before and after"),
    column("num_control_rounds", BigInteger, "Vanilla rounds in them"),
    column("control_share", Double, "Of seconds times sequences, those in control slices"),
    column("speedup", Double, "Measured, over vanilla; null before there are eight blocks", nullable=True),
    column("speedup_low", Double, "Lower 95 % bound", nullable=True),
    column("speedup_high", Double, "Upper 95 % bound", nullable=True),
    column("verdict", Text, "alphaloop.experiment.estimate.Verdict"),
    instant("covers_from", "When the first slice began"),
    instant("covers_to", "When the last slice began"),
    instant("computed_at", "When it was computed"),
    PrimaryKeyConstraint(*SUBJECT),
    comment="The measured speed-up of each subject of the switchback experiment over the last day of its slices",
)

expectation_pairs: Final = Table(
    "expectation_pairs",
    metadata,
    *_subject(),
    column("expected", Double, "Expected speed-up, as shown: mean over the rounds"),
    column("expected_low", Double, "Its lower 95 % bound"),
    column("expected_high", Double, "Its upper 95 % bound"),
    column("uncorrected", Double, "Expected before earlier pairs corrected it"),
    column("model_sd", Double, "Standard deviation of its logarithm, by acceptance and costs"),
    column("speedup", Double, "Measured over the same rounds"),
    column("speedup_low", Double, "Its lower 95 % bound"),
    column("speedup_high", Double, "Its upper 95 % bound"),
    column("num_blocks", BigInteger, "Control slices with the treatment before and after"),
    column("min_num_draft_tokens", Integer, "Smallest k of the treatment"),
    column("max_num_draft_tokens", Integer, "Largest k of the treatment"),
    column("mean_running", Double, "Sequences of all tasks a round, of the treatment"),
    instant("covers_from", "When the first slice began"),
    instant("covers_to", "When the last slice began"),
    instant("computed_at", "When it was computed"),
    PrimaryKeyConstraint(*SUBJECT, "covers_from"),
    Index("ix_expectation_pairs_computed_at", "computed_at"),
    comment="Expected and measured speed-up of a subject over the same rounds, a row for every eight blocks or more",
)
