"""The drift test of traffic: sequential, two-sided, with a memory that is stored between two runs.

`watch_traffic` is a run over all streams: it reads what is new, adds it to the memories, stores them, gives the
verdicts. A verdict knows four states. "Steady" is a finding: the interval of the change lies within a margin
(equivalence). "No change was found" is not enough for it.

A stream whose jobs come from several segments has one test of all of them, and one of each. A mean over segments can
stay while every segment moves (Simpson 1951), and a small segment moves the mean too little to be seen. So each segment
has windows and a reference of its own, from the moment on at which the stream has two. Every job is then in two tests.
Each of them gets half of the job's share of false alarms, so that the stated rate holds for all tests together
(Bonferroni).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Final, Self, TypeVar

import numpy as np

from alphaloop.acceptance import Z95, Interval
from alphaloop.errors import StoreError
from alphaloop.measurements import AcceptedLevel, DriftSubject, Stream, WatchedJob
from alphaloop.probe_plan import WINDOW
from alphaloop.settings import SchedulerSettings
from alphaloop.store.drift import DriftMemoryStore, Position, StoredMemory
from scheduler.counts import subject_of
from scheduler.drift.memory import (
    ACCEPTS,
    ALPHA_MARGIN,
    CHANGED_AFTER,
    CHANGED_BEFORE,
    DIRECTION,
    JOBS,
    LEARNING,
    NUM_JOBS,
    PHASE,
    POSITIONS,
    RESIDUALS,
    ROWS,
    SCALES,
    SEGMENTS,
    SQUARES,
    TRIALS,
    VERSION,
    Floats,
    Jobs,
    JobTally,
    Memory,
    empty_memory,
    empty_tally,
    from_document,
    inflation,
    is_open,
    merge,
    reference_error,
    standard_error,
    to_document,
)
from scheduler.drift.phases import fold

log = logging.getLogger(__name__)
MONTH: Final = timedelta(days=30)
PAGE_JOBS: Final = 5_000  # read at once: some 5 MB
MOST_JOBS: Final = 100_000  # of a task in one run; the next run goes on from there
LEAST_RUN_LENGTH: Final = 1_000.0  # jobs: a stated rate is not used up where there are hardly any jobs
#: Segments with a test of their own; later ones are in the test of all. A memory takes some 26 kB as JSON.
MOST_SEGMENTS: Final = 8
LEAST_JOBS: Final = 8  # fewer later jobs give no interval
LEAST_OF_SEGMENT: Final = 3  # on either side: its variance is that of all segments
WITHOUT_SEGMENT: Final = "(none)"  #: how jobs without a segment are called beside those with one


class State(StrEnum):
    """What is known of a change of acceptance."""

    TOO_LITTLE = "too_little"  #: neither a change nor steadiness can be shown
    STEADY = "steady"  #: the interval of the change lies within the margin
    FELL = "fell"
    ROSE = "rose"


_MOVED: Final = (State.FELL, State.ROSE)


def state_of(change: Interval | None) -> State:
    """What an estimate of a change of α_1 shows."""
    if change is not None:
        if change.is_within(ALPHA_MARGIN):
            return State.STEADY
        if change.high < 0 and change.mean < -ALPHA_MARGIN:
            return State.FELL
        if change.low > 0 and change.mean > ALPHA_MARGIN:
            return State.ROSE
    return State.TOO_LITTLE


@dataclass(frozen=True, slots=True)
class TrafficVerdict:
    """What the jobs of a subject show. `segment` is empty for all of a task's segments together."""

    subject: DriftSubject
    segment: str
    state: State
    change: Interval | None  #: of α_1, estimated on jobs after the alarm; None without one
    changed_after: datetime | None  #: the change lies between these two moments; None without one
    changed_before: datetime | None
    num_jobs_before: int
    num_jobs_after: int
    trials_before: int
    accepts_before: int
    trials_after: int
    accepts_after: int


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
    oldest = now - WINDOW
    false_alarm_jobs = run_length(store.jobs_a_month(now, MONTH), settings.drift_false_alarms_per_month)
    store.forget(oldest)
    current: list[TrafficVerdict] = []
    for task in store.tasks(oldest, until):
        norms = {drafter: level.at for (name, drafter), level in (accepted or {}).items() if name == task}
        current += _of_current(_follow(store, task, oldest, until, false_alarm_jobs, norms))
    return sorted(current, key=lambda verdict: (verdict.subject, verdict.segment))


def run_length(jobs_a_month: float, false_alarms_per_month: float) -> float:
    """Jobs between two false alarms. Every job of every stream has the same share of the month's false alarms."""
    return max(LEAST_RUN_LENGTH, jobs_a_month / false_alarms_per_month)


def _follow(
    store: DriftMemoryStore,
    task: str,
    oldest: datetime,
    until: datetime,
    run_length: float,
    norms: Mapping[str, datetime],
) -> dict[Stream, tuple[SegmentedStream, datetime]]:
    """Every stream of a task after its new jobs, with the time of its last job.

    `norms` says by drafter when its level was accepted: what was learned of jobs until then is forgotten.
    """
    stored = store.load(task)
    outdated = {stream for stream, memory in stored.memories.items() if memory.norm_since != norms.get(stream.drafter)}
    streams = {
        stream: (SegmentedStream() if stream in outdated else _restored(stream, memory), memory.last_decoded_at)
        for stream, memory in stored.memories.items()
    }
    position = stored.position or Position(oldest, 0)
    num_read = 0
    while num_read < MOST_JOBS and (jobs := store.page(task, position, until, PAGE_JOBS)):
        by_stream: dict[Stream, list[WatchedJob]] = {}
        for job in jobs:
            by_stream.setdefault(job.stream, []).append(job)
        for stream, new in by_stream.items():
            watched = streams[stream][0] if stream in streams else SegmentedStream()
            norm_since = norms.get(stream.drafter)
            watched.add([job for job in new if norm_since is None or job.decoded_at > norm_since], run_length)
            streams[stream] = watched, new[-1].decoded_at
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


def _of_current(streams: dict[Stream, tuple[SegmentedStream, datetime]]) -> list[TrafficVerdict]:
    """The verdicts of the revisions that decoded last, by drafter; of a subject's streams those of the clearest."""
    seen = sorted((at, subject_of(stream)) for stream, (_, at) in streams.items())
    newest = {subject.drafter: subject for _, subject in seen}
    clearest: dict[DriftSubject, tuple[tuple[bool, bool, int], list[TrafficVerdict]]] = {}
    for stream, (watched, _) in streams.items():
        subject = subject_of(stream)
        if newest[stream.drafter] != subject:
            continue
        of_stream = watched.verdicts(subject)
        has_moved = any(verdict.state in _MOVED for verdict in of_stream)
        rank = (has_moved, of_stream[0].state is State.STEADY, watched.num_jobs)
        if subject not in clearest or rank > clearest[subject][0]:
            clearest[subject] = rank, of_stream
    return [verdict for _, of_stream in clearest.values() for verdict in of_stream]


# The memory of a stream

Name = TypeVar("Name", int, str)


@dataclass(slots=True)
class WatchedStream:
    """The memory of a stream and the names of its rows; later names share the last row."""

    memory: Memory = field(default_factory=empty_memory)
    draft_lengths: list[int] = field(default_factory=list)  #: k, by row
    segments: list[str] = field(default_factory=list)  #: by row; empty is the jobs without one

    def add(self, jobs: Sequence[WatchedJob], run_length: float) -> None:
        """Add jobs in the order in which they were decoded. In how many calls they come changes nothing."""
        fold(self.memory, run_length, self._page(jobs))

    def document(self) -> dict[str, Any]:
        """As JSON keeps it."""
        return {"draft_lengths": self.draft_lengths, "segments": self.segments, "memory": to_document(self.memory)}

    @classmethod
    def of(cls, document: Any) -> Self:
        """The inverse of `document`. Raises StoreError for anything else."""
        try:
            lengths, segments = document["draft_lengths"], document["segments"]
            stream = cls(from_document(document["memory"]), [int(k) for k in lengths], [str(name) for name in segments])
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"memory of a drift test: expected draft_lengths, segments and memory: {error}") from error
        if len(stream.draft_lengths) > ROWS or len(stream.segments) > SEGMENTS:
            raise StoreError(f"memory of a drift test: expected at most {ROWS} draft lengths and {SEGMENTS} segments")
        return stream

    def _page(self, jobs: Sequence[WatchedJob]) -> Jobs:
        trials, accepts = np.zeros((len(jobs), POSITIONS)), np.zeros((len(jobs), POSITIONS))
        for index, job in enumerate(jobs):
            width = min(len(job.trials), POSITIONS)
            trials[index, :width] = job.trials[:width]
            accepts[index, :width] = job.accepts[:width]
        return Jobs(
            rows=np.array([_row(self.draft_lengths, job.num_draft_tokens, ROWS) for job in jobs], dtype=np.int64),
            trials=trials,
            accepts=accepts,
            tokens=np.array([job.num_tokens for job in jobs], dtype=np.float64),
            at=np.array([job.decoded_at.timestamp() for job in jobs], dtype=np.float64),
            segments=np.array([_row(self.segments, job.segment, SEGMENTS) for job in jobs], dtype=np.int64),
        )


def _row(names: list[Name], name: Name, most: int) -> int:
    """The row of a name; a new name gets a new one while there are some."""
    if name in names:
        return names.index(name)
    if len(names) < most - 1:
        names.append(name)
        return len(names) - 1
    return most - 1


@dataclass(slots=True)
class SegmentedStream:
    """The memories of a stream."""

    whole: WatchedStream = field(default_factory=WatchedStream)
    parts: dict[str, WatchedStream] = field(default_factory=dict)  #: by segment; empty while there is only one

    @property
    def num_jobs(self) -> int:
        """Jobs that were added and tested a draft."""
        return int(self.whole.memory.clock[NUM_JOBS])

    def add(self, jobs: Sequence[WatchedJob], run_length: float) -> None:
        """Add jobs in the order in which they were decoded. In how many calls they come changes nothing."""
        num_alone = self._num_alone(jobs)
        self.whole.add(jobs[:num_alone], run_length)
        # Two tests share each of these jobs: both together raise as many false alarms as one.
        self.whole.add(jobs[num_alone:], 2 * run_length)
        by_segment: dict[str, list[WatchedJob]] = {}
        for job in jobs[num_alone:]:
            by_segment.setdefault(job.segment, []).append(job)
        for segment, part in by_segment.items():
            if segment in self.parts or len(self.parts) < MOST_SEGMENTS:
                self.parts.setdefault(segment, WatchedStream()).add(part, 2 * run_length)

    def verdicts(self, subject: DriftSubject) -> list[TrafficVerdict]:
        """The verdict of all segments together first; then of each, where there are two or more.

        A segment whose own test is in alarm has the verdict of that test, the others that of the alarm of all.
        """
        overall, *segments = verdicts(subject, self.whole)
        own = {name or WITHOUT_SEGMENT: verdicts(subject, part)[0] for name, part in self.parts.items()}
        by_segment = [overall]
        for verdict in segments:
            alone = own.get(verdict.segment)
            if alone is not None and alone.state in _MOVED:
                by_segment.append(replace(alone, segment=verdict.segment))
            elif {verdict.state, overall.state} == {State.FELL, State.ROSE}:
                # Alone, an interval of the alarm of all does not show that a segment moved against all.
                by_segment.append(replace(verdict, state=State.TOO_LITTLE, changed_after=None, changed_before=None))
            else:
                by_segment.append(verdict)
        return by_segment

    def document(self) -> dict[str, Any]:
        """As JSON keeps it."""
        return {**self.whole.document(), "parts": {name: part.document() for name, part in self.parts.items()}}

    @classmethod
    def of(cls, document: Any) -> Self:
        """The inverse of `document`. Raises StoreError for anything else."""
        whole = WatchedStream.of(document)
        return cls(whole, {name: WatchedStream.of(part) for name, part in document.get("parts", {}).items()})

    def _num_alone(self, jobs: Sequence[WatchedJob]) -> int:
        """How many of the first jobs come before the stream has two segments."""
        first = next(iter(self.whole.segments), jobs[0].segment if jobs else "")
        is_mixed = len(self.whole.segments) > 1
        return next((n for n, job in enumerate(jobs) if is_mixed or job.segment != first), len(jobs))


# What a memory says


def verdicts(subject: DriftSubject, stream: WatchedStream) -> list[TrafficVerdict]:
    """The verdict of all segments together first; then of each, where there are two or more.

    The change is estimated on jobs that were decoded after the alarm. Jobs that raised an alarm look worse than the
    change is, because the alarm chose them.
    """
    memory = stream.memory
    before, later = _sides(memory)
    overall = _overall(subject, memory, before, later)
    if len(stream.segments) < 2:
        return [overall]
    names = enumerate(name or WITHOUT_SEGMENT for name in stream.segments)
    return [overall, *(_segment(subject, name, memory, row, (before, later)) for row, name in names)]


def _sides(memory: Memory) -> tuple[JobTally, JobTally]:
    """What is compared: the jobs since the last alarm with the norm, or the last periods with the reference."""
    later = empty_tally()
    if is_open(memory):
        merge(later, memory.earlier)
        merge(later, memory.latest)
        return memory.norm, later
    if memory.clock[PHASE] == LEARNING:
        return memory.current, later
    merge(later, memory.pending)
    merge(later, memory.current)
    return memory.reference, later


def _overall(subject: DriftSubject, memory: Memory, before: JobTally, later: JobTally) -> TrafficVerdict:
    difference = None
    if later.first[JOBS] >= LEAST_JOBS:
        error = math.hypot(standard_error(memory, later), reference_error(memory, before, later))
        difference = _bounded(float(later.first[RESIDUALS] / later.first[TRIALS]), error)
    state = State.TOO_LITTLE
    if is_open(memory):
        state = State.FELL if memory.alarm[DIRECTION] < 0 else State.ROSE
    elif difference is not None and difference.is_within(ALPHA_MARGIN):
        state = State.STEADY
    counts = [[side.first[i] for i in (JOBS, TRIALS, ACCEPTS)] for side in (before, later)]
    return _verdict(subject, "", state, difference, memory, counts)


def _bounded(change: float, error: float) -> Interval:
    return Interval(change, change - Z95 * error, change + Z95 * error)


def _segment(
    subject: DriftSubject, name: str, memory: Memory, row: int, sides: tuple[JobTally, JobTally]
) -> TrafficVerdict:
    reference, later = sides
    before, after = reference.segments[row], later.segments[row]
    difference = None
    if min(before[0], after[0]) >= LEAST_OF_SEGMENT and later.first[JOBS] >= LEAST_JOBS and later.first[SQUARES]:
        difference = _bounded(
            float(after[2] / after[1] - before[2] / before[1]),
            math.hypot(*(_mean_error(memory, reference, later, side) for side in (after, before))),
        )
    state = state_of(difference)
    if state in _MOVED and not is_open(memory):
        state = State.TOO_LITTLE
    counts = [_counts(reference, before), _counts(reference, after)]
    return _verdict(subject, name, state, difference, memory, counts)


def _mean_error(memory: Memory, reference: JobTally, later: JobTally, segment: Floats) -> float:
    """Standard error of a segment's mean residual: a binomial variance, times the dispersion of all segments."""
    scale = min(SCALES - 1, int(math.log2(segment[0])))
    sum_of_squares = _dispersion(reference, later) * float(_binomial(reference, segment[None])[0])
    return math.sqrt(sum_of_squares * inflation(memory, scale)) / float(segment[1])


def _dispersion(reference: JobTally, later: JobTally) -> float:
    """How much more residuals vary inside segments than binomial counts do (quasi-likelihood, Wedderburn 1974).

    Inside: the squares without those of the segments' means, as in an analysis of variance.
    """
    segments = later.segments[later.segments[:, 1] > 0]
    num_jobs = float(later.first[JOBS])
    between = float((segments[:, 2] ** 2 / segments[:, 0]).sum())
    inside = max(float(later.first[SQUARES]) - between, 0.0) * num_jobs / max(num_jobs - len(segments), 1.0)
    return inside / float(_binomial(reference, segments).sum())


def _binomial(reference: JobTally, segments: Floats) -> Floats:
    """Trials · α · (1 - α) of each segment; no α is taken to be surer than .05 or .95."""
    alpha = np.clip(_level(reference) + segments[:, 2] / segments[:, 1], 0.05, 0.95)
    variance: Floats = segments[:, 1] * alpha * (1 - alpha)
    return variance


def _level(reference: JobTally) -> float:
    """Its α_1."""
    first = reference.first
    return float(first[ACCEPTS] / first[TRIALS]) if first[TRIALS] else 0.0


def _counts(reference: JobTally, segment: Floats) -> Sequence[float]:
    """Jobs, trials and accepts of a segment; the accepts follow from the residuals and the level of the reference."""
    return segment[0], segment[1], max(0.0, segment[2] + _level(reference) * segment[1])


def _verdict(
    subject: DriftSubject,
    segment: str,
    state: State,
    difference: Interval | None,
    memory: Memory,
    counts: Sequence[Sequence[float]],
) -> TrafficVerdict:
    (num_before, *before), (num_after, *after) = ([round(number) for number in side] for side in counts)
    ends = memory.alarm[[CHANGED_AFTER, CHANGED_BEFORE]]
    earliest, latest = (datetime.fromtimestamp(end, UTC) if state in _MOVED else None for end in ends)
    numbers = [num_before, num_after, *before, *after]
    return TrafficVerdict(subject, segment, state, difference, earliest, latest, *numbers)
