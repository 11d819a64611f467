from __future__ import annotations

import math

import pytest

from alphaloop.acceptance import Z95
from alphaloop.intervals import t95, two_sided_tail


@pytest.mark.parametrize(
    ("degrees_of_freedom", "expected"),
    [
        (1, 12.7062047),
        (2, 4.3026527),
        (3, 3.1824463),
        (5, 2.5705818),
        (10, 2.2281389),
        (30, 2.0422725),
        (120, 1.9799304),
    ],
)
def test_t_is_that_of_the_tables(degrees_of_freedom: float, expected: float) -> None:
    assert t95(degrees_of_freedom) == pytest.approx(expected, abs=1e-6)


def test_between_whole_degrees_t_falls() -> None:
    values = [t95(df / 4) for df in range(2, 80)]
    assert values == sorted(values, reverse=True)


def test_without_a_degree_nothing_is_bounded_and_with_many_it_is_normal() -> None:
    assert t95(0) == math.inf
    assert t95(math.inf) == pytest.approx(Z95)
    assert t95(99_999) == pytest.approx(Z95, abs=1e-4)


def test_the_tail_of_one_degree_is_the_arctangent() -> None:
    for t in (0.1, 1.0, 7.0):
        assert two_sided_tail(t, 1) == pytest.approx(1 - 2 * math.atan(t) / math.pi, abs=1e-12)
