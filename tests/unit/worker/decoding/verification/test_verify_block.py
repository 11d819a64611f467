"""Block verification, by exact enumeration: the target's distribution, and never fewer tokens than token-wise."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tests.fixtures.enumeration import (
    TOP,
    Draft,
    Fixed,
    Language,
    Verify,
    bias,
    chain,
    drawn,
    enumerate_round,
    l1,
    likeliest,
    verify_sampled,
)
from worker.decoding.verification import DraftVerdict, verify_block

EXACT = 1e-13


@pytest.fixture(params=["all tokens possible", "some impossible", "drafter equals target"])
def pair(request: pytest.FixtureRequest, seed: int) -> tuple[Language, Language]:
    """A target and a drafter over three tokens."""
    target = Language(f"target {seed}", 3, num_impossible=int(request.param == "some impossible"))
    return target, target if request.param == "drafter equals target" else Language(f"drafter {seed}", 3)


def by_block(p: Tensor, draft: Draft, uniforms: Tensor) -> DraftVerdict:
    return verify_block(p, draft.q, torch.tensor(draft.tokens, dtype=torch.long), uniforms)


def by_token(p: Tensor, draft: Draft, uniforms: Tensor) -> DraftVerdict:
    return verify_sampled(p, draft.q, torch.tensor(draft.tokens, dtype=torch.long), uniforms)


def test_a_block_leaves_the_targets_distribution_and_accepts_no_less(
    pair: tuple[Language, Language], rng: random.Random
) -> None:
    for k in (0, 1, 2):
        compare(*pair, k, rng)


def test_a_longer_block(seed: int, rng: random.Random) -> None:
    compare(Language(f"target {seed}", 2), Language(f"drafter {seed}", 2), 4, rng)


def compare(target: Language, drafter: Language, k: int, rng: random.Random) -> None:
    found = enumerate_round(target, drawn(drafter, k), by_block, rng)
    assert bias(target, found, k + 1) < EXACT
    token_wise = enumerate_round(target, drawn(drafter, k), by_token, rng)
    assert found.num_accepted > token_wise.num_accepted - EXACT
    if k == 1:
        assert found.num_accepted == pytest.approx(token_wise.num_accepted, abs=EXACT)


@pytest.mark.parametrize("verify", [by_block, by_token])
def test_alpha_at_a_position_does_not_move_with_k(verify: Verify, seed: int, rng: random.Random) -> None:
    """What every decision and drift test stands on: counts of different k are counts of one thing, by block too."""
    target, drafter = Language(f"target {seed}", 2), Language(f"drafter {seed}", 2)
    short, long = (enumerate_round(target, drawn(drafter, k), verify, rng) for k in (2, 3))
    assert [short.alpha(i) for i in (1, 2)] == pytest.approx([long.alpha(i) for i in (1, 2)], abs=EXACT)


def test_the_papers_example(rng: random.Random) -> None:
    """Sun et al. 2024, section 2: two tokens drafted, 10/9 accepted one by one, 11/9 as a block."""
    target, drafter = Fixed(1 / 3, 2 / 3), Fixed(2 / 3, 1 / 3)
    for verify, num_accepted in ((by_token, 10 / 9), (by_block, 11 / 9)):
        found = enumerate_round(target, drawn(drafter, 2), verify, rng)
        assert found.num_accepted == pytest.approx(num_accepted, abs=EXACT)
        assert bias(target, found, 3) < EXACT


def test_a_one_hot_drafter_gains_nothing_and_loses_nothing(pair: tuple[Language, Language], rng: random.Random) -> None:
    target, drafter = pair
    drafts = [
        Draft(1.0, draft.tokens, draft.parents, torch.nn.functional.one_hot(torch.tensor(draft.tokens), 3).double())
        for draft in likeliest(drafter, chain(3))
    ]
    block = enumerate_round(target, drafts, by_block, rng)
    token_wise = enumerate_round(target, drafts, by_token, rng)
    assert l1(dict(block.begun), dict(token_wise.begun)) < EXACT
    assert bias(target, block, 4) < EXACT


def test_one_uniform_number_for_all_prefixes_is_caught(rng: random.Random) -> None:
    """An easy slip: the test of one prefix must not depend on that of another."""
    target, drafter = Fixed(0.5, 0.3, 0.2), Fixed(0.2, 0.7, 0.1)

    def with_one_number(p: Tensor, draft: Draft, uniforms: Tensor) -> DraftVerdict:
        return by_block(p, draft, torch.cat((uniforms[:1].expand(len(uniforms) - 1), uniforms[-1:])))

    found = enumerate_round(target, drawn(drafter, 2), with_one_number, rng)
    assert bias(target, found, 3) > 0.01


def test_equal_distributions_that_differ_by_rounding_still_yield_a_token() -> None:
    p = torch.tensor([[0.1, 0.2, 0.7, 0.0]], dtype=torch.float64).repeat(4, 1)
    top = torch.full((4,), TOP, dtype=torch.float64)
    for q in (p[:3], p[:3] * (1 + 2**-52), p[:3] * (1 - 2**-52)):
        assert verify_block(p, q, torch.tensor([0, 1, 2]), top).next_token != 3
