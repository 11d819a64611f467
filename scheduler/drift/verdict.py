"""What a stream's memory says: too little, steady, fell or rose, for all segments together and for each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import numpy as np

from alphaloop.acceptance import Z95, Interval
from alphaloop.measurements import DriftSubject
from scheduler.drift.memory import (
    ACCEPTS,
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
    is_open,
)
from scheduler.drift.precision import inflation, reference_error, standard_error
from scheduler.drift.reference import merge
from scheduler.drift.stream import WatchedStream
from scheduler.verdicts import State, TrafficVerdict

LEAST_JOBS: Final = 8  # fewer later jobs give no interval
LEAST_OF_SEGMENT: Final = 3  # on either side: its variance is that of all segments
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
    before, later = _sides(memory)
    found = [_overall(subject, memory, before, later, margin)]
    if len(stream.segments) > 1:
        found += [
            _segment(subject, name or WITHOUT_SEGMENT, memory, before, later, row, margin)
            for row, name in enumerate(stream.segments)
        ]
    return found


def _sides(memory: Memory) -> tuple[Tally, Tally]:
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


def _overall(subject: DriftSubject, memory: Memory, before: Tally, later: Tally, margin: float) -> TrafficVerdict:
    difference = None
    if later.first[JOBS] >= LEAST_JOBS:
        error = math.hypot(standard_error(memory, later), reference_error(memory, before, later))
        difference = Difference(float(later.first[RESIDUALS] / later.first[TRIALS]), error)
    state = State.TOO_LITTLE
    if is_open(memory):
        state = State.FELL if memory.alarm[DIRECTION] < 0 else State.ROSE
    elif difference is not None and difference.interval.is_within(margin):
        state = State.STEADY
    counts = _of_first(before.first), _of_first(later.first)
    return _verdict(subject, "", state, difference, memory, counts)


def _segment(
    subject: DriftSubject, name: str, memory: Memory, reference: Tally, later: Tally, row: int, margin: float
) -> TrafficVerdict:
    before, after = reference.segments[row], later.segments[row]
    difference = None
    if min(before[0], after[0]) >= LEAST_OF_SEGMENT and later.first[JOBS] >= LEAST_JOBS and later.first[SQUARES]:
        difference = Difference(
            float(after[2] / after[1] - before[2] / before[1]),
            math.hypot(*(_mean_error(memory, reference, later, side) for side in (after, before))),
        )
    state = State.TOO_LITTLE
    if difference is not None:
        if difference.interval.is_within(margin):
            state = State.STEADY
        elif is_open(memory) and difference.interval.high < 0 and difference.change < -margin:
            state = State.FELL
        elif is_open(memory) and difference.interval.low > 0 and difference.change > margin:
            state = State.ROSE
    return _verdict(subject, name, state, difference, memory, (_counts(reference, before), _counts(reference, after)))


def _mean_error(memory: Memory, reference: Tally, later: Tally, segment: Floats) -> float:
    """Of a segment's mean residual: a binomial variance, times the dispersion that all segments share."""
    scale = min(SCALES - 1, int(math.log2(segment[0])))
    sum_of_squares = _dispersion(reference, later) * float(_binomial(reference, segment[None])[0])
    return math.sqrt(sum_of_squares * inflation(memory, scale)) / float(segment[1])


def _dispersion(reference: Tally, later: Tally) -> float:
    """How much more residuals vary inside segments than binomial counts do (quasi-likelihood, Wedderburn 1974).

    Inside: the squares without those of the segments' means, as in an analysis of variance.
    """
    its = later.segments[later.segments[:, 1] > 0]
    num_jobs = float(later.first[JOBS])
    between = float((its[:, 2] ** 2 / its[:, 0]).sum())
    inside = max(float(later.first[SQUARES]) - between, 0.0) * num_jobs / max(num_jobs - len(its), 1.0)
    return inside / float(_binomial(reference, its).sum())


def _binomial(reference: Tally, segments: Floats) -> Floats:
    """Trials · α · (1 - α) of each segment; no α is taken to be surer than .05 or .95."""
    alpha = np.clip(_level(reference) + segments[:, 2] / segments[:, 1], 0.05, 0.95)
    variance: Floats = segments[:, 1] * alpha * (1 - alpha)
    return variance


def _level(reference: Tally) -> float:
    """Its α_1."""
    first = reference.first
    return float(first[ACCEPTS] / first[TRIALS]) if first[TRIALS] else 0.0


def _of_first(first: Floats) -> Sequence[float]:
    return first[JOBS], first[TRIALS], first[ACCEPTS]


def _counts(reference: Tally, segment: Floats) -> Sequence[float]:
    """Jobs, trials and accepts of a segment; the accepts follow from the residuals and the level of the reference."""
    return segment[0], segment[1], max(0.0, segment[2] + _level(reference) * segment[1])


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
