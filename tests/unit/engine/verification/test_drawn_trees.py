"""Trees of which a part was drawn, by exact enumeration; and what may not be done with a drawn token.

The trees are merged by the drafter that merges them, `hybrid.merged`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from engine.drafters.hybrid import merged
from engine.proposal import DraftDistributions, Proposal, tree_depths
from engine.verification import verify_block, verify_drawn_tree
from tests.fixtures.enumeration import (
    Draft,
    Fixed,
    Language,
    bias,
    by_drawn_tree,
    chain,
    drawn,
    enumerate_blocks,
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


def proposal(draft: Draft, *, is_drawn: bool) -> Proposal:
    q = DraftDistributions(draft.q) if is_drawn else None
    return Proposal(draft.tokens, draft.parents, q, proposers=("a",) * len(draft.tokens))


def with_branches(drafts: Iterator[Draft], beside: Language, parents: tuple[int, ...], most: int) -> Iterator[Draft]:
    """Each draft in one tree with the likeliest tokens of another language, as a hybrid drafter merges them."""
    (other,) = likeliest(beside, parents)
    for draft in drafts:
        tree = merged([proposal(other, is_drawn=False), proposal(draft, is_drawn=True)], most)
        assert tree.q is not None
        shape = chain(len(tree.tokens)) if tree.parents is None else tree.parents
        yield Draft(draft.weight, tree.tokens, shape, tree.q.probabilities)


def enumerated(target: Language, drafts: Iterator[Draft], length: int, rng: random.Random) -> float:
    return bias(target, enumerate_blocks(target, drafts, rng, by_drawn_tree), length)


@pytest.mark.parametrize("parents", [(-1, -1), (-1, -1, -1), (-1, -1, 0)])
def test_siblings_drawn_without_replacement_leave_the_targets_distribution(
    pair: tuple[Language, Language], parents: tuple[int, ...], rng: random.Random
) -> None:
    target, drafter = pair
    assert enumerated(target, with_siblings(drafter, parents), max(tree_depths(parents)) + 1, rng) < EXACT


def test_a_second_sibling_is_accepted_as_often_as_can_be(rng: random.Random) -> None:
    """By hand: the first stays with .6; only token 1 is rejected, and of r = 3/4, 0, 1/4 and q = 2/3, 0, 1/3 the
    smaller ones add up to 11/12."""
    found = enumerate_round(TARGET, with_siblings(DRAFTER, (-1, -1)), by_drawn_tree, rng)
    assert found.num_accepted == pytest.approx(0.6 + 0.4 * 11 / 12, abs=EXACT)


@pytest.mark.parametrize("parents", [(-1, 0), (-1, -1), (-1, 0, -1)])
def test_branches_that_follow_from_the_text_beside_a_drawn_chain(
    pair: tuple[Language, Language], seed: int, parents: tuple[int, ...], rng: random.Random
) -> None:
    """Where both say the same the token stands once, and what was drawn behind it goes on beside the branch's own."""
    target, drafter = pair
    drafts = list(with_branches(drawn(drafter, 2), Language(f"look-up {seed}", 3), parents, 4))
    assert enumerated(target, iter(drafts), 4, rng) < EXACT
    assert len({len(draft.tokens) for draft in drafts}) > 1, "nothing was merged"


def test_a_branch_that_goes_on_behind_the_whole_draft(rng: random.Random, seed: int) -> None:
    target, drafter = Language(f"target {seed}", 2), Language(f"drafter {seed}", 2)
    drafts = with_branches(drawn(drafter, 1), Language(f"look-up {seed}", 2), (-1, 0, 1), 3)
    assert enumerated(target, drafts, 4, rng) < EXACT


def test_branches_beside_drawn_siblings(pair: tuple[Language, Language], seed: int, rng: random.Random) -> None:
    target, drafter = pair
    drafts = with_branches(with_siblings(drafter, (-1, -1)), Language(f"look-up {seed}", 3), (-1, 0), 4)
    assert enumerated(target, drafts, 3, rng) < EXACT


def test_a_branch_adds_to_what_a_block_accepts(rng: random.Random) -> None:
    """By hand: token 1 is rejected with .4 in all; token 0, proposed beside it, is 3/4 of what is left then."""
    beside = Fixed(1.0, 0.0, 0.0)
    found = enumerate_blocks(TARGET, with_branches(drawn(DRAFTER, 1), beside, (-1,), 2), rng, by_drawn_tree)
    assert found.num_accepted == pytest.approx(0.6 + 0.4 * 3 / 4, abs=EXACT)


def test_a_drawn_chain_alone_is_judged_as_a_block(pair: tuple[Language, Language], rng: random.Random) -> None:
    target, drafter = pair
    for draft in drawn(drafter, 2):
        p = torch.stack([target.behind(draft.prefix(i)) for i in range(-1, 2)])
        uniforms = torch.tensor([rng.random() for _ in range(3)], dtype=torch.float64)
        q = DraftDistributions(draft.q)
        tree = verify_drawn_tree(p, q, draft.tokens, draft.parents, uniforms)
        block = verify_block(p, q, torch.tensor(draft.tokens), uniforms)
        assert (tree.path, tree.next_token) == (block.path, block.next_token)
        assert tree.num_tested == min(2, block.num_accepted + 1)


def test_the_likeliest_tokens_judged_by_p_over_q_are_caught(rng: random.Random) -> None:
    """Rule (e) of the known errors, with siblings: a tree that was not drawn comes with a q.

    By hand: token 1 stays with 3/7; else token 0 always does. The text is 4/7, 3/7, 0, not .5, .3, .2.
    """
    found = enumerate_round(TARGET, likeliest(DRAFTER, (-1, -1)), by_drawn_tree, rng)
    assert bias(TARGET, found, 2) == pytest.approx(0.4, abs=EXACT)


def without(draft: Draft, place: int) -> Draft:
    """The draft without its token of that place, which has no children."""
    kept = [i for i in range(len(draft.tokens)) if i != place]
    parents = tuple(draft.parents[i] for i in kept)
    return Draft(draft.weight, tuple(draft.tokens[i] for i in kept), parents, draft.q[kept])


def test_pruning_a_drawn_sibling_for_its_probability_is_caught(rng: random.Random) -> None:
    """By hand: behind the rejected token 1, token 2 is drawn with 1/3 and pruned; r = 3/4, 0, 1/4 is drawn instead."""
    drafts = list(with_siblings(DRAFTER, (-1, -1)))
    pruned = (without(draft, 1) if DRAFTER.behind(())[draft.tokens[1]] < 0.15 else draft for draft in drafts)
    assert enumerated(TARGET, pruned, 2, rng) == pytest.approx(2 / 15, abs=EXACT)


def test_dropping_a_drawn_token_that_look_up_has_too_is_caught(rng: random.Random) -> None:
    """By hand: look-up says 1. Where 1 is drawn it is dropped and p decides; 0 and 2 always stay.

    The text is .2 + .7 · .5, .7 · .3, .1 + .7 · .2, not .5, .3, .2. Merged the other way round nothing is lost.
    """
    nothing = torch.empty((0, 3), dtype=torch.float64)
    dropped = (
        Draft(draft.weight, (1,), (-1,), nothing)
        if draft.tokens == (1,)
        else Draft(draft.weight, (*draft.tokens, 1), (-1, -1), draft.q)
        for draft in drawn(DRAFTER, 1)
    )
    assert enumerated(TARGET, dropped, 2, rng) == pytest.approx(0.18, abs=EXACT)
    right = with_branches(drawn(DRAFTER, 1), Fixed(0.0, 1.0, 0.0), (-1,), 2)
    assert enumerated(TARGET, right, 2, rng) < EXACT


@pytest.mark.parametrize(
    ("least", "expected"), [(None, 0.0), (0.15, 0.16)], ids=["by the text before", "by the drawn token"]
)
def test_a_switch_that_looks_at_a_drawn_token_is_caught(
    least: float | None, expected: float, rng: random.Random
) -> None:
    """By hand: token 2 is drawn with .1 and replaced by look-up's token 1, so p decides there."""
    (beside,) = likeliest(DRAFTER, chain(1))
    nothing = torch.empty((0, 3), dtype=torch.float64)
    switched = (
        Draft(draft.weight, beside.tokens, (-1,), nothing)
        if least is not None and draft.q[0, draft.tokens[0]] < least
        else draft
        for draft in drawn(DRAFTER, 1)
    )
    assert enumerated(TARGET, switched, 2, rng) == pytest.approx(expected, abs=EXACT)


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
            one, other = (verify_drawn_tree(p, q, draft.tokens, draft.parents, uniforms) for q in (few, whole))
            assert one == other
            certain = [q[:2].followed_by([5, 0]) for q in (few, whole)]
            assert torch.equal(certain[0].of(torch.tensor([0, 1, 5, 0])), certain[1].of(torch.tensor([0, 1, 5, 0])))
            assert torch.allclose(*(q.taken_from(torch.ones((4, 6), dtype=torch.float64)) for q in certain))


def told(tokens: tuple[int, ...], parents: tuple[int, ...] | None, by: str, **more: object) -> Proposal:
    return Proposal(tokens, parents, proposers=(by,) * len(tokens), **more)  # type: ignore[arg-type]


def test_common_beginnings_stand_once_under_the_first() -> None:
    tree = merged([told((5, 6), None, "a"), told((5, 7, 8), None, "b"), told((9,), None, "c")], 9)
    assert (tree.tokens, tree.parents) == ((5, 6, 7, 8, 9), (-1, 0, 0, 2, -1))
    assert tree.proposers == ("a", "a", "b", "b", "c")


def test_what_goes_beyond_the_wanted_tokens_is_cut_with_what_hangs_on_it() -> None:
    tree = merged([told((5, 6), None, "a"), told((5, 7, 8), None, "b")], 3)
    assert (tree.tokens, tree.parents) == ((5, 6, 7), (-1, 0, 0))


def test_a_second_proposal_that_goes_on_with_the_first_is_a_chain() -> None:
    tree = merged([told((5,), None, "a"), told((5, 7), None, "b"), Proposal(num_read=3)], 4)
    assert (tree.tokens, tree.parents, tree.num_read) == ((5, 7), None, 3)
    assert merged([], 4).tokens == ()


def test_the_drawn_draft_comes_first_and_a_second_one_is_left_out() -> None:
    q = DraftDistributions(torch.full((2, 10), 0.1, dtype=torch.float64))
    tree = merged([told((1, 2), None, "a"), told((1, 3), None, "b", q=q), told((4, 5), None, "c", q=q)], 9)
    assert (tree.tokens, tree.parents, tree.proposers) == ((1, 3, 2), (-1, 0, 0), ("b", "b", "a"))
    assert tree.q is q
    alone = merged([told((1, 3), None, "b", q=q)], 9)
    assert (alone.tokens, alone.parents, alone.q) == ((1, 3), None, q)
