"""What is chosen and explored, when a running choice is left, what rules a drafter out, and what a whole job costs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.costs import CostPoint, CostTable
from alphaloop.deciding.decision import DecisionContext, DraftSetting, Reason
from alphaloop.deciding.exploration import ExplorationBudget
from alphaloop.deciding.goodput import DrafterState, JobSize, weigh
from alphaloop.deciding.job_facts import Aim, Objective
from alphaloop.deciding.policy import decide
from alphaloop.deciding.posterior import Posterior
from alphaloop.messages import Decoding, Mode, Purpose
from tests.fixtures.deciding import LOOKUP, choose, context_of, costs, find, inferred, with_prompts


def test_a_task_that_gains_is_decoded_speculatively_at_the_best_k() -> None:
    decision = choose({"lookup": inferred(0.9)})
    assert (decision.mode, decision.reason, decision.drafter) == (Mode.SPECULATIVE, Reason.FASTER, "lookup")
    assert decision.draft_revision == "r1"
    assert decision.num_draft_tokens == 8
    assert decision.kept == DraftSetting("lookup", 8)
    best = decision.alternatives[0]
    assert best.num_draft_tokens == 8
    assert f"{best.speedup:.2f}x" in decision.explanation


@pytest.mark.parametrize("incumbent", [None, DraftSetting("lookup", 8)])
def test_a_task_that_loses_is_decoded_vanilla_at_once(incumbent: DraftSetting | None) -> None:
    decision = choose({"lookup": inferred(0.03, sd=0.5)}, incumbent=incumbent)
    assert (decision.mode, decision.reason, decision.num_draft_tokens) == (Mode.VANILLA, Reason.NOT_FASTER, 0)
    assert decision.drafter is None
    assert decision.kept == DraftSetting()


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
    none_given = choose(unsure, costs=costs(draft_ms=9.0))
    none_allowed = choose(unsure, costs=costs(draft_ms=9.0), budget=ExplorationBudget(explore_share=0.0))
    for decision in (none_given, none_allowed):
        assert decision.mode is Mode.VANILLA
        assert decision.reason is not Reason.EXPLORING


def test_what_is_uncertain_is_explored_and_what_is_certain_is_not() -> None:
    table = costs(draft_ms=6.0)
    unsure = choose({"lookup": inferred(0.10, sd=0.8, jobs=1.0)}, costs=table, budget=ExplorationBudget())
    assert (unsure.mode, unsure.reason) == (Mode.SPECULATIVE, Reason.EXPLORING)
    assert unsure.kept == DraftSetting()
    assert unsure.budget.spent > 0
    sure = choose({"lookup": inferred(0.10, sd=0.02, jobs=500.0)}, costs=table, budget=ExplorationBudget())
    assert (sure.mode, sure.reason) == (Mode.VANILLA, Reason.NOT_FASTER)


def test_a_small_uncertain_gain_does_not_move_vanilla() -> None:
    table = costs(draft_ms=3.0)
    hopeful = {"lookup": inferred(0.11, sd=0.5)}
    free, held = choose(hopeful, costs=table), choose(hopeful, costs=table, incumbent=DraftSetting())
    assert 1.01 <= free.alternatives[0].speedup < 1.02
    assert free.mode is Mode.SPECULATIVE
    assert (held.mode, held.reason) == (Mode.VANILLA, Reason.UNCERTAIN)


ALPHAS = st.floats(0.001, 0.999)


@given(
    posterior=st.builds(inferred, ALPHAS, jobs=st.floats(0, 5000), sd=st.floats(0.001, 2)),
    table=st.builds(costs, wide_ms=st.floats(1, 1000), draft_ms=st.floats(0.001, 1000)),
    context=st.builds(
        context_of,
        st.integers(1, 64),
        st.integers(1, 8),
        st.floats(0, 1e6),
        purpose=st.sampled_from(Purpose),
        decoding=st.sampled_from(Decoding),
    ),
    incumbent=st.none() | st.just(DraftSetting()) | st.builds(DraftSetting, st.just("lookup"), st.integers(1, 8)),
    budget=st.none() | st.just(ExplorationBudget()),
)
def test_every_decision_is_possible_explained_and_repeatable(
    posterior: Posterior,
    table: CostTable,
    context: DecisionContext,
    incumbent: DraftSetting | None,
    budget: ExplorationBudget | None,
) -> None:
    history = {"lookup": posterior}
    decision = decide(history, [LOOKUP], table, context, incumbent=incumbent, budget=budget)
    assert decision == decide(history, [LOOKUP], table, context, incumbent=incumbent, budget=budget)
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


def test_short_outputs_are_not_worth_a_draft() -> None:
    short = choose({"lookup": inferred(0.9)}, expected_tokens=19.0, known_output_jobs=12.0)
    assert short.reason is Reason.SHORT_OUTPUT
    assert "12 jobs" in short.explanation
    assert choose({"lookup": inferred(0.9)}, expected_tokens=20.0).reason is Reason.FASTER


def test_a_stale_drafter_serves_nobody_but_its_probe() -> None:
    stale = replace(LOOKUP, is_stale=True)
    history = {"lookup": inferred(0.9)}
    assert choose(history, drafters=(stale,)).reason is Reason.STALE_DRAFT
    assert choose(history, drafters=(stale,), decoding=Decoding.SPECULATIVE).mode is Mode.VANILLA
    assert choose(history, drafters=(stale,), purpose=Purpose.PROBE).reason is Reason.PROBE
    assert choose(history, drafters=()).reason is Reason.NO_DRAFTER


def test_every_guard_has_its_own_reason_and_says_why() -> None:
    history = {"lookup": inferred(0.9)}
    heavy = replace(LOOKUP, cache_bytes_per_token=1 << 20)
    at_600_tokens = partial(choose, history, drafters=(heavy,), max_sequence_tokens=600.0)
    memory = at_600_tokens(free_cache_bytes=512 << 20)
    told = "1 sequences x 600 tokens x 1048576 bytes = 600 MiB, 512 MiB are free beside the target"
    assert (memory.reason, told in memory.explanation) == (Reason.NO_MEMORY, True)
    assert at_600_tokens(free_cache_bytes=601 << 20).mode is Mode.SPECULATIVE
    for beside, of_its_own, mode in ((0, 600, Mode.SPECULATIVE), (10_000, 599, Mode.VANILLA)):
        elsewhere = {LOOKUP.name: of_its_own << 20, "another": 0}
        found = at_600_tokens(free_cache_bytes=beside << 20, free_elsewhere=elsewhere)
        assert found.mode is mode, "a draft on a device of its own takes nothing of the target's"
    assert "600 MiB, 599 MiB are free on its device" in found.explanation
    for output, needed in ((200.0, 300), (550.0, 600)):
        hasty = partial(at_600_tokens, drafters=(replace(heavy, max_prompt_tokens=100),), max_output_tokens=output)
        short = hasty(free_cache_bytes=(needed << 20) - 1)
        assert f"1 sequences x {needed} tokens" in short.explanation, "what it does not read takes no memory"
        assert hasty(free_cache_bytes=needed << 20).mode is Mode.SPECULATIVE
    unable = choose(history, cannot_serve={"lookup": "logit_bias"})
    assert (unable.reason, "logit_bias" in unable.explanation) == (Reason.CANNOT_SERVE, True)
    off = choose(history, switched_off="Translate *")
    assert (off.reason, "Translate *" in off.explanation) == (Reason.SWITCHED_OFF, True)
    assert choose(history, drafters=(replace(LOOKUP, revision=""),)).reason is Reason.UNKNOWN_REVISION


def test_a_guard_takes_out_one_drafter_and_leaves_the_other() -> None:
    other = DrafterState("other", "r2", 4)
    table = CostTable([*costs().points, CostPoint("other", 1, 2, 1.0, 5)])
    history = {"lookup": inferred(0.9), "other": inferred(0.7, k=4)}
    decision = choose(history, drafters=(replace(LOOKUP, is_stale=True), other), costs=table)
    assert (decision.drafter, decision.reason) == ("other", Reason.FASTER)


def test_a_probe_uses_the_drafter_and_k_it_names() -> None:
    other = DrafterState("other", "r2", 4)
    drafters = (LOOKUP, other)
    probe = choose(drafters=drafters, purpose=Purpose.PROBE, probe_drafter="other", probe_num_draft_tokens=2)
    assert (probe.drafter, probe.draft_revision, probe.num_draft_tokens) == ("other", "r2", 2)
    assert choose(drafters=drafters, purpose=Purpose.PROBE, probe_num_draft_tokens=64).num_draft_tokens == 8
    unknown = choose(drafters=drafters, purpose=Purpose.PROBE, probe_drafter="gone")
    assert (unknown.mode, unknown.reason) == (Mode.VANILLA, Reason.NO_DRAFTER)


def test_controls_and_forced_modes_are_obeyed() -> None:
    history = {"lookup": inferred(0.9)}
    assert choose(history, purpose=Purpose.CONTROL).reason is Reason.CONTROL
    vanilla = choose(history, decoding=Decoding.VANILLA)
    assert (vanilla.mode, vanilla.reason) == (Mode.VANILLA, Reason.FORCED)
    forced = choose({"lookup": inferred(0.05)}, decoding=Decoding.SPECULATIVE, expected_tokens=1.0)
    assert (forced.mode, forced.reason) == (Mode.SPECULATIVE, Reason.FORCED)
    unmeasured = choose({"lookup": inferred(0.8)}, decoding=Decoding.SPECULATIVE, costs=CostTable(()))
    assert unmeasured.num_draft_tokens == 3  # .8³ > .5 > .8⁴


def test_a_target_time_is_met_surely_before_it_is_beaten_probably() -> None:
    # Vanilla needs 30 ms a token. Speculation is expected at 23, and may well be at 33.
    hopeful = {"lookup": inferred(0.35, sd=1.2)}
    table = costs(draft_ms=4.0)
    assert choose(hopeful, costs=table).mode is Mode.SPECULATIVE
    careful = choose(hopeful, costs=table, objective=Objective(Aim.TIME_PER_TOKEN, 31.0))
    assert (careful.mode, careful.reason) == (Mode.VANILLA, Reason.ON_TARGET)
    # Nothing but speculation can meet 25 ms, so it is tried however uncertain.
    needed = choose(hopeful, costs=table, objective=Objective(Aim.TIME_PER_TOKEN, 25.0))
    assert (needed.mode, needed.reason) == (Mode.SPECULATIVE, Reason.ON_TARGET)


def test_a_deadline_counts_the_whole_job() -> None:
    sure = {"lookup": inferred(0.9, sd=0.01)}
    table = with_prompts(costs(), target_ms=300.0)
    objective = Objective(Aim.DEADLINE, 300 + 200 * 30.0)
    relaxed = choose(sure, costs=table, prompt_tokens=100.0, objective=objective)
    assert relaxed.mode is Mode.SPECULATIVE
    assert all(a.chance == 1.0 for a in relaxed.alternatives if a.speedup >= 1)


def test_first_tokens_are_not_kept_waiting_for_a_draft_to_read() -> None:
    table = with_prompts(costs(), target_ms=300.0, draft_ms=60.0)
    history = {"lookup": inferred(0.9)}
    late = choose(history, costs=table, prompt_tokens=100.0, objective=Objective(Aim.TIME_TO_FIRST_TOKEN, 350.0))
    assert (late.mode, late.reason) == (Mode.VANILLA, Reason.FIRST_TOKENS)
    assert "300 + 60 ms" in late.explanation
    met = choose(history, costs=table, prompt_tokens=100.0, objective=Objective(Aim.TIME_TO_FIRST_TOKEN, 370.0))
    assert met.mode is Mode.SPECULATIVE


def test_a_job_gains_less_than_its_rounds_the_longer_its_prompt_is_read() -> None:
    history, table = {"lookup": inferred(0.9)}, with_prompts(costs(), target_ms=300.0)
    rounds = choose(history, costs=table).alternatives[0]
    short, long = (choose(history, costs=table, prompt_tokens=n).alternatives[0] for n in (100.0, 10_000.0))
    assert 1 < long.speedup < short.speedup < rounds.speedup
    # 200 tokens of 30 ms behind a prompt of 300 ms, against as many at the speed of the rounds.
    assert short.speedup == pytest.approx((300 + 200 * 30) / (300 + 200 * 30 / rounds.speedup), rel=1e-6)
    assert long.speedup_low <= long.speedup <= long.speedup_high


def test_a_draft_model_that_has_to_read_a_long_prompt_may_not_pay() -> None:
    history, table = {"lookup": inferred(0.5)}, with_prompts(costs(), target_ms=300.0, draft_ms=60.0)
    assert choose(history, costs=table, prompt_tokens=100.0).mode is Mode.SPECULATIVE
    decision = choose(history, costs=table, prompt_tokens=10_000.0)
    assert (decision.mode, decision.reason) == (Mode.VANILLA, Reason.NOT_FASTER)
    hasty = replace(LOOKUP, max_prompt_tokens=100)
    assert choose(history, costs=table, prompt_tokens=10_000.0, drafters=(hasty,)).mode is Mode.SPECULATIVE


def test_costs_are_taken_at_the_context_of_the_job() -> None:
    # Verification grows dear with the context here: what pays behind a short prompt does not behind a long one.
    far = [
        CostPoint(p.drafter, p.batch, p.width, p.median_ms * (9 if p.width > 1 else 1), 5, 4096) for p in costs().points
    ]
    table, history = CostTable([*costs().points, *far]), {"lookup": inferred(0.7)}
    size = JobSize(4000.0, 200.0)
    assert size.context == 4100.0
    assert choose(history, costs=table, prompt_tokens=10.0).mode is Mode.SPECULATIVE
    assert choose(history, costs=table, prompt_tokens=size.num_prompt_tokens).mode is Mode.VANILLA


def test_a_drafter_that_ends_its_drafts_early_is_charged_for_what_it_proposes() -> None:
    # The same acceptance where anything is proposed; one drafter goes on to eight tokens, the other ends after two.
    full, ended = inferred(0.9), inferred(0.9, reach=(1.0, 1.0, *(0.1,) * 6))
    dear = costs(wide_ms=90.0)
    for posterior, low, high in ((full, 80.0, 92.0), (ended, 40.0, 70.0)):
        assert low < find(weigh({"lookup": posterior}, [LOOKUP], dear, 1), 8).round_ms < high
