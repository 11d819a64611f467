"""Estimates for the report: α_1 and α with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from alphaloop.acceptance import Interval
from alphaloop.clustered_share import consecutive_runs, share_interval
from alphaloop.measurements import DecodedJob, ProbeResult


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance of a set of jobs; None where nothing was tested."""

    num_jobs: int
    alpha_1: Interval | None
    alpha: Interval | None


@dataclass(frozen=True, slots=True)
class AlphaAt:
    """α of one stretch of time."""

    start: datetime
    num_jobs: int
    alpha: Interval


def acceptance(jobs: Sequence[DecodedJob] | Sequence[ProbeResult]) -> Acceptance:
    """Pooled over `jobs`, which are in the order of their decoding; runs of consecutive jobs are the clusters."""
    return Acceptance(
        num_jobs=len(jobs),
        alpha_1=share_interval(consecutive_runs([(job.accepts[0], job.trials[0]) for job in jobs if job.trials])),
        alpha=share_interval(consecutive_runs([(sum(job.accepts), sum(job.trials)) for job in jobs])),
    )


def alpha_over_time(jobs: Sequence[DecodedJob], step: timedelta) -> list[AlphaAt]:
    """α of position 1 by stretches of `step`, oldest first; stretches without a trial are left out."""
    by_start: dict[int, list[DecodedJob]] = {}
    for job in jobs:
        by_start.setdefault(int(job.decoded_at.timestamp() // step.total_seconds()), []).append(job)
    found = []
    for index, group in sorted(by_start.items()):
        alpha = acceptance(group).alpha_1
        if alpha is not None:
            start = datetime.fromtimestamp(index * step.total_seconds(), UTC)
            found.append(AlphaAt(start, len(group), alpha))
    return found
