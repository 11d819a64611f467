"""What a draft model keeps of each sequence: what its slot holds, and what a round makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from worker.decoding.proposal import Ask, Proposal


@dataclass(slots=True)
class Held:
    """What one sequence's slot holds: `num_text` tokens of the text, then the drafts that were read behind it."""

    slot: int
    text: Sequence[int]  #: live: the list itself, or what is read of it
    num_text: int = 0
    drafts: list[int] = field(default_factory=list)
    highest: int = -1  #: token of the text, as far as `is_below` has seen it
    num_seen: int = 0

    def is_below(self, num_rows: int) -> bool:
        """Whether every token of the text is less than `num_rows`."""
        self.highest = max((self.highest, *self.text[self.num_seen :]))
        self.num_seen = len(self.text)
        return self.highest < num_rows

    def keep(self) -> None:
        """Count the drafts that became text, and drop the rest; the text's last token is always read anew.

        That token may have been read, in a round that failed behind its proposals.
        """
        self.num_text = min(self.num_text, len(self.text) - 1)
        for draft in self.drafts:
            if self.num_text >= len(self.text) - 1 or self.text[self.num_text] != draft:
                break
            self.num_text += 1
        self.drafts = []


@dataclass(slots=True)
class Row:
    """One sequence of a round."""

    index: int  #: of its ask
    ask: Ask
    held: Held
    num_wanted: int
    num_branches: int = 1
    num_read: int = 0  #: of its text, beyond what a round leaves behind
    tokens: list[int] = field(default_factory=list)
    others: list[list[int]] = field(default_factory=list)  #: beside each token, the next likeliest ones
    q: list[Tensor] = field(default_factory=list)
    together: list[float] = field(default_factory=list)  #: probability of its tokens through each, if it is weighed

    @property
    def depth(self) -> int:
        """Tokens of its chain, so that branches have room beside them."""
        return -(-self.num_wanted // self.num_branches)

    def weigh(self, probability: float) -> None:
        """Its last token's."""
        self.together.append(probability * (self.together[-1] if self.together else 1.0))

    def proposal(self) -> Proposal:
        """What was drafted so far; nothing, while the text is still being read."""
        if self.num_branches == 1 or not self.tokens:
            q = torch.stack(self.q) if self.q else None
            return Proposal(tuple(self.tokens), q=q, together=tuple(self.together), num_read=self.num_read)
        tokens: list[int] = []
        parents: list[int] = []
        room, parent = self.num_wanted - len(self.tokens), -1
        for token, others in zip(self.tokens, self.others, strict=True):
            siblings = [token, *others[:room]]
            room -= len(siblings) - 1
            parents += [parent] * len(siblings)
            parent = len(tokens)
            tokens += siblings
        return Proposal(tuple(tokens), tuple(parents), num_read=self.num_read)
