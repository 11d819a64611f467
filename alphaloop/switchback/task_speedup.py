"""The measured speed-up of a task: the one figure that status, report, explain and SQL show. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from alphaloop.acceptance import Interval
from alphaloop.switchback.slices import Phase, Slice
from alphaloop.switchback.speedup import Verdict, measured_speedup


@dataclass(frozen=True, slots=True, order=True)
class Subject:
    """What is compared with itself: a drafter in a task, on one engine of one machine."""

    task: str
    sampling_bucket: str
    target_revision: str
    engine: str
    host: str
    device: str
    drafter: str
    draft_revision: str


@dataclass(frozen=True, slots=True)
class TaskSpeedup:
    """How many times faster a subject's texts come than vanilla, with the draft lengths and the load it was seen at."""

    subject: Subject
    min_num_draft_tokens: int
    max_num_draft_tokens: int
    mean_running: float  #: sequences of all tasks a round
    mean_context: float  #: tokens of context a sequence
    num_tokens: int  #: of the treatment
    sequence_s: float  #: seconds times sequences of the treatment
    num_blocks: int
    num_control_rounds: int
    control_share: float  #: of the seconds times sequences of all slices, those of control; washouts are in no slice
    speedup: Interval | None  #: None before there are eight blocks
    verdict: Verdict
    covers_from: datetime
    covers_to: datetime
    computed_at: datetime

    @property
    def drafter(self) -> str:
        """The drafter that was measured."""
        return self.subject.drafter

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second of one running sequence, as it drafts; None without time."""
        return self.num_tokens / self.sequence_s if self.sequence_s > 0 else None

    @property
    def vanilla_tokens_per_s(self) -> float | None:
        """The same of vanilla rounds, by the measured speed-up; None before it was measured."""
        tokens_per_s = self.tokens_per_s
        return tokens_per_s / self.speedup.mean if tokens_per_s is not None and self.speedup is not None else None


def task_speedup(subject: Subject, slices: Sequence[Slice], computed_at: datetime) -> TaskSpeedup:
    """The figure of all slices of a subject in a window of time, of which at least one is of the treatment."""
    treated = [one for one in slices if one.phase is not Phase.CONTROL]
    num_rounds = sum(one.num_rounds + one.num_prompt_rounds for one in treated)
    lengths = [one.treatment.num_draft_tokens for one in treated]
    found = measured_speedup(slices)
    begins = [one.started_at for one in slices]
    return TaskSpeedup(
        subject=subject,
        min_num_draft_tokens=min(lengths),
        max_num_draft_tokens=max(lengths),
        mean_running=sum(one.sum_running for one in treated) / num_rounds,
        mean_context=sum(one.sum_context for one in treated) / num_rounds,
        num_tokens=sum(one.num_tokens + one.num_prompt_tokens for one in treated),
        sequence_s=_sequence_s(treated),
        num_blocks=found.num_blocks,
        num_control_rounds=found.num_control_rounds,
        control_share=1 - _sequence_s(treated) / whole_s if (whole_s := _sequence_s(slices)) else 0.0,
        speedup=found.speedup,
        verdict=found.verdict,
        covers_from=min(begins),
        covers_to=max(begins),
        computed_at=computed_at,
    )


def _sequence_s(slices: Iterable[Slice]) -> float:
    return sum(one.sequence_s + one.prompt_sequence_s for one in slices)


def shown_of(speedups: Iterable[TaskSpeedup]) -> TaskSpeedup | None:
    """Of one task's subjects the one that is shown: where most of its text was speculated. None without any.

    The view task_speedup_now chooses by the same rule.
    """
    return min(speedups, key=lambda one: (-one.num_tokens, one.subject), default=None)
