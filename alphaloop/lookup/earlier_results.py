"""Results of one task that its later jobs may look things up in: first in, first out, within a limit of bytes."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import Final

from alphaloop.lookup.suffixes import SuffixIndex

#: Most that a remembered token takes: itself (4), its link (8), and its n-gram's entry in a hash table, with its key
#: and its place, where no other token of the memory shares it; and the moment in which that table grows.
BYTES_PER_TOKEN: Final = 240
#: Stands behind each result and equals no token: neither a match nor a continuation crosses it.
END: Final = -1


class EarlierResults:
    """The latest results of one task, all in one index."""

    def __init__(self, min_ngram: int, max_ngram: int, max_bytes: int) -> None:
        self._tokens = array("i")
        self._lengths: deque[int] = deque()
        self._max_tokens = max_bytes // BYTES_PER_TOKEN
        self._index = SuffixIndex(self._tokens, min_ngram, max_ngram)
        self._num_dropped = 0

    def __len__(self) -> int:
        """Tokens held."""
        return len(self._tokens)

    @property
    def num_ever(self) -> int:
        """Tokens held and tokens let go of."""
        return self._num_dropped + len(self._tokens)

    def remember(self, token_ids: Sequence[int]) -> None:
        """Take in a result and let go of the oldest ones whose room it needs. One beyond the limit itself is let be."""
        num_tokens = len(token_ids) + 1
        if not token_ids or num_tokens > self._max_tokens:
            return
        while len(self._tokens) + num_tokens > self._max_tokens:
            oldest = self._lengths.popleft()
            self._index.drop(oldest)
            del self._tokens[:oldest]
            self._num_dropped += oldest
        self._tokens.extend(token_ids)
        self._tokens.append(END)
        self._lengths.append(num_tokens)
        self._index.advance_apart(len(self._tokens))

    def continuations(
        self, suffix: Sequence[int], num_tokens: int, end: int | None = None
    ) -> list[tuple[int, list[int]]]:
        """The match length of each occurrence of the end of `suffix`, and up to `num_tokens` tokens behind it.

        With an `end`, a `num_ever` of before, only those occurrences count that were there then. The later ones still
        take their places among the occurrences looked at.
        """
        found = []
        for length, place in self._index.matches(suffix):
            if end is not None and self._num_dropped + place >= end:
                continue
            behind = self._tokens[place : place + num_tokens].tolist()
            if END in behind:
                behind = behind[: behind.index(END)]
            if behind:
                found.append((length, behind))
        return found
