"""Proposals with branches: valid trees, of the likeliest tokens there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from alphaloop.lookup import NOVELTY, Rule, grow

Found = list[tuple[int, list[int]]]

found_places: st.SearchStrategy[Found] = st.lists(
    st.tuples(st.integers(1, 5), st.lists(st.integers(0, 2), min_size=1, max_size=6)), max_size=12
)
rules = st.builds(Rule, min_probability=st.sampled_from([0.01, 0.1, 0.3]), num_branches=st.integers(1, 4))


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


@given(found_places, st.integers(1, 12), rules)
def test_a_tree_holds_the_likeliest_paths(found: Found, num_tokens: int, rule: Rule) -> None:
    tokens, given_parents = grow(found, num_tokens, rule)
    parents = list(range(-1, len(tokens) - 1)) if given_parents is None else given_parents
    assert len(parents) == len(tokens) <= num_tokens
    paths: list[tuple[int, ...]] = []
    for place, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        assert -1 <= parent < place
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len(set(paths)) == len(paths)
    assert all(count <= rule.num_branches for count in Counter(parents).values())

    scores = [probability(found, path) for path in paths]
    if rule.num_branches > 1:
        assert scores == sorted(scores, reverse=True), "likeliest first, siblings too"
    allowed = worth_it(found, rule)
    assert set(paths) <= set(allowed)
    assert len(paths) == min(num_tokens, len(allowed))
    left = [probability(found, path) for path in set(allowed) - set(paths)]
    assert not left or max(left) <= min(scores)


def test_a_token_just_as_likely_as_asked_for_is_proposed() -> None:
    assert NOVELTY == 2.0**2, "a lone match of two tokens: probability 1/2"
    assert grow([(2, [5, 6])], 4, Rule(0.5, 1)) == ([5], None)
    assert grow([(2, [5, 6])], 4, Rule(0.5, 2)) == ([5], None)
