"""A drawn draft may end behind an improbable token, and may not hold that token back: by exact enumeration."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
import torch
from torch import Tensor

from tests.fixtures.enumeration import Draft, Language, Round, Verify, bias, chain, drawn, enumerate_round
from tests.fixtures.verification_rules import verify_sampled
from worker.decoding.verification import DraftVerdict, verify_block

EXACT = 1e-13


def by_block(p: Tensor, draft: Draft, uniforms: Tensor) -> DraftVerdict:
    return verify_block(p, draft.q, torch.tensor(draft.tokens, dtype=torch.long), uniforms)


def by_token(p: Tensor, draft: Draft, uniforms: Tensor) -> DraftVerdict:
    return verify_sampled(p, draft.q, torch.tensor(draft.tokens, dtype=torch.long), uniforms)


def ended(drafter: Language, k: int, least: float, *, is_shown: bool) -> dict[int, list[Draft]]:
    """Chains of up to k tokens that end with the token at which their probability falls below `least`, by length.

    Not `is_shown`: they end before that token.
    """
    found: dict[tuple[int, ...], Draft] = {}
    for whole in drawn([drafter], chain(k)):
        num, probability = 0, 1.0
        while num < k and probability >= least:
            probability *= float(whole.q[num, whole.tokens[num]])
            num += 1
        num -= not is_shown and probability < least
        tokens = whole.tokens[:num]
        weight = whole.weight + (found[tokens].weight if tokens in found else 0.0)
        found[tokens] = Draft(weight, tokens, chain(num), whole.q[:num])
    groups = defaultdict(list)
    for draft in found.values():
        groups[len(draft.tokens)].append(draft)
    return groups


def round_of(target: Language, groups: dict[int, list[Draft]], verify: Verify, rng: random.Random) -> Round:
    found = Round()
    for drafts in groups.values():
        found.begun.update(enumerate_round(target, drafts, verify, rng).begun)
    return found


@pytest.mark.parametrize("least", [0.3, 0.6])
@pytest.mark.parametrize("verify", [by_token, by_block])
def test_a_draft_that_ends_with_an_improbable_token_is_exact(
    verify: Verify, least: float, seed: int, rng: random.Random
) -> None:
    target, drafter = Language(f"target {seed}", 3), Language(f"drafter {seed}", 3)
    groups = ended(drafter, 2, least, is_shown=True)
    assert bias(target, round_of(target, groups, verify, rng), 3) < EXACT


def test_a_longer_draft_of_any_length_is_exact(seed: int, rng: random.Random) -> None:
    target, drafter = Language(f"target {seed}", 2), Language(f"drafter {seed}", 2)
    groups = ended(drafter, 4, 0.2, is_shown=True)
    for verify in (by_token, by_block):
        assert bias(target, round_of(target, groups, verify, rng), 5) < EXACT


@pytest.mark.parametrize("verify", [by_token, by_block])
def test_an_improbable_token_that_is_held_back_is_caught(verify: Verify, rng: random.Random) -> None:
    """The tokens that remain were not drawn from q any more."""
    target, drafter = Language("target", 3), Language("drafter", 3)
    groups = ended(drafter, 2, 0.5, is_shown=False)
    assert len(groups) > 1
    assert bias(target, round_of(target, groups, verify, rng), 3) > 0.01
