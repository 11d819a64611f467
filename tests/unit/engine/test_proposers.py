"""Several proposers in one round: each one's trials and accepts, and tokens that leave no choice.

Here the target's text decides what is accepted, as in `VirtualRounds`, so expectations can be taken over all texts.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Final

import pytest
import torch

from alphaloop.acceptance import PREFILL, AcceptanceCounts, ProposerCounts
from alphaloop.deciding.goodput import DrafterState
from alphaloop.messages import Constraint
from engine.constraint import ConstrainedText
from engine.distribution import draw_rows
from engine.grammars import Grammars
from engine.proposal import FORCED, NOTHING, Proposal, RoundCounts
from engine.scoring import VirtualRounds
from engine.verification import verify_against_choices, verify_against_draws
from tests.fixtures.models import NUM_TOKENS, make_tiny_tokenizer

DRAFTER = DrafterState("lookup", "r1", 8)
#: The target's probabilities of the tokens 0, 1 and 2 behind each beginning.
P = {
    (): (Fraction(5, 10), Fraction(3, 10), Fraction(2, 10)),
    (0,): (Fraction(1, 10), Fraction(2, 10), Fraction(7, 10)),
    (1,): (Fraction(6, 10), Fraction(3, 10), Fraction(1, 10)),
    (2,): (Fraction(1, 3),) * 3,
}
#: Two proposers' siblings at depth 1, and two behind the first of them at depth 2.
TREE = Proposal((0, 1, 2, 0), (-1, -1, 0, 0), proposers=("lookup", "model", "model", "lookup"))


def counted(proposal: Proposal, path: Sequence[int], num_emitted: int = 99) -> dict[str, tuple[tuple[int, ...], ...]]:
    counts = RoundCounts()
    counts.take_proposers("lookup", proposal, path, num_emitted=num_emitted)
    return {one.proposer: (one.trials, one.accepts) for one in counts.proposers}


@pytest.mark.parametrize(
    ("proposal", "path", "num_emitted", "expected"),
    [
        # A chain: the drafter's own tokens, then a grammar's; what stands behind a wrong one is no trial.
        (Proposal((5, 6, 7), proposers=("lookup", "lookup", "grammar")), (0, 1), 3,
         {"lookup": ((1, 1), (1, 1)), "grammar": ((0, 0, 1), (0, 0, 0))}),
        (Proposal((5, 6, 7), proposers=("lookup", "lookup", "grammar")), (), 1, {"lookup": ((1,), (0,))}),
        # The text ended with its first token.
        (Proposal((5, 6, 7), proposers=("a", "b", "c")), (0, 1, 2), 1, {"a": ((1,), (1,))}),
        # Siblings: each has its trial, whoever was tried first; two of one proposer are one trial.
        (TREE, (1,), 2, {"lookup": ((1,), (0,)), "model": ((1,), (1,))}),
        (TREE, (0, 2), 3, {"lookup": ((1, 1), (1, 0)), "model": ((1, 1), (0, 1))}),
        (Proposal((3, 4, 5), (-1, -1, -1), proposers=("a", "b", "a")), (2,), 2, {"a": ((1,), (1,)), "b": ((1,), (0,))}),
        # The same token twice: both proposers were right.
        (Proposal((3, 3), (-1, -1), proposers=("a", "b")), (0,), 2, {"a": ((1,), (1,)), "b": ((1,), (1,))}),
        # Forced tokens are neither trials nor depths.
        (Proposal((5, 6, 7), proposers=("a", FORCED, "b")), (0, 1), 3, {"a": ((1,), (1,)), "b": ((0, 1), (0, 0))}),
        (Proposal((5,), proposers=(FORCED,)), (0,), 2, {}),
        (Proposal((5, 6)), (0, 1), 3, {}),
    ],
)  # fmt: skip
def test_who_had_a_trial(
    proposal: Proposal, path: Sequence[int], num_emitted: int, expected: Mapping[str, tuple[tuple[int, ...], ...]]
) -> None:
    assert counted(proposal, path, num_emitted) == expected


def test_the_drafters_own_rounds_before_are_counted_with_the_mixed_ones() -> None:
    """A job whose first rounds had one proposer: once a second one comes, both are complete."""
    counts = RoundCounts()
    own, mixed = Proposal((1, 2)), Proposal((1, 2), proposers=("lookup", "grammar"))
    for proposal, num_accepted in ((own, 2), (own, 0), (mixed, 2), (own, 1)):
        path = range(num_accepted)
        counts.take_proposers("lookup", proposal, path, num_emitted=num_accepted + 1)
        counts.take_drafted(
            DRAFTER, 2, num_asked=2, num_proposed=2, num_accepted=num_accepted, num_emitted=num_accepted + 1
        )
    assert counts.proposers == (ProposerCounts("lookup", (4, 2), (3, 1)), ProposerCounts("grammar", (0, 1), (0, 1)))
    assert (counts.total.trials, counts.total.accepts) == ((4, 3), (3, 2))


def texts() -> dict[tuple[int, ...], Fraction]:
    """Every text of two tokens with its probability."""
    return {(a, b): P[()][a] * P[(a,)][b] for a, b in itertools.product(range(3), repeat=2)}


def followed(text: Sequence[int]) -> tuple[int, ...]:
    best = [text[depth] if depth < len(text) else -2 for depth in (0, *TREE.depths)]
    return verify_against_choices(best, TREE).path


def test_alpha_of_each_proposer_is_the_chance_that_its_token_is_the_targets() -> None:
    """Over all texts, exactly; and what counting only those tried after a rejection would have given."""
    trials: defaultdict[tuple[str, int], Fraction] = defaultdict(Fraction)
    accepts: defaultdict[tuple[str, int], Fraction] = defaultdict(Fraction)
    tried_later = right_later = Fraction(0)
    for text, chance in texts().items():
        for proposer, (its_trials, its_accepts) in counted(TREE, followed(text)).items():
            for depth, (n, a) in enumerate(zip(its_trials, its_accepts, strict=True), 1):
                trials[proposer, depth] += n * chance
                accepts[proposer, depth] += a * chance
        if text[0] != 0:  # the first sibling was rejected, so the second one was tried
            tried_later += chance
            right_later += chance * (text[0] == 1)
    alpha = {place: accepts[place] / trials[place] for place in trials}
    assert alpha == {
        ("lookup", 1): P[()][0],
        ("model", 1): P[()][1],
        ("lookup", 2): P[(0,)][0],
        ("model", 2): P[(0,)][2],
    }
    assert right_later / tried_later == Fraction(3, 5) != P[()][1]


def test_a_sampled_tree_counts_the_same_in_whatever_order_siblings_are_tried() -> None:
    """Real verification with drawn numbers, within four standard errors of the target's probabilities."""
    generator, num = torch.Generator().manual_seed(7), 4000
    tokens, parents, who = (1, 0, 0, 2), (-1, -1, 1, 1), ("model", "lookup", "lookup", "model")
    tree = Proposal(tokens, parents, proposers=who)
    rows = [P[()], P[(1,)], P[(0,)], P[(0,)], P[(0,)]]
    p = torch.tensor([[float(x) for x in row] for row in rows], dtype=torch.float64)
    counts = RoundCounts()
    uniforms = torch.rand((num * len(p), 1), generator=generator, dtype=torch.float64)
    for drawn in draw_rows(p.repeat(num, 1), uniforms).reshape(num, len(p)).tolist():
        path = verify_against_draws(drawn, tree).path
        counts.take_proposers("lookup", tree, path, num_emitted=len(path) + 1)
    expected = {"model": (P[()][1], P[(0,)][2]), "lookup": (P[()][0], P[(0,)][0])}
    for one in counts.proposers:
        for n, a, alpha in zip(one.trials, one.accepts, map(float, expected[one.proposer]), strict=True):
            assert abs(a / n - alpha) < 4 * (alpha * (1 - alpha) / n) ** 0.5
    assert counts.proposers[0].trials[0] == counts.proposers[1].trials[0] == num


@pytest.mark.parametrize(
    ("proposal", "trial_depths"),
    [
        (Proposal((1, 2, 3)), [1, 2, 3]),
        (Proposal((1, 2, 3), proposers=("a", FORCED, "a")), [1, 1, 2]),
        (Proposal((1, 2, 3), proposers=(FORCED, FORCED, "a")), [0, 0, 1]),
        (Proposal((1, 2, 3), (-1, 0, 0), proposers=(FORCED, "a", "b")), [0, 1, 1]),
        (NOTHING, []),
    ],
)
def test_forced_tokens_have_no_depth_of_their_own(proposal: Proposal, trial_depths: list[int]) -> None:
    assert proposal.trial_depths == trial_depths


GRAMMARS: Final = Grammars(make_tiny_tokenizer(), NUM_TOKENS, frozenset({0}))


def tokens_of(letters: str) -> list[int]:
    return [GRAMMARS.tokens.tokenize_str(letter)[0] for letter in letters]


def beginning_of(text: str) -> ConstrainedText:
    """Small letters stand where there is a choice of two, large ones where there is none."""
    pattern = "".join("[ab]" if letter.islower() else letter for letter in text)
    return ConstrainedText.of(GRAMMARS, Constraint("regex", pattern, "body.structured_outputs.regex"))


ONE = AcceptanceCounts().with_round(0, 0, num_emitted=1)


@pytest.mark.parametrize(
    ("text", "draft", "expected"),
    [
        # Behind the prefill's token two are forced, so the round begins at the fourth.
        ("aQZbab", "ba", replace(PREFILL, num_forced=2).with_round(2, 2, num_emitted=3)),
        # The draft runs through a forced place: a trial less, and the token is forced all the same.
        ("abQaba", "bQa", PREFILL.with_round(2, 2, num_emitted=3, num_forced=1) + ONE),
        # It is wrong where there was no choice: it is cut there, and goes on with what must follow.
        ("abQaba", "ba", PREFILL.with_round(1, 1, num_emitted=2, num_forced=1) + ONE + ONE),
        # Forced tokens behind a round's own, up to the end of the text.
        ("abaQZX", "bb", PREFILL.with_round(2, 1, num_emitted=2, num_forced=3)),
        # Forced tokens before any round.
        ("QZaba", "b", replace(PREFILL, num_forced=2).with_round(1, 1, num_emitted=2)),
    ],
)
def test_virtual_rounds_by_hand(text: str, draft: str, expected: AcceptanceCounts) -> None:
    proposals = iter([Proposal(tuple(tokens_of(draft)))])
    rounds = VirtualRounds(lambda room: next(proposals, NOTHING), [9], 3, len(text), beginning_of(text))
    while rounds.take_round([9, *tokens_of(text)], has_ended=True):
        pass
    assert rounds.counts == expected
    assert rounds.counts.num_tokens == len(text)
