"""Verification of chains, blocks and trees: how much is accepted, greedy rounds, and what rounding may not do.

That texts keep the target's distribution: test_exact.py.

The reproducible coupling: its marginal is p, by an exact argument. That a job's own choices are `coupled_tokens` of its
noise, and that its noise is Gumbel noise and independent: test_sampling.py.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from engine.proposal import DraftDistributions, Proposal, tree_depths
from engine.verdict import DraftVerdict
from engine.verification import verify_greedy, verify_tree_greedy
from tests.fixtures.enumeration import (
    TOP,
    Fixed,
    Language,
    Verify,
    beside_others,
    by_block,
    by_token,
    by_tree,
    chain,
    coupled_tokens,
    deterministic,
    draw,
    drawn,
    enumerate_round,
    likeliest,
    with_siblings,
)

EXACT = 1e-13
TARGET, DRAFTER = Fixed(0.5, 0.3, 0.2), Fixed(0.2, 0.7, 0.1)


@pytest.fixture(params=["all tokens possible", "some impossible", "drafter equals target"])
def pair(request: pytest.FixtureRequest, seed: int) -> tuple[Language, Language]:
    """A target and a drafter over three tokens."""
    target = Language(f"target {seed}", 3, num_impossible=int(request.param == "some impossible"))
    return target, target if request.param == "drafter equals target" else Language(f"drafter {seed}", 3)


def test_acceptance_is_one_minus_the_total_variation(pair: tuple[Language, Language], rng: random.Random) -> None:
    """A rule that accepts less could still be exact."""
    target, drafter = pair
    p, q = target.behind(()), drafter.behind(())
    found = enumerate_round(target, drawn(drafter, 1), by_token, rng)
    assert found.num_accepted == pytest.approx(float(torch.minimum(p, q).sum()), abs=EXACT)
    found = enumerate_round(target, likeliest(drafter, chain(1)), deterministic, rng)
    assert found.num_accepted == pytest.approx(float(p[q.argmax()]), abs=EXACT)


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


def test_a_certain_draft_is_not_rejected_by_rounding() -> None:
    p = torch.tensor([[0.0, TOP], [0.5, 0.5]], dtype=torch.float64)
    uniforms = torch.tensor([TOP, 0.1], dtype=torch.float64)
    assert beside_others(p, Proposal((1,)), uniforms) == DraftVerdict(1, 0)


@pytest.mark.parametrize("k", [1, 2])
def test_a_block_accepts_no_less_than_token_by_token(
    pair: tuple[Language, Language], k: int, rng: random.Random
) -> None:
    target, drafter = pair
    block, token_wise = (
        enumerate_round(target, drawn(drafter, k), verify, rng).num_accepted for verify in (by_block, by_token)
    )
    assert block > token_wise - EXACT
    assert k > 1 or block == pytest.approx(token_wise, abs=EXACT)


def test_the_papers_example(rng: random.Random) -> None:
    """Sun et al. 2024, section 2: two tokens drafted, 10/9 accepted one by one, 11/9 as a block."""
    target, drafter = Fixed(1 / 3, 2 / 3), Fixed(2 / 3, 1 / 3)
    for verify, num_accepted in ((by_token, 10 / 9), (by_block, 11 / 9)):
        found = enumerate_round(target, drawn(drafter, 2), verify, rng)
        assert found.num_accepted == pytest.approx(num_accepted, abs=EXACT)


@pytest.mark.parametrize("verify", [by_block, by_token])
def test_alpha_at_a_position_does_not_move_with_k(verify: Verify, seed: int, rng: random.Random) -> None:
    """What every decision and drift test stands on: counts of different k are counts of one thing, by block too."""
    target, drafter = Language(f"target {seed}", 2), Language(f"drafter {seed}", 2)
    short, long = (enumerate_round(target, drawn(drafter, k), verify, rng) for k in (2, 3))
    assert [short.alpha(i) for i in (1, 2)] == pytest.approx([long.alpha(i) for i in (1, 2)], abs=EXACT)


def test_equal_distributions_that_differ_by_rounding_still_yield_a_token() -> None:
    p = torch.tensor([[0.1, 0.2, 0.7, 0.0]], dtype=torch.float64).repeat(4, 1)
    top = torch.full((4,), TOP, dtype=torch.float64)
    for q in map(DraftDistributions, (p[:3], p[:3] * (1 + 2**-52), p[:3] * (1 - 2**-52))):
        assert beside_others(p, Proposal((0, 1, 2), q=q), top).next_token != 3


def test_children_are_accepted_with_the_probability_of_all_of_them(
    pair: tuple[Language, Language], rng: random.Random
) -> None:
    """A rule that accepts less could still be exact."""
    target, drafter = pair
    p, q = target.behind(()), drafter.behind(())
    found = enumerate_round(target, likeliest(drafter, (-1, -1)), by_tree, rng)
    assert found.num_accepted == pytest.approx(float(p[q.topk(2).indices].sum()), abs=EXACT)


def test_a_tree_without_branches_is_judged_as_a_chain(pair: tuple[Language, Language], rng: random.Random) -> None:
    target, drafter = pair
    (draft,) = likeliest(drafter, chain(3))
    p = torch.stack([target.behind(draft.prefix(i)) for i in range(-1, 3)])
    best = p.argmax(-1).tolist()
    for _ in range(30):
        uniforms = torch.tensor([rng.random() for _ in range(4)], dtype=torch.float64)
        for tree, plain in (
            (by_tree(p, draft, uniforms), beside_others(p, Proposal(draft.tokens), uniforms)),
            (verify_tree_greedy(best, draft.tokens, draft.parents), verify_greedy(best, draft.tokens)),
        ):
            assert (tree.path, tree.next_token) == (plain.path, plain.next_token)
            assert tree.num_tested == min(3, plain.num_accepted + 1)


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
    assert beside_others(p, Proposal((), ()), torch.tensor([0.3], dtype=torch.float64)) == DraftVerdict(0, 1, (), 0)


def test_rounding_leaves_no_tree_without_a_token() -> None:
    """Every uniform number as large as it can be, and an impossible token."""
    p = torch.tensor([[0.1, 0.2, 0.7, 0.0]], dtype=torch.float64).repeat(3, 1)
    top = torch.full((3,), TOP, dtype=torch.float64)
    assert beside_others(p, Proposal((0, 1), (-1, -1)), top).next_token != 3
    certain = torch.tensor([[0.0, TOP, 0.0, 0.0]], dtype=torch.float64).repeat(3, 1)
    assert beside_others(certain, Proposal((1, 1), (-1, -1)), top).next_token == 1


def test_a_drawn_chain_alone_is_judged_as_a_block(pair: tuple[Language, Language], rng: random.Random) -> None:
    target, drafter = pair
    for draft in drawn(drafter, 2):
        p = torch.stack([target.behind(draft.prefix(i)) for i in range(-1, 2)])
        uniforms = torch.tensor([rng.random() for _ in range(3)], dtype=torch.float64)
        q = DraftDistributions(draft.q)
        tree = beside_others(p, Proposal(draft.tokens, draft.parents, q), uniforms)
        block = beside_others(p, Proposal(draft.tokens, q=q), uniforms)
        assert (tree.path, tree.next_token) == (block.path, block.next_token)
        assert tree.num_tested == min(2, block.num_accepted + 1)


def test_few_tokens_with_their_probabilities_say_what_a_whole_row_says(seed: int, rng: random.Random) -> None:
    target, drafter = Language(f"target {seed}", 6), Language(f"drafter {seed}", 6, num_impossible=3)
    for draft in [next(with_siblings(drafter, (-1, -1, 0))), *list(drawn(drafter, 2))[:20]]:
        few = DraftDistributions.of_rows(
            [(row[kept], kept) for row in draft.q if (kept := row.nonzero().squeeze(1)).numel()]
        )
        p = torch.stack([target.behind(draft.prefix(i)) for i in range(-1, len(draft.tokens))])
        whole = DraftDistributions(draft.q)
        for _ in range(20):
            uniforms: Tensor = torch.tensor([rng.random() for _ in p], dtype=torch.float64)
            one, other = (beside_others(p, Proposal(draft.tokens, draft.parents, q), uniforms) for q in (few, whole))
            assert one == other
            certain = [q[:2].followed_by([5, 0]) for q in (few, whole)]
            assert torch.equal(certain[0].of(torch.tensor([0, 1, 5, 0])), certain[1].of(torch.tensor([0, 1, 5, 0])))
            assert torch.allclose(*(q.taken_from(torch.ones((4, 6), dtype=torch.float64)) for q in certain))


VOCABULARY = 4


@pytest.mark.parametrize("num_impossible", [0, 1])
def test_the_marginal_is_p(seed: int, num_impossible: int) -> None:
    """Exact, by geometry.

    exp(-g) is exponential, so exp(-g) over its sum is uniform on the simplex with corners e_j. The point p cuts it into
    the simplices S_i = conv(p, e_j for all j ≠ i), which share no inner point and fill it; the volume of S_i is p_i of
    the whole (its determinant). So the marginal is p if i is chosen everywhere inside S_i, whatever the sum was.
    """
    p = Language(f"target {seed}", VOCABULARY, num_impossible=num_impossible).behind(())
    generator = torch.Generator().manual_seed(seed)
    for i in range(VOCABULARY):
        corners = torch.eye(VOCABULARY, dtype=torch.float64)
        corners[i] = p
        assert float(torch.linalg.det(corners)) == pytest.approx(float(p[i]), abs=1e-15)
        if p[i] == 0:
            continue  # flat: no inner points
        spread = torch.rand((500, VOCABULARY), generator=generator, dtype=torch.float64).pow(4) + 1e-6
        inside = spread / spread.sum(dim=1, keepdim=True) @ corners
        total = torch.rand((500, 1), generator=generator, dtype=torch.float64) * 20 + 0.01
        assert coupled_tokens(p.expand(500, -1), -(inside * total).log()).eq(i).all()
