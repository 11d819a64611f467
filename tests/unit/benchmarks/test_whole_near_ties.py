"""Where a text parts from the engine's tokens, told by its text, and whether a near-tie explains it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from benchmarks.whole.near_ties import NEAR_TIE, Difference, explain, num_shared

WORDS = ("<end>", "a", "b", "ab", "c", "\N{REPLACEMENT CHARACTER}", "é")
END, A, B, AB, C, HALF, E_ACUTE = range(len(WORDS))


class Target:
    """Logits by what stands before; a token is its word, the end token no text, and HALF and HALF are one é."""

    end_tokens = frozenset({END})

    def __init__(self, logits: Mapping[tuple[int, ...], Mapping[int, float]]) -> None:
        self._logits = logits

    def logits(self, token_ids: Sequence[int]) -> list[float]:
        given = self._logits.get(tuple(token_ids), {})
        return [given.get(token, 0.0) for token in range(len(WORDS))]

    def decode(self, token_ids: Sequence[int]) -> str:
        text = "".join(WORDS[token] for token in token_ids if token != END)
        return text.replace(2 * WORDS[HALF], WORDS[E_ACUTE])


def differ(text: str, token_ids: Sequence[int], logits: Mapping[tuple[int, ...], Mapping[int, float]]) -> Difference:
    """`logits` by prompt and text before; elsewhere the target wants what the engine wrote, and nothing else."""
    wanted = {(C, *token_ids[:place]): {token: 9.0} for place, token in enumerate(token_ids)}
    return explain("job", Target(wanted | dict(logits)), (C,), token_ids, text)


@pytest.mark.parametrize(
    ("tokens", "text", "shared"),
    [
        ((A, B, C), "abc", 3),
        ((A, B, C), "abb", 2),
        ((A, B), "abc", 2),
        ((A, B, C), "ab", 2),
        ((A, B, C), "c", 0),
        ((A, HALF, HALF, C), "aéb", 3),
    ],
)
def test_tokens_are_shared_as_far_as_their_text_is(tokens: tuple[int, ...], text: str, shared: int) -> None:
    assert num_shared(Target({}).decode, tokens, text) == shared


def test_two_tokens_as_good_as_equal_are_a_near_tie() -> None:
    found = differ("abc", (A, B, B), {(C, A, B): {B: 9.0, C: 8.9}})
    assert found.place == 2
    assert found.gap == pytest.approx(0.1)
    assert found.is_near_tie


def test_the_gap_is_taken_from_the_best_token_to_the_lower_one_of_the_two() -> None:
    found = differ("ac", (A, B), {(C, A): {A: 9.0, B: 8.9, C: 8.7}})
    assert found.gap == pytest.approx(0.3)


def test_a_token_that_the_target_does_not_want_is_no_near_tie() -> None:
    found = differ("abc", (A, B, B), {(C, A, B): {B: 9.0, C: 8.9 - NEAR_TIE}})
    assert (found.place, found.gap, found.is_near_tie) == (2, None, False)


def test_a_near_tie_with_a_token_that_goes_on_otherwise_explains_nothing() -> None:
    assert not differ("abc", (A, B, B), {(C, A, B): {B: 9.0, A: 9.0}}).is_near_tie


def test_the_engine_going_on_where_the_worker_ended_is_explained_by_an_end_token() -> None:
    assert differ("ab", (A, B, C), {(C, A, B): {C: 9.0, END: 8.9}}).is_near_tie
    assert not differ("ab", (A, B, C), {(C, A, B): {C: 9.0, A: 8.9}}).is_near_tie


def test_the_worker_going_on_where_the_engine_ended_is_explained_by_the_next_token() -> None:
    found = differ("abc", (A, B, END), {(C, A, B): {END: 9.0, C: 8.9}})
    assert (found.place, found.is_near_tie) == (2, True)


def test_a_text_that_was_cut_short_is_not_explained() -> None:
    assert not differ("a", (A, B, C), {}).is_near_tie


def test_the_same_characters_in_other_tokens_are_found_before_the_place_that_shows() -> None:
    """The engine wrote a, b, b; the worker ab, c: the texts part behind "ab", the tokens at the first one."""
    found = differ("abc", (A, B, B), {(C,): {A: 9.0, AB: 8.9}})
    assert (found.place, found.is_near_tie) == (0, True)
