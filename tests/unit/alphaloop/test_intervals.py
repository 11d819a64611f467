"""Intervals of a mean and of a median, and what a measurement concludes from them."""

from __future__ import annotations

import math
import random
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.acceptance import (
    MOST_RUNS,
    Z95,
    consecutive_runs,
    share_interval,
    t95,
    t_quantile,
    two_sided_tail,
    wilson,
)
from alphaloop.deciding.posterior import tokens_per_round
from alphaloop.payoff.figures import (
    Candidate,
    Judgement,
    PromptBlock,
    RatioBounds,
    RoundTimes,
    ShipVerdict,
    judge,
    median_bounds,
    min_values,
    percentile,
    total_bounds,
)
from alphaloop.payoff.report import RoundParts, costs_of
from tests.fixtures.costs import acceptance, evidence, figures, rounds


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


@given(st.floats(0.2, 99_999), st.floats(1e-6, 0.9))
def test_the_tail_beyond_a_quantile_is_the_one_asked_for(degrees_of_freedom: float, tail: float) -> None:
    t = t_quantile(degrees_of_freedom, tail)
    assert two_sided_tail(t, degrees_of_freedom) == pytest.approx(tail, rel=1e-6)


def test_without_a_degree_nothing_is_bounded_and_with_many_it_is_normal() -> None:
    assert t95(0) == math.inf
    assert t95(math.inf) == pytest.approx(Z95)
    assert t95(99_999) == pytest.approx(Z95, abs=1e-4)


CLUSTERS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda p: (min(p), max(p))), max_size=60)


def test_wilsons_interval_has_its_published_values() -> None:
    # Newcombe 1998, table I: the score interval without continuity correction.
    for successes, trials, low, high in [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)]:
        interval = wilson(successes / trials, trials)
        assert (interval.low, interval.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


@given(CLUSTERS)
def test_an_interval_holds_its_estimate_and_is_never_narrower_than_with_independent_trials(
    clusters: list[tuple[int, int]],
) -> None:
    found, trials = share_interval(clusters), sum(n for _, n in clusters)
    if not trials:
        assert found is None
        return
    share = sum(a for a, _ in clusters) / trials
    independent = wilson(share, trials)
    assert 0 <= found.low <= independent.low + 1e-9
    assert found.mean == pytest.approx(share)
    assert found.low <= found.mean <= found.high
    assert independent.high - 1e-9 <= found.high <= 1


@given(CLUSTERS.filter(lambda clusters: any(n for _, n in clusters)))
def test_runs_keep_every_count_and_are_at_most_thirty(clusters: list[tuple[int, int]]) -> None:
    runs, tested = consecutive_runs(clusters), [one for one in clusters if one[1]]
    assert len(runs) == min(len(tested), MOST_RUNS)
    assert [sum(column) for column in zip(*runs, strict=True)] == [sum(column) for column in zip(*tested, strict=True)]
    if len(tested) <= MOST_RUNS:
        assert runs == tested


def test_one_job_tells_nothing_of_the_spread_nor_does_one_beside_tiny_ones() -> None:
    for clusters in ([(30, 40)], [(300, 400), (1, 1)]):
        found = share_interval(clusters)
        assert (found.low, found.high) == (0.0, 1.0)


def test_jobs_that_were_all_accepted_count_as_one_decision_each() -> None:
    found = share_interval([(20, 20)] * 10)
    ten = wilson(1.0, 10)
    assert found.high == 1
    assert 0 < found.low < ten.low


@pytest.mark.parametrize(("num_jobs", "correlation"), [(4, 0.3), (20, 0.1), (20, 0.3), (100, 0.1)])
def test_the_interval_holds_the_truth_of_unequal_jobs(num_jobs: int, correlation: float, seed: int) -> None:
    draws = np.random.default_rng(seed)
    covered, repeats, share, spread = 0, 400, 0.7, 1 / correlation - 1
    for _ in range(repeats):
        trials = np.clip(np.rint(draws.lognormal(3.5, 0.8, num_jobs)), 2, 300).astype(int)
        accepts = draws.binomial(trials, draws.beta(share * spread, (1 - share) * spread, num_jobs))
        found = share_interval(consecutive_runs(list(zip(accepts.tolist(), trials.tolist(), strict=True))))
        covered += found.low <= share <= found.high
    # Three standard errors of 400 runs are 3 points.
    assert 0.92 <= covered / repeats <= 0.99


@pytest.mark.parametrize(("n", "ranks"), [(6, (1, 6)), (10, (2, 9)), (20, (6, 15)), (30, (10, 21)), (100, (40, 61))])
def test_the_ranks_are_those_of_the_sign_test(n: int, ranks: tuple[int, int], rng: random.Random) -> None:
    values = [float(i) for i in range(1, n + 1)]
    rng.shuffle(values)
    bounds = median_bounds(values)
    assert (bounds.low, bounds.high) == ranks
    assert bounds.estimate == (n + 1) / 2


@pytest.mark.parametrize("num_comparisons", [1, 2, 3, 6, 25])
def test_so_many_values_bound_so_many_medians_and_one_fewer_does_not(num_comparisons: int) -> None:
    enough = min_values(num_comparisons)
    assert median_bounds(range(enough), num_comparisons).known == (0, enough - 1)
    assert median_bounds(range(enough - 1), num_comparisons).known is None


def test_the_ratio_of_all_tokens_weighs_a_block_by_its_time() -> None:
    # Sixteen short blocks at 1.30 and four long ones at .75.
    vanilla = [PromptBlock(100, 1.0)] * 16 + [PromptBlock(2000, 20.0)] * 4
    ours = [PromptBlock(b.num_tokens, b.wall_s / (1.3 if b.wall_s == 1.0 else 0.75)) for b in vanilla]
    found = total_bounds(ours, vanilla)
    assert found.estimate == pytest.approx(96 / (16 / 1.3 + 80 / 0.75))
    assert found.known[0] < found.estimate < found.known[1]
    assert median_bounds([a.tokens_per_s / b.tokens_per_s for a, b in zip(ours, vanilla, strict=True)]).estimate == 1.3
    assert judge(found, 1.2, 1).verdict is ShipVerdict.DO_NOT_SHIP, "a median above the bar ships no slower total"


def test_one_long_block_beside_short_ones_bounds_nothing() -> None:
    vanilla = [PromptBlock(10, 0.1)] * 9 + [PromptBlock(9000, 90.0)]
    assert total_bounds(vanilla, vanilla).known is None


@pytest.mark.parametrize("num_blocks", [6, 20, 60])
def test_bounds_of_totals_hold_the_truth(num_blocks: int, seed: int) -> None:
    draws = np.random.default_rng(seed)
    held, repeats, true_ratio = 0, 400, math.exp(-(0.2**2) / 2)  # of the time of all tokens: E[1 / ratio]
    for _ in range(repeats):
        seconds = draws.lognormal(0, 0.6, num_blocks)
        ratios = draws.lognormal(0, 0.2, num_blocks)
        vanilla = [PromptBlock(round(1e4 * s), s) for s in seconds]
        ours = [PromptBlock(round(1e4 * s), s / r) for s, r in zip(seconds, ratios, strict=True)]
        low, high = total_bounds(ours, vanilla).known or (0.0, math.inf)
        held += low <= true_ratio <= high
    assert 0.91 <= held / repeats <= 0.99


def test_percentiles_are_interpolated(rng: random.Random) -> None:
    values = [rng.random() for _ in range(rng.randint(1, 60))]
    for share in (0.5, 0.95, 0.99):
        assert percentile(values, share) == pytest.approx(float(np.percentile(values, 100 * share)))


@pytest.mark.parametrize(
    ("low", "high", "bar", "verdict"),
    [
        (1.3, 1.5, 1.3, ShipVerdict.SHIP),
        (1.2999, 1.5, 1.3, ShipVerdict.TOO_CLOSE),
        (1.1, 1.3, 1.3, ShipVerdict.TOO_CLOSE),
        (1.1, 1.2999, 1.3, ShipVerdict.DO_NOT_SHIP),
        (0.5, 0.6, 1.3, ShipVerdict.DO_NOT_SHIP),
        (1.0, 2.0, 1.3, ShipVerdict.TOO_CLOSE),
        (0.95, 1.05, 0.9, ShipVerdict.TOO_CLOSE),
    ],
)
def test_the_bar_belongs_to_those_who_reach_it_and_are_not_slower(
    low: float, high: float, bar: float, verdict: ShipVerdict
) -> None:
    assert judge(RatioBounds((low + high) / 2, low, high, 30), bar, 3).verdict is verdict


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3)), min_size=1, max_size=40),
    st.floats(0.1, 3.0),
    st.integers(1, 6),
)
def test_what_ships_is_faster_in_total_beyond_its_error(
    blocks: list[tuple[int, float, float]], bar: float, num_comparisons: int
) -> None:
    ours = [PromptBlock(num_tokens, wall_s) for num_tokens, wall_s, _ in blocks]
    vanilla = [PromptBlock(num_tokens, wall_s) for num_tokens, _, wall_s in blocks]
    bounds = total_bounds(ours, vanilla, num_comparisons)
    total = sum(b.wall_s for b in vanilla) / sum(b.wall_s for b in ours)
    assert bounds.estimate == pytest.approx(total)
    if judge(bounds, bar, num_comparisons).verdict is ShipVerdict.SHIP:
        assert 1 < bounds.low <= total * (1 + 1e-9)
        assert bounds.low >= bar


def test_a_wrong_text_never_ships() -> None:
    assert judge(RatioBounds(2.0, 1.9, 2.1, 30), 1.3, 1, is_exact=False) == Judgement(ShipVerdict.DO_NOT_SHIP)


def test_too_few_values_ask_for_as_many_as_bound_anything() -> None:
    judgement = judge(median_bounds([1.4] * 4, 3), 1.3, 3)
    assert judgement == Judgement(ShipVerdict.TOO_CLOSE, 3)


def test_a_median_at_the_bar_asks_for_nothing() -> None:
    assert judge(RatioBounds(1.3001, 1.1, 1.5, 30), 1.3, 1) == Judgement(ShipVerdict.TOO_CLOSE, None)


@pytest.mark.parametrize("median", [1.16, 1.45])
def test_so_many_more_prompts_settle_it_in_most_cases(median: float, seed: int) -> None:
    spread, bar, num = 0.3, 1.3, 16
    quantiles = [statistics.NormalDist().inv_cdf((i + 0.5) / num) for i in range(num)]
    typical = judge(median_bounds([median * math.exp(spread * z) for z in quantiles]), bar, 1)
    assert typical.verdict is ShipVerdict.TOO_CLOSE
    draws = np.random.default_rng(seed)
    settled = 0
    for _ in range(200):
        ratios = median * np.exp(spread * draws.standard_normal(num + typical.num_more))
        settled += judge(median_bounds(ratios.tolist()), bar, 1).verdict is not ShipVerdict.TOO_CLOSE
    assert 0.6 < settled / 200 < 0.995


def costs(**options: object) -> RoundParts:
    return evidence(**options).costs  # type: ignore[arg-type]


def test_parts_are_in_vanilla_rounds_and_add_up() -> None:
    found = costs(alphas=(0.8, 0.7, 0.6, 0.5), draft=0.4, verify=1.2)
    assert (found.draft, found.verify, found.rest) == pytest.approx((0.4, 1.2, 0.1))
    assert found.total == pytest.approx(1.7)
    # Rounds accept .8, .56, .34 and .17 of a hundred.
    assert found.tokens == pytest.approx(tokens_per_round((0.8, 0.7, 0.6, 0.5))[4], abs=0.02)
    assert found.speedup == pytest.approx(found.tokens / 1.7)
    assert found.draft_step == pytest.approx(0.1)
    assert found.positions == pytest.approx(5)


def test_reading_prompts_is_not_sped_up() -> None:
    found = costs(reading=1.0)  # as long as all of vanilla's rounds
    assert found.vanilla_reading == pytest.approx(0.5)
    assert found.whole(1e9) == pytest.approx(2.0)
    assert found.whole(2.0) == pytest.approx(1 / (0.5 + 0.25))


def test_a_drafter_that_reads_for_itself_pays_for_it() -> None:
    vanilla = figures(times=rounds(reading=0.5))
    own = figures(Candidate("small", 1), accepted=acceptance([1.0]), times=rounds(0, 0.9, 0.1, reading=1.0, k=1))
    found = costs_of(vanilla, own)
    assert found.speedup == pytest.approx(1.5 / (1.0 + 1.0 / 2))


def test_the_needed_alpha_is_leviathans(rng: random.Random) -> None:
    alpha, k, draft = rng.uniform(0.3, 0.9), rng.randint(1, 8), rng.uniform(0, 0.3)
    found = costs(alphas=(0.5,) * k, draft=draft, verify=0.9)
    target = (1 - alpha ** (k + 1)) / (1 - alpha) / found.total
    assert found.needed_alpha(target) == pytest.approx(alpha, abs=1e-6)
    assert found.needed_alpha((k + 1) / found.total + 1e-6) is None
    assert found.needed_alpha(0.01) == pytest.approx(0, abs=1e-6)


def test_a_shorter_draft_costs_and_brings_its_part() -> None:
    found = costs(alphas=(0.9, 0.8, 0.1, 0.1), draft=0.8, verify=1.3)
    assert found.at_length(4) == pytest.approx(found.speedup, rel=0.01)
    # Half of the drafting, half of what the pass takes beyond vanilla's.
    assert found.at_length(2) == pytest.approx((1 + 0.9 + 0.72) / (0.4 + 0.9 + 0.2 + 0.1), rel=0.01)
    assert found.best_shorter() == (2, pytest.approx(found.at_length(2) / found.at_length(4)))
    assert costs(alphas=(0.9,)).best_shorter() is None


def test_without_rounds_there_is_nothing_to_say() -> None:
    own = figures(Candidate("small", 2), accepted=acceptance([0.5, 0.5]), times=RoundTimes(reading_s=1.0))
    assert costs_of(figures(), own) is None
    assert costs_of(figures(times=RoundTimes()), own) is None
