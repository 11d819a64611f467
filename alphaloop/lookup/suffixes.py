"""Where the last tokens of a text occurred before: chains of occurrences, as Deflate finds its matches (RFC 1951, §4).

A text suffix automaton answers the same question in fewer steps when a match is rare and long, but costs some 20 times
the memory and time a token in Python, and every token of every prompt pays for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

#: Occurrences looked at, the latest first: a comma occurs everywhere, and the older places rarely say more.
MAX_OCCURRENCES: Final = 32


class SuffixIndex:
    """Finds earlier occurrences in tokens that are only ever appended to, or dropped at the front.

    Each token costs one dictionary entry and one link, whatever the length of the matches; nothing is scanned again.
    Two n-grams with one hash share a chain: what is found is always compared.
    """

    def __init__(self, tokens: Sequence[int], min_ngram: int, max_ngram: int) -> None:
        self._tokens = tokens
        self._min_ngram = min_ngram
        self._max_ngram = max_ngram
        self._num_dropped = 0
        # Ends of n-grams, counted from the first token that ever was: the latest one, and for each the one before it.
        self._latest: dict[int, int] = {}
        self._before = array("q")

    def advance(self, end: int) -> None:
        """Enter the tokens up to `end`, and every n-gram among those that this call enters or that goes on into them.

        A text that searches itself leaves its last token out: nothing stands behind it.
        """
        self._enter(len(self._before), end, 0)

    def advance_apart(self, end: int) -> None:
        """Enter the tokens up to `end` as a text of its own: no n-gram begins in the tokens before it."""
        self._enter(len(self._before), end, len(self._before))

    def drop(self, num_tokens: int) -> None:
        """Forget the first `num_tokens`, whole texts of their own; the owner removes them from the tokens next."""
        tokens, n, latest = self._tokens, self._min_ngram, self._latest
        for place in range(n - 1, num_tokens):
            key = hash(tuple(tokens[place + 1 - n : place + 1]))
            if latest.get(key) == place + self._num_dropped:
                del latest[key]
        del self._before[:num_tokens]
        self._num_dropped += num_tokens

    def matches(self, suffix: Sequence[int]) -> list[tuple[int, int]]:
        """Earlier occurrences of the end of `suffix`, latest first: (length, index of the token right behind it).

        Lengths count up to the longest n-gram; a place that does not agree over the shortest one is no occurrence.
        """
        n, longest = self._min_ngram, min(self._max_ngram, len(suffix))
        found: list[tuple[int, int]] = []
        if n > longest:
            return found
        tokens, before, dropped = self._tokens, self._before, self._num_dropped
        wanted = suffix[: -longest - 1 : -1]
        place = self._latest.get(hash(tuple(wanted[n - 1 :: -1])), -1) - dropped
        for _ in range(MAX_OCCURRENCES):
            if place < 0:
                break
            length = 0
            for token in wanted:
                if length > place or tokens[place - length] != token:
                    break
                length += 1
            if length >= n:
                found.append((length, place + 1))
            place = before[place] - dropped
        return found

    def _enter(self, begin: int, end: int, first: int) -> None:
        tokens, n, latest, before, dropped = (
            self._tokens,
            self._min_ngram,
            self._latest,
            self._before,
            self._num_dropped,
        )
        for place in range(begin, end):
            if place + 1 - n < first:
                before.append(-1)
                continue
            key = hash(tuple(tokens[place + 1 - n : place + 1]))
            before.append(latest.get(key, -1))
            latest[key] = place + dropped
