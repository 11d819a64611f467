"""Virtual rounds over a text: they accept what the target would have, and wait for as much as they need."""

from __future__ import annotations

import random
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from alphaloop.acceptance import PREFILL, AcceptanceCounts
from alphaloop.settings.models import LookupDrafterSettings
from worker.decoding.drafters.lookup import LookupDrafter
from worker.decoding.proposal import NOTHING, Proposal, tree_depths
from worker.decoding.scoring import MAX_TOKENS, VirtualRounds
from worker.decoding.verification import verify_greedy, verify_tree_greedy


def counted(
    propose: Callable[[int], Proposal],
    prompt: list[int],
    output: list[int],
    num_draft_tokens: int,
    max_tokens: int,
    *,
    is_first_drafted: bool = False,
) -> AcceptanceCounts:
    """The counts over a text that has ended."""
    rounds = VirtualRounds(propose, list(prompt), num_draft_tokens, max_tokens)
    text = [*prompt, *output]
    while rounds.take_round(text, has_ended=True, is_first_drafted=is_first_drafted):
        pass
    return rounds.counts


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Tokens and parents, siblings different."""
    tokens: list[int] = []
    parents: list[int] = []
    for _ in range(draw(st.integers(1, 8))):
        parent = draw(st.integers(-1, len(tokens) - 1))
        token = draw(st.integers(0, 2))
        if (token, parent) not in zip(tokens, parents, strict=True):
            tokens.append(token)
            parents.append(parent)
    return tokens, parents


@given(st.lists(st.integers(0, 2), min_size=1, max_size=9), st.integers(0, 3), st.booleans(), st.data())
def test_a_virtual_round_accepts_what_the_target_would_and_is_cropped_where_the_text_ends(
    following: list[int], room_behind: int, is_first_drafted: bool, data: st.DataObject
) -> None:
    """One round over a text known beforehand, against the verification of real rounds, whatever would follow it."""
    is_chain = data.draw(st.booleans())
    tokens, parents = data.draw(trees())
    if is_chain:
        parents = list(range(-1, len(tokens) - 1))
    beyond = data.draw(st.lists(st.integers(0, 2), min_size=9, max_size=9))
    depths = tree_depths(parents)
    real = [*following, *beyond]
    best = [real[0], *(real[depth] for depth in depths)]
    verdict = verify_greedy(best, tokens) if is_chain else verify_tree_greedy(best, tokens, parents)
    num_emitted = min(verdict.num_accepted + 1, len(following))
    prefilled = [] if is_first_drafted else [7]
    expected = (PREFILL if prefilled else AcceptanceCounts()).with_round(
        max(depths), verdict.num_accepted, num_emitted=num_emitted, num_tested=verdict.num_tested
    )
    for _ in range(len(following) - num_emitted):
        expected = expected.with_round(0, 0, num_emitted=1)
    proposals = iter([Proposal(tuple(tokens), None if is_chain else tuple(parents))])
    found = counted(
        lambda room: next(proposals, NOTHING),
        [7],
        [*prefilled, *following],
        9,
        len(prefilled) + len(following) + room_behind,
        is_first_drafted=is_first_drafted,
    )
    assert found == expected


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=60),
    st.lists(st.integers(1, 9), min_size=1),
    st.integers(1, 6),
    st.booleans(),
    st.integers(0, 5),
)
def test_reading_along_counts_what_reading_at_the_end_counts(
    output: list[int], pieces: list[int], k: int, is_first_drafted: bool, room_behind: int
) -> None:
    """However many tokens the text grows by between two readings."""
    settings = LookupDrafterSettings(min_ngram=1, min_probability=0, max_draft_tokens=k)
    prompt, max_tokens = [0, 1, 0], len(output) + room_behind

    def reading() -> VirtualRounds:
        seen = list(prompt)
        return VirtualRounds(LookupDrafter("lookup", settings).rereading(seen, "", 0), seen, k, max_tokens)

    along, at_end = reading(), reading()
    text = list(prompt)
    for number in range(len(output)):
        piece = pieces[number % len(pieces)]
        text += output[len(text) - len(prompt) :][:piece]
        while along.take_round(text, has_ended=False, is_first_drafted=is_first_drafted):
            assert along.counts.num_tokens <= len(text) - len(prompt)
    for rounds in (along, at_end):
        while rounds.take_round(text, has_ended=True, is_first_drafted=is_first_drafted):
            pass
    assert along.counts == at_end.counts
    assert at_end.counts.num_tokens == len(output)


def test_a_proposal_is_never_asked_for_beyond_the_jobs_own_limit() -> None:
    asked = []

    def propose(room: int) -> Proposal:
        asked.append(room)
        return NOTHING

    counted(propose, [0], [1, 2, 3, 4], 2, 4)
    assert asked == [2, 1, 0]
    asked.clear()
    counted(propose, [0], [1, 2, 3, 4], 2, 4, is_first_drafted=True)
    assert asked == [2, 2, 1, 0]


def test_rounds_begin_in_the_first_tokens_of_a_long_text_only(rng: random.Random) -> None:
    output = [rng.randrange(5) for _ in range(MAX_TOKENS + 300)]
    seen = [0]
    propose = LookupDrafter("lookup", LookupDrafterSettings(min_probability=0)).rereading(seen, "", 0)
    rounds = VirtualRounds(propose, seen, 12, 10_000)
    while rounds.take_round([0, *output], has_ended=True):
        pass
    assert MAX_TOKENS <= rounds.counts.num_tokens <= MAX_TOKENS + 12
    assert rounds.counts.num_cropped == 0
