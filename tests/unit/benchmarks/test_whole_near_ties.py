"""Where a text parts from the engine's tokens, told by its text, and whether a near-tie explains it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from benchmarks.whole.near_ties import NEAR_TIE, explain, num_shared

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


@pytest.mark.parametrize(
    ("text", "tokens", "logits", "place", "gap"),
    [
        pytest.param("abc", (A, B, B), {(C, A, B): {B: 9.0, C: 8.9}}, 2, 0.1, id="two tokens as good as equal"),
        pytest.param("ac", (A, B), {(C, A): {A: 9.0, B: 8.9, C: 8.7}}, 1, 0.3, id="the lower of the two counts"),
        pytest.param("abc", (A, B, B), {(C, A, B): {B: 9.0, C: 8.9 - NEAR_TIE}}, 2, None, id="one is not wanted"),
        pytest.param("abc", (A, B, B), {(C, A, B): {B: 9.0, A: 9.0}}, 2, None, id="one that goes on otherwise"),
        pytest.param("ab", (A, B, C), {(C, A, B): {C: 9.0, END: 8.9}}, 2, 0.1, id="the worker ended"),
        pytest.param(
            "ab", (A, B, C), {(C, A, B): {C: 9.0, A: 8.9}}, 2, None, id="the worker ended without an end token"
        ),
        pytest.param("abc", (A, B, END), {(C, A, B): {END: 9.0, C: 8.9}}, 2, 0.1, id="the engine ended"),
        pytest.param("a", (A, B, C), {}, 1, None, id="a text that was cut short"),
        pytest.param("abc", (A, B, B), {(C,): {A: 9.0, AB: 8.9}}, 0, 0.1, id="the same characters in other tokens"),
    ],
)
def test_a_difference_is_explained_by_a_near_tie_with_a_token_that_goes_on_as_the_text_does(
    text: str,
    tokens: tuple[int, ...],
    logits: dict[tuple[int, ...], dict[int, float]],
    place: int,
    gap: float | None,
) -> None:
    """`logits` by prompt and text before; elsewhere the target wants what the engine wrote, and nothing else."""
    wanted = {(C, *tokens[:number]): {token: 9.0} for number, token in enumerate(tokens)}
    found = explain("job", Target(wanted | logits), (C,), tokens, text)
    assert (found.place, found.gap) == (place, pytest.approx(gap))
    assert found.is_near_tie is (gap is not None)
