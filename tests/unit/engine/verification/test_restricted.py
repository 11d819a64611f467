"""A constraint and the acceptance rules, by exact enumeration: both sides restricted are exact, a naive cut is not."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import Tensor

from tests.fixtures.enumeration import (
    Draft,
    Fixed,
    Language,
    Text,
    bias,
    by_tree,
    chain,
    deterministic,
    drawn,
    enumerate_blocks,
    enumerate_round,
    likeliest,
)

EXACT = 1e-13


class Restricted(Language):
    """A language cut to what a grammar allows behind each prefix, and renormalised."""

    def __init__(self, inner: Language, allowed: Restriction) -> None:
        super().__init__("restricted", inner.vocabulary)
        self.inner, self.allowed = inner, allowed

    def behind(self, prefix: Text) -> Tensor:
        """[vocabulary], float64."""
        allowed = torch.tensor([token in self.allowed(prefix) for token in range(self.vocabulary)])
        p = self.inner.behind(prefix).where(allowed, 0.0)
        return p / p.sum()


class Restriction:
    """A grammar over three tokens: the same one twice in a row is refused, and behind token 2 token 0 is forced."""

    def __call__(self, prefix: Text) -> set[int]:
        if prefix and prefix[-1] == 2:
            return {0}
        return {0, 1, 2} - set(prefix[-1:])


GRAMMAR = Restriction()


@pytest.fixture
def pair(seed: int) -> tuple[Restricted, Restricted]:
    """A target and a drafter, restricted alike."""
    return Restricted(Language(f"target {seed}", 3), GRAMMAR), Restricted(Language(f"drafter {seed}", 3), GRAMMAR)


def cut(drafts: Iterable[Draft], allowed: Restriction) -> Iterator[Draft]:
    """Each draft up to its first refused token, with what it was drawn from: the naive way."""
    for draft in drafts:
        num = next((i for i, t in enumerate(draft.tokens) if t not in allowed(draft.tokens[:i])), len(draft.tokens))
        yield Draft(draft.weight, draft.tokens[:num], chain(num), draft.q[:num])


def test_a_drawn_token_that_is_cut_because_the_grammar_refuses_it_is_caught(rng: random.Random) -> None:
    """By hand: a is drafted with ½ and kept, the refused token with ½ and cut; p is drawn instead. a has ¾, not ½."""

    class NotTwo(Restriction):
        def __call__(self, prefix: Text) -> set[int]:
            return {0, 1}

    target, drafter = Fixed(0.5, 0.5, 0.0), Fixed(0.5, 0.0, 0.5)
    found = enumerate_blocks(target, cut(drawn(drafter, 1), NotTwo()), rng)
    first = sum(weight for text, weight in found.texts(target, 2).items() if text[0] == 0)
    assert first == pytest.approx(0.75, abs=EXACT)
    restricted = enumerate_blocks(target, drawn(Restricted(drafter, NotTwo()), 1), rng)
    assert bias(target, restricted, 2) < EXACT


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_drafter_that_is_restricted_before_it_draws_is_exact(
    pair: tuple[Restricted, Restricted], k: int, rng: random.Random
) -> None:
    target, drafter = pair
    assert bias(target, enumerate_blocks(target, drawn(drafter, k), rng), k + 1) < EXACT


def test_the_naive_cut_is_biased_behind_any_drafter(pair: tuple[Restricted, Restricted], rng: random.Random) -> None:
    target, drafter = pair
    assert bias(target, enumerate_blocks(target, cut(drawn(drafter.inner, 2), GRAMMAR), rng), 3) > 1e-4


def test_what_must_follow_may_be_added_to_a_drawn_draft(
    pair: tuple[Restricted, Restricted], rng: random.Random
) -> None:
    """Forced tokens, and tokens that the grammar only suggests, stand in it with a one-hot q."""
    target, drafter = pair

    def lengthened(suggested: int) -> Iterator[Draft]:
        for draft in drawn(drafter, 2):
            token = 0 if draft.tokens[-1] == 2 else suggested if suggested != draft.tokens[-1] else 2
            one_hot = torch.nn.functional.one_hot(torch.tensor([token]), 3).double()
            yield Draft(draft.weight, (*draft.tokens, token), chain(3), torch.cat((draft.q, one_hot)))

    for suggested in range(2):
        found = enumerate_blocks(target, lengthened(suggested), rng)
        assert bias(target, found, 4) < EXACT


def test_a_forced_token_is_never_where_a_block_ends(pair: tuple[Restricted, Restricted], rng: random.Random) -> None:
    """So what is accepted goes through it, and it needs no trial."""
    target, drafter = pair
    found = enumerate_blocks(target, drawn(drafter, 3), rng)
    refused = [text for text, weight in found.begun.items() if weight > EXACT and text[-1] == 0 and text[-2:-1] == (2,)]
    # Such a text ended with the target's own token: the whole draft was accepted before it, never a part of it.
    assert all(len(text) == 4 for text in refused)


@pytest.mark.parametrize("k", [1, 3])
def test_a_draft_that_follows_from_the_text_may_be_cut(
    pair: tuple[Restricted, Restricted], k: int, rng: random.Random
) -> None:
    target, drafter = pair
    (draft,) = cut(likeliest(drafter.inner, chain(k)), GRAMMAR)
    assert bias(target, enumerate_round(target, [draft], deterministic, rng), k + 1) < EXACT


def test_a_tree_without_its_refused_tokens_is_exact(pair: tuple[Restricted, Restricted], rng: random.Random) -> None:
    target, drafter = pair
    tree = (-1, -1, 0, 0, 1)
    (draft,) = likeliest(drafter, tree)
    kept = [
        i for i in range(len(tree)) if all(t in GRAMMAR(draft.prefix(i)[:n]) for n, t in enumerate(draft.prefix(i)))
    ]
    parents = tuple(-1 if tree[i] < 0 else kept.index(tree[i]) for i in kept)
    pruned = Draft(1.0, tuple(draft.tokens[i] for i in kept), parents, draft.q[kept])
    assert bias(target, enumerate_round(target, [pruned], by_tree, rng), 3) < EXACT


#: Tokens that a draft with another tokenizer shares with the target.
SHARED = frozenset({0, 2})


class Intersected(Restriction):
    """A draft that has only some of the target's tokens, whatever stands before; the target has them all."""

    def __call__(self, prefix: Text) -> set[int]:
        return {*SHARED}


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_drafter_that_has_a_part_of_the_tokens_leaves_the_targets_distribution(
    seed: int, k: int, rng: random.Random
) -> None:
    """Token-level intersection: q is renormalised over the shared tokens, p is not restricted."""
    target, drafter = Language(f"target {seed}", 3), Restricted(Language(f"drafter {seed}", 3), Intersected())
    assert bias(target, enumerate_blocks(target, drawn(drafter, k), rng), k + 1) < EXACT
    (draft,) = likeliest(drafter, chain(k))
    assert bias(target, enumerate_round(target, [draft], deterministic, rng), k + 1) < EXACT


def test_a_drafter_that_drops_the_tokens_that_are_not_shared_is_caught(seed: int, rng: random.Random) -> None:
    target, drafter = Language(f"target {seed}", 3), Language(f"drafter {seed}", 3)
    assert bias(target, enumerate_blocks(target, cut(drawn(drafter, 2), Intersected()), rng), 3) > 1e-4
