"""The look-up drafter against a rescan of the whole text by the same rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.lookup import MAX_OCCURRENCES, NOVELTY, SuffixIndex
from alphaloop.settings.models import LookupDrafterSettings
from worker.decoding.drafters.lookup import LookupDrafter
from worker.decoding.proposal import Ask, Drafter, Proposal
from worker.decoding.sampling import TokenChooser
from worker.engine import Sampling

GREEDY = Sampling(max_tokens=64, temperature=0.0)
NO_CHOICE = cast(TokenChooser, None)  # what followed before does not depend on how tokens are chosen

tokens = st.integers(0, 3)
texts = st.lists(tokens, min_size=1, max_size=60)
pieces = st.lists(st.lists(tokens, min_size=1, max_size=8), max_size=5)
rules = st.builds(
    LookupDrafterSettings,
    min_ngram=st.integers(1, 3),
    max_ngram=st.integers(3, 6),
    min_probability=st.sampled_from([0.0, 0.1, 0.3]),
    num_branches=st.just(1),
)


def lookup(**settings: object) -> Drafter:
    return LookupDrafter("lookup", LookupDrafterSettings.model_validate(settings))


def ask(drafter: Drafter, text: Sequence[int], num_tokens: int, job_id: str = "job") -> Proposal:
    (proposal,) = drafter.propose([Ask(job_id, text, num_tokens, NO_CHOICE)])
    return proposal


def occurrences(searched: list[int], text: list[int], settings: LookupDrafterSettings) -> list[tuple[int, int]]:
    """(match length, place behind) of the latest occurrences in `searched` of the end of `text`, by comparing all."""
    found = []
    for behind in range(len(searched), 0, -1):
        length = 0
        while (
            length < min(settings.max_ngram, behind, len(text)) and searched[behind - 1 - length] == text[-1 - length]
        ):
            length += 1
        if length >= settings.min_ngram:
            found.append((length, behind))
    return found[:MAX_OCCURRENCES]


def reference(text: list[int], num_tokens: int, settings: LookupDrafterSettings) -> list[int]:
    """The likeliest continuation: at every place the token whose occurrences weigh most, as long as it is likely."""
    agreeing = occurrences(text[:-1], text, settings)
    draft: list[int] = []
    probability = 1.0
    while len(draft) < num_tokens and agreeing:
        longer = text + draft
        weights: dict[int, float] = {}
        for length, behind in agreeing:
            token = longer[behind + len(draft)]
            weights[token] = weights.get(token, 0.0) + 2.0**length
        token = max(weights, key=weights.__getitem__)
        probability *= weights[token] / (sum(weights.values()) + NOVELTY)
        if probability < settings.min_probability:
            break
        agreeing = [(length, behind) for length, behind in agreeing if longer[behind + len(draft)] == token]
        draft.append(token)
    return draft


@given(texts, pieces, rules, st.integers(1, 9))
def test_proposals_are_the_rescanned_ones(
    prompt: list[int], pieces: list[list[int]], settings: LookupDrafterSettings, num_tokens: int
) -> None:
    drafter, text = LookupDrafter("lookup", settings), list(prompt)
    drafter.open("job", text, GREEDY, "code")
    for piece in [[], *pieces]:
        text.extend(piece)
        proposal = ask(drafter, text, num_tokens)
        assert proposal.parents is None
        assert proposal.q is None
        assert list(proposal.tokens) == reference(text, num_tokens, settings)


def test_two_n_grams_with_one_hash_are_told_apart() -> None:
    assert hash((-1, 3)) == hash((-2, 3)), "CPython's hash of -1 is that of -2"
    index = SuffixIndex([-1, 3, 5], 2, 4)
    index.advance(3)
    assert index.matches([-2, 3]) == []
    assert index.matches([-1, 3]) == [(2, 2)]


def test_each_ask_is_answered_from_its_own_text() -> None:
    drafter = lookup()
    one, two = [1, 2, 3, 1, 2], [1, 2, 4, 1, 2]
    drafter.open("one", one, GREEDY, "code")
    drafter.open("two", two, GREEDY, "code")
    answers = drafter.propose([Ask("two", two, 1, NO_CHOICE), Ask("one", one, 1, NO_CHOICE)])
    assert [answer.tokens for answer in answers] == [(4,), (3,)]


@pytest.mark.parametrize(
    "changed",
    [{"max_ngram": 8}, {"min_ngram": 2}, {"min_probability": 0.2}, {"num_branches": 2}, {"remember_tasks": ("sql",)}],
)
def test_the_revision_names_what_the_proposals_depend_on(changed: dict[str, object]) -> None:
    assert lookup(**changed).state.revision != lookup().state.revision


def test_the_longest_draft_is_no_part_of_the_revision() -> None:
    wider = lookup(max_draft_tokens=20).state
    assert (wider.revision, wider.max_draft_tokens) == (lookup().state.revision, 20)
