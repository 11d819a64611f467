"""One pass of a model over the slot cache: which tokens it reads, where they are written, what each may see.

For the linear layers, the tokens of all sequences are in one flat row. So a sequence without drafts has one token, even
if another has eight. Attention works on groups: the short reads of all slots together, padded to the widest, and every
long read (a piece of a prompt) alone. torch's attention needs a rectangle with masks. It is laid out at its first use,
because compiled kernels use the reads directly and never need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from engine.network.slots import SlotCache
from engine.proposal import tree_depths


@dataclass(frozen=True, slots=True)
class Read:
    """Tokens of one slot, written after the slot's length. The length does not change until the caller raises it."""

    slot: int
    token_ids: Sequence[int]
    num_logits: int = 1  #: number of last tokens whose logits are wanted
    #: None: each token follows the one before. Otherwise token i's parent is token parents[i] < i of this read; -1 is
    #: what the slot holds.
    parents: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Placed:
    """A read with its slot and its place in the pass."""

    read: Read
    length: int  #: tokens that the slot held before
    first: int  #: flat token

    @property
    def slot(self) -> int:
        """Row of the cache."""
        return self.read.slot

    @property
    def width(self) -> int:
        """Tokens read."""
        return len(self.read.token_ids)

    @property
    def depths(self) -> list[int]:
        """The number of ancestors of each token within the read."""
        if self.read.parents is None:
            return list(range(self.width))
        return [depth - 1 for depth in tree_depths(self.read.parents)]

    @property
    def ancestry(self) -> list[int]:
        """For each token the tokens of the read that it sees, as bits: itself and its ancestors."""
        if self.read.parents is None:
            return [(2 << token) - 1 for token in range(self.width)]
        seen: list[int] = []
        for token, parent in enumerate(self.read.parents):
            seen.append(1 << token | (seen[parent] if parent >= 0 else 0))
        return seen


@dataclass(frozen=True)
class ReadGroup:
    """Reads of slots that lie near each other, in the order of their slots."""

    placed: tuple[Placed, ...]
    window: int | None  #: of layers with a sliding one
    dtype: torch.dtype
    device: torch.device

    @property
    def slots(self) -> slice:
        """Rows of the cache. A row between them that is not read is computed too, without effect."""
        return slice(self.placed[0].slot, self.placed[-1].slot + 1)

    @property
    def tokens(self) -> slice:
        """The group's part of the flat tokens."""
        return slice(self.placed[0].first, self.placed[-1].first + self.placed[-1].width)

    @cached_property
    def width(self) -> int:
        """Tokens of the widest read."""
        return max(placed.width for placed in self.placed)

    @cached_property
    def num_keys(self) -> int:
        """Keys of each row of the rectangle.

        The greatest length and the greatest width may belong to two reads. Their sum is not needed, because padding is
        never written and its results are dropped.
        """
        return max(placed.length + placed.width for placed in self.placed)

    @cached_property
    def cells(self) -> Tensor | None:
        """[tokens] the cell of each token in [rows * width]; None where the tokens fill the rectangle."""
        if self.tokens.stop - self.tokens.start == self._num_rows * self.width:
            return None
        low = self.slots.start
        return torch.tensor(
            [(placed.slot - low) * self.width + column for placed in self.placed for column in range(placed.width)],
            device=self.device,
        )

    @cached_property
    def padded(self) -> Tensor | None:
        """[rows * width] the inverse: the group's token of each cell, its first where there is none."""
        if self.cells is None:
            return None
        padded = torch.zeros(self._num_rows * self.width, dtype=torch.long, device=self.device)
        padded[self.cells] = torch.arange(len(self.cells), device=self.device)
        return padded

    @cached_property
    def mask(self) -> Tensor | None:
        """[rows, 1, width, num_keys], added to the scores; None: everything is seen."""
        return None if self._num_rows == self.width == 1 else self._added(self._visible[0])

    @cached_property
    def local_mask(self) -> Tensor | None:
        """The mask for layers with a sliding window; the same tensor while no window is full."""
        if self.window is None or self.num_keys <= self.window:
            return self.mask
        seen, distance = self._visible
        near = seen & (distance < self.window)
        # Padding may stand further from all keys than the window reaches.
        near[..., 0] |= ~near.any(dim=-1)
        return self._added(near)

    @property
    def _num_rows(self) -> int:
        return self.placed[-1].slot + 1 - self.placed[0].slot

    @cached_property
    def _visible(self) -> tuple[Tensor, Tensor]:
        """Which cells of [rows, width, num_keys] are seen, and how many positions lie between their two tokens."""
        low = self.slots.start
        lengths = torch.zeros(self._num_rows, dtype=torch.long)
        lengths[[placed.slot - low for placed in self.placed]] = torch.tensor([p.length for p in self.placed])
        keys = torch.arange(self.num_keys, device=self.device)
        positions = lengths.to(self.device)[:, None] + torch.arange(self.width, device=self.device)
        distance = positions[:, :, None] - keys
        # A row that is not read sees its first cell, because a softmax over no cell is NaN.
        seen = distance >= 0
        for placed in self.placed:
            if placed.read.parents is None:
                continue
            row, length, width = placed.slot - low, placed.length, placed.width
            depths = torch.tensor(placed.depths, device=self.device)
            sees = [[bits >> column & 1 for column in range(width)] for bits in placed.ancestry]
            seen[row, :width, length : length + width] = torch.tensor(sees, dtype=torch.bool, device=self.device)
            distance[row, :width, :length] = (length + depths)[:, None] - keys[:length]
            distance[row, :width, length : length + width] = depths[:, None] - depths
        return seen, distance

    def _added(self, seen: Tensor) -> Tensor:
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(~seen, -torch.inf)[:, None]


#: Attention of wider reads is computed alone, because padding all others to their width would cost more than a call.
WIDEST_SHARED: Final = 32


@dataclass(frozen=True)
class Pass:
    """What a network needs to read a list of `Read`s."""

    token_ids: Tensor  #: [tokens]
    positions: Tensor  #: [tokens]
    groups: tuple[ReadGroup, ...]
    num_heads: int  #: of the keys
    capacity: int  #: of the cache
    #: [logits] flat tokens whose logits are wanted, in the order of the reads; None: all as they lie
    wanted: Tensor | None

    @property
    def num_tokens(self) -> int:
        """Tokens read."""
        return len(self.token_ids)

    @cached_property
    def wide(self) -> tuple[ReadGroup, ...]:
        """Groups of a read that is attended to alone."""
        return tuple(group for group in self.groups if group.width > WIDEST_SHARED)

    @cached_property
    def wide_trees(self) -> tuple[ReadGroup, ...]:
        """Those of `wide` that are trees."""
        return tuple(group for group in self.wide if group.placed[0].read.parents is not None)

    @cached_property
    def stored(self) -> Tensor:
        """[tokens * 2 * heads] rows of a layer seen as [slots * 2 * heads * capacity, head_dim]."""
        places = [
            (placed.slot, placed.length + column)
            for group in self.groups
            for placed in group.placed
            for column in range(placed.width)
        ]
        slot, column = torch.tensor(places, device=self.token_ids.device).unbind(1)
        head = torch.arange(2 * self.num_heads, device=slot.device)
        return ((slot[:, None] * len(head) + head) * self.capacity + column[:, None]).flatten()


def plan_pass(cache: SlotCache, reads: Sequence[Read], window: int | None) -> Pass:
    """Lay out `reads`, at most one a slot, and reserve the cache's memory. `window` is that of sliding layers."""
    short = sorted((read for read in reads if len(read.token_ids) <= WIDEST_SHARED), key=lambda read: read.slot)
    long = [read for read in reads if len(read.token_ids) > WIDEST_SHARED]
    cache.reserve({read.slot: cache.lengths[read.slot] + len(read.token_ids) for read in reads})
    first = 0
    placed: list[Placed] = []
    for read in (*short, *long):
        placed.append(Placed(read, cache.lengths[read.slot], first))
        first += len(read.token_ids)
    members = [group for group in (placed[: len(short)], *([alone] for alone in placed[len(short) :])) if group]
    firsts = {read.slot: read.first for read in placed}
    wanted = [
        firsts[read.slot] + column
        for read in reads
        for column in range(len(read.token_ids) - read.num_logits, len(read.token_ids))
    ]
    return Pass(
        token_ids=torch.tensor([token for each in placed for token in each.read.token_ids], device=cache.device),
        positions=torch.tensor([each.length + depth for each in placed for depth in each.depths], device=cache.device),
        groups=tuple(ReadGroup(tuple(group), window, cache.shape.dtype, cache.device) for group in members),
        num_heads=cache.shape.num_heads,
        capacity=cache.capacity,
        wanted=None if wanted == list(range(first)) else torch.tensor(wanted, dtype=torch.long, device=cache.device),
    )
