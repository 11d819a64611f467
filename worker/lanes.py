"""Lanes: the jobs of one task with alike settings. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

from alphaloop.messages import Job, Purpose
from worker.engine import Sampling

_MEASURED: Final = frozenset({Purpose.PROBE.value, Purpose.CONTROL.value})


class LaneKey(NamedTuple):
    """What the jobs of a lane have in common: they get the same decision. A tuple, because lanes are compared often."""

    task: str
    sampling_bucket: str
    decoding: str
    purpose: str
    probe_drafter: str
    probe_num_draft_tokens: int
    switched_off: str = ""  #: the operator's pattern that covers the prompts; empty if none does

    @property
    def is_measured(self) -> bool:
        """Whether the jobs are probes or controls, which run alone."""
        return self.purpose in _MEASURED


def lane_of(job: Job, sampling: Sampling, switched_off: str = "") -> LaneKey:
    """The lane of a job.

    Args:
        job: the job as its producer sent it.
        sampling: its sampling settings with every default filled in.
        switched_off: the prompt pattern that covers the prompt, if one does.
    """
    return LaneKey(
        job.task,
        sampling.bucket,
        job.decoding.value,
        job.purpose.value,
        job.probe_drafter or "",
        job.probe_num_draft_tokens or 0,
        switched_off,
    )
