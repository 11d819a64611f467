"""Every rule of verification leaves the target's distribution, by exact enumeration; and well-known errors are caught.

Rules × how target and drafter may differ: also where a grammar or a job's bars cut both, and where a drafter has a part
of the target's tokens. Trees are merged by the drafter that merges them, `hybrid.merged`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import pytest
import torch
from torch import Tensor

from alphaloop.engine import Sampling
from engine.drafters.hybrid import merged
from engine.proposal import DraftDistributions, Proposal, tree_depths
from engine.sampling import Barred, TokenChooser
from engine.verdict import DraftVerdict
from tests.fixtures.enumeration import (
    Draft,
    Fixed,
    Language,
    Text,
    Verify,
    bias,
    by_block,
    by_drawn_tree,
    by_token,
    by_tree,
    chain,
    deterministic,
    drawn,
    enumerate_blocks,
    likeliest,
    with_siblings,
)

EXACT: Final = 1e-13
TARGET: Final = Fixed(0.5, 0.3, 0.2)
DRAFTER: Final = Fixed(0.2, 0.7, 0.1)
NOTHING: Final = torch.empty((0, 3), dtype=torch.float64)
PROMPT: Final = (2, 0)
Allowed = Callable[[Text], set[int]]


class Restricted(Language):
    """A language cut to what may follow each prefix, and renormalised."""

    def __init__(self, inner: Language, allowed: Allowed) -> None:
        super().__init__("restricted", inner.vocabulary)
        self.inner, self.allowed = inner, allowed

    def behind(self, prefix: Text) -> Tensor:
        """[vocabulary], float64."""
        allowed = torch.tensor([token in self.allowed(prefix) for token in range(self.vocabulary)])
        p = self.inner.behind(prefix).where(allowed, 0.0)
        return p / p.sum()


def grammar(prefix: Text) -> set[int]:
    """The same token twice in a row is refused, and after token 2 token 0 is forced."""
    return {0} if prefix[-1:] == (2,) else {0, 1, 2} - set(prefix[-1:])


def shared(prefix: Text) -> set[int]:
    """Tokens that a draft with another tokenizer shares with the target."""
    return {0, 2}


class Barring(Language):
    """Another language's distributions as a job with bars sees them, by the job's own rule."""

    def __init__(self, other: Language) -> None:
        super().__init__("barred", other.vocabulary)
        self._other = other
        barred = Barred(((0, 1), (2, 2), (1, 0, 2)), frozenset({1}))
        sampling = Sampling(max_tokens=9, temperature=1.0, bad_words=("known by their tokens",), min_tokens=2)
        self._choice = TokenChooser("job", sampling, len(PROMPT), barred=barred)

    def behind(self, prefix: Text) -> Tensor:
        """[vocabulary], float64."""
        scores = self._choice.scores(self._other.behind(prefix).log()[None], PROMPT, [prefix])
        return self._choice.probabilities(scores)[0]


#: A target and a drafter, given two languages.
PAIRS: Final[dict[str, Callable[[Language, Language], tuple[Language, Language]]]] = {
    "all tokens possible": lambda target, drafter: (target, drafter),
    "some impossible": lambda target, drafter: (Language(target.name, 3, num_impossible=1), drafter),
    "drafter equals target": lambda target, drafter: (target, target),
    "under a grammar": lambda target, drafter: (Restricted(target, grammar), Restricted(drafter, grammar)),
    "the target under a grammar": lambda target, drafter: (Restricted(target, grammar), drafter),
    "barred": lambda target, drafter: (Barring(target), Barring(drafter)),
    "the target barred": lambda target, drafter: (Barring(target), drafter),
    "a drafter with a part of the tokens": lambda target, drafter: (target, Restricted(drafter, shared)),
}
#: Whether a chain goes on after its token at a place, given q at each place and the tokens.
Gate = Callable[[Tensor, Text, int], bool]


def likely_enough(least: float) -> Gate:
    """The gate of draft models: the probability of the chain up to its token."""
    return lambda q, tokens, i: float(q[range(i + 1), tokens[: i + 1]].prod()) >= least


def shortened(drafts: Iterable[Draft], goes_on: Gate, *, keeps_last: bool) -> Iterator[Draft]:
    """Chains that end before (or with, `keeps_last`) the first token that `goes_on` refuses."""
    for draft in drafts:
        num = 0
        while num < len(draft.tokens) and goes_on(draft.q, draft.tokens, num):
            num += 1
        num = min(num + keeps_last, len(draft.tokens))
        yield Draft(draft.weight, draft.tokens[:num], chain(num), draft.q[:num])


def with_branches(drafts: Iterable[Draft], beside: Language, parents: tuple[int, ...], most: int) -> Iterator[Draft]:
    """Each draft in one tree with the likeliest tokens of another language, as a hybrid drafter merges them."""
    (other,) = likeliest(beside, parents)
    for draft in drafts:
        proposals = [
            Proposal(tree.tokens, tree.parents, q, proposers=("a",) * len(tree.tokens))
            for tree, q in ((other, None), (draft, DraftDistributions(draft.q)))
        ]
        tree = merged(proposals, most)
        assert tree.q is not None
        shape = chain(len(tree.tokens)) if tree.parents is None else tree.parents
        yield Draft(draft.weight, tree.tokens, shape, tree.q.probabilities)


def one_hot(drafts: Iterable[Draft]) -> Iterator[Draft]:
    """As if each were certain of its tokens."""
    for draft in drafts:
        q = torch.nn.functional.one_hot(torch.tensor(draft.tokens), 3).double()
        yield Draft(1.0, draft.tokens, draft.parents, q)


def lengthened(drafts: Iterable[Draft], suggested: int) -> Iterator[Draft]:
    """With a token that follows from the text: forced, or only suggested."""
    for draft in drafts:
        token = 0 if draft.tokens[-1] == 2 else suggested if suggested != draft.tokens[-1] else 2
        q = torch.cat((draft.q, torch.nn.functional.one_hot(torch.tensor([token]), 3).double()))
        yield Draft(draft.weight, (*draft.tokens, token), chain(len(draft.tokens) + 1), q)


def cut(drafts: Iterable[Draft], allowed: Allowed) -> Iterator[Draft]:
    """Each draft up to its first refused token, with what it was drawn from: the naive way."""
    return shortened(drafts, lambda _, tokens, i: tokens[i] in allowed(tokens[:i]), keeps_last=False)


def without(draft: Draft, place: int) -> Draft:
    """The draft without its token of that place, which has no children."""
    kept = [i for i in range(len(draft.tokens)) if i != place]
    parents = tuple(draft.parents[i] for i in kept)
    return Draft(draft.weight, tuple(draft.tokens[i] for i in kept), parents, draft.q[kept])


LOOK_UP: Final = Language("look-up", 3)
#: How a drafter drafts, and the rule that judges.
RULES: Final[dict[str, tuple[Callable[[Language], Iterable[Draft]], Verify]]] = {
    "no draft": (lambda drafter: likeliest(drafter, ()), deterministic),
    "a chain": (lambda drafter: likeliest(drafter, chain(3)), deterministic),
    "a chain that is cut": (lambda drafter: cut(likeliest(drafter, chain(3)), grammar), deterministic),
    "no drawn token": (lambda drafter: drawn(drafter, 0), by_block),
    "a drawn token": (lambda drafter: drawn(drafter, 1), by_block),
    "a block": (lambda drafter: drawn(drafter, 2), by_block),
    "a block of one-hot distributions": (lambda drafter: one_hot(likeliest(drafter, chain(3))), by_block),
    "a block with a token that follows": (lambda drafter: lengthened(drawn(drafter, 2), 0), by_block),
    "a block with a token that may follow": (lambda drafter: lengthened(drawn(drafter, 2), 1), by_block),
    "a block token by token": (lambda drafter: drawn(drafter, 2), by_token),
    "a gate after an unlikely token": (
        lambda drafter: shortened(drawn(drafter, 2), lambda q, tokens, i: bool(q[i, tokens[i]] > 0.3), keeps_last=True),
        by_block,
    ),
    "a gate after an unlikely chain": (
        lambda drafter: shortened(drawn(drafter, 2), likely_enough(0.3), keeps_last=True),
        by_block,
    ),
    "a gate where no token is likely": (
        lambda drafter: shortened(drawn(drafter, 2), lambda q, _, i: bool(q[i].max() > 0.6), keeps_last=False),
        by_block,
    ),
    # Bushy ones, wide ones, siblings that are not neighbours. Which tokens they hold is all that a drafter decides.
    "a bushy tree": (lambda drafter: likeliest(drafter, (-1, -1, 0, 0, 1, 2)), by_tree),
    "a wide tree": (lambda drafter: likeliest(drafter, (-1, -1, -1)), by_tree),
    "a tree of two": (lambda drafter: likeliest(drafter, (-1, -1)), by_tree),
    "siblings apart": (lambda drafter: likeliest(drafter, (-1, 0, -1, 2)), by_tree),
    "equal siblings": (lambda _: [Draft(1.0, (1, 1, 2), (-1, -1, 1), NOTHING)], by_tree),
    "drawn siblings": (lambda drafter: with_siblings(drafter, (-1, -1)), by_drawn_tree),
    "three drawn siblings": (lambda drafter: with_siblings(drafter, (-1, -1, -1)), by_drawn_tree),
    "a drawn tree": (lambda drafter: with_siblings(drafter, (-1, -1, 0)), by_drawn_tree),
    # Where both say the same the token stands once, and what was drawn after it goes on beside the branch's own.
    "a chain beside a block": (lambda drafter: with_branches(drawn(drafter, 2), LOOK_UP, (-1, 0), 4), by_drawn_tree),
    "siblings beside a block": (lambda drafter: with_branches(drawn(drafter, 2), LOOK_UP, (-1, -1), 4), by_drawn_tree),
    "a tree beside a block": (lambda drafter: with_branches(drawn(drafter, 2), LOOK_UP, (-1, 0, -1), 4), by_drawn_tree),
    "a chain beside drawn siblings": (
        lambda drafter: with_branches(with_siblings(drafter, (-1, -1)), LOOK_UP, (-1, 0), 4),
        by_drawn_tree,
    ),
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("rule", RULES)
def test_texts_have_the_targets_distribution(pair: str, rule: str, seed: int, rng: random.Random) -> None:
    target, drafter = PAIRS[pair](Language(f"target {seed}", 3), Language(f"drafter {seed}", 3))
    draft, verify = RULES[rule]
    assert bias_of(target, draft(drafter), verify, rng) < EXACT


@pytest.mark.parametrize(
    ("draft", "verify"),
    [
        (lambda drafter: drawn(drafter, 4), by_block),
        (lambda drafter: shortened(drawn(drafter, 4), likely_enough(0.2), keeps_last=True), by_block),
        (lambda drafter: with_branches(drawn(drafter, 1), Language("look-up", 2), (-1, 0, 1), 3), by_drawn_tree),
    ],
    ids=["a long block", "a long gated block", "a branch that goes on after the whole draft"],
)
def test_longer_drafts_of_fewer_tokens_are_exact_too(
    draft: Callable[[Language], Iterable[Draft]], verify: Verify, seed: int, rng: random.Random
) -> None:
    assert bias_of(Language(f"target {seed}", 2), draft(Language(f"drafter {seed}", 2)), verify, rng) < EXACT


def bias_of(target: Language, drafts: Iterable[Draft], verify: Verify, rng: random.Random) -> float:
    """Over all texts as long as the longest path and one token more."""
    every = list(drafts)
    length = 1 + max(max(tree_depths(draft.parents), default=0) for draft in every)
    return bias(target, enumerate_blocks(target, every, rng, verify), length)


def generous(p: Tensor, draft: Draft, uniforms: Tensor) -> DraftVerdict:
    """1 % more acceptance than allowed."""
    return by_token(p, draft, torch.cat((uniforms[:-1] / 1.01, uniforms[-1:])))


def with_one_number(p: Tensor, draft: Draft, uniforms: Tensor) -> DraftVerdict:
    """An easy slip: the test of one prefix depends on that of another."""
    return by_block(p, draft, torch.cat((uniforms[:1].expand(len(uniforms) - 1), uniforms[-1:])))


#: Two tokens, of which the drafter knows one; the other half of its drafts may not be written.
HALF: Final = (Fixed(0.5, 0.5, 0.0), Fixed(0.5, 0.0, 0.5))
#: Drafts over TARGET and DRAFTER, the rule that judges them, and the bias by hand.
ERRORS: Final[dict[str, tuple[Callable[[], Iterable[Draft]], Verify, float]]] = {
    # (e) q was not what the draft was drawn from: token 1 stays with 3/7, the rest is 3 : 0 : 1. 3/7, 3/7, 1/7.
    "likeliest tokens judged by p over q": (lambda: likeliest(DRAFTER, chain(1)), by_token, 9 / 35),
    # With siblings: token 1 stays with 3/7; else token 0 always does. 4/7, 3/7, 0.
    "likeliest siblings judged by p over q": (lambda: likeliest(DRAFTER, (-1, -1)), by_drawn_tree, 0.4),
    # (f) A gate that looks at the token it drops: token 2 is drawn with .1, p is drawn instead. .55, .33, .12.
    "a drawn token dropped for its probability": (
        lambda: shortened(drawn(DRAFTER, 1), likely_enough(0.15), keeps_last=False),
        by_block,
        0.16,
    ),
    # After the rejected token 1, token 2 is drawn with 1/3 and pruned; r = 3/4, 0, 1/4 is drawn instead.
    "a drawn sibling pruned for its probability": (
        lambda: (
            without(draft, 1) if DRAFTER.behind(())[draft.tokens[1]] < 0.15 else draft
            for draft in with_siblings(DRAFTER, (-1, -1))
        ),
        by_drawn_tree,
        2 / 15,
    ),
    # Look-up says 1. Where 1 is drawn it is dropped and p decides; 0 and 2 always stay. .55, .21, .24.
    "a drawn token dropped because look-up has it": (
        lambda: (
            Draft(draft.weight, (1,), (-1,), NOTHING)
            if draft.tokens == (1,)
            else Draft(draft.weight, (*draft.tokens, 1), (-1, -1), draft.q)
            for draft in drawn(DRAFTER, 1)
        ),
        by_drawn_tree,
        0.18,
    ),
    # Token 2 is drawn with .1 and replaced by look-up's token 1, so p decides there.
    "a switch that looks at a drawn token": (
        lambda: (
            Draft(draft.weight, (1,), (-1,), NOTHING) if draft.tokens == (2,) else draft for draft in drawn(DRAFTER, 1)
        ),
        by_drawn_tree,
        0.16,
    ),
    # Token 1 is accepted with .303 instead of .3, and .003 less is drawn from the rest.
    "1 % more acceptance than allowed": (lambda: drawn(DRAFTER, 1), generous, 0.006),
}


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_is_caught_with_its_bias(error: str, rng: random.Random) -> None:
    draft, verify, expected = ERRORS[error]
    assert bias_of(TARGET, draft(), verify, rng) == pytest.approx(expected, abs=EXACT)


def test_what_may_not_be_written_is_not_cut_after_the_draw(seed: int, rng: random.Random) -> None:
    """By hand: a is drafted with ½ and kept, the refused token with ½ and cut; p is drawn instead. a has ¾, not ½."""
    target, drafter = HALF
    assert bias_of(target, cut(drawn(drafter, 1), lambda _: {0, 1}), by_block, rng) == pytest.approx(0.5, abs=EXACT)
    inner, other = Language(f"target {seed}", 3), Language(f"drafter {seed}", 3)
    assert bias_of(Restricted(inner, grammar), cut(drawn(other, 2), grammar), by_block, rng) > 1e-4
    assert bias_of(inner, cut(drawn(other, 2), shared), by_block, rng) > 1e-4
    assert bias_of(TARGET, drawn(DRAFTER, 2), with_one_number, rng) > 0.01


def test_a_forced_token_is_never_where_a_block_ends(seed: int, rng: random.Random) -> None:
    """So what is accepted goes through it, and it needs no trial."""
    target, drafter = (Restricted(Language(f"{name} {seed}", 3), grammar) for name in ("target", "drafter"))
    found = enumerate_blocks(target, drawn(drafter, 3), rng)
    refused = [text for text, weight in found.begun.items() if weight > EXACT and text[-1] == 0 and text[-2:-1] == (2,)]
    # Such a text ended with the target's own token: the whole draft was accepted before it, never a part of it.
    assert all(len(text) == 4 for text in refused)


def test_a_second_sibling_is_accepted_as_often_as_can_be(rng: random.Random) -> None:
    """By hand: the first stays with .6; only token 1 is rejected, and of r = 3/4, 0, 1/4 and q = 2/3, 0, 1/3 the
    smaller ones add up to 11/12."""
    found = enumerate_blocks(TARGET, with_siblings(DRAFTER, (-1, -1)), rng, by_drawn_tree)
    assert found.num_accepted == pytest.approx(0.6 + 0.4 * 11 / 12, abs=EXACT)


def test_a_branch_adds_to_what_a_block_accepts(rng: random.Random) -> None:
    """By hand: token 1 is rejected with .4 in all; token 0, proposed beside it, is 3/4 of what is left then."""
    beside = Fixed(1.0, 0.0, 0.0)
    found = enumerate_blocks(TARGET, with_branches(drawn(DRAFTER, 1), beside, (-1,), 2), rng, by_drawn_tree)
    assert found.num_accepted == pytest.approx(0.6 + 0.4 * 3 / 4, abs=EXACT)
