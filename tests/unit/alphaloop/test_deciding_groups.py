from __future__ import annotations

from functools import partial
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.costs import CostKind, CostPoint, CostTable
from alphaloop.deciding.decision import DecisionContext, DraftSetting, Reason
from alphaloop.deciding.exploration import ExplorationBudget
from alphaloop.deciding.goodput import DrafterState, JobSize
from alphaloop.deciding.policy import Group, Together, decide_groups
from alphaloop.messages import Decoding, Mode
from tests.fixtures.deciding import context_of, inferred

DRAFTER = DrafterState("draft", "r1", 4)
OTHER = DrafterState("lookup", "r1", 3)


def costs(per_position_ms: float) -> CostTable:
    """A pass of w positions for each of b sequences takes 20 ms and so much a position."""
    return CostTable(
        [
            *(CostPoint(None, b, w, 20 + per_position_ms * b * w, 5) for b in (1, 8) for w in (1, 5)),
            *(CostPoint("draft", b, w, 1.0 * (w - 1) + 0.2 * b, 5) for b in (1, 8) for w in (2, 5)),
            *(CostPoint("lookup", b, w, 0.1, 5) for b in (1, 8) for w in (2, 5)),
        ]
    )


def group(num_jobs: int, draft: float, lookup: float = 0.05) -> Group:
    sure = partial(inferred, jobs=100.0, sd=0.01)
    return Group(num_jobs, {"draft": sure(draft, k=4), "lookup": sure(lookup, k=3)})


def context(num_jobs: int, **more: object) -> DecisionContext:
    return context_of(num_jobs, num_jobs, 200.0, **more)


def test_a_group_that_drafts_badly_makes_room_for_one_that_drafts_well() -> None:
    groups = [group(4, 0.9), group(4, 0.05)]
    good, bad = decide_groups(groups, [DRAFTER, OTHER], costs(3.0), context(8))
    assert (good.mode, good.drafter, good.reason) == (Mode.SPECULATIVE, "draft", Reason.FASTER)
    assert (bad.mode, bad.num_draft_tokens, bad.reason) == (Mode.VANILLA, 0, Reason.NOT_FASTER)
    assert "apart" in bad.explanation


def test_groups_may_use_different_drafters() -> None:
    groups = [group(4, 0.9, 0.05), group(4, 0.05, 0.9)]
    first, second = decide_groups(groups, [DRAFTER, OTHER], costs(2.0), context(8))
    assert (first.drafter, second.drafter) == ("draft", "lookup")


def test_a_group_whose_prompts_a_draft_would_have_to_read_stays_without_it() -> None:
    groups = [group(7, 0.9, 0.05), group(1, 0.7, 0.05)]
    table = costs(0.5)
    reads = CostTable(
        [
            *table.points,
            CostPoint(None, 1, 100, 500.0, 3, 0, CostKind.PREFILL),
            CostPoint("draft", 1, 100, 130.0, 3, 0, CostKind.PREFILL),
        ]
    )
    without, free, dear = (
        Together(groups, [DRAFTER, OTHER], costs, size, 8)
        for costs, size in ((table, None), (table, JobSize(1000.0, 200.0)), (reads, JobSize(1000.0, 200.0)))
    )
    drafting = (DraftSetting("draft", 4), DraftSetting("draft", 2))
    assert without.rate(drafting) == pytest.approx(free.rate(drafting))
    assert without.climb(DraftSetting("draft", 4))[0][1].drafter == "draft"
    assert dear.climb(DraftSetting("draft", 4))[0][1].drafter is None
    # 1,600 tokens behind eight prompts of 5 s, and eight of 1.3 s that the draft reads.
    assert dear.rate(drafting) == pytest.approx(1600 / (8 * 6300.0 + 1600 / (without.rate(drafting) or 0.0)))


def test_groups_that_hardly_differ_stay_together() -> None:
    groups = [group(4, 0.80), group(4, 0.79)]
    first, second = decide_groups(groups, [DRAFTER, OTHER], costs(1.0), context(8))
    assert (first.drafter, first.num_draft_tokens) == (second.drafter, second.num_draft_tokens)


@pytest.mark.parametrize("more", [{"decoding": Decoding.VANILLA}, {"switched_off": "Translate *"}])
def test_what_is_fixed_for_the_batch_is_fixed_for_its_groups(more: dict[str, object]) -> None:
    groups = [group(4, 0.9), group(4, 0.05)]
    decisions = decide_groups(groups, [DRAFTER], costs(3.0), context(8, **more))
    assert {decision.mode for decision in decisions} == {Mode.VANILLA}


def test_a_trial_is_a_trial_for_all() -> None:
    budget = ExplorationBudget(balance=1e6, accrued=1e6, unseen={"draft": 1e6})
    decisions = decide_groups(
        [group(6, 0.35), group(2, 0.05, 0.9)], [DRAFTER, OTHER], costs(3.0), context(8), budget=budget
    )
    assert {(decision.reason, decision.drafter) for decision in decisions} == {(Reason.EXPLORING, "draft")}


def test_one_job_beside_many_is_decided_at_the_cost_of_many() -> None:
    """A draft for two jobs pays while two run, and does not while 32 run, which are taken to be mixed alike."""
    groups, table = [group(1, 0.8), group(1, 0.6)], costs(3.0)
    alone = decide_groups(groups, [DRAFTER], table, context(2))
    beside = decide_groups(groups, [DRAFTER], table, context_of(32, 2, 200.0))
    assert {decision.mode for decision in alone} == {Mode.SPECULATIVE}
    assert sum(decision.num_draft_tokens for decision in beside) < sum(d.num_draft_tokens for d in alone)


@given(
    alphas=st.tuples(*(st.floats(0.02, 0.97),) * 4),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    per_position_ms=st.floats(0.0, 5.0),
)
def test_climbing_ends_near_the_best_of_all_combinations_and_never_below_the_common_choice(
    alphas: tuple[float, ...], sizes: tuple[int, int], per_position_ms: float
) -> None:
    groups = [group(sizes[0], alphas[0], alphas[1]), group(sizes[1], alphas[2], alphas[3])]
    together = Together(groups, [DRAFTER, OTHER], costs(per_position_ms), None, sum(sizes))
    common = together.best_common(DraftSetting())
    apart, gain = together.climb(common)
    choices = [
        DraftSetting(),
        *(DraftSetting("draft", k) for k in range(1, 5)),
        *(DraftSetting("lookup", k) for k in range(1, 4)),
    ]
    best = max(together.rate(pair) or 0.0 for pair in product(choices, choices))
    found = together.rate(apart) or 0.0
    assert gain >= 1
    assert found >= 0.93 * best
