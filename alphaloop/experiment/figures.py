"""The figures of a subject, for screens: its measured speed-up, what decisions expected, and how often that held. Pure.

The measured speed-up is a mean of speed-ups over the seconds times sequences of the treatment (estimate.py). So the
expectation of a window of time is the mean of its decisions' expectations with the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from statistics import fmean, stdev
from typing import Final

from alphaloop.acceptance import Z95, Interval, t95
from alphaloop.experiment.estimate import Verdict, measured_speedup
from alphaloop.experiment.observe import Phase, Slice


@dataclass(frozen=True, slots=True, order=True)
class SpeedupSubject:
    """What is compared with itself: a drafter in a task, on one engine of one machine."""

    task: str
    sampling_bucket: str
    target_revision: str
    engine: str
    host: str
    device: str
    drafter: str
    draft_revision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OfSlices:
    """What speed-ups and pairs say of the slices that they come from."""

    subject: SpeedupSubject
    min_num_draft_tokens: int
    max_num_draft_tokens: int
    mean_running: float  #: sequences of all tasks a round
    num_blocks: int
    covers_from: datetime
    covers_to: datetime  #: when the last slice began
    computed_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpeedup(OfSlices):
    """How many times faster a subject's texts come than vanilla, with the draft lengths and the load it was seen at.

    With `against`, than with that drafter: the two are on trial beside each other.
    """

    mean_context: float  #: tokens of context a sequence
    num_tokens: int  #: of the treatment
    sequence_s: float  #: seconds times sequences of the treatment
    num_control_rounds: int
    control_share: float  #: of the seconds times sequences of all slices, those of control; washouts are in no slice
    speedup: Interval | None  #: None before there are eight blocks
    verdict: Verdict
    against: str = ""

    @property
    def drafter(self) -> str:
        """The drafter that was measured."""
        return self.subject.drafter

    @property
    def revisions(self) -> tuple[str, str]:
        """The revisions of target and draft."""
        return self.subject.target_revision, self.subject.draft_revision

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second of one running sequence, as it drafts; None without time."""
        return self.num_tokens / self.sequence_s if self.sequence_s > 0 else None

    @property
    def vanilla_tokens_per_s(self) -> float | None:
        """The same of vanilla rounds, by the measured speed-up; None before it was measured."""
        tokens_per_s = self.tokens_per_s
        return tokens_per_s / self.speedup.mean if tokens_per_s is not None and self.speedup is not None else None

    @property
    def saved_device_s(self) -> Interval | None:
        """Device seconds that speculation saved in these slices; below 0 they were lost. None without a verdict.

        The speculative rounds took their share of the device's time, seconds times sequences over the sequences of a
        round; vanilla they would have taken the speed-up times as long.
        """
        if self.speedup is None or self.verdict is Verdict.NO_VERDICT_YET:
            return None
        spent_s = self.sequence_s / self.mean_running
        return Interval(*(spent_s * (bound - 1) for bound in (self.speedup.mean, self.speedup.low, self.speedup.high)))


def over_vanilla(slices: Iterable[Slice]) -> list[Slice]:
    """Those without the blocks whose control slices draft."""
    return [part for part in slices if not part.against]


def over_rivals(slices: Sequence[Slice]) -> dict[str, list[Slice]]:
    """By drafter of a control slice, the blocks against it, and what the treatment did between blocks."""
    between = [part for part in slices if part.phase is Phase.BETWEEN]
    rivals = sorted({part.against for part in slices} - {""})
    whole = {rival: [*between, *(part for part in slices if part.against == rival)] for rival in rivals}
    return {rival: sorted(parts, key=lambda part: part.started_at) for rival, parts in whole.items()}


def task_speedup(
    subject: SpeedupSubject, slices: Sequence[Slice], computed_at: datetime, against: str = ""
) -> TaskSpeedup:
    """The figure of all slices of a subject in a window of time, of which at least one is of the treatment.

    Their control slices are vanilla, or those of the drafter `against`.
    """
    treated = [part for part in slices if part.phase is not Phase.CONTROL]
    num_rounds = sum(part.num_rounds + part.num_prompt_rounds for part in treated)
    lengths = [part.treatment.num_draft_tokens for part in treated]
    measured = measured_speedup(slices)
    begins = [part.started_at for part in slices]
    return TaskSpeedup(
        subject=subject,
        min_num_draft_tokens=min(lengths),
        max_num_draft_tokens=max(lengths),
        mean_running=sum(part.sum_running for part in treated) / num_rounds,
        mean_context=sum(part.sum_context for part in treated) / num_rounds,
        num_tokens=sum(part.num_tokens + part.num_prompt_tokens for part in treated),
        sequence_s=_sequence_s(treated),
        num_blocks=measured.num_blocks,
        num_control_rounds=measured.num_control_rounds,
        control_share=1 - _sequence_s(treated) / whole_s if (whole_s := _sequence_s(slices)) else 0.0,
        speedup=measured.speedup,
        verdict=measured.verdict,
        covers_from=min(begins),
        covers_to=max(begins),
        computed_at=computed_at,
        against=against,
    )


def _sequence_s(slices: Iterable[Slice]) -> float:
    return sum(part.sequence_s + part.prompt_sequence_s for part in slices)


def shown_of(speedups: Iterable[TaskSpeedup]) -> TaskSpeedup | None:
    """The subject of a task that is shown: where most of its text was speculated. None without any.

    The view task_speedup_now chooses by the same rule.
    """
    return min(speedups, key=lambda speedup: (-speedup.num_tokens, speedup.subject), default=None)


#: Least share of a window's treatment that sequences with an expectation for their drafter took.
_LEAST_EXPECTED: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectationPair(OfSlices):
    """What was expected of a subject over a window of time, and what was measured over the same rounds."""

    expected: Interval  #: as it was shown
    uncorrected: float
    model_sd: float
    measured: Interval

    @property
    def is_held(self) -> bool:
        """Whether the shown interval holds the measured speed-up."""
        return self.expected.low <= self.measured.mean <= self.expected.high

    @property
    def log_ratio(self) -> float:
        """ln(measured / expected), as it was shown."""
        return math.log(self.measured.mean / self.expected.mean)

    @property
    def log_error(self) -> float:
        """ln(measured / expected), without the correction: what a correction is learned from."""
        return math.log(self.measured.mean / self.uncorrected)

    @property
    def variance(self) -> float:
        """Variance of `log_error`, as the expectation and the measurement state it themselves."""
        measured_sd = math.log(self.measured.high / self.measured.low) / (2 * Z95)
        return self.model_sd**2 + measured_sd**2


def expectation_pair(subject: SpeedupSubject, slices: Sequence[Slice], now: datetime) -> ExpectationPair | None:
    """The pair of all slices of a subject in a window of time.

    None before a speed-up is measured, and where decisions expected nothing of this drafter.
    """
    treated = [part for part in slices if part.phase is not Phase.CONTROL]
    expected_s = sum(part.expected_sequence_s for part in treated)
    if expected_s <= 0 or expected_s < _LEAST_EXPECTED * _sequence_s(treated):
        return None
    measured = task_speedup(subject, slices, now)
    if measured.speedup is None or not math.isfinite(measured.speedup.high):
        return None
    mean, low, high, uncorrected, model_sd = (
        sum(getattr(part, name) for part in treated) / expected_s
        for name in ("expected_vanilla_s", "expected_low_s", "expected_high_s", "uncorrected_vanilla_s", "model_sd_s")
    )
    return ExpectationPair(
        expected=Interval(mean, low, high),
        uncorrected=uncorrected,
        model_sd=model_sd,
        measured=measured.speedup,
        **{field.name: getattr(measured, field.name) for field in fields(OfSlices)},
    )


@dataclass(frozen=True, slots=True)
class Reliability:
    """The pairs of one drafter in one task together, with the draft lengths and the load of their rounds."""

    task: str
    drafter: str
    num_pairs: int
    num_held: int  #: shown intervals that hold the measured speed-up; 95 % of them should
    ratio: float  #: measured over expected as shown, geometric mean
    ratio_bounds: tuple[float, float] | None  #: 95 %, pairs as the unit; None with one pair
    min_num_draft_tokens: int
    max_num_draft_tokens: int
    mean_running: float


def by_drafter(pairs: Iterable[ExpectationPair]) -> dict[tuple[str, str], list[ExpectationPair]]:
    """Pairs by task and drafter, in order of their names; pairs stay in their order."""
    of_drafters: dict[tuple[str, str], list[ExpectationPair]] = {}
    for pair in sorted(pairs, key=lambda pair: (pair.subject.task, pair.subject.drafter)):
        of_drafters.setdefault((pair.subject.task, pair.subject.drafter), []).append(pair)
    return of_drafters


def reliability(pairs: Sequence[ExpectationPair]) -> Reliability:
    """The reliability that pairs of one task and drafter show, at least one pair."""
    log_ratios = [pair.log_ratio for pair in pairs]
    mean, num = fmean(log_ratios), len(log_ratios)
    margin = t95(num - 1) * stdev(log_ratios) / math.sqrt(num) if num > 1 else None
    return Reliability(
        task=pairs[0].subject.task,
        drafter=pairs[0].subject.drafter,
        num_pairs=num,
        num_held=sum(pair.is_held for pair in pairs),
        ratio=math.exp(mean),
        ratio_bounds=None if margin is None else (math.exp(mean - margin), math.exp(mean + margin)),
        min_num_draft_tokens=min(pair.min_num_draft_tokens for pair in pairs),
        max_num_draft_tokens=max(pair.max_num_draft_tokens for pair in pairs),
        mean_running=fmean(pair.mean_running for pair in pairs),
    )
