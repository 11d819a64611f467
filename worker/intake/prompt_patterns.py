"""Prompts for which an operator switched speculation off: patterns of configs/tasks.toml. Pure.

Patterns are literal text and `*`, for any text, and nothing else. A regular expression would be matched against any
prompt that a caller sends, and one that backtracks could block a worker. Here every literal is searched for once,
from the end of the one before it, so a prompt is read at most once for each pattern
(`str.find` takes linear time: Crochemore and Perrin 1991, two-way matching).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from alphaloop.messages.job import Body


@dataclass(frozen=True, slots=True)
class PromptPattern:
    """A pattern, and its literals between the asterisks, case folded; the first and the last are at the text's ends."""

    pattern: str
    literals: tuple[str, ...]

    @classmethod
    def of(cls, pattern: str) -> PromptPattern:
        """Read a pattern. Case does not matter."""
        return cls(pattern, tuple(pattern.casefold().split("*")))

    def covers(self, folded: str) -> bool:
        """Whether it covers the whole of a case-folded text."""
        first, *inner = self.literals
        if not inner:
            return folded == first
        *between, last = inner
        place, end = len(first), len(folded) - len(last)
        if place > end or not folded.startswith(first) or not folded.endswith(last):
            return False
        # The earliest place of each literal leaves the most room for those behind it.
        for literal in between:
            found = folded.find(literal, place, end)
            if found < 0:
                return False
            place = found + len(literal)
        return True


class PromptPatterns:
    """The patterns of one task."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._patterns = [PromptPattern.of(pattern) for pattern in patterns]

    def pattern_of(self, body: Body) -> str:
        """The first pattern that covers the prompt, or a message of the conversation; empty if none does."""
        if not self._patterns:
            return ""
        texts = [text.casefold() for text in _texts(body)]
        return next((one.pattern for one in self._patterns if any(map(one.covers, texts))), "")


def _texts(body: Body) -> Sequence[str]:
    if body.prompt is not None:
        return [body.prompt]
    return [message.content for message in body.messages or ()]
