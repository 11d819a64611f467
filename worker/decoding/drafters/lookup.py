"""Prompt look-up: propose what followed the longest earlier match of the text's last tokens.

Saxena 2023 (prompt look-up decoding). The proposal is deterministic, so its draft distribution is one-hot.
"""

from __future__ import annotations

from collections.abc import Iterable

from alphaloop.goodput import DrafterState
from alphaloop.settings.model import LookupDrafterSettings


class LookupText:
    """One sequence's tokens, and for every n-gram in them the place right behind its latest occurrence.

    Extending by a token costs one dictionary entry an n-gram length; nothing is ever scanned again.
    """

    def __init__(self, token_ids: Iterable[int], min_ngram: int, max_ngram: int) -> None:
        self._token_ids: list[int] = []
        self._lengths = range(max_ngram, min_ngram - 1, -1)
        self._behind: dict[tuple[int, ...], int] = {}
        self.extend(token_ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens to the text."""
        tokens = self._token_ids
        for token_id in token_ids:
            # Entered only now that something stands behind it: the text's own end must not match itself.
            place = len(tokens)
            for n in self._lengths:
                if n <= place:
                    self._behind[tuple(tokens[place - n :])] = place
            tokens.append(token_id)

    def propose(self, num_tokens: int) -> list[int]:
        """Up to `num_tokens` tokens; none where no n-gram of the permitted lengths occurred before.

        Where the match lies so close to the end that the text runs out, the proposal goes on with itself: the text
        is taken to be periodic.
        """
        place = self._match()
        if place is None:
            return []
        tokens, end = self._token_ids, len(self._token_ids)
        proposal: list[int] = []
        for i in range(place, place + num_tokens):
            proposal.append(tokens[i] if i < end else proposal[i - end])
        return proposal

    def _match(self) -> int | None:
        tokens = self._token_ids
        for n in self._lengths:
            if n <= len(tokens) and (place := self._behind.get(tuple(tokens[-n:]))) is not None:
                return place
        return None


class LookupDrafter:
    """The method and its settings; `start` opens one sequence."""

    def __init__(self, name: str, settings: LookupDrafterSettings) -> None:
        self._min_ngram = min(settings.min_ngram, settings.max_ngram)
        self._max_ngram = settings.max_ngram
        # The method has no weights: what it proposes is settled by its n-gram lengths and this code's version.
        self.state = DrafterState(
            name, f"lookup1-n{self._min_ngram}-{self._max_ngram}", settings.max_draft_tokens, is_stale=False
        )

    def start(self, token_ids: Iterable[int]) -> LookupText:
        """The state of one sequence, beginning with its prompt."""
        return LookupText(token_ids, self._min_ngram, self._max_ngram)
