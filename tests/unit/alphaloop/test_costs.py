"""What a round costs: interpolation, ratios, doubt, and how corrections fade."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.costs import (
    HALF_LIFE_S,
    TIMING_SD,
    CostKind,
    CostPoint,
    CostTable,
    LogEstimate,
    after_pause,
    faded,
    num_half_lives,
    timing_variance,
)

#: Mean tokens proposed, by what is asked for from 0, of a drafter that never has more than three.
THREE = [min(i, 3) for i in range(9)]


def table(*points: tuple[str | None, int, int, float]) -> CostTable:
    return CostTable(CostPoint(drafter, batch, width, ms, 5) for drafter, batch, width, ms in points)


def test_between_points_the_cost_is_linear_in_width_and_batch() -> None:
    costs = table((None, 1, 1, 30.0), (None, 1, 9, 38.0), (None, 3, 1, 50.0), (None, 3, 9, 90.0))
    assert costs.rounds(1).round_ms(None, 4) == pytest.approx(34.0)
    assert costs.rounds(2).round_ms(None, 0) == pytest.approx(40.0)
    assert costs.rounds(2).round_ms(None, 4) == pytest.approx((34.0 + 70.0) / 2)


def test_what_was_never_measured_is_unknown_and_not_free() -> None:
    costs = table((None, 1, 1, 30.0))
    assert costs.rounds(1).round_ms("d", 4) is None
    assert costs.rounds(1).round_ms("d", 0) == 30.0
    assert table(("d", 1, 5, 4.0)).rounds(1).round_ms("d", 4) is None


@given(
    st.dictionaries(st.tuples(st.integers(1, 64), st.integers(1, 33)), st.floats(0.1, 1e4), min_size=1),
    st.integers(1, 100),
    st.integers(0, 40),
)
def test_an_interpolated_cost_lies_within_what_was_measured(
    points: dict[tuple[int, int], float], batch: int, k: int
) -> None:
    ms = table(*((None, b, w, cost) for (b, w), cost in points.items())).rounds(batch).round_ms(None, k)
    assert min(points.values()) * (1 - 1e-9) <= ms <= max(points.values()) * (1 + 1e-9)


def test_a_drafter_that_seldom_proposes_seldom_widens_the_pass() -> None:
    costs = table((None, 1, 1, 30.0), (None, 1, 9, 50.0), (None, 2, 1, 30.0), (None, 2, 9, 50.0), ("d", 1, 9, 1.0))
    one, two = costs.rounds(1), costs.rounds(2)
    assert one.round_ms("d", 8, [0.0] * 9) == two.round_ms("d", 8, [0.0] * 9) == 31.0
    assert one.round_ms("d", 8, [0.25 * i for i in range(9)]) == pytest.approx(1 + 0.25 * 50 + 0.75 * 30)
    # Two sequences: nobody proposes in a quarter of the rounds; in the others 4 / .75 positions a sequence on average.
    expected = 1 + 0.75 * (30 + 20 * 4 / 0.75 / 8) + 0.25 * 30
    assert two.round_ms("d", 8, [0.5 * i for i in range(9)]) == pytest.approx(expected)
    assert costs.rounds(1).round_ms("d", 8) == 51.0


@given(
    st.lists(st.floats(1.0, 100.0), min_size=2, max_size=9),
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8),
    st.data(),
)
def test_the_pass_of_one_sequence_costs_the_mean_over_its_widths(
    times: list[float], lasting: list[float], data: st.DataObject
) -> None:
    """Whatever steps the device's time takes from one width to the next."""
    at_least = [math.prod(lasting[:i]) for i in range(len(lasting) + 1)]
    k = data.draw(st.integers(1, len(lasting)))
    chances = [at_least[i] - at_least[i + 1] for i in range(k)] + [at_least[k]]
    points = [(None, 1, width, ms) for width, ms in enumerate(times, 1)]
    costs = table(*points, ("d", 1, 2, 0.5))
    mean = sum(p * (costs.part_ms(None, 1, 1 + num) or 0.0) for num, p in enumerate(chances))
    proposed = [sum(at_least[1 : i + 1]) for i in range(len(lasting) + 1)]
    assert costs.rounds(1).round_ms("d", k, proposed) == pytest.approx(0.5 + mean)


def at(context: int, *points: tuple[str | None, int, int, float]) -> list[CostPoint]:
    return [CostPoint(drafter, batch, width, ms, 5, context) for drafter, batch, width, ms in points]


def test_a_longer_context_costs_its_ratio_at_shapes_that_were_not_measured_there() -> None:
    near = at(256, (None, 1, 1, 30.0), (None, 1, 5, 33.0), (None, 1, 9, 40.0))
    far = at(2048, (None, 1, 1, 36.0), (None, 1, 9, 60.0))
    costs = CostTable([*near, *far])
    assert costs.part_ms(None, 1, 1) == 30.0
    assert costs.part_ms(None, 1, 5, 2048) == pytest.approx(33.0 * (1.2 + 1.5) / 2)
    assert costs.part_ms(None, 1, 9, (256 + 2048) / 2) == pytest.approx(50.0)
    assert costs.part_ms(None, 1, 1, 1e6) == pytest.approx(36.0)
    assert costs.part_ms(None, 1, 1, 0) == 30.0
    assert costs.rounds(1, 2048).round_ms(None, 8) == pytest.approx(60.0)


@given(
    st.dictionaries(
        st.tuples(st.integers(1, 16), st.integers(1, 17), st.sampled_from([64, 256, 2048])),
        st.floats(0.1, 1e4),
        min_size=1,
    )
)
def test_every_measured_point_of_any_context_comes_back(points: dict[tuple[int, int, int], float]) -> None:
    costs = CostTable(CostPoint(None, b, w, ms, 5, context) for (b, w, context), ms in points.items())
    for (batch, width, context), ms in points.items():
        assert costs.part_ms(None, batch, width, context) == pytest.approx(ms)


def test_a_prompt_costs_by_the_token_beyond_the_longest_one_measured() -> None:
    prompts = [CostPoint(None, 1, n, ms, 3, 0, CostKind.PREFILL) for n, ms in ((64, 20.0), (512, 100.0))]
    costs = CostTable([*prompts, *at(256, (None, 1, 1, 30.0))])
    assert costs.prefill_ms(None, 64) == 20.0
    assert costs.prefill_ms(None, 288) == pytest.approx(60.0)
    assert costs.prefill_ms(None, 5120) == pytest.approx(1000.0)
    assert costs.prefill_ms(None, 1) == 20.0  # a pass is a pass
    assert costs.prefill_ms(None, 0) == 0.0
    assert costs.prefill_ms("d", 64) == 0.0
    assert costs.part_ms(None, 1, 512) == 30.0  # a prompt is no round
    assert CostTable(prompts).part_ms(None, 1, 1) is None


def test_a_correction_multiplies_what_was_measured() -> None:
    costs = CostTable([CostPoint(None, 1, 1, 30.0, 5, correction=1.5), CostPoint(None, 1, 9, 40.0, 5)])
    assert costs.part_ms(None, 1, 1) == 45.0
    assert costs.part_ms(None, 1, 5) == pytest.approx(42.5)


def test_a_drafter_that_stops_early_is_paid_for_its_longest_proposal() -> None:
    costs = table((None, 1, 1, 30.0), (None, 1, 9, 46.0), ("d", 1, 2, 5.0), ("d", 1, 9, 40.0)).rounds(1)
    assert costs.round_ms("d", 8, THREE) == pytest.approx(40 + 30 + 2 * 3)
    assert costs.round_ms("d", 8, THREE, longest_proposed=3.0) == pytest.approx(15 + 30 + 2 * 3)
    assert costs.round_ms("d", 8, [0.0] * 9, longest_proposed=0.0) == pytest.approx(5 + 30)


def test_the_components_of_a_round_add_up_to_it() -> None:
    costs = table((None, 2, 1, 30.0), (None, 2, 9, 70.0), ("d", 2, 2, 1.0), ("d", 2, 9, 8.0)).rounds(2)
    assert costs.components_ms("d", 4) == pytest.approx((4.0, 50.0))
    found = costs.components_ms("d", 8, THREE, 2.5)
    assert sum(found) == costs.round_ms("d", 8, THREE, 2.5)
    assert costs.components_ms("never measured", 4) is None


def test_the_variance_of_a_cost_is_the_mean_over_the_rounds_that_were_timed() -> None:
    points = [
        CostPoint(None, 1, 1, 30.0, 5, correction_variance=0.01),
        CostPoint(None, 1, 9, 38.0, 5, correction_variance=0.03),
        CostPoint(None, 1, 64, 38.0, 5, 0, CostKind.PREFILL, correction_variance=9.0),
        CostPoint("d", 1, 9, 2.0, 5, correction_variance=0.16),
    ]
    costs = CostTable(points).rounds(1)
    assert [costs.variance(name) for name in (None, "d", "never measured")] == pytest.approx([0.02, 0.16, 0.0])


logs, ages = st.floats(-3, 3), st.floats(0, 30)


@given(logs, st.floats(0, 1), logs, ages, ages)
def test_fading_twice_is_fading_once(mean: float, variance: float, towards: float, one: float, more: float) -> None:
    estimate = LogEstimate(mean, variance)
    twice, once = faded(faded(estimate, towards, one), towards, more), faded(estimate, towards, one + more)
    assert twice.mean == pytest.approx(once.mean, abs=1e-9)
    assert twice.variance == pytest.approx(once.variance, abs=1e-9)


def test_a_clock_that_was_set_back_makes_nothing_younger() -> None:
    assert num_half_lives(-5.0) == 0.0


def test_the_variance_of_a_measurement_is_that_of_a_median_of_timings() -> None:
    rng = random.Random(1)
    medians = [statistics.median(rng.gauss(0, TIMING_SD) for _ in range(25)) for _ in range(4000)]
    assert timing_variance(25) == pytest.approx(statistics.variance(medians), rel=0.1)


def test_a_pause_leaves_what_shapes_differ_by_and_the_target_alone() -> None:
    points = [
        CostPoint(None, 1, 1, 30.0, 9, correction=2.0),
        CostPoint("a", 1, 2, 5.0, 9, correction=8.0),
        CostPoint("a", 1, 3, 9.0, 9, correction=8.0),
        CostPoint("a", 1, 9, 20.0, 9, correction=12.0),
        CostPoint("b", 1, 9, 20.0, 9, correction=8.0),
    ]
    target, *of_a, of_b = after_pause(points, {"a": HALF_LIFE_S, "b": 1.0})
    assert [target, of_b] == [points[0], points[-1]], "a second is no pause"
    assert [point.correction for point in of_a] == pytest.approx([4.0, 4.0, 6.0])
    assert all(point.correction_variance > 0.1 for point in of_a)


def test_without_points_of_the_target_a_correction_fades_towards_what_was_calibrated() -> None:
    (point,) = after_pause([CostPoint("a", 1, 9, 20.0, 9, correction=math.e)], {"a": 100 * HALF_LIFE_S})
    assert point.correction == pytest.approx(1.0)
