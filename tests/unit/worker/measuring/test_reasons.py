"""Every reason speaks where the figures bear it out, with their numbers, and is silent elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.payoff.figures import Acceptance, Candidate
from tests.fixtures.costs import NUM_PROMPTS, acceptance, evidence, figures
from worker.measuring import report as why
from worker.measuring.report import REASONS, GreedySample, HeldOut, reasons


def test_a_candidate_with_nothing_wrong_has_an_account_and_no_excuse() -> None:
    fine = evidence((0.9, 0.9, 0.9, 0.9), draft=0.05, verify=0.95, ratio=1.9)
    assert [name for name, _ in reasons(fine)] == ["account"]
    assert len({reason.__name__ for reason in REASONS}) == len(REASONS)


def test_the_account_adds_up() -> None:
    told = why.account(evidence((0.5,), draft=0.3, verify=1.0, reading=1.0))
    assert told is not None
    assert "1.50 tokens a round" in told
    assert "takes 1.40 vanilla rounds (drafting 0.30, the target's pass 1.00, the rest 0.10)" in told
    assert "50 % of vanilla's time: 1.03x" in told
    assert why.account(replace(evidence(), costs=None)) is None


def test_low_acceptance_names_what_the_bar_needs() -> None:
    # A round of 1.4 at k = 1 needs 1 + α = 1.4 · 1.3.
    low = evidence((0.5,), draft=0.3, verify=1.0)
    told = why.low_acceptance(low)
    assert told is not None
    assert "α is .50 [" in told
    assert "1.30x needs 0.82, and 0.40 to lose nothing" in told
    assert why.low_acceptance(evidence((0.95,), draft=0.3, verify=1.0)) is None
    assert why.low_acceptance(evidence(accepted=acceptance([]))) is None
    impossible = why.low_acceptance(evidence((0.5,), draft=0.9, verify=1.0))
    assert impossible is not None
    assert impossible.endswith("more than every token accepted.")


def test_k_is_too_high_where_a_shorter_draft_was_faster_on_the_same_prompts() -> None:
    falling = (0.9, 0.5, 0.3, 0.2)
    own = [1.0 + 0.02 * i for i in range(NUM_PROMPTS)]
    faster = figures(Candidate("small", 2), [1.2 * ratio for ratio in own])
    told = why.k_too_high(evidence(falling, ratio=own, siblings=[faster]))
    assert told is not None
    assert told.startswith("k=4 is too long: on the same prompts k=2 is 1.20 [1.20 1.20] times as fast")
    assert "from .90 at position 1 to .2" in told


def test_k_is_not_too_high_for_a_faster_one_by_chance() -> None:
    # Faster on seven prompts of twelve, slower on five: the medians differ, the prompts do not say so.
    flat = (0.9,) * 4
    own = [1.0] * NUM_PROMPTS
    mixed = figures(Candidate("small", 2), [1.1] * 7 + [0.9] * 5)
    assert why.k_too_high(evidence(flat, draft=0.0, verify=0.9, ratio=own, siblings=[mixed])) is None
    longer = figures(Candidate("small", 8), [2.0] * NUM_PROMPTS)
    assert why.k_too_high(evidence(flat, draft=0.0, verify=0.9, ratio=own, siblings=[longer])) is None


def test_a_shorter_draft_that_was_not_tried_is_modelled() -> None:
    steep = evidence((0.9, 0.2, 0.2, 0.2), draft=0.8, verify=1.2)
    told = why.k_too_high(steep)
    assert told is not None
    assert "k=1 would be" in told
    assert "measure it with --k 1" in told
    # It was measured, and was no faster on these prompts: the model is not believed.
    assert why.k_too_high(replace(steep, siblings=[figures(Candidate("small", 1), 1.0)])) is None
    assert why.k_too_high(evidence((0.9,) * 4, draft=0.1, verify=1.0)) is None


def test_temperature_is_blamed_where_greedy_is_accepted_more_often() -> None:
    costly = replace(evidence(), temperature=0.8, greedy=GreedySample(acceptance([0.9], 8), acceptance([0.6], 8)))
    told = why.temperature(costly)
    assert told is not None
    assert "Temperature 0.8 costs acceptance: on 8 of the prompts α is .60 [" in told
    assert "and .90 [" in told
    same = GreedySample(acceptance([0.6], 8), acceptance([0.6], 8))
    assert why.temperature(replace(costly, greedy=same)) is None
    assert why.temperature(evidence()) is None
    nothing = GreedySample(acceptance([], 8), acceptance([0.6], 8))
    assert why.temperature(replace(costly, greedy=nothing)) is None


def test_the_tokenizer_is_blamed_for_what_the_check_found() -> None:
    warned = replace(evidence(), findings=[("size", "It is large."), ("chat template", "The draft has none.")])
    told = why.tokenizer(warned)
    assert told is not None
    assert "chat template: The draft has none." in told
    assert "large" not in told
    assert why.tokenizer(replace(evidence(), findings=[("size", "It is large.")])) is None


def test_the_domain_is_blamed_where_its_own_texts_were_accepted_more_often() -> None:
    told = why.domain(replace(evidence((0.6,)), held_out=HeldOut(0.75, "its 64 held-out texts")))
    assert told is not None
    assert "α_1 is .60 [" in told
    assert ".75 on its 64 held-out texts" in told
    assert why.domain(replace(evidence((0.6,)), held_out=HeldOut(0.6, "its texts"))) is None
    assert why.domain(evidence((0.6,))) is None


def test_drafting_is_too_dear_where_a_free_draft_would_reach_the_bar() -> None:
    dear = evidence((0.7, 0.7), draft=0.8, verify=0.9, ratio=1.2)
    told = why.draft_cost(dear)
    assert told is not None
    assert "costs 0.40 of a target pass (c), 0.80 a round" in told
    assert "this would be 2.19x" in told
    assert why.draft_cost(evidence((0.2, 0.2), draft=0.8, verify=0.9, ratio=0.7)) is None
    assert why.draft_cost(evidence((0.7, 0.7), draft=0.8, verify=0.9, ratio=1.35)) is None


def test_a_wide_pass_is_blamed_where_a_narrow_one_would_reach_the_bar() -> None:
    busy = evidence((0.7, 0.7), draft=0.1, verify=1.8, ratio=1.05, batch=16)
    told = why.wide_pass(busy)
    assert told is not None
    assert "on this device at batch 16: a pass over 3.0 positions takes 2.00 times one over 1" in told
    assert why.wide_pass(evidence((0.7, 0.7), draft=0.1, verify=0.91, ratio=1.05)) is None
    assert why.wide_pass(evidence((0.1, 0.1), draft=0.1, verify=1.8, ratio=0.6)) is None


def test_prompts_dominate_where_the_rounds_alone_would_reach_the_bar() -> None:
    told = why.prompt_dominated(evidence((0.9, 0.9), draft=0.1, verify=1.0, reading=3.0, ratio=1.15))
    assert told is not None
    assert "75 % of vanilla's time" in told
    assert "could gain more than 1.33x" in told
    assert why.prompt_dominated(evidence((0.9, 0.9), draft=0.1, verify=1.0, reading=3.0, ratio=1.4)) is None
    assert why.prompt_dominated(evidence((0.2, 0.2), draft=0.1, verify=1.0, reading=3.0)) is None


@pytest.mark.parametrize(("tokens", "is_short"), [(19.0, True), (20.0, False)])
def test_short_answers(tokens: float, is_short: bool) -> None:
    told = why.short_outputs(evidence(output_tokens=tokens))
    assert (told is not None) is is_short
    assert told is None or "19 tokens in the median" in told


def test_silence_of_a_drafter() -> None:
    quiet = AcceptanceCounts(101, 61, 0, (40, 40), (40, 30), (30, 20))
    seen = Acceptance((quiet,) * NUM_PROMPTS, NUM_PROMPTS)
    told = why.nothing_proposed(evidence(accepted=seen))
    assert told is not None
    assert "small proposes nothing in 60 % of the rounds" in told
    assert why.nothing_proposed(evidence()) is None


def test_the_median_is_not_believed_alone() -> None:
    ratios, seconds = [1.4] * 16 + [0.75] * 4, [1.0] * 16 + [20.0] * 4
    told = why.long_tail(evidence(ratio=ratios, seconds=seconds))
    assert told is not None
    assert "The median is 1.40x" in told
    assert "all tokens over all seconds are 0.81x: prompts that gain less" in told
    assert why.long_tail(evidence(ratio=[1.3, 1.4, 1.5] * 6)) is None
    assert why.long_tail(evidence(ratio=[1.4] * 3)) is None


def test_what_ships_shows_the_texts_that_it_slows_down() -> None:
    told = dict(why.reasons(evidence(ratio=[2.0] * 18 + [0.9, 0.8]), ships=True))
    assert told.keys() == {"long_tail", "slower_texts"}
    slower = "2 of 20 prompts were slower than vanilla, the slowest 0.80x; they took 21 % of its time."
    assert told["slower_texts"] == slower
    assert not list(why.reasons(evidence(ratio=2.0), ships=True))
