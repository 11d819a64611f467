"""What the doubt of costs does to bounds, comparisons and news."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.costs import CostKind, CostPoint, CostTable
from alphaloop.deciding.exploration import News, news_of, noise_between
from alphaloop.deciding.goodput import Alternative, DrafterState, JobSize, marked_stale, weigh
from tests.fixtures import deciding

DRAFTERS = (DrafterState("draft", "r1", 4), DrafterState("other", "r1", 4))
SIZE = JobSize(200.0, 100.0)
POINTS = (
    *(CostPoint(None, 1, width, 20.0 + width, 9) for width in (1, 5)),
    *(CostPoint(name, 1, width, 4.0 * (width - 1), 9) for name in ("draft", "other") for width in (2, 5)),
    CostPoint(None, 1, 256, 80.0, 9, 0, CostKind.PREFILL),
    CostPoint("draft", 1, 256, 30.0, 9, 0, CostKind.PREFILL),
)


inferred_from_jobs = partial(deciding.inferred, 0.7, k=4, sd=0.2, own_sd=0.1)
POSTERIORS = {"draft": inferred_from_jobs(), "other": inferred_from_jobs()}


def table(target_sd: float = 0.0, draft_sd: float = 0.0) -> CostTable:
    sds = {None: target_sd, "draft": draft_sd}
    return CostTable(replace(point, correction_variance=sds.get(point.drafter, 0.0) ** 2) for point in POINTS)


def weighed(costs: CostTable, size: JobSize | None = SIZE) -> dict[tuple[str | None, int], Alternative]:
    return {(a.drafter, a.num_draft_tokens): a for a in weigh(POSTERIORS, DRAFTERS, costs, 1, size)}


def test_without_doubt_about_costs_the_bounds_are_those_of_tokens() -> None:
    posterior = inferred_from_jobs()
    three = weighed(table(), None)["draft", 3]
    factor = posterior.tokens[3] / posterior.tokens_bounds(3)[0]
    assert three.cost_sd == 0.0
    assert three.speedup_low == pytest.approx(three.speedup / factor, rel=1e-3)
    assert three.speedup_high == pytest.approx(three.speedup * factor, rel=1e-3)


@given(st.floats(0, 0.4), st.floats(0, 0.4), st.integers(1, 4))
def test_doubt_about_costs_widens_bounds_on_both_sides_and_moves_no_expectation(
    target_sd: float, draft_sd: float, k: int
) -> None:
    sure, unsure = weighed(table())["draft", k], weighed(table(target_sd, draft_sd))["draft", k]
    assert unsure.speedup == sure.speedup
    assert unsure.speedup_low <= sure.speedup_low + 1e-12
    assert unsure.speedup_high >= sure.speedup_high - 1e-12
    assert weighed(table(target_sd, draft_sd))["other", k] == weighed(table(target_sd))["other", k]
    assert weighed(table(target_sd, draft_sd))[None, 0].cost_sd == 0.0


def test_the_doubt_of_costs_is_what_errors_of_measured_times_come_to() -> None:
    rng, k, target_sd, draft_sd = random.Random(1), 4, 0.05, 0.1
    stated = weighed(table(target_sd, draft_sd), None)["draft", k]
    logs = []
    for _ in range(800):
        # Points are measured apart; those of a drafter share its level, which is what its doubt is about.
        level = rng.gauss(0, draft_sd)
        moved = [
            replace(
                point, median_ms=point.median_ms * math.exp(rng.gauss(0, target_sd) if not point.drafter else level)
            )
            for point in POINTS
        ]
        logs.append(math.log(weighed(CostTable(moved), None)["draft", k].speedup))
    assert stated.cost_sd == pytest.approx(statistics.stdev(logs), rel=0.15)


def test_reading_prompts_counts_for_the_doubt_about_a_drafter() -> None:
    costs = table(draft_sd=0.3)
    rounds, jobs = weighed(costs, None)["draft", 1], weighed(costs, JobSize(4000.0, 20.0))["draft", 1]
    other = weighed(table(), JobSize(4000.0, 20.0))["other", 1]
    draft_ms = 4000 / 256 * 30.0 + 20.0 / jobs.tokens_per_round * 4.0
    taken_ms = 4000 / 256 * 110.0 + 20.0 / jobs.tokens_per_round * jobs.round_ms
    assert rounds.cost_sd == pytest.approx(0.3 * 4.0 / rounds.round_ms)
    assert jobs.cost_sd == pytest.approx(0.3 * draft_ms / taken_ms)
    assert other.cost_sd == 0.0


def test_doubt_about_costs_cancels_between_lengths_of_one_drafter_and_not_between_drafters() -> None:
    posteriors = {"draft": inferred_from_jobs(sd=1e-3), "other": inferred_from_jobs(sd=1e-3)}
    sure, unsure = weighed(table()), weighed(table(draft_sd=0.3))

    def added(one: tuple[str | None, int], other: tuple[str | None, int]) -> float:
        noises = [noise_between(found[one], found[other], posteriors) for found in (unsure, sure)]
        return math.sqrt(noises[0] ** 2 - noises[1] ** 2)

    assert added(("draft", 3), (None, 0)) == pytest.approx(unsure["draft", 3].cost_sd)
    assert added(("draft", 3), ("other", 3)) == pytest.approx(unsure["draft", 3].cost_sd)
    assert added(("draft", 3), ("draft", 4)) == pytest.approx(unsure["draft", 4].cost_sd - unsure["draft", 3].cost_sd)


def test_doubt_about_a_drafters_cost_is_news_unless_its_rounds_are_timed_already() -> None:
    found = weighed(table(draft_sd=0.3))
    three, four, vanilla = found["draft", 3], found["draft", 4], found[None, 0]
    assert news_of(three, vanilla, POSTERIORS, {}).cost_sd == three.cost_sd > 0
    assert news_of(three, found["other", 3], POSTERIORS, {}).cost_sd == three.cost_sd
    assert news_of(four, three, POSTERIORS, {}).cost_sd == 0.0
    beyond = news_of(four, three, POSTERIORS, {}, ["draft"]).cost_sd
    assert beyond == pytest.approx(math.sqrt(four.cost_sd**2 - three.cost_sd**2)), "a server's lengths are timed apart"
    assert news_of(three, four, POSTERIORS, {}, ["draft"]) == News(), "as well known as what is chosen"
    assert news_of(three, found["other", 3], POSTERIORS, {"draft": "w", "other": "w"}) == News()
    assert news_of(vanilla, three, POSTERIORS, {}).sd == 0.0


def test_a_hybrid_is_stale_with_any_of_its_sources() -> None:
    drafters = [DrafterState("lookup", "l", 4), DrafterState("heads", "h", 4), DrafterState("small", "s", 4)]
    for name in ("heads", "small"):
        drafters.append(DrafterState(f"with {name}", "b", 4, sources=("lookup", name)))
    marked = marked_stale(drafters, lambda drafter: drafter.name == "heads")
    assert [drafter.name for drafter in marked if drafter.is_stale] == ["heads", "with heads"]
    own = marked_stale(drafters, lambda drafter: drafter.name == "with heads")
    assert [drafter.name for drafter in own if drafter.is_stale] == ["with heads"], "its sources still draft alone"
