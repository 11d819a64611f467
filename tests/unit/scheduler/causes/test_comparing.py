"""Steady is a finding; a move needs an interval without zero and an estimate beyond the margin."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.acceptance import Interval
from scheduler.drift.watching import State
from scheduler.probe_history import compare, state_of
from tests.fixtures.causes import MARGIN, history, measured

changes = st.floats(-1, 1).flatmap(
    lambda mean: st.tuples(st.just(mean), st.floats(-1, mean), st.floats(mean, 1)).map(lambda t: Interval(*t))
)


@given(changes)
def test_a_verdict_is_never_bolder_than_its_interval(change: Interval) -> None:
    state = state_of(change, MARGIN)
    if state is State.STEADY:
        assert -MARGIN <= change.low <= change.high <= MARGIN
    if state is State.FELL:
        assert change.high < 0
        assert change.mean < -MARGIN
    mirrored = state_of(Interval(-change.mean, -change.high, -change.low), MARGIN)
    assert (state is State.FELL) == (mirrored is State.ROSE)
    assert (state is State.STEADY) == (mirrored is State.STEADY)


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ((-0.088, -0.127, -0.048), State.FELL),  # a review found it told as steady
        ((-0.21, -0.5, 0.08), State.TOO_LITTLE),  # .80 then, .59 now, over four prompts
        ((0.0, -0.03, 0.03), State.STEADY),
        ((-0.03, -0.055, -0.005), State.TOO_LITTLE),
        ((0.2, 0.1, 0.3), State.ROSE),
    ],
)
def test_verdicts(change: tuple[float, float, float], state: State) -> None:
    assert state_of(Interval(*change), MARGIN) is state


def test_only_shared_prompts_at_the_same_k_are_compared() -> None:
    found = history(
        measured(0, [16, 16, 16]), measured(1, [16, 4], first_prompt=2), measured(2, [4] * 3, num_draft_tokens=5)
    )
    first, second, third = found.measurements
    over = compare("code", "small", first, second, MARGIN)
    assert (over.num_prompts, over.state) == (1, State.TOO_LITTLE)
    none = compare("code", "small", first, third, MARGIN)
    assert (none.num_prompts, none.change, none.state) == (0, None, State.TOO_LITTLE)


def test_the_same_counts_again_are_steady() -> None:
    one, two = history(measured(0, [16, 9, 12, 20]), measured(1, [16, 9, 12, 20])).measurements
    assert compare("code", "small", one, two, MARGIN).state is State.STEADY
