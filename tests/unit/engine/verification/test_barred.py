"""Barred tokens under drafts: texts keep the target's distribution over what may be written, exactly.

The masks are those of `TokenChooser.scores`, on both sides, for every path of a round. Cutting a draft that was drawn
without the mask is the negative test.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
from torch import Tensor

from alphaloop.engine import Sampling
from engine.sampling import Barred, TokenChooser
from tests.fixtures.enumeration import (
    Draft,
    Fixed,
    Language,
    Verify,
    bias,
    by_block,
    by_tree,
    chain,
    deterministic,
    drawn,
    enumerate_round,
    likeliest,
)

EXACT = 1e-13
WORDS = ((0, 1), (2, 2), (1, 0, 2))
PROMPT = (2, 0)


class Barring(Language):
    """Another language's distributions as a job sees them: behind bars, by the job's own rule."""

    def __init__(self, other: Language) -> None:
        super().__init__("barred", other.vocabulary)
        self._other = other
        self._choice = TokenChooser(
            "job",
            Sampling(max_tokens=9, temperature=1.0, bad_words=("known by their tokens",), min_tokens=2),
            len(PROMPT),
            barred=Barred(WORDS, frozenset({1})),
        )

    def behind(self, prefix: tuple[int, ...]) -> Tensor:
        """[vocabulary], float64."""
        scores = self._choice.scores(self._other.behind(prefix).log()[None], PROMPT, [prefix])
        return self._choice.probabilities(scores)[0]


TREE = (-1, -1, 0, 0, 1)


@pytest.mark.parametrize(
    ("verify", "parents", "is_drawn"),
    [(by_block, chain(2), True), (deterministic, chain(3), False), (by_tree, TREE, False)],
    ids=["drawn chain", "deterministic chain", "tree"],
)
@pytest.mark.parametrize("knows_bars", [True, False])
def test_texts_have_the_targets_distribution_over_what_may_be_written(
    verify: Verify, parents: tuple[int, ...], is_drawn: bool, knows_bars: bool, seed: int, rng: random.Random
) -> None:
    """A drafter that does not know the bars (look-up) proposes barred tokens, which have no probability: all exact."""
    target, other = Barring(Language(f"target {seed}", 3)), Language(f"drafter {seed}", 3)
    drafter: Language = Barring(other) if knows_bars else other
    drafts: Iterator[Draft] = drawn(drafter, len(parents)) if is_drawn else likeliest(drafter, parents)
    found = enumerate_round(target, drafts, verify, rng)
    length = 1 + len(parents) if parents == chain(len(parents)) else 3
    assert bias(target, found, length) < EXACT
    for text in itertools.product(range(3), repeat=length):
        is_barred = 1 in text[:2] or any(
            text[i : i + len(word)] == word for word in WORDS for i in range(len(text) - len(word) + 1)
        )
        assert (found.texts(target, length).get(text, 0.0) == 0.0) >= is_barred


def test_cutting_a_drawn_draft_that_is_barred_is_caught(rng: random.Random) -> None:
    """p = (½, ½, 0), q = (½, 0, ½) with token 2 barred: cut behind the draw, the text is ¾, ¼."""
    target, drafter = Fixed(0.5, 0.5, 0.0), Fixed(0.5, 0.0, 0.5)
    cut = [draft if draft.tokens != (2,) else Draft(draft.weight, (), (), draft.q[:0]) for draft in drawn(drafter, 1)]
    found = {}
    for draft in cut:
        for text, weight in enumerate_round(target, [draft], by_block, rng).begun.items():
            found[text[0]] = found.get(text[0], 0.0) + weight
    assert found[0] == pytest.approx(0.75, abs=EXACT)
