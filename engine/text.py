"""Tokens to text while they come: no broken characters, and nothing after a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Container, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final

from transformers.convert_slow_tokenizer import bytes_to_unicode

UNREADABLE: Final = "\N{REPLACEMENT CHARACTER}"
# A character has at most four bytes, and each of them may be a token: waiting longer for its end is in vain.
_MAX_WAIT = 8
# Tokens decoded again with each new one, so that a token's text is found in its context; and how many remain of them
# when the window is cut back.
WINDOW, OVERLAP = 32, 16
#: The first byte that is no character by itself.
_FIRST_PARTIAL: Final = 0x80
_NONE: Final[Mapping[int, Any]] = MappingProxyType({})


def byte_tokens(tokenizer: Any) -> dict[int, int]:
    """Token id to byte, of a vocabulary that writes what it lacks as bytes (`<0xE4>`); empty for any other."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    token_ids = tokenizer.convert_tokens_to_ids(names)
    if None in token_ids or tokenizer.convert_ids_to_tokens(token_ids) != names:
        return {}
    byte_of = {token_id: byte for byte, token_id in enumerate(token_ids)}
    letter = [token_ids[byte] for byte in "é".encode()]
    return byte_of if tokenizer.decode(letter, skip_special_tokens=True) == "é" else {}


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Token id to string, of the tokens that have no text."""
    return {token_id: token.content for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}


def token_bytes(tokenizer: Any, token_id: int) -> bytes:
    """What a token stands for: bytes, because it may end within a character. A special token stands for its string."""
    special, of_bytes, letters = _of_tokens(tokenizer)
    if (string := special.get(token_id)) is not None:
        return string.encode()
    if (byte := of_bytes.get(token_id)) is not None:
        return bytes((byte,))
    if (name := tokenizer.convert_ids_to_tokens(token_id)) is None:
        return b""  # a row of the logits that no token has
    if letters and all(letter in letters for letter in name):
        return bytes(letters[letter] for letter in name)
    if "▁" in name:
        return str(name).replace("▁", " ").encode()
    return str(tokenizer.decode([token_id])).encode()


@lru_cache(maxsize=4)
def _of_tokens(tokenizer: Any) -> tuple[dict[int, str], dict[int, int], dict[str, int]]:
    """Special tokens, tokens that are one byte, and the letters in which a byte-level vocabulary is written."""
    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
    if tokenizer.is_fast:
        # Its vocabulary may lack bytes that no text has, and that of another kind may have all letters.
        decoder = tokenizer.backend_tokenizer.decoder
        is_byte_level = decoder is not None and decoder.decode(["Ġ"]) == " "
    else:
        is_byte_level = tokenizer.get_vocab().keys() >= letters.keys()
    return special_tokens(tokenizer), byte_tokens(tokenizer), letters if is_byte_level else {}


class TextStream:
    """One job's text. Push every token of the text; read `take_delta` when convenient.

    The text ends before the first stop string, or after it. Whether tokens arrive one by one or many a round makes no
    difference: each is pushed alone, and the first that completes a stop string ends the text. Without a reader of
    deltas and without stop strings nothing is decoded before `finish`; `text` is empty until then.

    A run of byte tokens is decoded here, byte by byte: tokenizers make every byte of a run U+FFFD if one of its
    characters lacks a byte, so what they say of a run changes while it grows.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[str] = (),
        *,
        is_live: bool = True,
        before: Sequence[int] = (),
        byte_tokens: Mapping[int, int] = _NONE,
        special_tokens: Mapping[int, str] = _NONE,
        shown: Container[str] = (),
        includes_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """A text without a token yet.

        Args:
            decode: text of tokens, without that of special tokens.
            stop: strings before which the text ends. One may have special tokens' strings in it.
            is_live: whether deltas are taken while the text grows.
            before: tokens that the text continues. SentencePiece drops the space that begins a text, so the first
                space of a continuation is only found with what stands before it.
            byte_tokens: of the tokenizer, by token id.
            special_tokens: of the tokenizer, by token id.
            shown: special tokens whose strings are text.
            includes_stop: whether the stop string that ends the text is part of it.
            min_tokens: stop strings that the first `min_tokens` tokens complete end nothing.
        """
        self.is_stopped = False  #: a stop string ended the text
        self._decode = decode
        self._stop = tuple(stop)
        self._is_lazy = not (is_live or self._stop or shown)
        self._shown = shown
        self._includes_stop = includes_stop
        self._min_tokens = min_tokens
        self._num_pushed = 0
        self._byte_of = byte_tokens
        self._specials = special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._tokens: list[int] = []  #: all of them, if lazy
        self._window = [self._readable(token_id) for token_id in before[-OVERLAP:] if token_id not in special_tokens]
        self._num_shown = len(decode(self._window)) if self._window else 0  #: characters of its text that were appended
        self._num_waiting = 0  #: tokens pushed since the last readable end
        self._pieces: list[str] = []  #: the text that is certain
        self._num_taken = 0  #: of them
        self._tail = ""  #: what may grow into a stop string, with the strings of special tokens
        self._hidden: list[tuple[int, int]] = []  #: where these strings stand in the tail

    @property
    def text(self) -> str:
        """The text so far, as far as it is certain."""
        return "".join(self._pieces)

    def push(self, token_id: int) -> bool:
        """Append a token; True when the text is now complete because of a stop string."""
        self._num_pushed += 1
        if self._is_lazy:
            self._tokens.append(token_id)
        else:
            self._read(token_id)
        return self.is_stopped

    def finish(self) -> bool:
        """No more tokens come: what waited becomes text, a broken end as U+FFFD. True when a stop string ended it."""
        if self._tokens:
            text = self._decode([*self._window, *self._tokens])
            if self._byte_of and UNREADABLE in text:
                for token_id in self._tokens:
                    self._read(token_id)
            else:
                self._append(text[self._num_shown :])
                self._num_shown = len(text)
                self._window = []
        self._flush()
        self._settle(len(self._tail))
        return self.is_stopped

    def take_delta(self) -> str:
        """Text that has become certain since the last call; an end that may grow into a stop string waits."""
        if len(self._pieces) == self._num_taken:
            return ""
        delta = "".join(self._pieces[self._num_taken :])
        self._num_taken = len(self._pieces)
        return delta

    def _read(self, token_id: int) -> None:
        byte = self._byte_of.get(token_id, 0)
        if (string := self._specials.get(token_id)) is not None:
            if string in self._shown:
                self._flush()
                self._append(string)
            elif any(string in stop for stop in self._stop):
                self._flush()
                self._hidden.append((len(self._tail), len(self._tail) + len(string)))
                self._append(string)
        elif byte >= _FIRST_PARTIAL:
            if not self._window:
                self._window.append(self._readable(token_id))
                self._num_shown = len(self._decode(self._window))
            self._append(self._utf8.decode(bytes((byte,))))
        elif self._utf8.getstate()[0] and len(self._decode([*self._window, token_id])) == self._num_shown:
            return  # a token without text does not stand between the bytes of a character
        else:
            self._append(self._utf8.decode(b"", final=True))
            self._read_in_context(token_id)

    def _readable(self, token_id: int) -> int:
        """The token, or one that stands in the window for a byte which cannot be read alone."""
        if self._byte_of.get(token_id, 0) < _FIRST_PARTIAL:
            return token_id
        return next(letter for letter, byte in self._byte_of.items() if byte == ord("a"))

    def _read_in_context(self, token_id: int) -> None:
        self._window.append(token_id)
        self._num_waiting += 1
        shown = self._decode(self._window)
        num_readable = len(shown)
        if shown.endswith(UNREADABLE) and not self._byte_of:
            if self._num_waiting < _MAX_WAIT:
                return
            num_readable = max(self._num_shown, len(shown) - 4)
        else:
            self._num_waiting = 0
        self._append(shown[self._num_shown : num_readable])
        self._num_shown = num_readable
        if len(self._window) > WINDOW:
            num_held = len(shown) - num_readable
            # Tokens without text are no context: what follows would count as the text's beginning.
            kept = self._window[-OVERLAP:] if self._decode(self._window[-OVERLAP:]) else self._window[:OVERLAP]
            self._window, self._num_shown = kept, len(self._decode(kept)) - num_held

    def _flush(self) -> None:
        """Append what waits for the rest of a character."""
        waiting = self._utf8.decode(b"", final=True)
        if self._num_waiting:
            shown = self._decode(self._window)
            waiting += shown[self._num_shown :]
            self._num_shown, self._num_waiting = len(shown), 0
        self._append(waiting)

    def _append(self, piece: str) -> None:
        if self.is_stopped or not piece:
            return
        self._tail += piece
        stops = [(place, len(stop)) for stop in self._stop if (place := self._tail.find(stop)) >= 0]
        if stops and self._num_pushed > self._min_tokens:
            place, length = min(stops)
            self._settle(place + length if self._includes_stop else place)
            self._tail, self.is_stopped = "", True
        else:
            self._settle(len(self._tail) - self._num_suspect())

    def _num_suspect(self) -> int:
        """Characters of the tail that may be the beginning of a stop string."""
        return max(
            (
                num
                for stop in self._stop
                for num in range(1, min(len(stop), len(self._tail) + 1))
                if self._tail.endswith(stop[:num])
            ),
            default=0,
        )

    def _settle(self, num: int) -> None:
        """The first characters of the tail are certain; those of special tokens are no text."""
        begin = 0
        for first, end in self._hidden:
            if first < num:
                self._pieces.append(self._tail[begin:first])
                begin = min(end, num)
        self._pieces.append(self._tail[begin:num])
        self._hidden = [(first - num, end - num) for first, end in self._hidden if end > num]
        self._tail = self._tail[num:]
