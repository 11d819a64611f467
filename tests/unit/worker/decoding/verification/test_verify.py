"""Verification of chains, by exact enumeration; and the two well-known errors, which it must catch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.fixtures.enumeration import (
    TOP,
    Draft,
    Fixed,
    Language,
    Round,
    Verify,
    bias,
    chain,
    drawn,
    enumerate_round,
    likeliest,
    verify_sampled,
)
from worker.decoding.verification import DraftVerdict, draw, verify_block, verify_deterministic, verify_greedy

EXACT = 1e-13
TARGET, DRAFTER = Fixed(0.5, 0.3, 0.2), Fixed(0.2, 0.7, 0.1)


@pytest.fixture(params=["all tokens possible", "some impossible", "drafter equals target"])
def pair(request: pytest.FixtureRequest, seed: int) -> tuple[Language, Language]:
    """A target and a drafter over three tokens."""
    target = Language(f"target {seed}", 3, num_impossible=int(request.param == "some impossible"))
    return target, target if request.param == "drafter equals target" else Language(f"drafter {seed}", 3)


def sampled(p: Tensor, draft: Draft, uniforms: Tensor) -> DraftVerdict:
    return verify_sampled(p, draft.q, torch.tensor(draft.tokens, dtype=torch.long), uniforms)


def by_block(p: Tensor, draft: Draft, uniforms: Tensor) -> DraftVerdict:
    return verify_block(p, draft.q, torch.tensor(draft.tokens, dtype=torch.long), uniforms)


def deterministic(p: Tensor, draft: Draft, uniforms: Tensor) -> DraftVerdict:
    return verify_deterministic(p, torch.tensor(draft.tokens, dtype=torch.long), uniforms)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_a_deterministic_draft_leaves_the_targets_distribution(
    pair: tuple[Language, Language], k: int, rng: random.Random
) -> None:
    target, drafter = pair
    found = enumerate_round(target, likeliest(drafter, chain(k)), deterministic, rng)
    assert bias(target, found, k + 1) < EXACT


@pytest.mark.parametrize("k", [1, 3])
def test_a_drawn_draft_leaves_the_targets_distribution(
    pair: tuple[Language, Language], k: int, rng: random.Random
) -> None:
    target, drafter = pair
    found = enumerate_round(target, drawn(drafter, k), sampled, rng)
    assert bias(target, found, k + 1) < EXACT


def test_acceptance_is_one_minus_the_total_variation(pair: tuple[Language, Language], rng: random.Random) -> None:
    """A rule that accepts less could still be exact."""
    target, drafter = pair
    p, q = target.behind(()), drafter.behind(())
    found = enumerate_round(target, drawn(drafter, 1), sampled, rng)
    assert found.num_accepted == pytest.approx(float(torch.minimum(p, q).sum()), abs=EXACT)
    found = enumerate_round(target, likeliest(drafter, chain(1)), deterministic, rng)
    assert found.num_accepted == pytest.approx(float(p[q.argmax()]), abs=EXACT)


def test_a_deterministic_draft_judged_by_p_over_q_is_caught(rng: random.Random) -> None:
    """Rule (e) of the known errors: q was not what the draft was drawn from.

    By hand: token 1 is proposed and kept with 3/7, the rest is 3 : 0 : 1. So the text is 3/7, 3/7, 1/7, not .5, .3, .2.
    """
    found = enumerate_round(TARGET, likeliest(DRAFTER, chain(1)), sampled, rng)
    assert bias(TARGET, found, 2) == pytest.approx(9 / 35, abs=EXACT)


#: Whether a chain goes on behind its token at a place, given q at each place and the tokens.
Gate = Callable[[Tensor, tuple[int, ...], int], bool]


def likely_enough(least: float) -> Gate:
    """The gate of draft models: the probability of the chain up to its token."""
    return lambda q, tokens, i: float(q[range(i + 1), tokens[: i + 1]].prod()) >= least


def shortened(drafts: Iterator[Draft], goes_on: Gate, *, stop_behind: bool) -> Iterator[Draft]:
    """Chains that end before (or `stop_behind`) the first token that `goes_on` refuses."""
    for draft in drafts:
        num = 0
        while num < len(draft.tokens) and goes_on(draft.q, draft.tokens, num):
            num += 1
        num = min(num + stop_behind, len(draft.tokens))
        yield Draft(draft.weight, draft.tokens[:num], chain(num), draft.q[:num])


def enumerated(target: Language, drafts: Iterator[Draft], length: int, verify: Verify, rng: random.Random) -> float:
    """The bias over drafts of different lengths."""
    groups: dict[int, dict[tuple[int, ...], Draft]] = {}
    for draft in drafts:
        group = groups.setdefault(len(draft.tokens), {})
        before = group.get(draft.tokens)
        group[draft.tokens] = draft if before is None else replace(before, weight=before.weight + draft.weight)
    found = Round()
    for group in groups.values():
        found.begun.update(enumerate_round(target, group.values(), verify, rng).begun)
    return bias(target, found, length)


@pytest.mark.parametrize("verify", [sampled, by_block])
def test_dropping_a_drawn_token_for_its_probability_is_caught(verify: Verify, rng: random.Random) -> None:
    """Rule (f) of the known errors: a gate that looks at the token it drops.

    By hand: token 2 is drawn with .1 and dropped, p is drawn instead. The text is .55, .33, .12, not .5, .3, .2.
    """
    gated = shortened(drawn(DRAFTER, 1), likely_enough(0.15), stop_behind=False)
    assert enumerated(TARGET, gated, 2, verify, rng) == pytest.approx(0.16, abs=EXACT)


@pytest.mark.parametrize("verify", [sampled, by_block])
@pytest.mark.parametrize(
    ("goes_on", "stop_behind"),
    [
        (lambda q, tokens, i: bool(q[i, tokens[i]] > 0.3), True),
        (likely_enough(0.3), True),
        (lambda q, tokens, i: bool(q[i].max() > 0.6), False),
    ],
    ids=["stopping behind an unlikely token", "behind an unlikely chain", "stopping where no token is likely"],
)
def test_the_safe_gates_leave_the_targets_distribution(
    pair: tuple[Language, Language], goes_on: Gate, stop_behind: bool, verify: Verify, rng: random.Random
) -> None:
    target, drafter = pair
    gated = shortened(drawn(drafter, 2), goes_on, stop_behind=stop_behind)
    assert enumerated(target, gated, 3, verify, rng) < EXACT


@pytest.mark.parametrize("verify", [sampled, by_block])
def test_a_longer_draft_of_any_length_is_exact(verify: Verify, seed: int, rng: random.Random) -> None:
    target, drafter = Language(f"target {seed}", 2), Language(f"drafter {seed}", 2)
    gated = shortened(drawn(drafter, 4), likely_enough(0.2), stop_behind=True)
    assert enumerated(target, gated, 5, verify, rng) < EXACT


def test_a_rule_that_is_a_little_too_generous_is_caught(rng: random.Random) -> None:
    """The harness finds a function's own turning points: 1 % more acceptance than allowed is seen as such."""

    def generous(p: Tensor, draft: Draft, uniforms: Tensor) -> DraftVerdict:
        return sampled(p, draft, torch.cat((uniforms[:-1] / 1.01, uniforms[-1:])))

    found = enumerate_round(TARGET, drawn(DRAFTER, 1), generous, rng)
    # Token 1 is accepted with .303 instead of .3, and .003 less is drawn from the rest.
    assert bias(TARGET, found, 2) == pytest.approx(0.006, abs=EXACT)


@pytest.mark.parametrize(
    ("best", "draft", "expected"),
    [
        ([5, 6, 7], [5, 6], DraftVerdict(2, 7)),
        ([5, 6, 7], [5, 8], DraftVerdict(1, 6)),
        ([5, 6, 8], [7, 6], DraftVerdict(0, 5)),
        ([3], [], DraftVerdict(0, 3)),
    ],
)
def test_greedy_keeps_drafts_up_to_the_first_difference(
    best: list[int], draft: list[int], expected: DraftVerdict
) -> None:
    verdict = verify_greedy(best, draft)
    assert verdict == expected
    assert verdict.path == tuple(range(expected.num_accepted))


@pytest.mark.parametrize("uniform", [0.0, 0.3, 0.5, TOP])
def test_an_index_without_weight_is_never_drawn(uniform: float) -> None:
    weights = torch.tensor([0.0, 0.1, 0.0, 0.0, 0.1, 0.0], dtype=torch.float64)
    assert draw(weights, torch.tensor(uniform, dtype=torch.float64)) == (1 if uniform < 0.5 else 4)


def test_equal_distributions_that_differ_by_rounding_still_yield_a_token() -> None:
    p = torch.tensor([[0.5, 0.5], [0.5, 0.5]], dtype=torch.float64)
    q = torch.tensor([[0.5 + 2**-52, 0.5 + 2**-52]], dtype=torch.float64)
    almost_one = torch.tensor([TOP, 0.1], dtype=torch.float64)
    assert verify_sampled(p, q, torch.tensor([0]), almost_one) == DraftVerdict(0, 0)


def test_a_certain_draft_rejected_by_rounding_still_yields_a_token() -> None:
    p = torch.tensor([[0.0, TOP], [0.5, 0.5]], dtype=torch.float64)
    assert verify_deterministic(p, torch.tensor([1]), torch.tensor([TOP, 0.1], dtype=torch.float64)) == DraftVerdict(
        0, 1
    )
