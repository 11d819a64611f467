"""What a stream's memory says: too little, steady, fell or rose, for all segments together and for each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from alphaloop.acceptance import Z95, Interval
from alphaloop.measurements import DriftSubject
from scheduler.drift.memory import (
    ACCEPTS,
    ALARMED,
    CHANGED_AFTER,
    CHANGED_BEFORE,
    DIRECTION,
    JOBS,
    LEARNING,
    PHASE,
    RESIDUALS,
    SCALES,
    SQUARES,
    TRIALS,
    Floats,
    Memory,
    Tally,
    empty_tally,
)
from scheduler.drift.phases import inflation, reference_error, standard_error
from scheduler.drift.reference import merge
from scheduler.drift.stream import WatchedStream
from scheduler.verdicts import State, TrafficVerdict

LEAST_JOBS: Final = 8  # fewer later jobs give no interval
WITHOUT_SEGMENT: Final = "(none)"  #: how jobs without a segment are called beside those with one


@dataclass(frozen=True, slots=True)
class Difference:
    """The later jobs beside the reference, in α_1."""

    change: float
    error: float  #: standard error

    @property
    def interval(self) -> Interval:
        """With 95 % bounds."""
        return Interval(self.change, self.change - Z95 * self.error, self.change + Z95 * self.error)


def verdicts(subject: DriftSubject, stream: WatchedStream, margin: float) -> list[TrafficVerdict]:
    """Of all segments together first; then of each, where there are two or more.

    The change is estimated on jobs that were decoded after the alarm. Jobs that raised an alarm look worse than the
    change is, because the alarm chose them.
    """
    memory = stream.memory
    later = empty_tally()
    if memory.clock[PHASE] != LEARNING:
        merge(later, memory.pending)
        merge(later, memory.current)
    found = [_overall(subject, memory, later, margin)]
    if len(stream.segments) > 1:
        found += [
            _segment(subject, name or WITHOUT_SEGMENT, memory, later, row, margin)
            for row, name in enumerate(stream.segments)
        ]
    return found


def _overall(subject: DriftSubject, memory: Memory, later: Tally, margin: float) -> TrafficVerdict:
    difference = None
    if later.first[JOBS] >= LEAST_JOBS:
        error = math.hypot(standard_error(memory, later), reference_error(memory, later))
        difference = Difference(float(later.first[RESIDUALS] / later.first[TRIALS]), error)
    before = memory.reference.first if memory.clock[PHASE] != LEARNING else memory.current.first
    state = State.TOO_LITTLE
    if memory.clock[PHASE] == ALARMED:
        state = State.FELL if memory.alarm[DIRECTION] < 0 else State.ROSE
    elif difference is not None and difference.interval.is_within(margin):
        state = State.STEADY
    counts = _of_first(before), _of_first(later.first)
    return _verdict(subject, "", state, difference, memory, counts)


def _segment(subject: DriftSubject, name: str, memory: Memory, later: Tally, row: int, margin: float) -> TrafficVerdict:
    before, after = memory.reference.segments[row], later.segments[row]
    difference = None
    if min(before[0], after[0]) >= LEAST_JOBS and later.first[SQUARES]:
        difference = Difference(
            float(after[2] / after[1] - before[2] / before[1]),
            math.hypot(_mean_error(memory, later, after), _mean_error(memory, later, before)),
        )
    state = State.TOO_LITTLE
    if difference is not None:
        if difference.interval.is_within(margin):
            state = State.STEADY
        elif memory.clock[PHASE] == ALARMED and difference.interval.high < 0:
            state = State.FELL
        elif memory.clock[PHASE] == ALARMED and difference.interval.low > 0:
            state = State.ROSE
    return _verdict(subject, name, state, difference, memory, (_counts(memory, before), _counts(memory, after)))


def _mean_error(memory: Memory, later: Tally, segment: Floats) -> float:
    """Of a segment's mean residual, with the variance of all jobs."""
    scale = min(SCALES - 1, int(math.log2(segment[0])))
    job = later.first[SQUARES] / later.first[JOBS]
    return math.sqrt(segment[0] * job * inflation(memory, scale)) / float(segment[1])


def _of_first(first: Floats) -> Sequence[float]:
    return first[JOBS], first[TRIALS], first[ACCEPTS]


def _counts(memory: Memory, segment: Floats) -> Sequence[float]:
    """Jobs, trials and accepts of a segment; the accepts follow from the residuals and the level of the reference."""
    first = memory.reference.first
    level = first[ACCEPTS] / first[TRIALS] if first[TRIALS] else 0.0
    return segment[0], segment[1], max(0.0, segment[2] + level * segment[1])


def _verdict(
    subject: DriftSubject,
    segment: str,
    state: State,
    difference: Difference | None,
    memory: Memory,
    counts: tuple[Sequence[float], Sequence[float]],
) -> TrafficVerdict:
    moved = state in (State.FELL, State.ROSE)
    before, after = ([round(number) for number in side] for side in counts)
    return TrafficVerdict(
        subject=subject,
        segment=segment,
        state=state,
        change=difference.interval if difference is not None else None,
        changed_after=_moment(memory.alarm[CHANGED_AFTER]) if moved else None,
        changed_before=_moment(memory.alarm[CHANGED_BEFORE]) if moved else None,
        num_jobs_before=before[0],
        num_jobs_after=after[0],
        trials_before=before[1],
        accepts_before=before[2],
        trials_after=after[1],
        accepts_after=after[2],
    )


def _moment(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)
