"""α_1 of tasks over time, of traffic and of probes, and when the revisions behind it changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from itertools import chain, groupby
from typing import Final

from alphaloop.measurements import DecodedJob, ProbeResult
from scheduler.counts import Counts
from scheduler.estimates import acceptance, alpha_over_time
from scheduler.probe_history import Setup, differences
from scheduler.report.data_over_time import HistoryPoint, RevisionMark, TaskHistory
from scheduler.report.part import Estimate

STEPS: Final = tuple(timedelta(minutes=m) for m in (1, 5, 15, 60, 360, 1440))
MAX_POINTS: Final = 24


def task_history(counts: Counts, task: str, drafter: str) -> TaskHistory | None:
    """The history of a task with a drafter, under every revision; None where nothing was tested."""
    streams = {s: jobs for s, jobs in counts.streams.items() if (s.task, s.drafter) == (task, drafter)}
    jobs = sorted(chain.from_iterable(streams.values()), key=lambda job: job.decoded_at)
    probes = sorted(
        (p for p in counts.probes if (p.task, p.drafter) == (task, drafter) and p.scheduled_for >= counts.since),
        key=lambda probe: probe.scheduled_for,
    )
    step = _step(jobs)
    traffic = tuple(
        HistoryPoint(start=p.start, num_jobs=p.num_jobs, alpha_1=Estimate.of(p.alpha))
        for p in alpha_over_time(jobs, step)
    )
    probed = tuple(_probe_points(probes))
    if not traffic and not probed:
        return None
    seen = [(jobs[0].decoded_at, Setup(s.target_revision, s.draft_revision, s.engine)) for s, jobs in streams.items()]
    seen += [(p.scheduled_for, Setup(p.target_revision, p.draft_revision, p.engine)) for p in probes]
    return TaskHistory(
        drafter=drafter,
        step_s=step.total_seconds(),
        traffic=traffic,
        probes=probed,
        revisions=tuple(_marks(seen)),
    )


def _step(jobs: Sequence[DecodedJob]) -> timedelta:
    span = jobs[-1].decoded_at - jobs[0].decoded_at if jobs else timedelta()
    return next((step for step in STEPS if span / step <= MAX_POINTS), STEPS[-1])


def _probe_points(probes: Sequence[ProbeResult]) -> Iterable[HistoryPoint]:
    """A point for every run whose probes were decoded."""
    for scheduled_for, group in groupby(probes, key=lambda probe: probe.scheduled_for):
        results = list(group)
        found = acceptance(results).alpha_1
        if found is not None:
            yield HistoryPoint(start=scheduled_for, num_jobs=len(results), alpha_1=Estimate.of(found))


def _marks(seen: Iterable[tuple[datetime, Setup]]) -> Iterable[RevisionMark]:
    """When each setup was seen first, and how it differs from the one that was new before it."""
    known: list[Setup] = []
    for at, setup in sorted(seen, key=lambda one: one[0]):
        if setup in known:
            continue
        if known:
            yield RevisionMark(at=at, changed=differences(known[-1], setup))
        known.append(setup)
