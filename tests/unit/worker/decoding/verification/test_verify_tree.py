"""Verification of deterministic trees of any shape, by exact enumeration."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from tests.fixtures.enumeration import TOP, Draft, Fixed, Language, bias, chain, enumerate_round, likeliest
from worker.decoding.proposal import tree_depths
from worker.decoding.verification import (
    DraftVerdict,
    verify_deterministic,
    verify_greedy,
    verify_tree,
    verify_tree_greedy,
)

EXACT = 1e-13


@pytest.fixture(params=["all tokens possible", "some impossible", "drafter equals target"])
def pair(request: pytest.FixtureRequest, seed: int) -> tuple[Language, Language]:
    """A target and a drafter over three tokens."""
    target = Language(f"target {seed}", 3, num_impossible=int(request.param == "some impossible"))
    return target, target if request.param == "drafter equals target" else Language(f"drafter {seed}", 3)


def verified(p: Tensor, draft: Draft, uniforms: Tensor) -> DraftVerdict:
    return verify_tree(p, draft.tokens, draft.parents, uniforms)


# Bushy ones, a wide one, siblings that are not neighbours.
@pytest.mark.parametrize("parents", [(-1, -1, 0, 0, 1, 2), (-1, -1, -1), (-1, 0, -1, 2)])
def test_a_tree_leaves_the_targets_distribution(
    pair: tuple[Language, Language], parents: tuple[int, ...], rng: random.Random
) -> None:
    target, drafter = pair
    found = enumerate_round(target, likeliest(drafter, parents), verified, rng)
    assert bias(target, found, max(tree_depths(parents)) + 1) < EXACT


def test_equal_siblings_do_no_harm(pair: tuple[Language, Language], rng: random.Random) -> None:
    target, _ = pair
    draft = Draft(1.0, (1, 1, 2), (-1, -1, 1), torch.empty(0))
    assert bias(target, enumerate_round(target, [draft], verified, rng), 3) < EXACT


def test_children_are_accepted_with_the_probability_of_all_of_them(
    pair: tuple[Language, Language], rng: random.Random
) -> None:
    """A rule that accepts less could still be exact."""
    target, drafter = pair
    p, q = target.behind(()), drafter.behind(())
    found = enumerate_round(target, likeliest(drafter, (-1, -1)), verified, rng)
    assert found.num_accepted == pytest.approx(float(p[q.topk(2).indices].sum()), abs=EXACT)


def test_a_tree_without_branches_is_judged_as_a_chain(pair: tuple[Language, Language], rng: random.Random) -> None:
    target, drafter = pair
    (draft,) = likeliest(drafter, chain(3))
    p = torch.stack([target.behind(draft.prefix(i)) for i in range(-1, 3)])
    best = p.argmax(-1).tolist()
    for _ in range(30):
        uniforms = torch.tensor([rng.random() for _ in range(4)], dtype=torch.float64)
        for tree, plain in (
            (verified(p, draft, uniforms), verify_deterministic(p, torch.tensor(draft.tokens), uniforms)),
            (verify_tree_greedy(best, draft.tokens, draft.parents), verify_greedy(best, draft.tokens)),
        ):
            assert (tree.path, tree.next_token) == (plain.path, plain.next_token)
            assert tree.num_tested == min(3, plain.num_accepted + 1)


def edited(draft: Draft, places: Iterable[int]) -> Draft:
    """A tree of siblings of which a drafter offers only some, in an order of its own."""
    tokens = tuple(draft.tokens[i] for i in places)
    return Draft(draft.weight, tokens, (-1,) * len(tokens), draft.q)


def test_a_tree_may_be_edited(rng: random.Random) -> None:
    """Sorted by what the drafter thinks of its tokens, and pruned of the unlikely ones."""
    (draft,) = likeliest(Fixed(0.2, 0.7, 0.1), (-1, -1, -1))
    for places in ([2, 0, 1], [0, 1], [1]):
        found = enumerate_round(target := Fixed(0.5, 0.3, 0.2), [edited(draft, places)], verified, rng)
        assert bias(target, found, 2) < EXACT


def test_greedy_follows_the_targets_choices() -> None:
    #        root ── 0:5 ── 2:6 ── 4:8
    #         └───── 1:7 ── 3:9
    tokens, parents = (5, 7, 6, 9, 8), (-1, -1, 0, 1, 2)
    assert tree_depths(parents) == [1, 1, 2, 2, 3]
    for best, branch, next_token, num_tested in (
        ([7, 0, 9, 0, 4, 0], (1, 3), 4, 2),
        ([5, 6, 0, 8, 0, 3], (0, 2, 4), 3, 3),
        ([5, 6, 0, 1, 0, 3], (0, 2), 1, 3),
        ([4, 6, 9, 8, 0, 3], (), 4, 1),
    ):
        verdict = verify_tree_greedy(best, tokens, parents)
        assert verdict == DraftVerdict(len(branch), next_token, branch, num_tested)


def test_greedy_takes_the_deeper_one_of_equal_siblings() -> None:
    verdict = verify_tree_greedy([5, 0, 6, 8], (5, 5, 6), (-1, -1, 1))
    assert verdict == DraftVerdict(2, 8, (1, 2), 2)


def test_an_empty_tree_is_vanilla() -> None:
    p = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    assert verify_tree_greedy([3], (), ()) == DraftVerdict(0, 3, (), 0)
    assert verify_tree(p, (), (), torch.tensor([0.3], dtype=torch.float64)) == DraftVerdict(0, 1, (), 0)


def test_rounding_leaves_no_tree_without_a_token() -> None:
    """Every uniform number as large as it can be, and an impossible token."""
    p = torch.tensor([[0.1, 0.2, 0.7, 0.0]], dtype=torch.float64).repeat(3, 1)
    top = torch.full((3,), TOP, dtype=torch.float64)
    assert verify_tree(p, (0, 1), (-1, -1), top).next_token != 3
    certain = torch.tensor([[0.0, TOP, 0.0, 0.0]], dtype=torch.float64).repeat(3, 1)
    assert verify_tree(certain, (1, 1), (-1, -1), top).next_token == 1
