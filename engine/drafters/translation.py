"""A draft model with a tokenizer of its own: the tokens that both have, and the target's text in the draft's tokens.

Token-level intersection (Timor et al. 2025, arXiv 2502.05202). Two tokens that stand for the same bytes are one token
under two ids, and so are the tokens that end a text. A draft proposes only those: its head is cut to them, so what it
draws from is its distribution over them, renormalised, in the target's ids. That is q as the acceptance rules need it.

The draft reads the text as its own tokenizer writes it. After each round only the text's end is written anew, after
the last boundary: a single space between two other characters, over which tokens do not reach. So what is written in
steps is what is written at once. Where no boundary comes for long (a script without spaces, base64), the text is cut
somewhere, and there a token may differ.

A control token of the target is read as the draft's of the same string, the one that ends a text as the draft's, and
the one that begins a text as whatever the draft's tokenizer begins with. Any other is read as its string, because it
says who speaks. Typed text never becomes a control token.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch
from tokenizers import Tokenizer
from torch import Tensor

from engine.text import byte_tokens, special_tokens, token_bytes

#: Version of what a draft reads and may propose, part of its revision.
_VERSION: Final = 1
#: Characters after the last boundary at which a text is cut, and those that stay open.
_MOST_OPEN, _LEFT_OPEN = 128, 32

#: What jobs write: prose, figures, JSON, code. Its tokens are counted.
SAMPLE: Final = '''\
The order was placed on 14 March 2024 and has not arrived. According to the carrier, the parcel left the warehouse in
Rotterdam two days later, so it should have reached you within a week. We're sorry about the delay: please let us know
whether you'd like a refund of $49.90 or a replacement.

{"customer": {"id": 10482, "name": "Maria Jensen", "is_active": true}, "items": [{"sku": "A-113", "quantity": 2}]}

def total(items: list[dict[str, float]], *, tax: float = 0.25) -> float:
    """The sum of all prices, with tax."""
    if not items:
        return 0.0
    return sum(item["price"] * item["quantity"] for item in items) * (1 + tax)

SELECT name, count(*) AS orders FROM customers JOIN orders USING (customer_id) WHERE status = 'open' GROUP BY name;

1. Summarize the text in three sentences.
2. Explain why the second argument is wrong, and give an example.
'''


@dataclass(frozen=True, eq=False)
class Translation:
    """What stands between a target and a draft whose tokenizers differ. `between` makes it."""

    target: Any  #: the target's tokenizer
    draft: Any  #: the draft's
    target_ids: Tensor  #: [number], int64, ascending: the tokens that both have
    draft_ids: Tensor  #: [number]: the same tokens
    share: float  #: of the target's tokens of SAMPLE, those that the draft has too
    length: float  #: the draft's tokens of SAMPLE, over the target's

    @classmethod
    def between(cls, target: Any, draft: Any, *, num_target_rows: int, num_draft_rows: int) -> Translation | None:
        """Between two tokenizers; tokens beyond the models' rows count for nothing.

        None where the tokens of one have no bytes of their own, because a token's text depends on its neighbours, or
        the tokenizer is none of the library tokenizers.
        """
        samples = [_sample_tokens(tokenizer) for tokenizer in (target, draft)]
        if not all(samples):
            return None
        of_target, of_draft = _by_bytes(target, num_target_rows), _by_bytes(draft, num_draft_rows)
        pairs = {token: of_draft[piece] for piece, token in of_target.items() if piece in of_draft}
        ends = target.eos_token_id, draft.eos_token_id
        if None not in ends and ends[0] < num_target_rows and ends[1] < num_draft_rows:
            pairs[ends[0]] = ends[1]
        target_ids = sorted(pairs)
        return cls(
            target,
            draft,
            torch.tensor(target_ids, dtype=torch.int64),
            torch.tensor([pairs[token] for token in target_ids], dtype=torch.int64),
            share=sum(token in pairs for token in samples[0]) / len(samples[0]),
            length=len(samples[1]) / len(samples[0]),
        )

    def __len__(self) -> int:
        return len(self.target_ids)

    @property
    def has_end(self) -> bool:
        """Whether the draft can propose the end of a text."""
        return self.target.eos_token_id in self.draft_of

    @cached_property
    def draft_of(self) -> Mapping[int, int]:
        """The draft's id of each token that both have, by the target's."""
        return dict(zip(self.target_ids.tolist(), self.draft_ids.tolist(), strict=True))

    @cached_property
    def revision(self) -> str:
        """Eight digits of a hash over which token is which, and how texts are written."""
        said = f"{_VERSION} {self.target_ids.tolist()} {self.draft_ids.tolist()} {sorted(self.control.items())}"
        return hashlib.sha256(said.encode()).hexdigest()[:8]

    @cached_property
    def control(self) -> Mapping[int, int]:
        """Control tokens of the target that the draft has too: the draft's, by the target's id."""
        of_draft = {string: token for token, string in special_tokens(self.draft).items()}
        of_target = special_tokens(self.target)
        both = {token: of_draft[string] for token, string in of_target.items() if string in of_draft}
        if self.has_end:
            both.setdefault(self.target.eos_token_id, self.draft_of[self.target.eos_token_id])
        return both

    @cached_property
    def beginnings(self) -> tuple[int | None, int | None]:
        """The token that each tokenizer, the target's and the draft's, puts before a text; None: it puts none."""
        return _beginning(self.target), _beginning(self.draft)

    def proposing(self, known: Tensor | None) -> tuple[Tensor, Tensor]:
        """What the draft may propose of `known`, its own ids (None: all): the rows of its head, and the target's ids.

        Both [number], in the order of the target's ids.
        """
        if known is None:
            return self.draft_ids, self.target_ids
        kept = torch.isin(self.draft_ids, known)
        return self.draft_ids[kept], self.target_ids[kept]

    def written(self, text: str, *, is_first: bool) -> list[int]:
        """The draft's tokens of a piece of text; `is_first`: it begins a text, or follows a control token."""
        # A space before the text is the tokenizer's own: the target's left it there, or the draft's will.
        is_added = self._adds_space[0] if is_first else self._adds_space[1]
        text = text[1:] if is_added and text.startswith(" ") else text
        return list(self._encoder.encode(text, add_special_tokens=False).ids) if text else []

    def bytes_written(self, of: bytes) -> list[int]:
        """The draft's tokens of bytes that are a part of a character; none for bytes that it has no token for."""
        return [token for byte in of if (token := self._of_bytes.get(bytes((byte,)))) is not None]

    @cached_property
    def _encoder(self) -> Tokenizer:
        # A copy, in which strings of control tokens are text. It is much quicker than a call of transformers'.
        encoder = Tokenizer.from_str(self.draft.backend_tokenizer.to_str())
        encoder.no_padding()
        encoder.no_truncation()
        encoder.encode_special_tokens = True
        return encoder

    @cached_property
    def _adds_space(self) -> tuple[bool, bool]:
        target, draft = (
            _joined(tokenizer, _plain(tokenizer, "a")).startswith(b" ") for tokenizer in (self.target, self.draft)
        )
        return target, draft

    @cached_property
    def _of_bytes(self) -> Mapping[bytes, int]:
        return {piece: token for piece, token in _by_bytes(self.draft, len(self.draft)).items() if len(piece) == 1}


class TranslatedText:
    """One sequence's text in the draft's tokens, while it grows by tokens of the target."""

    def __init__(self, translation: Translation) -> None:
        self._translation = translation
        self._has_begun = False
        self._open = ""  # characters after the last boundary
        self._is_first = True  # nothing stands before them, or a control token
        self._num_open = 0  # the draft's tokens of them, and of a part of a character at the end
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, tokens: Sequence[int]) -> tuple[int, list[int]]:
        """Take in tokens that were added: how many of the draft's last tokens go, and those that stand there instead.

        The two begin alike where the new tokens did not change how the text's end is written.
        """
        translation, num_gone = self._translation, self._num_open
        written: list[int] = []
        if tokens and not self._has_begun:
            self._has_begun = True
            of_target, of_draft = translation.beginnings
            if tokens[0] == of_target:
                tokens = tokens[1:]
            if of_draft is not None:
                written.append(of_draft)
        pieces = [self._open]
        for token in tokens:
            if (control := translation.control.get(token)) is None:
                pieces.append(self._utf8.decode(token_bytes(translation.target, token)))
                continue
            pieces.append(self._utf8.decode(b"", final=True))
            written += translation.written("".join(pieces), is_first=self._is_first)
            written.append(control)
            pieces, self._is_first = [], True
        self._open = "".join(pieces)
        if end := _boundary(self._open):
            written += translation.written(self._open[:end], is_first=self._is_first)
            self._open, self._is_first = self._open[end:], False
        still_open = translation.written(self._open, is_first=self._is_first)
        still_open += translation.bytes_written(self._utf8.getstate()[0])
        self._num_open = len(still_open)
        return num_gone, written + still_open


def _boundary(text: str) -> int:
    """Where the last boundary inside the text stands; 0 where there is none."""
    place = text.rfind(" ", 0, len(text) - 1)
    while place > 0:
        if not (text[place - 1].isspace() or text[place + 1].isspace()):
            return place
        place = text.rfind(" ", 0, place)
    return len(text) - _LEFT_OPEN if len(text) > _MOST_OPEN else 0


def _by_bytes(tokenizer: Any, num_rows: int) -> dict[bytes, int]:
    """Token by its bytes, without control tokens; among several with the same bytes, one that is no byte's own name."""
    of_bytes, control = byte_tokens(tokenizer), {*special_tokens(tokenizer), *tokenizer.all_special_ids}
    tokens: dict[bytes, int] = {}
    for token in sorted(tokenizer.get_vocab().values(), key=lambda token: (token in of_bytes, token)):
        if token < num_rows and token not in control and (piece := token_bytes(tokenizer, token)):
            tokens.setdefault(piece, token)
    return tokens


def _sample_tokens(tokenizer: Any) -> list[int]:
    """The tokens of SAMPLE; none where their bytes are not its own."""
    tokens = _plain(tokenizer, SAMPLE) if tokenizer.is_fast else []
    return tokens if _joined(tokenizer, tokens).removeprefix(b" ") == SAMPLE.encode() else []


def _plain(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _joined(tokenizer: Any, tokens: Sequence[int]) -> bytes:
    return b"".join(token_bytes(tokenizer, token) for token in tokens)


def _beginning(tokenizer: Any) -> int | None:
    first = next(iter(tokenizer("a")["input_ids"]), None)
    return first if first == tokenizer.bos_token_id else None
