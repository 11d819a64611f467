"""A run of the test over all streams: read what is new, add it to the memories, store them, give the verdicts."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Final

from alphaloop.measurements import AcceptedLevel, DriftSubject, Stream, WatchedJob
from alphaloop.settings import SchedulerSettings
from alphaloop.store.drift import DriftMemoryStore, Position, StoredMemory
from scheduler.counts import subject_of
from scheduler.drift.memory import VERSION
from scheduler.drift.segmented import Rates, SegmentedStream
from scheduler.verdicts import State, TrafficVerdict

log = logging.getLogger(__name__)

MONTH: Final = timedelta(days=30)
PAGE_JOBS: Final = 5_000  # read at once: some 5 MB
MOST_JOBS: Final = 100_000  # of a task in one run; the next run goes on from there
LEAST_RUN_LENGTH: Final = 1_000.0  # jobs: a stated rate is not used up where there are hardly any jobs


def watch_traffic(
    store: DriftMemoryStore,
    settings: SchedulerSettings,
    now: datetime,
    accepted: Mapping[tuple[str, str], AcceptedLevel] | None = None,
) -> list[TrafficVerdict]:
    """The verdicts about the traffic decoded until `now`: of each subject, and of each of its segments.

    Where a level was accepted (by task and drafter), streams are learned anew from the jobs decoded after that.

    Reads only jobs that no earlier run has read. The jobs and their place are stored in one transaction, so a run that
    ends in between is repeated exactly by the next one. Raises StoreError.
    """
    until = now - timedelta(seconds=settings.drift_settle_s)
    oldest = now - timedelta(days=settings.drift_window_days)
    false_alarm_jobs = run_length(store.jobs_a_month(now, MONTH), settings.drift_false_alarms_per_month)
    rates = Rates.of(false_alarm_jobs, settings.drift_reference_jobs, settings.alpha_margin)
    store.forget(oldest)
    found: list[TrafficVerdict] = []
    for task in store.tasks(oldest, until):
        norms = {drafter: level.at for (name, drafter), level in (accepted or {}).items() if name == task}
        found += _of_current(_follow(store, task, oldest, until, rates, norms), settings.alpha_margin)
    return sorted(found, key=lambda verdict: (verdict.subject, verdict.segment))


def run_length(jobs_a_month: float, false_alarms_per_month: float) -> float:
    """Jobs between two false alarms. Every job of every stream has the same share of the month's false alarms."""
    return max(LEAST_RUN_LENGTH, jobs_a_month / false_alarms_per_month)


def _follow(
    store: DriftMemoryStore,
    task: str,
    oldest: datetime,
    until: datetime,
    rates: Rates,
    norms: Mapping[str, datetime],
) -> dict[Stream, tuple[SegmentedStream, datetime]]:
    """Every stream of a task after its new jobs, with the time of its last job.

    `norms` says by drafter when its level was accepted: what was learned of jobs until then is forgotten.
    """
    stored = store.load(task)
    outdated = {stream for stream, its in stored.memories.items() if its.norm_since != norms.get(stream.drafter)}
    streams = {
        stream: (SegmentedStream() if stream in outdated else _restored(stream, memory), memory.last_decoded_at)
        for stream, memory in stored.memories.items()
    }
    position = stored.position or Position(oldest, 0)
    num_read = 0
    while num_read < MOST_JOBS and (jobs := store.page(task, position, until, PAGE_JOBS)):
        for stream, its in _by_stream(jobs).items():
            watched = streams[stream][0] if stream in streams else SegmentedStream()
            norm_since = norms.get(stream.drafter)
            watched.add([job for job in its if norm_since is None or job.decoded_at > norm_since], rates)
            streams[stream] = watched, its[-1].decoded_at
        position = Position(jobs[-1].decoded_at, jobs[-1].ledger_id)
        num_read += len(jobs)
    if num_read or outdated:
        memories = {
            s: StoredMemory(VERSION, watched.document(), at, norms.get(s.drafter))
            for s, (watched, at) in streams.items()
        }
        store.save(task, stored.position, position, memories)
    return streams


def _restored(stream: Stream, stored: StoredMemory) -> SegmentedStream:
    """A memory of another version cannot be read: the stream is learned anew."""
    if stored.version == VERSION:
        return SegmentedStream.of(stored.document)
    log.warning(
        "the drift test of task %s, drafter %s begins anew: its memory has version %d, this release has %d",
        stream.task, stream.drafter, stored.version, VERSION,
    )  # fmt: skip
    return SegmentedStream()


def _by_stream(jobs: Iterable[WatchedJob]) -> dict[Stream, list[WatchedJob]]:
    found: dict[Stream, list[WatchedJob]] = {}
    for job in jobs:
        found.setdefault(job.stream, []).append(job)
    return found


def _of_current(streams: dict[Stream, tuple[SegmentedStream, datetime]], margin: float) -> list[TrafficVerdict]:
    """The verdicts of the revisions that decoded last, by drafter; of a subject's streams those of the clearest."""
    newest: dict[str, tuple[datetime, DriftSubject]] = {}
    for stream, (_, at) in streams.items():
        newest[stream.drafter] = max(newest.get(stream.drafter, (at, subject_of(stream))), (at, subject_of(stream)))
    clearest: dict[DriftSubject, tuple[tuple[bool, bool, int], list[TrafficVerdict]]] = {}
    for stream, (watched, _) in streams.items():
        subject = subject_of(stream)
        if newest[stream.drafter][1] != subject:
            continue
        its = watched.verdicts(subject, margin)
        has_moved = any(verdict.state in (State.FELL, State.ROSE) for verdict in its)
        rank = (has_moved, its[0].state is State.STEADY, watched.num_jobs)
        if subject not in clearest or rank > clearest[subject][0]:
            clearest[subject] = rank, its
    return [verdict for _, its in clearest.values() for verdict in its]
