"""Where two texts of a job part, and whether the target's two tokens are as good as equal there.

Passes of another shape round differently. In bfloat16 two tokens whose logits are close may change places, so that a
text parts from another one of the same job. A result on Kafka has a text and no tokens: the place is found by the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

#: Between float32 logits of two tokens that passes in bfloat16 may swap. A logit of 16 to 32 has steps of 0.125 in
#: bfloat16, and each of the two texts comes from passes of 30 rounded layers.
NEAR_TIE: Final = 0.5
_UNREADABLE: Final = "\N{REPLACEMENT CHARACTER}"
#: The same characters may be written with other tokens: the true place may lie a little before the one that shows.
_NUM_PLACES: Final = 4


class Target(Protocol):
    """The model that both texts come from."""

    end_tokens: frozenset[int]

    def logits(self, token_ids: Sequence[int]) -> list[float]:
        """Logits of every token that may follow."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where the worker's text parts from the engine's."""

    job_id: str
    place: int  #: tokens that are equal
    gap: float | None  #: from the highest logit to the lower one of the two tokens; None: wider than NEAR_TIE

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains the difference."""
        return self.gap is not None


class Reference:
    """A transformers model and its tokenizer as a Target."""

    def __init__(self, model: Any, tokenizer: Any, end_tokens: frozenset[int]) -> None:
        self.end_tokens = end_tokens
        self._model = model
        self._tokenizer = tokenizer

    def logits(self, token_ids: Sequence[int]) -> list[float]:
        """A plain pass over all tokens, without a cache."""
        import torch

        with torch.inference_mode():
            found = self._model(input_ids=torch.tensor([list(token_ids)]), use_cache=False, logits_to_keep=1)
        return [float(logit) for logit in found.logits[0, 0]]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))


def num_shared(decode: Callable[[Sequence[int]], str], token_ids: Sequence[int], text: str) -> int:
    """Leading tokens whose text `text` begins with."""
    for count in range(1, len(token_ids) + 1):
        if not _begins(text, decode(token_ids[:count])):
            return count - 1
    return len(token_ids)


def explain(job_id: str, target: Target, prompt: Sequence[int], token_ids: Sequence[int], text: str) -> Difference:
    """The engine wrote `token_ids` and the worker `text`, which is another text: where they part, and the gap there.

    A place explains the worker's text if a token other than the engine's goes on as that text does. The latest place
    with a near-tie before the texts show a difference is taken, else the latest place.
    """
    shown = num_shared(target.decode, token_ids, text)
    # Where all of the engine's tokens are in the worker's text, the engine's last token ended its text.
    last = min(shown, len(token_ids) - 1)
    found = []
    for place in range(last, max(-1, last - _NUM_PLACES), -1):
        difference = Difference(job_id, place, _gap(target, prompt, token_ids, place, text))
        if difference.is_near_tie:
            return difference
        found.append(difference)
    return found[0]


def _gap(target: Target, prompt: Sequence[int], token_ids: Sequence[int], place: int, text: str) -> float | None:
    shared = token_ids[:place]
    logits = target.logits([*prompt, *shared])
    best = max(logits)
    for token in sorted(range(len(logits)), key=lambda token: -logits[token]):
        gap = best - min(logits[token], logits[token_ids[place]])
        if gap > NEAR_TIE:
            break
        if token != token_ids[place] and _goes_on(target, shared, token, text):
            return gap
    return None


def _goes_on(target: Target, shared: Sequence[int], token: int, text: str) -> bool:
    if token in target.end_tokens:
        return target.decode(shared) == text
    return _begins(text, target.decode([*shared, token]))


def _begins(text: str, beginning: str) -> bool:
    """The last character of a beginning may be cut in the middle."""
    return text.startswith(beginning.rstrip(_UNREADABLE))
