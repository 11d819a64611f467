"""One pass of a model over the slot cache: which tokens it reads, where they are written, what each may see.

For the linear layers, the tokens of all sequences are in one flat row. So a sequence without drafts has one token, even
if another has eight. Attention works on groups: the short reads of all slots together, padded to the widest, and every
long read (a piece of a prompt) alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from worker.decoding.network.groups import Group, Placed, Read
from worker.decoding.network.slots import SlotCache

#: Attention of wider reads is computed alone, because padding all others to their width would cost more than a call.
WIDEST_SHARED: Final = 32


@dataclass(frozen=True)
class Pass:
    """What a network needs to read a list of `Read`s."""

    token_ids: Tensor  #: [tokens]
    positions: Tensor  #: [tokens]
    groups: tuple[Group, ...]
    num_heads: int  #: of the keys
    capacity: int  #: of the cache
    wanted: (
        Tensor | None
    )  #: [logits] flat tokens whose logits are wanted, in the order of the reads; None: all as they lie

    @property
    def num_tokens(self) -> int:
        """Tokens read."""
        return len(self.token_ids)

    @cached_property
    def wide(self) -> tuple[Group, ...]:
        """Of reads that are attended to alone."""
        return tuple(group for group in self.groups if group.width > WIDEST_SHARED)

    @cached_property
    def wide_trees(self) -> tuple[Group, ...]:
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
    firsts = {one.slot: one.first for one in placed}
    wanted = [
        firsts[read.slot] + column
        for read in reads
        for column in range(len(read.token_ids) - read.num_logits, len(read.token_ids))
    ]
    return Pass(
        token_ids=torch.tensor([token for one in placed for token in one.read.token_ids], device=cache.device),
        positions=torch.tensor([one.length + depth for one in placed for depth in one.depths], device=cache.device),
        groups=tuple(Group(tuple(group), window, cache.shape.dtype, cache.device) for group in members),
        num_heads=cache.shape.num_heads,
        capacity=cache.capacity,
        wanted=None if wanted == list(range(first)) else torch.tensor(wanted, dtype=torch.long, device=cache.device),
    )
