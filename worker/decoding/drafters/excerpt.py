"""A growing text without its middle: what a draft reads of a prompt that is longer than it cares to read.

Its first tokens stay, because attention rests on them whatever they say (Xiao et al. 2024, "Efficient Streaming
Language Models with Attention Sinks"), and so do those before its end, from which the next ones follow. What a draft
has not read only makes its guesses worse, never the text: the target has read everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, overload

#: First tokens that are always read.
NUM_FIRST: Final = 4


class Excerpt(Sequence[int]):
    """The first tokens of `text`, then those from a place on that leaves `num_kept` of it as it is now; live."""

    def __init__(self, text: Sequence[int], num_kept: int) -> None:
        self._text = text
        self._num_first = min(NUM_FIRST, num_kept)
        self._num_skipped = max(0, len(text) - num_kept)

    def __len__(self) -> int:
        return len(self._text) - self._num_skipped

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, int):
            return self._text[self._place(range(len(self))[index])]
        start, stop, step = index.indices(len(self))
        if step != 1 or start < self._num_first:
            return [self._text[self._place(i)] for i in range(start, stop, step)]
        return list(self._text[start + self._num_skipped : stop + self._num_skipped])

    def _place(self, index: int) -> int:
        return index if index < self._num_first else index + self._num_skipped


def excerpt(text: Sequence[int], num_kept: int | None) -> Sequence[int]:
    """All of a text that is no longer than `num_kept` tokens, or may be read whole (None); otherwise an Excerpt."""
    return text if num_kept is None or len(text) <= num_kept else Excerpt(text, num_kept)
