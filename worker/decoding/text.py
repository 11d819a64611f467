"""Tokens to text while they come: no broken characters, and nothing behind a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

UNREADABLE: Final = "\N{REPLACEMENT CHARACTER}"
# A character has at most four bytes, and each of them may be a token: waiting longer for its end is in vain.
MAX_WAIT = 8
# Tokens decoded again with each new one, so that a token's text is found in its context; and how many remain of them
# when the window is cut back.
WINDOW, OVERLAP = 32, 16


class TextStream:
    """One job's text. Push every token of the text; read `take_delta` when convenient.

    The text ends before the first stop string. Whether tokens arrive one by one or many a round makes no difference:
    each is pushed alone, and the first that completes a stop string ends the text. Where nobody waits for deltas and no
    stop string is looked for, nothing is decoded before `finish`; `text` is empty until then.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = (), *, is_live: bool = True
    ) -> None:
        self.text = ""
        self.is_stopped = False  #: a stop string ended the text
        self._decode = decode
        self._stop = tuple(stop)
        self._is_lazy = not (is_live or self._stop)
        self._window: list[int] = []  #: all tokens, if lazy
        self._num_shown = 0  #: characters of the window's text that are in `text`
        self._num_waiting = 0  #: tokens pushed since the last readable end
        self._num_taken = 0
        self._is_final = False

    def push(self, token_id: int) -> bool:
        """Append a token; True when the text is now complete because of a stop string."""
        self._window.append(token_id)
        if self._is_lazy:
            return False
        self._num_waiting += 1
        shown = self._decode(self._window)
        num_readable = len(shown)
        if shown.endswith(UNREADABLE):
            if self._num_waiting < MAX_WAIT:
                return self.is_stopped
            num_readable = max(self._num_shown, len(shown) - 4)
        else:
            self._num_waiting = 0
        self._append(shown[self._num_shown : num_readable])
        self._num_shown = num_readable
        if len(self._window) > WINDOW:
            num_held = len(shown) - num_readable
            del self._window[:-OVERLAP]
            self._num_shown = len(self._decode(self._window)) - num_held
        return self.is_stopped

    def finish(self) -> bool:
        """No more tokens come: what waited becomes text, a broken end as U+FFFD. True when a stop string ended it."""
        if not self.is_stopped and self._window:
            self._append(self._decode(self._window)[self._num_shown :])
        self._is_final = True
        return self.is_stopped

    def take_delta(self) -> str:
        """Text that has become certain since the last call; an end that may grow into a stop string waits."""
        held = 0 if self.is_stopped or self._is_final else self._num_suspect()
        end = max(len(self.text) - held, self._num_taken)
        delta, self._num_taken = self.text[self._num_taken : end], end
        return delta

    def _append(self, piece: str) -> None:
        longest = max(map(len, self._stop), default=0)
        begin = max(0, len(self.text) - longest + 1)
        self.text += piece
        places = [place for stop in self._stop if (place := self.text.find(stop, begin)) >= 0]
        if places:
            self.text, self.is_stopped = self.text[: min(places)], True

    def _num_suspect(self) -> int:
        lengths = [n for stop in self._stop for n in range(1, len(stop)) if self.text.endswith(stop[:n])]
        return max(lengths, default=0)
