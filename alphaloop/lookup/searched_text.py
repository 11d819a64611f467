"""A growing text that is searched for what followed its last tokens before, in itself and in earlier results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alphaloop.lookup.continuations import Rule, grow
from alphaloop.lookup.earlier_results import EarlierResults
from alphaloop.lookup.suffixes import SuffixIndex


@dataclass(frozen=True, slots=True)
class SearchedText:
    """One text and its index."""

    text: Sequence[int]  #: prompt and output, the owner's own sequence, which grows
    index: SuffixIndex
    earlier: EarlierResults | None  #: None: this task's results are not remembered
    earlier_end: int | None = None  #: only results remembered before that many tokens were; None: all

    def continuations(self, num_tokens: int) -> list[tuple[int, list[int]]]:
        """The match length of each occurrence, and `num_tokens` tokens behind it: its own first, then earlier results'.

        Where a match lies so close to the end that the text runs out, the text is taken to be periodic.
        """
        text, end = self.text, len(self.text)
        self.index.advance(end - 1)
        found = []
        for length, place in self.index.matches(text):
            behind = list(text[place : place + num_tokens])
            if len(behind) < num_tokens:
                behind = (behind * (num_tokens // (end - place) + 1))[:num_tokens]
            found.append((length, behind))
        if self.earlier is not None:
            found += self.earlier.continuations(text, num_tokens, self.earlier_end)
        return found

    def propose(self, num_tokens: int, rule: Rule) -> tuple[list[int], list[int] | None]:
        """What is likely to follow the text as it stands, at most `num_tokens` tokens: (tokens, parents), as `grow`."""
        if num_tokens < 1:
            return [], None
        return grow(self.continuations(num_tokens), num_tokens, rule)
