"""The drift test: a sequential test for a change of acceptance, with a given rate of false alarms.

Each job contributes one residual: accepted tokens less those that the reference expects, Σ_i (a_i - α_i · n_i), over
position 1 alone or over all positions. Expectations by position make the residual independent of k. Standardised
residuals feed a two-sided CUSUM (Page 1954):

    S⁺ = max(0, S⁺ + z - κ)      S⁻ = max(0, S⁻ - z - κ)      alarm when either reaches h

* The unit of variance is the job, because trials inside a job are correlated: the variance is that of the residuals of
  the reference jobs, by k. It is proportional to the tokens of the job, not to its trials, because the number of rounds
  depends on what was accepted, so dividing by trials would bias the mean.
* The reference is every job before this one (self-starting, Hawkins 1987). z includes the error of the reference, so a
  small reference does not raise the number of false alarms.
* h comes from the average run length wanted, by Siegmund's approximation (1985, §II.6) for normal z:
  ARL = (exp(2κb) - 2κb - 1) / (2κ²) with b = h + 1.166 for one side, and half of that for two.
* In alarm the reference stays what it was when the change began (the last time S was zero: Page's estimate of the
  change point), and S is held at h. The alarm ends when S is back at zero: two thresholds, so it does not flap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from alphaloop.measurements import DecodedJob

ALLOWANCE: Final = 0.5  # κ: quickest for a shift of one standard deviation of a job
WINSOR: Final = 3.0  # residuals of short jobs are skewed; one job alone cannot raise an alarm
PRIOR_VARIANCE: Final = 0.1  # accepted tokens squared, a token: about that of independent trials at α = .7
SHRINKAGE: Final = 2  # weight, in jobs, of the variance over all k beside that of the job's k
OVERSHOOT: Final = 1.166  # Siegmund's correction for jumps over the boundary: 2 · 0.583


@dataclass(frozen=True, slots=True)
class Drift:
    """The result of the test of a stream. Counts are summed over the positions tested."""

    is_alarm: bool
    direction: int  #: -1 fell, +1 rose, 0 no alarm
    statistic: float  #: the larger of S⁺ and S⁻, at most the threshold
    threshold: float
    num_jobs: int  #: jobs with a trial
    num_jobs_since_change: int  #: jobs after the estimated change point; 0 without an alarm
    trials_before: int
    accepts_before: int
    trials_after: int
    accepts_after: int
    num_alarms: int  #: times the threshold was crossed over the whole stream

    @property
    def alpha_before(self) -> float | None:
        """Acceptance of the reference."""
        return self.accepts_before / self.trials_before if self.trials_before else None

    @property
    def alpha_after(self) -> float | None:
        """Acceptance since the change; None without an alarm."""
        return self.accepts_after / self.trials_after if self.trials_after else None


@dataclass(slots=True)
class _Reference:
    """Running sums over the reference jobs: counts by position, tokens, and squared residuals a token."""

    num_jobs: int
    num_tokens: int
    trials: list[int]
    accepts: list[int]
    residuals_sq: dict[int, float]  #: by k: longer drafts put more tested tokens into a text, and more variance
    num_residuals: dict[int, int]

    def copy(self) -> _Reference:
        return replace(
            self,
            trials=list(self.trials),
            accepts=list(self.accepts),
            residuals_sq=dict(self.residuals_sq),
            num_residuals=dict(self.num_residuals),
        )

    def residual(self, job: DecodedJob, num_positions: int) -> float:
        """Σ (a - α n) a root of a token, over the positions that the reference knows; 0 where it knows none."""
        residual = sum(
            job.accepts[i] - job.trials[i] * self.accepts[i] / self.trials[i]
            for i in range(min(num_positions, len(job.trials)))
            if self.trials[i]
        )
        # (1 + T / ΣT) is the error of the reference itself (recursive residuals: Brown, Durbin and Evans 1975).
        return residual / math.sqrt(job.num_tokens * (1 + job.num_tokens / max(self.num_tokens, 1)))

    def standardised(self, job: DecodedJob, num_positions: int) -> float:
        """The residual in standard deviations; a prior of one residual avoids a division by 0."""
        overall = (sum(self.residuals_sq.values()) + PRIOR_VARIANCE) / (sum(self.num_residuals.values()) + 1)
        k = job.num_draft_tokens
        own, num_own = self.residuals_sq.get(k, 0.0), self.num_residuals.get(k, 0)
        variance = (own + SHRINKAGE * overall) / (num_own + SHRINKAGE)
        return self.residual(job, num_positions) / math.sqrt(variance)

    def add(self, job: DecodedJob, num_positions: int) -> None:
        if self.num_jobs:
            k = job.num_draft_tokens
            self.residuals_sq[k] = self.residuals_sq.get(k, 0.0) + self.residual(job, num_positions) ** 2
            self.num_residuals[k] = self.num_residuals.get(k, 0) + 1
        self.num_jobs += 1
        self.num_tokens += job.num_tokens
        for i in range(min(num_positions, len(job.trials))):
            self.trials[i] += job.trials[i]
            self.accepts[i] += job.accepts[i]


def average_run_length(threshold: float, allowance: float = ALLOWANCE) -> float:
    """Jobs between two false alarms of the two-sided test at `threshold`: Siegmund 1985."""
    exponent = 2 * allowance * (threshold + OVERSHOOT)
    return (math.exp(exponent) - exponent - 1) / (2 * allowance**2) / 2


def cusum_threshold(false_alarm_jobs: float, allowance: float = ALLOWANCE) -> float:
    """The threshold whose average run length is `false_alarm_jobs`, by bisection; at least 1."""
    low, high = 1.0, 60.0
    if average_run_length(low, allowance) >= false_alarm_jobs:
        return low
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if average_run_length(middle, allowance) < false_alarm_jobs else (low, middle)
    return high


def watch(
    jobs: Sequence[DecodedJob],
    *,
    false_alarm_jobs: float,
    min_jobs: int,
    num_positions: int = 1,
    allowance: float = ALLOWANCE,
) -> Drift | None:
    """Test a stream, oldest job first; None while fewer than `min_jobs` + 1 jobs were tested at all.

    The first `min_jobs` jobs only build the reference.
    """
    tested = [job for job in jobs if any(job.trials[:num_positions])]
    if len(tested) <= min_jobs:
        return None
    threshold = cusum_threshold(false_alarm_jobs, allowance)
    width = max(len(job.trials) for job in tested)
    reference = _Reference(0, 0, [0] * width, [0] * width, {}, {})
    for job in tested[:min_jobs]:
        reference.add(job, num_positions)
    # By direction, fallen then risen: the sum, where it last was zero, and the reference of that time.
    sums, since = [0.0, 0.0], [min_jobs, min_jobs]
    kept = [reference.copy(), reference.copy()]
    alarm: int | None = None
    num_alarms = 0
    for index, job in enumerate(tested[min_jobs:], start=min_jobs):
        z = max(-WINSOR, min(WINSOR, reference.standardised(job, num_positions)))
        if alarm is None:
            reference.add(job, num_positions)
        for side, towards in ((0, -z), (1, z)):
            if alarm in (None, side):
                sums[side] = min(threshold, max(0.0, sums[side] + towards - allowance))
                if not sums[side]:
                    since[side] = index + 1
                    alarm = None
                    kept[side] = reference.copy()
        if alarm is None and max(sums) >= threshold:
            alarm = sums.index(max(sums))
            num_alarms += 1
            reference = kept[alarm]
            sums[1 - alarm] = 0.0
    start = since[alarm] if alarm is not None else len(tested)
    after = tested[start:]
    return Drift(
        is_alarm=alarm is not None,
        direction=0 if alarm is None else (-1, 1)[alarm],
        statistic=max(sums),
        threshold=threshold,
        num_jobs=len(tested),
        num_jobs_since_change=len(after),
        trials_before=sum(reference.trials),
        accepts_before=sum(reference.accepts),
        trials_after=sum(sum(job.trials[:num_positions]) for job in after),
        accepts_after=sum(sum(job.accepts[:num_positions]) for job in after),
        num_alarms=num_alarms,
    )
