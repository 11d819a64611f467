"""Hidden states of the target, for drafters that want them: of which layers, and how they come from passes to an ask.

A tap names a state: `i` is what layer i reads (0: the embeddings), FINAL is the state after the last norm, which the
head reads. A pass gives states of layers for every token that it reads, and final ones where logits are wanted, because
elsewhere they are not computed. SAID is what the head makes of all of them: tokens, not a state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from engine.network.passes import Read

#: The tap after the last norm.
FINAL: Final = -1
#: The tap of the head: the likeliest tokens after each token of the last passes, also after drafts that it rejected.
SAID: Final = -2
NUM_SAID: Final = 8  #: of each


@dataclass(frozen=True, slots=True, eq=False)
class States:
    """States of a text, by tap: of a layer at consecutive positions, of FINAL at the last of them alone."""

    first: int  #: position of the first row of each layer
    end: int  #: positions that the target has read: the last row is at end - 1
    #: [positions, hidden]; FINAL: [1, hidden]; SAID: [tokens, 1 + NUM_SAID], a token and those likeliest after it
    by_tap: Mapping[int, Tensor]

    def of(self, taps: Sequence[int]) -> Tensor:
        """States of several layers side by side: [positions, len(taps) * hidden]."""
        return torch.cat([self.by_tap[tap] for tap in taps], dim=-1)


@dataclass(eq=False)
class PassStates:
    """The states that a pass over `reads` gave: of layers in the order of the reads, final ones as their logits.

    For SAID `by_tap` has the logits.
    """

    reads: Sequence[Read]
    by_tap: Mapping[int, Tensor]

    def __post_init__(self) -> None:
        self._tokens = [0, *accumulate(len(read.token_ids) for read in self.reads)]
        self._logits = [0, *accumulate(read.num_logits for read in self.reads)]

    def of(self, number: int, columns: Sequence[int], taps: Iterable[int]) -> dict[int, Tensor]:
        """States at some tokens of read `number`; final ones at the last of them, if its logits were wanted."""
        read = self.reads[number]
        states = {}
        for tap in taps:
            rows = self.by_tap[tap]
            if tap == SAID:
                said = rows[self._logits[number] : self._logits[number + 1]]
                tokens = torch.tensor(read.token_ids[len(read.token_ids) - len(said) :], device=said.device)
                likeliest = said.topk(min(NUM_SAID, said.shape[1]), dim=-1).indices
                states[tap] = torch.cat((tokens.long()[:, None], likeliest), dim=1)
            elif tap != FINAL:
                begin = self._tokens[number]
                if columns[-1] - columns[0] == len(columns) - 1:
                    # A copy, because a view would keep the states of the whole pass.
                    states[tap] = rows[begin + columns[0] : begin + columns[-1] + 1].clone()
                else:
                    states[tap] = rows[[begin + column for column in columns]]
            elif (place := columns[-1] - (len(read.token_ids) - read.num_logits)) >= 0:
                row = self._logits[number] + place
                states[tap] = rows[row : row + 1].clone()  # the next pass may write there
        return states


@dataclass(slots=True, eq=False)
class KeptStates:
    """States of one text that its drafter has not been given yet."""

    _first: int = 0
    _end: int = 0
    _pieces: dict[int, list[Tensor]] = field(default_factory=dict)
    _final: Tensor | None = None

    def add(self, first: int, num: int, by_tap: Mapping[int, Tensor]) -> None:
        """States at `num` positions from `first` on. Where others lie between, earlier ones are dropped."""
        if first != self._end:
            self._pieces, self._first = {}, first
        self._end, self._final = first + num, by_tap.get(FINAL)
        for tap, rows in by_tap.items():
            if tap != FINAL:
                self._pieces.setdefault(tap, []).append(rows)

    def take(self) -> States | None:
        """What has come since the last call, the last final state also again; None where there is nothing."""
        if not self._pieces and self._final is None:
            self._first = self._end
            return None
        by_tap = {tap: torch.cat(pieces) for tap, pieces in self._pieces.items()}
        if self._final is not None:
            by_tap[FINAL] = self._final
        taken = States(self._first, self._end, by_tap)
        self._pieces, self._first = {}, self._end
        return taken

    def clear(self) -> None:
        """Forget all of it."""
        self._pieces, self._final, self._first, self._end = {}, None, 0, 0
