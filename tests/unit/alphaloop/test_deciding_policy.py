"""What is chosen, what is explored, and when a running choice is left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.cost import CostPoint, CostTable
from alphaloop.deciding.exploration import ExplorationBudget
from alphaloop.deciding.goodput import DrafterState, weigh
from alphaloop.deciding.job_facts import PolicyLimits
from alphaloop.deciding.policy import DecisionContext, DraftSetting, Reason, decide
from alphaloop.messages import Decoding, Mode, Purpose
from tests.fixtures.deciding import LIMITS, LOOKUP, choose, costs, find, inferred


def test_a_task_that_gains_is_decoded_speculatively_at_the_best_k() -> None:
    decision = choose({"lookup": inferred(0.9)})
    assert (decision.mode, decision.reason, decision.drafter) == (Mode.SPECULATIVE, Reason.FASTER, "lookup")
    assert decision.draft_revision == "r1"
    assert decision.num_draft_tokens == 8
    assert decision.kept == DraftSetting("lookup", 8)
    best = decision.alternatives[0]
    assert best.num_draft_tokens == 8
    assert best.speedup_low <= best.speedup <= best.speedup_high
    assert f"{best.speedup:.2f}x" in decision.explanation


def test_a_task_that_loses_is_decoded_vanilla() -> None:
    decision = choose({"lookup": inferred(0.02)})
    assert (decision.mode, decision.reason, decision.num_draft_tokens) == (Mode.VANILLA, Reason.NOT_FASTER, 0)
    assert decision.drafter is None
    assert decision.kept == DraftSetting()


def test_the_same_alpha_flips_with_load() -> None:
    history = {"lookup": inferred(0.6)}
    assert choose(history, costs=costs(wide_ms=32.0)).mode is Mode.SPECULATIVE
    assert choose(history, costs=costs(wide_ms=300.0)).mode is Mode.VANILLA


def test_a_round_brings_what_its_formula_says_and_not_what_articles_say() -> None:
    sure = inferred(0.8, sd=1e-4)
    assert sure.tokens[5] == pytest.approx((1 - 0.8**6) / 0.2, abs=1e-3)
    assert sure.tokens[5] == pytest.approx(3.69, abs=0.005)  # not 4.5
    assert sure.tokens[0] == pytest.approx(1.0)


def test_an_unknown_drafter_is_tried_where_its_proposals_cost_next_to_nothing() -> None:
    cold = choose()
    assert (cold.mode, cold.reason) == (Mode.SPECULATIVE, Reason.NO_HISTORY)
    dear = choose(costs=costs(draft_ms=90.0))
    assert (dear.mode, dear.reason) == (Mode.VANILLA, Reason.NO_HISTORY)


def test_without_costs_there_is_no_choice() -> None:
    assert choose({"lookup": inferred(0.9)}, costs=CostTable(())).reason is Reason.NO_COSTS
    only_target = CostTable([CostPoint(None, 1, 1, 30.0, 5)])
    assert choose({"lookup": inferred(0.9)}, costs=only_target).reason is Reason.NO_COSTS


def test_without_a_budget_nothing_is_explored() -> None:
    unsure = {"lookup": inferred(0.1, sd=1.5, jobs=1.0)}
    limits = PolicyLimits(explore_share=0.0, control_share=0.0)
    none_given = choose(unsure, costs=costs(draft_ms=9.0))
    none_allowed = choose(unsure, costs=costs(draft_ms=9.0), limits=limits, budget=ExplorationBudget())
    for decision in (none_given, none_allowed):
        assert decision.mode is Mode.VANILLA
        assert decision.reason is not Reason.EXPLORING


def test_what_is_uncertain_is_explored_and_what_is_certain_is_not() -> None:
    table = costs(draft_ms=6.0)
    unsure = choose({"lookup": inferred(0.10, sd=0.8, jobs=1.0)}, costs=table, budget=ExplorationBudget())
    assert (unsure.mode, unsure.reason) == (Mode.SPECULATIVE, Reason.EXPLORING)
    assert unsure.kept == DraftSetting()
    assert unsure.budget is not None
    assert unsure.budget.spent > 0
    sure = choose({"lookup": inferred(0.10, sd=0.02, jobs=500.0)}, costs=table, budget=ExplorationBudget())
    assert (sure.mode, sure.reason) == (Mode.VANILLA, Reason.NOT_FASTER)


def test_a_running_choice_stays_while_the_gain_is_within_its_noise() -> None:
    near = {"lookup": inferred(0.62, sd=0.3)}
    best = choose(near).num_draft_tokens
    second = choose(near).alternatives[1]
    gain = choose(near).alternatives[0].speedup / second.speedup
    assert gain < 1.02
    stays = choose(near, incumbent=DraftSetting("lookup", second.num_draft_tokens))
    assert stays.num_draft_tokens in (best, second.num_draft_tokens)
    far = choose(near, incumbent=DraftSetting("lookup", 1))
    assert far.num_draft_tokens == best


def test_a_choice_that_has_become_a_loss_is_left_at_once() -> None:
    decision = choose({"lookup": inferred(0.03, sd=0.5)}, incumbent=DraftSetting("lookup", 8))
    assert (decision.mode, decision.reason) == (Mode.VANILLA, Reason.NOT_FASTER)


def test_a_small_uncertain_gain_does_not_move_vanilla() -> None:
    table = costs(draft_ms=3.0)
    hopeful = {"lookup": inferred(0.11, sd=0.5)}
    free, held = choose(hopeful, costs=table), choose(hopeful, costs=table, incumbent=DraftSetting())
    assert 1.01 <= free.alternatives[0].speedup < 1.02
    assert free.mode is Mode.SPECULATIVE
    assert (held.mode, held.reason) == (Mode.VANILLA, Reason.UNCERTAIN)


def test_the_best_of_two_drafters_is_chosen() -> None:
    other = DrafterState("other", "r2", 4)
    table = CostTable(
        [
            CostPoint(None, 1, 1, 30.0, 5),
            CostPoint(None, 1, 9, 32.0, 5),
            CostPoint("lookup", 1, 2, 1.0, 5),
            CostPoint("other", 1, 2, 8.0, 5),
        ]
    )
    history = {"lookup": inferred(0.1), "other": inferred(0.95, k=4)}
    assert choose(history, drafters=(LOOKUP, other), costs=table).drafter == "other"


ALPHAS = st.floats(0.001, 0.999)


@given(
    alpha=ALPHAS,
    jobs=st.floats(0, 5000),
    sd=st.floats(0.001, 2),
    num_running=st.integers(1, 64),
    num_jobs=st.integers(1, 8),
    wide_ms=st.floats(1, 1000),
    draft_ms=st.floats(0.001, 1000),
    expected=st.floats(0, 1e6),
    purpose=st.sampled_from(Purpose),
    decoding=st.sampled_from(Decoding),
    incumbent=st.none() | st.just(DraftSetting()) | st.builds(DraftSetting, st.just("lookup"), st.integers(1, 8)),
    budget=st.none() | st.just(ExplorationBudget()),
)
def test_every_decision_is_possible_explained_and_repeatable(
    alpha: float,
    jobs: float,
    sd: float,
    num_running: int,
    num_jobs: int,
    wide_ms: float,
    draft_ms: float,
    expected: float,
    purpose: Purpose,
    decoding: Decoding,
    incumbent: DraftSetting | None,
    budget: ExplorationBudget | None,
) -> None:
    history = {"lookup": inferred(alpha, jobs=jobs, sd=sd)}
    table = costs(wide_ms=wide_ms, draft_ms=draft_ms)
    context = DecisionContext("code", num_running, num_jobs, expected, purpose, decoding)
    decision = decide(history, [LOOKUP], table, context, LIMITS, incumbent=incumbent, budget=budget)
    assert decision == decide(history, [LOOKUP], table, context, LIMITS, incumbent=incumbent, budget=budget)
    assert decision.explanation
    speculative = decision.mode is Mode.SPECULATIVE
    assert speculative == (decision.drafter is not None) == (decision.num_draft_tokens > 0)
    assert decision.num_draft_tokens <= LOOKUP.max_draft_tokens
    for a in decision.alternatives:
        assert a.speedup_low <= a.speedup + 1e-9
        assert a.speedup <= a.speedup_high + 1e-9
        assert 1 <= a.tokens_per_round <= a.num_draft_tokens + 1
    if decision.reason is Reason.FASTER:
        assert find(decision.alternatives, decision.num_draft_tokens).speedup >= 1
    if decision.budget is not None:
        assert 0 <= decision.budget.spent <= decision.budget.accrued + 1e-6


@given(low=ALPHAS, high=ALPHAS, k=st.integers(1, 8))
def test_more_acceptance_never_lowers_the_expected_gain(low: float, high: float, k: int) -> None:
    low, high = sorted((low, high))

    def gain(alpha: float) -> float:
        return find(weigh({"lookup": inferred(alpha)}, [LOOKUP], costs(), 1), k).speedup

    assert gain(low) <= gain(high) + 1e-9
