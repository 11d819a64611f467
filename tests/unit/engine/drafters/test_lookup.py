"""Look-up against a rescan of the whole text by the same rule; its trees; and earlier results.

Results are found where allowed, within bounds, and nowhere else.
"""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.engine import Sampling
from alphaloop.lookup import (
    BYTES_PER_TOKEN,
    MAX_NGRAM,
    MAX_OCCURRENCES,
    MIN_NGRAM,
    NOVELTY,
    EarlierResults,
    Rule,
    SuffixIndex,
    grow,
)
from alphaloop.settings.models import LookupDrafterSettings
from engine.drafters.lookup import LookupDrafter
from engine.proposal import Ask, Proposal
from engine.sampling import TokenChooser
from tests.fixtures.memory import ScopedMemory

GREEDY = Sampling(max_tokens=64, temperature=0.0)
NO_CHOICE = cast(TokenChooser, None)  # what followed before does not depend on how tokens are chosen

tokens = st.integers(0, 3)
texts = st.lists(tokens, min_size=1, max_size=60)
pieces = st.lists(st.lists(tokens, min_size=1, max_size=8), max_size=5)
rules = st.builds(
    LookupDrafterSettings,
    min_probability=st.sampled_from([0.0, 0.1, 0.3]),
    num_branches=st.just(1),
)


def lookup(**settings: object) -> LookupDrafter:
    return LookupDrafter("lookup", LookupDrafterSettings.model_validate(settings))


def ask(drafter: LookupDrafter, text: Sequence[int], num_tokens: int, job_id: str = "job") -> Proposal:
    (proposal,) = drafter.propose([Ask(job_id, text, num_tokens, NO_CHOICE)])
    return proposal


def occurrences(searched: list[int], text: list[int], least: int, most: int) -> Iterator[tuple[int, int]]:
    """(match length, place behind) of occurrences in `searched` of the end of `text`, latest first, comparing all."""
    for behind in range(len(searched), 0, -1):
        length = 0
        while length < min(most, behind, len(text)) and searched[behind - 1 - length] == text[-1 - length]:
            length += 1
        if length >= least:
            yield length, behind


def reference(text: list[int], num_tokens: int, settings: LookupDrafterSettings) -> list[int]:
    """The likeliest continuation: at every place the token whose occurrences weigh most, as long as it is likely."""
    agreeing = list(occurrences(text[:-1], text, MIN_NGRAM, MAX_NGRAM))[:MAX_OCCURRENCES]
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


@pytest.mark.parametrize(
    "changed",
    [{"min_probability": 0.2}, {"num_branches": 2}, {"memory": True}],
)
def test_the_revision_names_what_the_proposals_depend_on(changed: dict[str, object]) -> None:
    assert lookup(**changed).state.revision != lookup().state.revision


def test_the_longest_draft_is_no_part_of_the_revision() -> None:
    wider = lookup(max_draft_tokens=20).state
    assert (wider.revision, wider.max_draft_tokens) == (lookup().state.revision, 20)


results = st.lists(st.lists(tokens, max_size=12), max_size=20)


def proposed(drafter: LookupDrafter, task: str, segment: str = "") -> tuple[int, ...]:
    text = [2, 10, 11, 12]
    drafter.open("now", text, GREEDY, task, segment)
    proposal = ask(drafter, text, 3, "now")
    drafter.clear()
    return proposal.tokens


EARLIER = [10, 11, 12, 13, 14, 15]


@pytest.mark.parametrize(
    ("searches", "task", "segment", "found"),
    [
        (True, "sql", "gold", (13, 14, 15)),
        (False, "sql", "gold", ()),
        (True, "code", "gold", ()),
        (True, "sql", "free", ()),
        (True, "", "gold", ()),
    ],
    ids=["its scope", "by default nothing", "another task", "another segment", "a probe"],
)
def test_a_job_finds_what_an_earlier_result_of_its_scope_went_on_with(
    searches: bool, task: str, segment: str, found: tuple[int, ...]
) -> None:
    drafter, memory = lookup(memory=searches), ScopedMemory()
    drafter.use_memory(memory.view)
    assert proposed(drafter, "sql", "gold") == ()
    memory.remember("sql", EARLIER, segment="gold")
    assert proposed(drafter, task, segment) == found


def test_a_sequence_that_is_closed_may_go_on_with_another_drafter() -> None:
    """Closing twice, or what never began, does nothing."""
    drafter = lookup()
    drafter.close("nobody")
    drafter.open("job", [1, *EARLIER], GREEDY, "sql")
    drafter.close("job")
    drafter.close("job")


@given(results, st.lists(tokens, min_size=1, max_size=8), st.integers(1, 3), st.integers(0, 25), st.integers(1, 6))
def test_the_latest_results_that_fit_are_searched_and_no_others(
    given_results: list[list[int]], text: list[int], min_ngram: int, max_tokens: int, num_tokens: int
) -> None:
    earlier = EarlierResults(min_ngram, 5, max_tokens * BYTES_PER_TOKEN)
    kept: list[list[int]] = []
    for result in given_results:
        earlier.remember(result)
        if result and len(result) + 1 <= max_tokens:
            kept.append(result)
            while sum(len(one) + 1 for one in kept) > max_tokens:
                kept.pop(0)
    assert len(earlier) == sum(len(one) + 1 for one in kept)

    expected = [
        (length, result[behind : behind + num_tokens])
        for result in reversed(kept)
        for length, behind in occurrences(result, text, min_ngram, 5)
    ]
    expected = [(length, behind) for length, behind in expected[:MAX_OCCURRENCES] if behind]
    assert earlier.continuations(text, num_tokens) == expected


@pytest.mark.parametrize(
    ("max_bytes", "min_ngram", "length", "times"),
    [
        # Shorter than an n-gram, a hundred times as many as fit: an entry left behind by each would be far too much.
        (80_000, 3, 2, 100),
        # Both sides of where a hash table doubles; tokens of which hardly any pair occurs twice, the dearest case.
        *((max_bytes, 2, 50, 3) for max_bytes in (80_000, 170_000, 240_000, 350_000, 470_000)),
    ],
)
def test_memory_stays_within_its_bytes(
    max_bytes: int, min_ngram: int, length: int, times: int, rng: random.Random
) -> None:
    tracemalloc.start()
    earlier = EarlierResults(min_ngram, 16, max_bytes)
    for _ in range(times * max_bytes // BYTES_PER_TOKEN // length):
        earlier.remember([rng.randrange(100_000) for _ in range(length)])
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(earlier) > 0.7 * max_bytes / BYTES_PER_TOKEN
    assert peak_bytes < max_bytes


Found = list[tuple[int, list[int]]]

found_places: st.SearchStrategy[Found] = st.lists(
    st.tuples(st.integers(1, 5), st.lists(st.integers(0, 2), min_size=1, max_size=6)), max_size=12
)
tree_rules = st.builds(Rule, min_probability=st.sampled_from([0.01, 0.1, 0.3]), num_branches=st.integers(1, 4))


def probability(found: Found, path: Sequence[int]) -> float:
    """Of the whole path being accepted, by its definition."""
    product = 1.0
    for depth, token in enumerate(path):
        agreeing = [(n, behind) for n, behind in found if len(behind) > depth and behind[:depth] == list(path[:depth])]
        product *= sum(2.0**n for n, behind in agreeing if behind[depth] == token) / (
            sum(2.0**n for n, _ in agreeing) + NOVELTY
        )
    return product


def worth_it(found: Found, rule: Rule, path: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """Every path that the rule lets in, however many there are."""
    agreeing = [behind for _, behind in found if len(behind) > len(path) and behind[: len(path)] == list(path)]
    next_tokens = list(dict.fromkeys(behind[len(path)] for behind in agreeing))
    likeliest = sorted(next_tokens, key=lambda token: -probability(found, (*path, token)))[: rule.num_branches]
    paths = [(*path, token) for token in likeliest if probability(found, (*path, token)) >= rule.min_probability]
    return paths + [longer for kept in paths for longer in worth_it(found, rule, kept)]


@given(found_places, st.integers(1, 12), tree_rules)
def test_a_tree_holds_the_likeliest_paths(found: Found, num_tokens: int, rule: Rule) -> None:
    tokens, given_parents, together = grow(found, num_tokens, rule)
    parents = list(range(-1, len(tokens) - 1)) if given_parents is None else given_parents
    assert len(parents) == len(tokens) <= num_tokens
    paths: list[tuple[int, ...]] = []
    for place, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        assert -1 <= parent < place
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len(set(paths)) == len(paths)
    assert all(count <= rule.num_branches for count in Counter(parents).values())

    scores = [probability(found, path) for path in paths]
    assert together == pytest.approx(scores)
    if rule.num_branches > 1:
        assert scores == sorted(scores, reverse=True), "likeliest first, siblings too"
    allowed = worth_it(found, rule)
    assert set(paths) <= set(allowed)
    assert len(paths) == min(num_tokens, len(allowed))
    left = [probability(found, path) for path in set(allowed) - set(paths)]
    assert not left or max(left) <= min(scores)


def test_a_token_just_as_likely_as_asked_for_is_proposed() -> None:
    assert NOVELTY == 2.0**2, "a lone match of two tokens: probability 1/2"
    assert grow([(2, [5, 6])], 4, Rule(0.5, 1)) == ([5], None, [0.5])
    assert grow([(2, [5, 6])], 4, Rule(0.5, 2)) == ([5], None, [0.5])
