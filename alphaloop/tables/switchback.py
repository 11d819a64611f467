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
    text,
)

from alphaloop.tables.metadata import instant, metadata

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
    return [Column(name, Text, nullable=False, comment=comment) for name, comment in parts.items()]


#: Partitioned by day, dropped by retention.
switchback_slices: Final = Table(
    "switchback_slices",
    metadata,
    instant("started_at", "When its first round began"),
    Column("block_id", Text, nullable=False, comment="The same for slices that are compared with each other"),
    Column("phase", Text, nullable=False, comment="control is vanilla; between, before and after are the treatment"),
    *_subject(),
    Column("num_draft_tokens", Integer, nullable=False, comment="k of the treatment"),
    Column("num_rounds", BigInteger, nullable=False, comment="Rounds in which no prompt was read"),
    Column("num_sequence_rounds", BigInteger, nullable=False, comment="Sum over these rounds of the task's sequences"),
    Column("num_tokens", BigInteger, nullable=False, comment="Tokens that these sequences put out"),
    Column("num_proposed", BigInteger, nullable=False, comment="Draft tokens that the target read for them"),
    Column("sequence_s", Double, nullable=False, comment="Sum over these rounds of seconds times the task's sequences"),
    Column("sum_running", BigInteger, nullable=False, comment="Sum over all rounds of the sequences of all tasks"),
    Column("sum_context", Double, nullable=False, comment="Sum over all rounds of the mean tokens of context"),
    Column("num_prompt_rounds", BigInteger, nullable=False, comment="Rounds in which a prompt was read"),
    Column("num_prompt_sequence_rounds", BigInteger, nullable=False, comment="num_sequence_rounds of these"),
    Column("num_prompt_tokens", BigInteger, nullable=False, comment="num_tokens of these"),
    Column("prompt_sequence_s", Double, nullable=False, comment="sequence_s of these"),
    *(
        Column(name, Double, nullable=False, comment=comment)
        for name, comment in (
            ("expected_sequence_s", "Sum over all rounds of seconds times sequences with an expected speed-up"),
            ("expected_vanilla_s", "The same times that speed-up: what vanilla rounds were expected to take"),
            ("expected_low_s", "The same times its lower 95 % bound"),
            ("expected_high_s", "The same times its upper 95 % bound"),
            ("uncorrected_vanilla_s", "The same times the speed-up before earlier measurements corrected it"),
            ("model_sd_s", "The same times the standard deviation of the logarithm of that"),
        )
    ),
    Column(
        "sum_elsewhere",
        Double,
        nullable=False,
        server_default=text("0"),
        comment="Sum over all rounds of requests at other endpoints than the task's; 0 of a device",
    ),
    Column("owner", Text, nullable=False, comment="Worker that decoded them"),
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
    Column("min_num_draft_tokens", Integer, nullable=False, comment="Smallest k of the treatment"),
    Column("max_num_draft_tokens", Integer, nullable=False, comment="Largest k of the treatment"),
    Column("mean_running", Double, nullable=False, comment="Sequences of all tasks a round, of the treatment"),
    Column("mean_context", Double, nullable=False, comment="Tokens of context a sequence, of the treatment"),
    Column("num_tokens", BigInteger, nullable=False, comment="Tokens that the treatment put out"),
    Column("sequence_s", Double, nullable=False, comment="Seconds times sequences that this took"),
    Column("num_blocks", BigInteger, nullable=False, comment="Control slices with the treatment before and after"),
    Column("num_control_rounds", BigInteger, nullable=False, comment="Vanilla rounds in them"),
    Column("control_share", Double, nullable=False, comment="Of seconds times sequences, those in control slices"),
    Column("speedup", Double, comment="Measured, over vanilla; null before there are eight blocks"),
    Column("speedup_low", Double, comment="Lower 95 % bound"),
    Column("speedup_high", Double, comment="Upper 95 % bound"),
    Column("verdict", Text, nullable=False, comment="alphaloop.experiment.estimate.Verdict"),
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
    Column("expected", Double, nullable=False, comment="Expected speed-up, as shown: mean over the rounds"),
    Column("expected_low", Double, nullable=False, comment="Its lower 95 % bound"),
    Column("expected_high", Double, nullable=False, comment="Its upper 95 % bound"),
    Column("uncorrected", Double, nullable=False, comment="Expected before earlier pairs corrected it"),
    Column("model_sd", Double, nullable=False, comment="Standard deviation of its logarithm, by acceptance and costs"),
    Column("speedup", Double, nullable=False, comment="Measured over the same rounds"),
    Column("speedup_low", Double, nullable=False, comment="Its lower 95 % bound"),
    Column("speedup_high", Double, nullable=False, comment="Its upper 95 % bound"),
    Column("num_blocks", BigInteger, nullable=False, comment="Control slices with the treatment before and after"),
    Column("min_num_draft_tokens", Integer, nullable=False, comment="Smallest k of the treatment"),
    Column("max_num_draft_tokens", Integer, nullable=False, comment="Largest k of the treatment"),
    Column("mean_running", Double, nullable=False, comment="Sequences of all tasks a round, of the treatment"),
    instant("covers_from", "When the first slice began"),
    instant("covers_to", "When the last slice began"),
    instant("computed_at", "When it was computed"),
    PrimaryKeyConstraint(*SUBJECT, "covers_from"),
    Index("ix_expectation_pairs_computed_at", "computed_at"),
    comment="Expected and measured speed-up of a subject over the same rounds, a row for every eight blocks or more",
)
