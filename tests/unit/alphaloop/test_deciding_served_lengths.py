"""Decisions where servers follow each request in how long they draft."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from alphaloop.costs import CostKind, CostPoint, CostTable
from alphaloop.deciding.decision import DraftSetting, Reason
from alphaloop.deciding.exploration import ExplorationBudget
from alphaloop.deciding.goodput import DrafterState, weigh
from alphaloop.deciding.policy import decide
from tests.fixtures.deciding import LIMITS, context_of, find, inferred

FREE = DrafterState("ngram", "r1", 4)
CONTEXT = context_of(1, 1, 200.0)


def served(
    longest_ms: float = 30.0, shortest_ms: float = 24.0, *, variance: float = 0.01, of_shortest: float = 0.01
) -> CostTable:
    """Vanilla rounds of 20 ms, at any load; the variances are those of ln(ms)."""
    return CostTable(
        [
            CostPoint(None, 1, 1, 20.0, 9, correction_variance=variance),
            CostPoint("ngram", 1, 2, shortest_ms, 9, kind=CostKind.SERVED, correction_variance=of_shortest),
            CostPoint("ngram", 1, 5, longest_ms, 9, kind=CostKind.SERVED, correction_variance=variance),
        ]
    )


def test_every_length_is_weighed_with_its_own_time_and_doubt() -> None:
    table, posteriors = served(of_shortest=0.09), {"ngram": inferred(0.7, k=4)}
    found = weigh(posteriors, [FREE], table, 1)
    assert {a.num_draft_tokens for a in found} == {0, 1, 2, 3, 4}
    assert [find(found, k, "ngram").round_ms for k in (1, 2, 3, 4)] == pytest.approx([24.0, 26.0, 28.0, 30.0])
    assert find(found, 1, "ngram").cost_sd == pytest.approx(math.hypot(0.3, 0.1))
    assert find(found, 4, "ngram").cost_sd == pytest.approx(math.hypot(0.1, 0.1))


@pytest.mark.parametrize(("alpha", "k"), [(0.95, 4), (0.3, 1), (0.05, 0)])
def test_the_length_follows_the_acceptance(alpha: float, k: int) -> None:
    decision = decide({"ngram": inferred(alpha, k=4)}, [FREE], served(shortest_ms=22.0), CONTEXT, LIMITS)
    assert decision.setting == (DraftSetting("ngram", k) if k else DraftSetting())


@pytest.mark.parametrize(("of_shortest", "is_tried"), [(1e-4, False), (0.09, True)])
def test_a_length_whose_time_is_doubted_is_tried_though_it_is_shorter(of_shortest: float, is_tried: bool) -> None:
    """Rounds of four tokens do not time rounds of one, and their acceptance is known: only a trial tells the time."""
    table = served(25.0, 22.0, variance=1e-4, of_shortest=of_shortest)
    posteriors = {"ngram": inferred(0.5, k=4, sd=1e-3, jobs=1e4)}
    context, budget = replace(CONTEXT, num_jobs=4, num_running=4), ExplorationBudget(5000.0, unseen={"ngram": 0.0})
    tried = set()
    for _ in range(20):
        decision = decide(posteriors, [FREE], table, context, LIMITS, budget=budget)
        assert decision.budget is not None
        budget = decision.budget
        if decision.reason is Reason.EXPLORING:
            tried.add(decision.setting)
    assert bool(tried) is is_tried
    assert tried <= {DraftSetting("ngram", k) for k in (1, 2, 3)}
