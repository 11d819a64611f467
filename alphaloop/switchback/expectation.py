"""Expected beside measured: the speed-up that decisions promised for rounds, and the one that these rounds showed.

The measured speed-up is a mean of speed-ups over the seconds times sequences of the treatment (speedup.py). So the
expectation of a window of time is the mean of its decisions' expectations with the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NamedTuple

from alphaloop.acceptance import Z95, Interval
from alphaloop.switchback.slices import Phase, Slice
from alphaloop.switchback.speedup import LEAST_BLOCKS, measured_speedup
from alphaloop.switchback.strata import compared_blocks
from alphaloop.switchback.task_speedup import Subject

#: Of a window's treatment, sequences with an expectation for their drafter must have taken at least this share.
_LEAST_EXPECTED: Final = 0.5


class Expected(NamedTuple):
    """The speed-up over vanilla that a decision expects of its setting."""

    speedup: float  #: as it was shown and decided on
    low: float  #: lower 95 % bound
    high: float
    uncorrected: float  #: before earlier measurements corrected it
    model_sd: float  #: standard deviation of ln(uncorrected), from acceptance and costs


@dataclass(frozen=True, slots=True)
class ExpectationPair:
    """What was expected of a subject over a window of time, and what was measured over the same rounds."""

    subject: Subject
    expected: Interval  #: as it was shown
    uncorrected: float
    model_sd: float
    measured: Interval
    num_blocks: int
    min_num_draft_tokens: int
    max_num_draft_tokens: int
    mean_running: float
    covers_from: datetime
    covers_to: datetime  #: when the last slice began
    computed_at: datetime

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
        """Of `log_error`, as the expectation and the measurement state it themselves."""
        measured_sd = math.log(self.measured.high / self.measured.low) / (2 * Z95)
        return self.model_sd**2 + measured_sd**2


def mean_expected(found: Iterable[Expected]) -> Expected | None:
    """Of sequences that run together; None without any."""
    columns = list(zip(*found, strict=True))
    return Expected(*(sum(values) / len(values) for values in columns)) if columns else None


def expectation_pair(subject: Subject, slices: Sequence[Slice], now: datetime) -> ExpectationPair | None:
    """The pair of all slices of a subject in a window of time.

    None before there are `LEAST_BLOCKS` blocks, and where decisions expected nothing of this drafter.
    """
    treated = [one for one in slices if one.phase is not Phase.CONTROL]
    expected_s = sum(one.expected_sequence_s for one in treated)
    spent_s = sum(one.sequence_s + one.prompt_sequence_s for one in treated)
    if expected_s <= 0 or expected_s < _LEAST_EXPECTED * spent_s or len(compared_blocks(slices)) < LEAST_BLOCKS:
        return None
    found = measured_speedup(slices)
    if found.speedup is None or not math.isfinite(found.speedup.high):
        return None
    mean, low, high, uncorrected, model_sd = (
        sum(values) / expected_s
        for values in zip(
            *(
                (
                    one.expected_vanilla_s,
                    one.expected_low_s,
                    one.expected_high_s,
                    one.uncorrected_vanilla_s,
                    one.model_sd_s,
                )
                for one in treated
            ),
            strict=True,
        )
    )
    num_rounds = sum(one.num_rounds + one.num_prompt_rounds for one in treated)
    lengths = [one.treatment.num_draft_tokens for one in treated]
    return ExpectationPair(
        subject=subject,
        expected=Interval(mean, low, high),
        uncorrected=uncorrected,
        model_sd=model_sd,
        measured=found.speedup,
        num_blocks=found.num_blocks,
        min_num_draft_tokens=min(lengths),
        max_num_draft_tokens=max(lengths),
        mean_running=sum(one.sum_running for one in treated) / num_rounds,
        covers_from=min(one.started_at for one in slices),
        covers_to=max(one.started_at for one in slices),
        computed_at=now,
    )
