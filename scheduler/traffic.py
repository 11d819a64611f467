"""Verdicts about traffic from the sequential test of every stream in use."""

from __future__ import annotations

from collections.abc import Sequence

from alphaloop.measurements import DecodedJob, DriftSubject
from alphaloop.settings import SchedulerSettings
from scheduler.counts import Counts, subject_of
from scheduler.drift import Drift, watch
from scheduler.paired import PromptPair, alpha_change
from scheduler.verdicts import State, TrafficVerdict


def watch_traffic(counts: Counts, settings: SchedulerSettings) -> list[TrafficVerdict]:
    """A verdict for each subject in use that has enough jobs: that of the stream with the clearest sign.

    Position 1 and all positions are tested side by side, each at twice the run length, so that both together keep
    the stated one.
    """
    found: dict[DriftSubject, tuple[Drift, Sequence[DecodedJob]]] = {}
    for stream, jobs in counts.current_streams().items():
        width = max((len(job.trials) for job in jobs), default=0)
        for num_positions in (1, width) if width > 1 else (1,):
            drift = watch(
                jobs,
                false_alarm_jobs=settings.drift_false_alarm_jobs * (2 if width > 1 else 1),
                min_jobs=settings.drift_min_jobs,
                num_positions=num_positions,
            )
            subject = subject_of(stream)
            if drift is not None and (subject not in found or _clearness(drift) > _clearness(found[subject][0])):
                found[subject] = drift, jobs
    return [_verdict(subject, drift, jobs) for subject, (drift, jobs) in sorted(found.items())]


def _clearness(drift: Drift) -> tuple[bool, float]:
    return drift.is_alarm, drift.statistic / drift.threshold


def _verdict(subject: DriftSubject, drift: Drift, jobs: Sequence[DecodedJob]) -> TrafficVerdict:
    tested = [job for job in jobs if any(job.trials[:1])]
    cut = len(tested) - drift.num_jobs_since_change
    before, after = tested[:cut], tested[cut:]
    moved = State.FELL if drift.direction < 0 else State.ROSE
    pairs = [PromptPair(job.trials[0], job.accepts[0], 0, 0) for job in before]
    pairs += [PromptPair(0, 0, job.trials[0], job.accepts[0]) for job in after]
    return TrafficVerdict(
        subject=subject,
        segment="",
        state=moved if drift.is_alarm else State.STEADY,
        change=alpha_change(pairs),
        changed_after=before[-1].decoded_at if drift.is_alarm else None,
        changed_before=after[0].decoded_at if drift.is_alarm else None,
        num_jobs_before=len(before),
        num_jobs_after=len(after),
        trials_before=sum(job.trials[0] for job in before),
        accepts_before=sum(job.accepts[0] for job in before),
        trials_after=sum(job.trials[0] for job in after),
        accepts_after=sum(job.accepts[0] for job in after),
    )
