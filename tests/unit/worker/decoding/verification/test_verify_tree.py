"""Verification of trees of any shape, by exact enumeration; and what a drafter may not do with a tree it has drawn."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import Tensor

from tests.fixtures.enumeration import (
    TOP,
    Draft,
    Fixed,
    Language,
    Round,
    bias,
    chain,
    drawn,
    enumerate_round,
    likeliest,
    verify_sampled,
)
from worker.decoding.proposal import tree_depths
from worker.decoding.verification import (
    DraftVerdict,
    verify_deterministic,
    verify_greedy,
    verify_tree,
    verify_tree_greedy,
)

EXACT = 1e-13
TARGET, DRAFTER = Fixed(0.5, 0.3, 0.2), Fixed(0.2, 0.7, 0.1)
#: A kind of target and drafter, and a shape: bushy ones, a wide one, siblings that are not neighbours.
CASES = [
    ("all tokens possible", (-1, -1, 0, 0)),
    ("some impossible", (-1, 0, -1, 2)),
    ("some impossible", (-1, -1, -1)),
    ("drafter equals target", (-1, -1, 1)),
]


def pair_of(kind: str, seed: int) -> tuple[Language, Language]:
    """A target and a drafter over three tokens."""
    target = Language(f"target {seed}", 3, num_impossible=int(kind == "some impossible"))
    return target, target if kind == "drafter equals target" else Language(f"drafter {seed}", 3)


@pytest.fixture(params=["all tokens possible", "some impossible", "drafter equals target"])
def pair(request: pytest.FixtureRequest, seed: int) -> tuple[Language, Language]:
    return pair_of(request.param, seed)


def independent(p: Tensor, draft: Draft, uniforms: Tensor) -> DraftVerdict:
    return verify_tree(p, draft.q, draft.tokens, draft.parents, uniforms, with_replacement=True)


def distinct(p: Tensor, draft: Draft, uniforms: Tensor) -> DraftVerdict:
    return verify_tree(p, draft.q, draft.tokens, draft.parents, uniforms, with_replacement=False)


def deterministic(p: Tensor, draft: Draft, uniforms: Tensor) -> DraftVerdict:
    return verify_tree(p, None, draft.tokens, draft.parents, uniforms, with_replacement=False)


@pytest.mark.parametrize(("kind", "parents"), CASES)
def test_independent_children_leave_the_targets_distribution(
    kind: str, parents: tuple[int, ...], seed: int, rng: random.Random
) -> None:
    target, drafter = pair_of(kind, seed)
    found = enumerate_round(target, drawn([drafter], parents), independent, rng)
    assert bias(target, found, max(tree_depths(parents)) + 1) < EXACT


def test_children_of_several_drafters_leave_the_targets_distribution(seed: int, rng: random.Random) -> None:
    target, *drafters = (Language(f"{name} {seed}", 3) for name in ("target", "one", "other"))
    found = enumerate_round(target, drawn(drafters, (-1, -1, 0, 0)), independent, rng)
    assert bias(target, found, 3) < EXACT


@pytest.mark.parametrize(("kind", "parents"), CASES)
@pytest.mark.parametrize("verify", [distinct, independent], ids=["siblings taken out here", "taken out by the drafter"])
def test_children_without_replacement_leave_the_targets_distribution(
    kind: str,
    parents: tuple[int, ...],
    verify: Callable[[Tensor, Draft, Tensor], DraftVerdict],
    seed: int,
    rng: random.Random,
) -> None:
    target, drafter = pair_of(kind, seed)
    drafts = drawn([drafter], parents, with_replacement=False)
    if verify is distinct:
        drafts = as_drawn_from(drafter, drafts)
    found = enumerate_round(target, drafts, verify, rng)
    assert bias(target, found, max(tree_depths(parents)) + 1) < EXACT


def as_drawn_from(drafter: Language, drafts: Iterable[Draft]) -> Iterator[Draft]:
    """The same drafts with the drafter's whole distribution in every row, siblings included."""
    for draft in drafts:
        rows = torch.stack([drafter.behind(draft.prefix(parent)) for parent in draft.parents])
        yield Draft(draft.weight, draft.tokens, draft.parents, rows)


@pytest.mark.parametrize("parents", [(-1, -1, 0, 0, 1, 2), (-1, -1, -1), (-1, 0, -1, 2)])
def test_deterministic_children_leave_the_targets_distribution(
    pair: tuple[Language, Language], parents: tuple[int, ...], rng: random.Random
) -> None:
    target, drafter = pair
    found = enumerate_round(target, likeliest(drafter, parents), deterministic, rng)
    assert bias(target, found, max(tree_depths(parents)) + 1) < EXACT


def test_equal_deterministic_siblings_do_no_harm(pair: tuple[Language, Language], rng: random.Random) -> None:
    target, _ = pair
    draft = Draft(1.0, (1, 1, 2), (-1, -1, 1), torch.empty(0))
    assert bias(target, enumerate_round(target, [draft], deterministic, rng), 3) < EXACT


def test_acceptance_is_what_the_rules_promise(pair: tuple[Language, Language], rng: random.Random) -> None:
    """A rule that accepts less could still be exact.

    Independent children: each of them is rejected with TV(r, q), r as the rejections before have left it. Deterministic
    ones: accepted with the probability of all of them together.
    """
    target, drafter = pair
    p, q = target.behind(()), drafter.behind(())
    rest, rejected = p, 1.0
    for _ in range(3):
        rejected *= 1 - float(torch.minimum(rest, q).sum())
        left = (rest - q).clamp_min(0)
        rest = left / left.sum() if rejected > EXACT else rest
    siblings = (-1, -1, -1)
    assert enumerate_round(target, drawn([drafter], siblings), independent, rng).num_accepted == pytest.approx(
        1 - rejected, abs=EXACT
    )
    assert enumerate_round(target, likeliest(drafter, (-1, -1)), deterministic, rng).num_accepted == pytest.approx(
        float(p[q.topk(2).indices].sum()), abs=EXACT
    )


def test_a_tree_without_branches_is_judged_as_a_chain(pair: tuple[Language, Language], rng: random.Random) -> None:
    target, drafter = pair
    drafts = list(drawn([drafter], chain(3)))
    for _ in range(30):
        compare_with_chain(target, rng.choice(drafts), rng)


def compare_with_chain(target: Language, draft: Draft, rng: random.Random) -> None:
    p = torch.stack([target.behind(draft.prefix(i)) for i in range(-1, 3)])
    uniforms = torch.tensor([rng.random() for _ in range(4)], dtype=torch.float64)
    tokens = torch.tensor(draft.tokens)
    for tree, plain in (
        (independent(p, draft, uniforms), verify_sampled(p, draft.q, tokens, uniforms)),
        (deterministic(p, draft, uniforms), verify_deterministic(p, tokens, uniforms)),
        (
            verify_tree_greedy(p.argmax(-1).tolist(), draft.tokens, draft.parents),
            verify_greedy(p.argmax(-1).tolist(), draft.tokens),
        ),
    ):
        assert (tree.path, tree.next_token) == (plain.path, plain.next_token)
        assert tree.num_tested == min(3, plain.num_accepted + 1)


def test_deterministic_children_judged_by_p_over_q_are_caught(rng: random.Random) -> None:
    """Rule (e) of the known errors, on a tree: two likeliest children, each judged by a q it was not drawn from.

    By hand: token 1 is kept with 3/7; of what is left, 3 : 0 : 1, q takes nothing but token 0's first .2 of .75, so
    token 0 is always kept. Token 2 is never written.
    """
    found = enumerate_round(TARGET, likeliest(DRAFTER, (-1, -1)), independent, rng)
    assert found.begun[(2, 0)] == found.begun[(2,)] == 0.0
    assert bias(TARGET, found, 2) == pytest.approx(0.4, abs=EXACT)


def edited(drafts: Iterable[Draft], keep: Callable[[Draft], list[int]]) -> list[list[Draft]]:
    """Trees of siblings of which a drafter offers only some, in an order of its own; grouped by their number."""
    groups: dict[int, list[Draft]] = {}
    for draft in drafts:
        places = keep(draft)
        tokens, rows = tuple(draft.tokens[i] for i in places), draft.q[places]
        groups.setdefault(len(places), []).append(Draft(draft.weight, tokens, (-1,) * len(places), rows))
    return list(groups.values())


def first_of_equals(draft: Draft) -> list[int]:
    return [i for i, token in enumerate(draft.tokens) if token not in draft.tokens[:i]]


def likeliest_first(draft: Draft) -> list[int]:
    return sorted(range(len(draft.tokens)), key=lambda i: float(-draft.q[i, draft.tokens[i]]))


def likely_ones(draft: Draft) -> list[int]:
    return [i for i, token in enumerate(draft.tokens) if draft.q[i, token] > 0.15]


@pytest.mark.parametrize(
    ("keep", "with_replacement"),
    [
        (first_of_equals, True),
        (likeliest_first, True),
        (likeliest_first, False),
        (likely_ones, True),
        (likely_ones, False),
    ],
)
def test_editing_a_drawn_tree_is_caught(
    keep: Callable[[Draft], list[int]], with_replacement: bool, rng: random.Random
) -> None:
    """Merging equal siblings, sorting them by their probability, and pruning the unlikely ones (rule f)."""
    found = Round()
    for group in edited(drawn([DRAFTER], (-1, -1), with_replacement=with_replacement), keep):
        found.begun.update(enumerate_round(TARGET, group, independent, rng).begun)
    assert bias(TARGET, found, 2) > 0.01


@pytest.mark.parametrize("keep", [likeliest_first, likely_ones])
def test_a_deterministic_tree_may_be_edited(keep: Callable[[Draft], list[int]], rng: random.Random) -> None:
    (group,) = edited(likeliest(DRAFTER, (-1, -1, -1)), keep)
    assert bias(TARGET, enumerate_round(TARGET, group, deterministic, rng), 2) < EXACT


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
    uniforms = torch.tensor([0.3], dtype=torch.float64)
    assert verify_tree_greedy([3], (), ()) == DraftVerdict(0, 3, (), 0)
    assert verify_tree(p, None, (), (), uniforms, with_replacement=False) == DraftVerdict(0, 1, (), 0)


@pytest.mark.parametrize("with_replacement", [True, False])
def test_rounding_leaves_no_tree_without_a_token(with_replacement: bool) -> None:
    """p and q that differ in their last bits, every uniform number as large as it can be, and an impossible token."""
    p = torch.tensor([[0.1, 0.2, 0.7, 0.0]], dtype=torch.float64).repeat(3, 1)
    q = (p[:2] * (1 + 2**-52)).contiguous()
    top = torch.full((3,), TOP, dtype=torch.float64)
    for rows in (p[:2], q, None):
        verdict = verify_tree(p, rows, (0, 1), (-1, -1), top, with_replacement=with_replacement)
        assert verdict.next_token != 3
    certain = torch.tensor([[0.0, TOP, 0.0, 0.0]], dtype=torch.float64).repeat(3, 1)
    assert verify_tree(certain, None, (1, 1), (-1, -1), top, with_replacement=with_replacement).next_token == 1
