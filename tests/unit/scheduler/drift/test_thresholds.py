"""From a rate of false alarms to thresholds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.drift.memory import LEVELS
from scheduler.drift.thresholds import exceedance_rate, thresholds
from scheduler.drift.watching import LEAST_RUN_LENGTH, run_length


@given(st.floats(LEAST_RUN_LENGTH, 1e7), st.floats(1.01, 10))
def test_fewer_false_alarms_need_higher_thresholds(jobs: float, factor: float) -> None:
    assert np.all(thresholds(jobs * factor) >= thresholds(jobs))
    assert thresholds(jobs * factor)[0] > thresholds(jobs)[0]


def test_the_levels_share_the_rate_equally_and_use_it_up() -> None:
    rates = [exceedance_rate(float(b), level) for level, b in enumerate(thresholds(50_000))]
    assert rates == pytest.approx([1 / (50_000 * LEVELS)] * LEVELS, rel=1e-5)
    assert sum(rates) == pytest.approx(1 / 50_000, rel=1e-5)


def test_the_alarms_of_a_month_are_spread_over_its_jobs() -> None:
    assert run_length(300_000, 2.0) == 150_000
    assert run_length(30, 2.0) == LEAST_RUN_LENGTH
