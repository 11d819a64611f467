"""Estimates for the report: α_1 and α with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from alphaloop.acceptance import Interval, design_effect, wilson
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
    """Pooled over `jobs`; intervals are Wilson's, widened by the design effect of jobs as clusters."""
    return Acceptance(
        num_jobs=len(jobs),
        alpha_1=_interval([(job.trials[0], job.accepts[0]) for job in jobs if job.trials]),
        alpha=_interval([(sum(job.trials), sum(job.accepts)) for job in jobs]),
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


def _interval(counts: Sequence[tuple[int, int]]) -> Interval | None:
    counts = [(n, a) for n, a in counts if n]
    trials, accepts = sum(n for n, _ in counts), sum(a for _, a in counts)
    if not trials:
        return None
    effect = design_effect(
        len(counts),
        accepts,
        trials,
        sum(a * a for _, a in counts),
        sum(n * n for n, _ in counts),
        sum(a * n for n, a in counts),
    )
    return wilson(accepts, trials, effect)
