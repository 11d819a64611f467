"""Means over segments: a shift of the mix is not a fall, and a fall may hide behind one."""

from __future__ import annotations

import pytest

from scheduler.causes import move_of, within_change
from scheduler.drift.watching import State, TrafficVerdict
from tests.fixtures.causes import MARGIN, day, jobs

FELL = jobs()


def steady(segment: str, half: float = 0.03, num_after: int = 100) -> TrafficVerdict:
    return jobs(State.STEADY, (0.0, -half, half), segment=segment, num_after=num_after)


def test_nothing_moved() -> None:
    assert move_of([], MARGIN) is None
    assert move_of([steady(""), steady("a")], MARGIN) is None


def test_a_mean_that_falls_while_each_segment_is_steady_is_a_shift_of_the_mix() -> None:
    move = move_of([FELL, steady("a"), steady("b")], MARGIN)
    assert move is not None
    assert move.mix is not None
    assert (move.mix.mean, move.is_hidden, move.state) == (0.0, False, State.FELL)


def test_thin_segments_are_steady_together() -> None:
    thin = [jobs(State.TOO_LITTLE, (0.01, -0.1, 0.12), segment=f"s{i}") for i in range(16)]
    move = move_of([FELL, *thin], MARGIN)
    assert move is not None
    assert move.mix is not None
    few = move_of([FELL, *thin[:1], steady("x", 0.5)], MARGIN)
    assert few is not None
    assert few.mix is None, "two of them show nothing"


def test_one_segment_that_fell_is_named() -> None:
    move = move_of([FELL, steady("a"), jobs(change=(-0.4, -0.5, -0.3), segment="b")], MARGIN)
    assert move is not None
    assert (move.mix, [v.segment for v in move.segments], move.told.segment) == (None, ["b"], "")


@pytest.mark.parametrize("overall", [steady(""), jobs(State.ROSE, (0.1, 0.06, 0.14))])
def test_every_segment_falls_while_the_mean_does_not(overall: TrafficVerdict) -> None:
    parts = [jobs(segment="a"), jobs(segment="b", when=(8.0, 8.4))]
    move = move_of([overall, *parts], MARGIN)
    assert move is not None
    assert (move.state, move.is_hidden, len(move.segments)) == (State.FELL, True, 2)
    assert (move.changed_after, move.changed_before) == (day(8.0), day(8.6))


def test_a_mean_that_falls_while_every_segment_rises_is_a_shift_of_the_mix() -> None:
    parts = [jobs(State.STEADY, (0.03, 0.01, 0.05), segment=name) for name in "ab"]
    move = move_of([FELL, *parts], MARGIN)
    assert move is not None
    assert move.mix is not None


def test_a_fall_inside_segments_beside_a_shift_of_the_mix_is_a_fall() -> None:
    parts = [jobs(State.TOO_LITTLE, (-0.08, -0.12, -0.04), segment=name) for name in "ab"]
    move = move_of([jobs(change=(-0.3, -0.33, -0.27)), *parts], MARGIN)
    assert move is not None
    assert move.mix is None


def test_the_change_within_segments_is_weighted_by_their_shares_afterwards() -> None:
    parts = [
        jobs(change=(-0.4, -0.5, -0.3), segment="small", num_after=25),
        jobs(State.STEADY, (0.0, -0.02, 0.02), segment="large", num_after=75),
    ]
    within = within_change(parts)
    assert within is not None
    assert within.mean == pytest.approx(-0.1)
    assert within.mean - within.low == pytest.approx((0.025**2 + 0.015**2) ** 0.5)
    assert within_change([]) is None
