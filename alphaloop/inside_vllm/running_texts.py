"""Which text stands in which row of vLLM's batch, told by the tokens themselves.

vLLM hands over rows of tokens, without names: rows change places, and a row may hold another request than a step
before. An index over a text depends on nothing but the text, so a row goes on with the index whose text it begins with.
Which request it is matters for what is remembered alone, and there the names are told.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from alphaloop.inside_vllm.asked import NOTHING_ASKED, Asked
from alphaloop.lookup.searched_text import SearchedText

Tokens = NDArray[np.int32]


@dataclass(slots=True, eq=False)
class RunningText:
    """Prompt and output of a request that is decoded."""

    tokens: array[int]
    num_prompt: int  #: tokens that were there when it was first seen
    asked: Asked
    searched: SearchedText  #: over `tokens`

    @property
    def output(self) -> array[int]:
        """What was generated since it was first seen."""
        return self.tokens[self.num_prompt :]

    def goes_on_in(self, tokens: Tokens, asked: Asked) -> bool:
        """Whether `tokens` begin with this text and go on, asked for in the same way."""
        num_before = len(self.tokens)
        return (
            num_before < len(tokens)
            and self.asked == asked
            and bool(np.array_equal(np.frombuffer(self.tokens, np.int32), tokens[:num_before]))
        )

    def go_on(self, tokens: Tokens) -> RunningText:
        """Take in what is new, usually the tokens of one step: near the end of a context vLLM asks for no drafts."""
        self.tokens.extend(tokens[len(self.tokens) :].tolist())
        return self


class RunningTexts:
    """At most one text a row; a text that no row goes on with has ended.

    vLLM also takes requests out of its batch that it interrupts for lack of memory. Such a text counts as ended, and
    as a new one when it comes back, with all that it has so far as its prompt.
    """

    def __init__(self, search: Callable[[array[int], Asked], SearchedText]) -> None:
        self._search = search
        self._by_row: list[RunningText | None] = []

    def __len__(self) -> int:
        return sum(text is not None for text in self._by_row)

    def follow(
        self,
        sampled: Sequence[Sequence[int]],
        num_tokens: Sequence[int],
        rows: Tokens,
        asked: Sequence[Asked] | None,
    ) -> tuple[list[RunningText | None], list[RunningText]]:
        """Take in a step: the text of each row, None where nothing was sampled, and the texts that have ended.

        `sampled[i]` are the last of the `num_tokens[i]` tokens of `rows[i]`; none while a prompt is being read.
        `asked` is by row too; None: nothing tells it.
        """
        by_asked = asked if asked is not None else [NOTHING_ASKED] * len(sampled)
        left = list(self._by_row)
        now: list[RunningText | None] = [None] * len(sampled)
        moved = []
        for i in range(len(sampled)):
            if not sampled[i]:
                continue
            text, tokens = left[i] if i < len(left) else None, rows[i, : num_tokens[i]]
            if text is not None and text.goes_on_in(tokens, by_asked[i]):
                left[i] = None
                now[i] = text.go_on(tokens)
            else:
                moved.append(i)
        ended = [text for text in left if text is not None]
        for i in moved:
            tokens = rows[i, : num_tokens[i]]
            text = next((one for one in ended if one.goes_on_in(tokens, by_asked[i])), None)
            if text is None:
                now[i] = self._open(tokens, num_tokens[i] - len(sampled[i]), by_asked[i])
            else:
                ended.remove(text)
                now[i] = text.go_on(tokens)
        self._by_row = now
        return list(now), ended

    def _open(self, tokens: Tokens, num_prompt: int, asked: Asked) -> RunningText:
        held = array("i", tokens.astype(np.int32).tobytes())
        return RunningText(held, num_prompt, asked, self._search(held, asked))
