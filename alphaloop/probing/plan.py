"""What a run sends of the measurements that are due. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from alphaloop.probing.due import Due
from alphaloop.probing.method import num_decoded

#: What scoring a text takes of what decoding it takes: a draft of 24 of the target's 30 layers (docs/guides/probes.md).
SCORE_SHARE: Final = 0.12
PRIOR_JOB_DEVICE_S: Final = 5.0  #: for a task without timings: 48 tokens at 10 a second


@dataclass(frozen=True, slots=True)
class Measurement:
    """Probes of a due (task, drafter): sent whole in this run, or not at all."""

    due: Due
    num_prompts: int
    num_decoded: int  #: of them decoded with the drafter; it is scored on the others
    device_s: float  #: what it is expected to take; of a task's measurements the first one sent pays for the controls
    is_sent: bool


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """The measurements that are due, the most urgent first."""

    measurements: tuple[Measurement, ...] = ()
    budget_device_s: float = 0.0
    num_probe_sets: int = 0

    @property
    def chosen(self) -> tuple[Due, ...]:
        """Those that are sent."""
        return tuple(one.due for one in self.measurements if one.is_sent)

    @property
    def waiting(self) -> tuple[Measurement, ...]:
        """Those that the budget holds back."""
        return tuple(one for one in self.measurements if not one.is_sent)


def make_plan(
    due: Sequence[Due],
    job_device_s: Mapping[str, float],
    num_prompts: Mapping[str, int],
    budget_device_s: float,
    decoded_share: float,
) -> ProbePlan:
    """Choose in order; what does not fit the rest of the budget is left out, and smaller ones behind it may fit.

    `job_device_s` is what a probe of a task took on average, `num_prompts` how many are sent. Each task pays for its
    controls once. Of a drafter that is scored, `decoded_share` of the prompts are decoded.
    """
    measurements: list[Measurement] = []
    left = budget_device_s
    with_controls: set[str] = set()
    for one in due:
        per_job = job_device_s.get(one.task, PRIOR_JOB_DEVICE_S)
        prompts = num_prompts[one.task]
        decoded = num_decoded(one, prompts, decoded_share)
        controls = 0 if one.task in with_controls else prompts
        cost = per_job * (controls + decoded + SCORE_SHARE * (prompts - decoded))
        fits = cost <= left
        if fits:
            left -= cost
            with_controls.add(one.task)
        measurements.append(Measurement(one, prompts, decoded, cost, fits))
    return ProbePlan(tuple(measurements), budget_device_s, len(num_prompts))
