"""Whether a task's traffic moved, and whether only the shares of its segments did.

A mean over segments can move while no segment does (a shift of the mix), and stay while every segment moves (Simpson
1951). So the segments are looked at before the mean is believed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from alphaloop.acceptance import Z95, Interval
from scheduler.causes.comparing import state_of
from scheduler.verdicts import State, TrafficVerdict

_MOVED: Final = (State.FELL, State.ROSE)
#: Share of the trials after a change that segments with an estimate must have, to speak for all.
MOST: Final = 0.75


@dataclass(frozen=True, slots=True)
class Move:
    """A change of a task's traffic."""

    told: TrafficVerdict  #: of all segments together; of the clearest segment where only segments moved
    state: State  #: FELL or ROSE
    changed_after: datetime
    changed_before: datetime
    mix: Interval | None  #: what happened inside segments, where it is the mix that moved
    is_hidden: bool  #: all segments together do not show it
    segments: tuple[TrafficVerdict, ...]  #: that moved this way, the clearest first


def move_of(verdicts: Sequence[TrafficVerdict], margin: float) -> Move | None:
    """The move that the verdicts about a (task, drafter) show, or None.

    The verdict without a segment is that of all segments together.
    """
    overall = next((v for v in verdicts if not v.segment), None)
    segments = [v for v in verdicts if v.segment]
    by_state = {state: [v for v in segments if v.state is state] for state in _MOVED}
    if overall is None or overall.state not in _MOVED:
        return _hidden(by_state[State.FELL] or by_state[State.ROSE])
    against = by_state[State.ROSE if overall.state is State.FELL else State.FELL]
    if _is_most(against, segments):
        return _hidden(against)
    within = within_change(segments) if len(segments) > 1 else None
    if _is_mix(overall, within, margin):
        return _move(overall, overall.state, mix=within)
    return _move(overall, overall.state, by_state[overall.state])


def within_change(segments: Sequence[TrafficVerdict]) -> Interval | None:
    """What of the change happened inside segments: Σ share after · change. None where too few have an estimate.

    Direct standardisation with the shares after the change. The rest of the change of the mean is the mix's. Segments
    without an estimate, because they are new or thin, are left out while the others have most of the trials.
    """
    told = [v for v in segments if v.change is not None]
    total = sum(v.trials_after for v in told)
    if not total or total < MOST * sum(v.trials_after for v in segments):
        return None
    mean = variance = 0.0
    for verdict in told:
        if verdict.change is not None:
            share = verdict.trials_after / total
            mean += share * verdict.change.mean
            variance += (share * (verdict.change.high - verdict.change.low) / 2 / Z95) ** 2
    half = Z95 * math.sqrt(variance)
    return Interval(mean, mean - half, mean + half)


def _is_mix(overall: TrafficVerdict, within: Interval | None, margin: float) -> bool:
    """Whether the shares of the segments explain the move.

    It is excluded that all of it happened inside segments, by the best estimate less than half of it did, and it is not
    shown that any did. Thin segments, of which none alone could be shown to be steady, are enough for this.
    """
    if within is None or overall.change is None:
        return False
    sign = -1 if overall.state is State.FELL else 1
    whole = sign * overall.change.mean
    most = max(sign * within.low, sign * within.high)
    is_small = most < whole and sign * within.mean < whole / 2
    return is_small and state_of(within, margin) is not overall.state


def _is_most(moved: Sequence[TrafficVerdict], segments: Sequence[TrafficVerdict]) -> bool:
    """Whether these segments have most of the trials after the change."""
    return 2 * sum(v.trials_after for v in moved) > sum(v.trials_after for v in segments)


def _hidden(moved: Sequence[TrafficVerdict]) -> Move | None:
    """A move that all segments together do not show."""
    told = max(moved, key=_size, default=None)
    return None if told is None else _move(told, told.state, moved, is_hidden=True)


def _size(verdict: TrafficVerdict) -> float:
    return abs(verdict.change.mean) * verdict.trials_after if verdict.change is not None else 0.0


def _move(
    told: TrafficVerdict,
    state: State,
    segments: Sequence[TrafficVerdict] = (),
    *,
    mix: Interval | None = None,
    is_hidden: bool = False,
) -> Move | None:
    """The move, or None where no verdict says when it was."""
    timed = [
        (v.changed_after, v.changed_before)
        for v in (told, *segments)
        if v.changed_after is not None and v.changed_before is not None
    ]
    if not timed:
        return None
    first, last = min(after for after, _ in timed), max(before for _, before in timed)
    clearest = tuple(sorted(segments, key=_size, reverse=True))
    return Move(told, state, first, last, mix, is_hidden, clearest)
