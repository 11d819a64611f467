"""Verification of chains, blocks and trees, by exact enumeration; and the well-known errors, which it must catch.

The reproducible coupling: its marginal is p, by an exact argument. That a job's own choices are `coupled_tokens` of its
noise, and that its noise is Gumbel noise and independent: test_sampling.py.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from alphaloop.engine import Sampling
from engine.proposal import DraftDistributions, tree_depths
from engine.sampling import TokenChooser
from engine.verification import (
    DraftVerdict,
    draw,
    verify_block,
    verify_deterministic,
    verify_greedy,
    verify_tree,
    verify_tree_greedy,
)
from tests.fixtures.enumeration import (
    TOP,
    Draft,
    Fixed,
    Language,
    Text,
    Verify,
    bias,
    by_block,
    chain,
    coupled_tokens,
    deterministic,
    drawn,
    enumerate_blocks,
    enumerate_round,
    l1,
    likeliest,
    verify_sampled,
)

EXACT = 1e-13
TARGET, DRAFTER = Fixed(0.5, 0.3, 0.2), Fixed(0.2, 0.7, 0.1)


@pytest.fixture(params=["all tokens possible", "some impossible", "drafter equals target"])
def pair(request: pytest.FixtureRequest, seed: int) -> tuple[Language, Language]:
    """A target and a drafter over three tokens."""
    target = Language(f"target {seed}", 3, num_impossible=int(request.param == "some impossible"))
    return target, target if request.param == "drafter equals target" else Language(f"drafter {seed}", 3)


def by_token(p: Tensor, draft: Draft, uniforms: Tensor) -> DraftVerdict:
    return verify_sampled(p, draft.q, torch.tensor(draft.tokens, dtype=torch.long), uniforms)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_a_deterministic_draft_leaves_the_targets_distribution(
    pair: tuple[Language, Language], k: int, rng: random.Random
) -> None:
    target, drafter = pair
    found = enumerate_round(target, likeliest(drafter, chain(k)), deterministic, rng)
    assert bias(target, found, k + 1) < EXACT


def test_acceptance_is_one_minus_the_total_variation(pair: tuple[Language, Language], rng: random.Random) -> None:
    """A rule that accepts less could still be exact."""
    target, drafter = pair
    p, q = target.behind(()), drafter.behind(())
    found = enumerate_round(target, drawn(drafter, 1), by_token, rng)
    assert found.num_accepted == pytest.approx(float(torch.minimum(p, q).sum()), abs=EXACT)
    found = enumerate_round(target, likeliest(drafter, chain(1)), deterministic, rng)
    assert found.num_accepted == pytest.approx(float(p[q.argmax()]), abs=EXACT)


def test_a_deterministic_draft_judged_by_p_over_q_is_caught(rng: random.Random) -> None:
    """Rule (e) of the known errors: q was not what the draft was drawn from.

    By hand: token 1 is proposed and kept with 3/7, the rest is 3 : 0 : 1. So the text is 3/7, 3/7, 1/7, not .5, .3, .2.
    """
    found = enumerate_round(TARGET, likeliest(DRAFTER, chain(1)), by_token, rng)
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


def enumerated(target: Language, drafts: Iterator[Draft], length: int, rng: random.Random) -> float:
    """The bias of blocks over drafts of different lengths."""
    return bias(target, enumerate_blocks(target, drafts, rng), length)


def test_dropping_a_drawn_token_for_its_probability_is_caught(rng: random.Random) -> None:
    """Rule (f) of the known errors: a gate that looks at the token it drops.

    By hand: token 2 is drawn with .1 and dropped, p is drawn instead. The text is .55, .33, .12, not .5, .3, .2.
    """
    gated = shortened(drawn(DRAFTER, 1), likely_enough(0.15), stop_behind=False)
    assert enumerated(TARGET, gated, 2, rng) == pytest.approx(0.16, abs=EXACT)


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
    pair: tuple[Language, Language], goes_on: Gate, stop_behind: bool, rng: random.Random
) -> None:
    target, drafter = pair
    gated = shortened(drawn(drafter, 2), goes_on, stop_behind=stop_behind)
    assert enumerated(target, gated, 3, rng) < EXACT


def test_a_longer_draft_of_any_length_is_exact(seed: int, rng: random.Random) -> None:
    target, drafter = Language(f"target {seed}", 2), Language(f"drafter {seed}", 2)
    gated = shortened(drawn(drafter, 4), likely_enough(0.2), stop_behind=True)
    assert enumerated(target, gated, 5, rng) < EXACT


def test_a_rule_that_is_a_little_too_generous_is_caught(rng: random.Random) -> None:
    """The harness finds a function's own turning points: 1 % more acceptance than allowed is seen as such."""

    def generous(p: Tensor, draft: Draft, uniforms: Tensor) -> DraftVerdict:
        return by_token(p, draft, torch.cat((uniforms[:-1] / 1.01, uniforms[-1:])))

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


def test_a_certain_draft_rejected_by_rounding_still_yields_a_token() -> None:
    p = torch.tensor([[0.0, TOP], [0.5, 0.5]], dtype=torch.float64)
    assert verify_deterministic(p, torch.tensor([1]), torch.tensor([TOP, 0.1], dtype=torch.float64)) == DraftVerdict(
        0, 1
    )


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

    def with_one_number(p: Tensor, draft: Draft, uniforms: Tensor) -> DraftVerdict:
        return by_block(p, draft, torch.cat((uniforms[:1].expand(len(uniforms) - 1), uniforms[-1:])))

    found = enumerate_round(TARGET, drawn(DRAFTER, 2), with_one_number, rng)
    assert bias(TARGET, found, 3) > 0.01


def test_equal_distributions_that_differ_by_rounding_still_yield_a_token() -> None:
    p = torch.tensor([[0.1, 0.2, 0.7, 0.0]], dtype=torch.float64).repeat(4, 1)
    top = torch.full((4,), TOP, dtype=torch.float64)
    for q in map(DraftDistributions, (p[:3], p[:3] * (1 + 2**-52), p[:3] * (1 - 2**-52))):
        assert verify_block(p, q, torch.tensor([0, 1, 2]), top).next_token != 3


def verified(p: Tensor, draft: Draft, uniforms: Tensor) -> DraftVerdict:
    return verify_tree(p, draft.tokens, draft.parents, uniforms)


# Bushy ones, wide ones, siblings that are not neighbours. Which tokens they hold is all that a drafter decides.
@pytest.mark.parametrize("parents", [(-1, -1, 0, 0, 1, 2), (-1, -1, -1), (-1, -1), (-1, 0, -1, 2)])
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
