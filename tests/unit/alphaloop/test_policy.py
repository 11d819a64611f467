from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.cost import CostKind, CostPoint, CostTable
from alphaloop.deciding.goodput import DrafterState, Evidence, JobSize, PolicyLimits, weigh
from alphaloop.deciding.policy import Decision, DecisionContext, Reason, decide
from alphaloop.messages import Decoding, Mode, Purpose

LOOKUP = DrafterState("lookup", "r1", 8)
LIMITS = PolicyLimits()


def costs(*, draft_ms: float = 1.0, wide_ms: float = 32.0, vanilla_ms: float = 30.0) -> CostTable:
    """A device on which verification of nine positions costs `wide_ms`, at batch 1 and 8 alike."""
    return CostTable(
        CostPoint(drafter, batch, width, ms, 5)
        for batch in (1, 8)
        for drafter, width, ms in [
            (None, 1, vanilla_ms), (None, 9, wide_ms), ("lookup", 2, draft_ms), ("lookup", 9, draft_ms),
        ]
    )  # fmt: skip


def evidence(
    alpha: float, *, k: int = 8, rounds: int = 400, num_jobs: int = 20, error: float | None = 0.05
) -> Evidence:
    """What `num_jobs` jobs at draft length k leave behind when every position is accepted with α, prefills included."""
    trials, accepts, through = [], [], rounds
    for _ in range(k):
        trials.append(through)
        through = round(through * alpha)
        accepts.append(through)
    counts = AcceptanceCounts(rounds + num_jobs, num_jobs, 0, tuple(trials), tuple(trials), tuple(accepts))
    return Evidence(counts, num_jobs, error)


def choose(history: dict[str, Evidence] | None = None, **changes: Any) -> Decision:
    drafters = changes.pop("drafters", (LOOKUP,))
    table = changes.pop("costs", costs())
    limits = changes.pop("limits", LIMITS)
    context = DecisionContext("code", 1, 200.0, 0.5)
    return decide(history or {}, drafters, table, replace(context, **changes), limits)


def test_a_task_that_gains_is_decoded_speculatively_at_the_best_k() -> None:
    decision = choose({"lookup": evidence(0.9)})
    assert (decision.mode, decision.reason, decision.drafter) == (Mode.SPECULATIVE, Reason.FASTER, "lookup")
    assert decision.draft_revision == "r1"
    assert decision.num_draft_tokens == 8
    best = decision.alternatives[0]
    assert best.num_draft_tokens == 8
    assert best.speedup_low <= best.speedup <= best.speedup_high
    assert f"{best.speedup:.2f}x" in decision.explanation


def test_a_task_that_loses_is_decoded_vanilla() -> None:
    decision = choose({"lookup": evidence(0.05)})
    assert (decision.mode, decision.reason, decision.num_draft_tokens) == (Mode.VANILLA, Reason.NOT_FASTER, 0)
    assert decision.drafter is None


@pytest.mark.parametrize(("alpha", "draft_ms", "faster"), [(0.30, 1.5, True), (0.15, 1.5, False),
                                                           (0.55, 9.0, False), (0.70, 9.0, True)])  # fmt: skip
def test_the_break_even_alpha_is_the_costs_business(alpha: float, draft_ms: float, faster: bool) -> None:
    # A draft model at k = 5: five draft steps of c = .05 and c = .30 of a target pass break even at .20 and .62.
    table = costs(draft_ms=5 * draft_ms, wide_ms=30.0)
    limits = PolicyLimits(prior_trials=0.01, min_speedup=1.0)
    five = next(
        a for a in weigh({"lookup": evidence(alpha, rounds=100_000, num_jobs=1000)}, [LOOKUP], table, 1, limits)
        if a.num_draft_tokens == 5
    )  # fmt: skip
    assert (five.speedup > 1) == faster


def test_the_same_alpha_flips_with_load() -> None:
    cheap_verification, dear_verification = costs(wide_ms=32.0), costs(wide_ms=200.0)
    history = {"lookup": evidence(0.6)}
    assert choose(history, costs=cheap_verification).mode is Mode.SPECULATIVE
    assert choose(history, costs=dear_verification).mode is Mode.VANILLA


def test_a_cold_task_is_vanilla_until_it_is_explored() -> None:
    assert choose().reason is Reason.NO_HISTORY
    explored = choose(draw=0.1)
    assert (explored.mode, explored.reason, explored.num_draft_tokens) == (Mode.SPECULATIVE, Reason.EXPLORING, 3)
    assert choose({"lookup": evidence(0.9, num_jobs=4)}).reason is Reason.FASTER


def test_a_cold_task_is_explored_even_before_anything_was_measured() -> None:
    assert choose(draw=0.1, costs=CostTable(())).reason is Reason.EXPLORING
    assert choose(draw=0.9, costs=CostTable(())).reason is Reason.NO_COSTS


def test_the_budget_buys_controls_where_speculation_runs_and_trials_where_it_does_not() -> None:
    control = choose({"lookup": evidence(0.9)}, draw=0.01)
    assert (control.mode, control.reason) == (Mode.VANILLA, Reason.CONTROL)
    trial = choose({"lookup": evidence(0.05)}, draw=0.01)
    assert (trial.mode, trial.reason) == (Mode.SPECULATIVE, Reason.EXPLORING)


@pytest.mark.parametrize("alpha", [0.05, 0.9])
def test_the_budget_is_kept(alpha: float) -> None:
    usual = choose({"lookup": evidence(alpha)}).mode
    draws = [i / 1000 for i in range(1000)]
    others = sum(choose({"lookup": evidence(alpha)}, draw=draw).mode is not usual for draw in draws)
    assert others == 20


def test_without_a_budget_nothing_is_explored() -> None:
    limits = PolicyLimits(explore_share=0.0, cold_explore_share=0.0)
    assert choose(draw=0.0, limits=limits).mode is Mode.VANILLA
    assert choose({"lookup": evidence(0.9)}, draw=0.0, limits=limits).mode is Mode.SPECULATIVE


def test_a_promising_but_uncertain_drafter_waits() -> None:
    decision = choose({"lookup": evidence(0.6, num_jobs=5, error=2.0)})
    assert (decision.mode, decision.reason) == (Mode.VANILLA, Reason.UNCERTAIN)


def test_a_promising_but_uncertain_drafter_is_tried_as_often_as_a_cold_one() -> None:
    uncertain = {"lookup": evidence(0.6, num_jobs=5, error=2.0)}
    decisions = [choose(uncertain, draw=i / 100) for i in range(100)]
    explored = [decision for decision in decisions if decision.reason is Reason.EXPLORING]
    assert len(explored) == 25
    assert {decision.mode for decision in explored} == {Mode.SPECULATIVE}


def test_a_certain_drafter_is_taken_before_a_better_uncertain_one() -> None:
    sure = DrafterState("sure", "r2", 4)
    table = CostTable([
        CostPoint(None, 1, 1, 30.0, 5), CostPoint(None, 1, 9, 32.0, 5), CostPoint("lookup", 1, 2, 1.0, 5),
        CostPoint("sure", 1, 2, 1.0, 5),
    ])  # fmt: skip
    history = {"lookup": evidence(0.8, error=2.5), "sure": evidence(0.6, k=4, error=0.05)}
    decision = choose(history, drafters=(LOOKUP, sure), costs=table)
    best = decision.alternatives[0]
    assert best.drafter == "lookup"
    assert best.speedup_low < 1.0 < best.speedup
    assert (decision.reason, decision.drafter) == (Reason.FASTER, "sure")


def test_a_drafter_that_never_proposes_is_worth_nothing() -> None:
    silent = Evidence(AcceptanceCounts(rounds=500, num_empty_rounds=500), 20, 0.01)
    assert choose({"lookup": silent}).reason is Reason.NOT_FASTER


def test_short_drafts_in_the_history_do_not_speak_against_long_ones() -> None:
    many_short = evidence(0.9, k=3, rounds=4000, num_jobs=200).counts
    few_long = evidence(0.9, k=8, rounds=400, num_jobs=20).counts
    both = many_short + few_long
    mixed = Evidence(both, 220, 0.05, chances=(both.trials[0], *both.accepts[:2], *few_long.accepts[2:7]))

    def eight(entry: Evidence) -> float:
        return next(
            a for a in weigh({"lookup": entry}, [LOOKUP], costs(), 1, LIMITS) if a.num_draft_tokens == 8
        ).speedup

    pure = Evidence(few_long, 20, 0.05)
    assert eight(mixed) == pytest.approx(eight(pure), rel=0.05)
    assert eight(Evidence(both, 220, 0.05)) < 0.8 * eight(pure)


def test_decayed_counts_never_promise_more_than_a_full_draft() -> None:
    uneven = Evidence(AcceptanceCounts(10, 0, 0, (10, 9), (10, 9), (9, 9)), num_jobs=9, tokens_per_round_se=0.0)
    for alternative in weigh({"lookup": uneven}, [LOOKUP], costs(), 1, LIMITS):
        assert alternative.tokens_per_round <= alternative.num_draft_tokens + 1


def test_short_outputs_are_not_worth_a_draft() -> None:
    assert choose({"lookup": evidence(0.9)}, expected_tokens=19.0).reason is Reason.SHORT_OUTPUT
    assert choose({"lookup": evidence(0.9)}, expected_tokens=20.0).reason is Reason.FASTER


def test_a_stale_drafter_serves_nobody_but_its_probe() -> None:
    stale = replace(LOOKUP, is_stale=True)
    history = {"lookup": evidence(0.9)}
    assert choose(history, drafters=(stale,)).reason is Reason.STALE_DRAFT
    assert choose(history, drafters=(stale,), decoding=Decoding.SPECULATIVE).mode is Mode.VANILLA
    assert choose(history, drafters=(stale,), purpose=Purpose.PROBE).reason is Reason.PROBE
    assert choose(history, drafters=()).reason is Reason.NO_DRAFTER


def test_a_probe_uses_the_drafter_and_k_it_names() -> None:
    other = DrafterState("other", "r2", 4)
    drafters = (LOOKUP, other)
    probe = choose(drafters=drafters, purpose=Purpose.PROBE, probe_drafter="other", probe_num_draft_tokens=2, draw=0.0)
    assert (probe.drafter, probe.draft_revision, probe.num_draft_tokens) == ("other", "r2", 2)
    assert choose(drafters=drafters, purpose=Purpose.PROBE, probe_num_draft_tokens=64).num_draft_tokens == 8
    unknown = choose(drafters=drafters, purpose=Purpose.PROBE, probe_drafter="gone")
    assert (unknown.mode, unknown.reason) == (Mode.VANILLA, Reason.NO_DRAFTER)


def test_controls_and_forced_modes_are_obeyed() -> None:
    history = {"lookup": evidence(0.9)}
    assert choose(history, purpose=Purpose.CONTROL).reason is Reason.CONTROL
    vanilla = choose(history, decoding=Decoding.VANILLA)
    assert (vanilla.mode, vanilla.reason) == (Mode.VANILLA, Reason.FORCED)
    forced = choose({"lookup": evidence(0.05)}, decoding=Decoding.SPECULATIVE, expected_tokens=1.0)
    assert (forced.mode, forced.reason) == (Mode.SPECULATIVE, Reason.FORCED)
    assert choose(decoding=Decoding.SPECULATIVE, costs=CostTable(())).num_draft_tokens == 3


def test_the_best_of_two_drafters_is_chosen() -> None:
    other = DrafterState("other", "r2", 4)
    table = CostTable([
        CostPoint(None, 1, 1, 30.0, 5), CostPoint(None, 1, 9, 32.0, 5), CostPoint("lookup", 1, 2, 1.0, 5),
        CostPoint("other", 1, 2, 8.0, 5),
    ])  # fmt: skip
    history = {"lookup": evidence(0.1), "other": evidence(0.95, k=4)}
    assert choose(history, drafters=(LOOKUP, other), costs=table).drafter == "other"


ALPHAS = st.floats(0, 1)


@given(
    alpha=ALPHAS,
    k=st.integers(1, 8),
    rounds=st.integers(0, 5000),
    num_jobs=st.integers(0, 50),
    error=st.none() | st.floats(0, 5),
    draw=st.floats(0, 1, exclude_max=True),
    batch=st.integers(1, 64),
    wide_ms=st.floats(1, 1000),
    draft_ms=st.floats(0.001, 1000),
    expected=st.floats(0, 1e6),
    purpose=st.sampled_from(Purpose),
    decoding=st.sampled_from(Decoding),
)
def test_every_decision_is_possible_explained_and_repeatable(
    alpha: float, k: int, rounds: int, num_jobs: int, error: float | None, draw: float, batch: int, wide_ms: float,
    draft_ms: float, expected: float, purpose: Purpose, decoding: Decoding,
) -> None:  # fmt: skip
    history = {"lookup": evidence(alpha, k=k, rounds=rounds, num_jobs=num_jobs, error=error)}
    table = costs(wide_ms=wide_ms, draft_ms=draft_ms)
    context = DecisionContext("code", batch, expected, draw, purpose, decoding)
    decision = decide(history, [LOOKUP], table, context, LIMITS)
    assert decision == decide(history, [LOOKUP], table, context, LIMITS)
    assert decision.explanation
    speculative = decision.mode is Mode.SPECULATIVE
    assert speculative == (decision.drafter is not None) == (decision.num_draft_tokens > 0)
    assert decision.num_draft_tokens <= LOOKUP.max_draft_tokens
    for a in decision.alternatives:
        assert a.speedup_low <= a.speedup + 1e-9
        assert a.speedup <= a.speedup_high + 1e-9
        assert 1 <= a.tokens_per_round <= a.num_draft_tokens + 1
    if decision.reason is Reason.FASTER:
        chosen = next(a for a in decision.alternatives if a.num_draft_tokens == decision.num_draft_tokens)
        assert chosen.speedup >= LIMITS.min_speedup


@given(low=ALPHAS, high=ALPHAS, k=st.integers(1, 8))
def test_more_acceptance_never_lowers_the_expected_gain(low: float, high: float, k: int) -> None:
    low, high = sorted((low, high))

    def gain(alpha: float) -> float:
        found = weigh({"lookup": evidence(alpha, rounds=1000)}, [LOOKUP], costs(), 1, LIMITS)
        return next(a for a in found if a.num_draft_tokens == k).speedup

    assert gain(low) <= gain(high) + 1e-9


def test_every_reason_has_a_word_of_its_own() -> None:
    assert len({reason.value for reason in Reason}) == len(Reason)
    assert all(reason.value.replace("_", "").islower() for reason in Reason)


def with_prompts(table: CostTable, *, target_ms: float, draft_ms: float = 0.0) -> CostTable:
    """The same device, on which a prompt of 100 tokens takes the target `target_ms` and the drafter `draft_ms`."""
    prompts = [("lookup", draft_ms)] if draft_ms else []
    return CostTable([
        *table.points,
        *(CostPoint(name, 1, 100, ms, 3, 0, CostKind.PREFILL) for name, ms in ((None, target_ms), *prompts)),
    ])  # fmt: skip


def test_a_job_gains_less_than_its_rounds_the_longer_its_prompt_is_read() -> None:
    history, table = {"lookup": evidence(0.9)}, with_prompts(costs(), target_ms=300.0)
    rounds = choose(history, costs=table).alternatives[0]
    short, long = (choose(history, costs=table, prompt_tokens=n).alternatives[0] for n in (100.0, 10_000.0))
    assert 1 < long.speedup < short.speedup < rounds.speedup
    # 200 tokens of 30 ms behind a prompt of 300 ms, against as many at the speed of the rounds.
    assert short.speedup == pytest.approx((300 + 200 * 30) / (300 + 200 * 30 / rounds.speedup), rel=1e-6)
    assert long.speedup_low <= long.speedup <= long.speedup_high


def test_a_draft_model_that_has_to_read_a_long_prompt_may_not_pay() -> None:
    history, table = {"lookup": evidence(0.5)}, with_prompts(costs(), target_ms=300.0, draft_ms=60.0)
    assert choose(history, costs=table, prompt_tokens=100.0).mode is Mode.SPECULATIVE
    decision = choose(history, costs=table, prompt_tokens=10_000.0)
    assert (decision.mode, decision.reason) == (Mode.VANILLA, Reason.NOT_FASTER)


def test_costs_are_taken_at_the_context_of_the_job() -> None:
    # Verification grows dear with the context here: what pays behind a short prompt does not behind a long one.
    far = [
        CostPoint(p.drafter, p.batch, p.width, p.median_ms * (6 if p.width > 1 else 1), 5, 4096) for p in costs().points
    ]
    table, history = CostTable([*costs().points, *far]), {"lookup": evidence(0.7)}
    size = JobSize(4000.0, 200.0)
    assert size.context == 4100.0
    assert choose(history, costs=table, prompt_tokens=10.0).mode is Mode.SPECULATIVE
    assert choose(history, costs=table, prompt_tokens=size.num_prompt_tokens).mode is Mode.VANILLA


def test_a_drafter_that_ends_its_drafts_early_is_charged_for_what_it_proposes() -> None:
    # The same acceptance where anything is proposed; one drafter goes on to eight tokens, the other ends after two.
    full = evidence(0.9, rounds=4000)
    trials, accepts = [4000, 3600], [3600, 3240]
    for _ in range(6):
        trials.append(min(accepts[-1], 400))
        accepts.append(round(0.9 * trials[-1]))
    counts = AcceptanceCounts(4020, 20, 0, (4000, 4000, *trials[2:]), tuple(trials), tuple(accepts))
    ended = Evidence(counts, 20, 0.05)
    dear = costs(wide_ms=90.0)
    for history, low, high in ((full, 80.0, 92.0), (ended, 40.0, 70.0)):
        eight = next(a for a in weigh({"lookup": history}, [LOOKUP], dear, 1, LIMITS) if a.num_draft_tokens == 8)
        assert low < eight.round_ms < high
