"""The look-up index against a rescan of the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from alphaloop.settings.model import LookupDrafterSettings
from worker.decoding.drafters.lookup import LookupDrafter, LookupText

texts = st.lists(st.integers(0, 3), max_size=60)


def rescanned(tokens: list[int], min_ngram: int, max_ngram: int, num_tokens: int) -> list[int]:
    """The longest suffix that occurred before, its latest occurrence, and what followed it."""
    for n in range(min(max_ngram, len(tokens)), min_ngram - 1, -1):
        suffix = tokens[len(tokens) - n :]
        for begin in range(len(tokens) - n - 1, -1, -1):
            if tokens[begin : begin + n] == suffix:
                longer = list(tokens)
                for i in range(num_tokens):
                    longer.append(longer[begin + n + i])
                return longer[len(tokens) :]
    return []


@given(texts, st.lists(texts, max_size=4), st.integers(1, 3), st.integers(0, 3), st.integers(1, 9))
def test_proposals_are_the_rescanned_ones(
    prompt: list[int], pieces: list[list[int]], min_ngram: int, more: int, num_tokens: int
) -> None:
    text, tokens = LookupText(prompt, min_ngram, min_ngram + more), list(prompt)
    for piece in [[], *pieces]:
        text.extend(piece)
        tokens += piece
        assert text.propose(num_tokens) == rescanned(tokens, min_ngram, min_ngram + more, num_tokens)


def test_a_proposal_goes_on_with_the_period_of_the_text() -> None:
    assert LookupText([9, 1, 2, 1, 2], 2, 4).propose(7) == [1, 2, 1, 2, 1, 2, 1]


def test_the_longest_match_wins_over_a_later_shorter_one() -> None:
    assert LookupText([1, 2, 3, 7, 2, 3, 8, 1, 2, 3], 1, 4).propose(1) == [7]


def test_the_revision_names_what_the_proposals_depend_on() -> None:
    short, long = (LookupDrafter("lookup", LookupDrafterSettings(max_ngram=n)).state for n in (3, 4))
    assert short.revision != long.revision
    wider = LookupDrafter("lookup", LookupDrafterSettings(max_ngram=3, max_draft_tokens=20)).state
    assert (wider.revision, wider.max_draft_tokens) == (short.revision, 20)


def test_n_gram_lengths_in_the_wrong_order_mean_one_length() -> None:
    text = LookupDrafter("lookup", LookupDrafterSettings(min_ngram=5, max_ngram=2)).start([1, 2, 3, 1, 2])
    assert text.propose(1) == [3]
