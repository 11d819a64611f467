"""One pass of a model over the slot cache: which tokens it reads, where they are written, what each may see.

Tokens of all sequences lie side by side in one flat row for the linear layers, so a sequence without drafts is one
token wide beside one with eight. Attention works on groups: the short reads of all slots together, padded to the
widest, and every long read (a piece of a prompt) alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from worker.decoding.slots import SlotCache

#: Reads wider than this are attended to alone: padding all others to their width would cost more than a call.
WIDEST_SHARED: Final = 32


@dataclass(frozen=True, slots=True)
class Read:
    """Tokens of one slot, written behind its length, which stays as it is until the caller raises it."""

    slot: int
    token_ids: Sequence[int]
    num_logits: int = 1  #: logits wanted, behind the last so many tokens
    #: None: each token follows the one before. Otherwise token i hangs on token parents[i] < i of this read; -1 is
    #: what the slot holds.
    parents: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Reads that are attended to together, as rows of one rectangle."""

    slots: slice  #: rows of the cache; one between them that is not read is carried along for nothing
    width: int
    num_keys: int
    tokens: slice  #: the group's part of the flat tokens
    padded: Tensor | None  #: [rows * width] flat token of each cell; None where the tokens fill the rectangle
    cells: Tensor | None  #: [tokens] the inverse
    mask: Tensor | None  #: [rows, 1, width, num_keys], added to the scores; None: everything is seen
    local_mask: Tensor | None  #: the same for layers with a sliding window


@dataclass(frozen=True, slots=True)
class Pass:
    """What a network needs to read a list of `Read`s."""

    token_ids: Tensor  #: [tokens]
    positions: Tensor  #: [tokens]
    stored: Tensor  #: [tokens * 2 * heads] rows of a layer seen as [slots * 2 * heads * capacity, head_dim]
    groups: tuple[Group, ...]
    wanted: (
        Tensor | None
    )  #: [logits] flat tokens whose logits are wanted, in the order of the reads; None: all as they lie

    @property
    def num_tokens(self) -> int:
        """Tokens read."""
        return len(self.token_ids)


def plan_pass(cache: SlotCache, reads: Sequence[Read], window: int | None) -> Pass:
    """Lay out `reads`, at most one a slot, and have the cache's memory for them. `window`: of sliding layers."""
    short = sorted((read for read in reads if len(read.token_ids) <= WIDEST_SHARED), key=lambda read: read.slot)
    long = [read for read in reads if len(read.token_ids) > WIDEST_SHARED]
    members = [group for group in (short, *([read] for read in long)) if group]
    cache.reserve(max(read.slot for read in reads) + 1, _most_positions(cache, members))
    begins: dict[int, int] = {}
    groups: list[Group] = []
    token_ids: list[int] = []
    positions: list[int] = []
    places: list[tuple[int, int]] = []
    for group in members:
        begin = len(token_ids)
        for read in group:
            begins[read.slot] = len(token_ids)
            length = cache.lengths[read.slot]
            token_ids += read.token_ids
            positions += [length + depth for depth in _depths(read)]
            places += [(read.slot, length + column) for column in range(len(read.token_ids))]
        groups.append(_group(cache, group, slice(begin, len(token_ids)), window))
    wanted = [
        begins[read.slot] + column
        for read in reads
        for column in range(len(read.token_ids) - read.num_logits, len(read.token_ids))
    ]
    return Pass(
        token_ids=torch.tensor(token_ids, device=cache.device),
        positions=torch.tensor(positions, device=cache.device),
        stored=_stored(cache, places),
        groups=tuple(groups),
        wanted=None
        if wanted == list(range(len(token_ids)))
        else torch.tensor(wanted, dtype=torch.long, device=cache.device),
    )


def _most_positions(cache: SlotCache, members: list[list[Read]]) -> int:
    return max(_num_positions(cache, group) for group in members)


def _num_positions(cache: SlotCache, reads: list[Read]) -> int:
    # Not the longest and the widest together, which may be two: padding is never written, and what it sees is dropped.
    return max(cache.lengths[read.slot] + len(read.token_ids) for read in reads)


def _depths(read: Read) -> list[int]:
    if read.parents is None:
        return list(range(len(read.token_ids)))
    depths: list[int] = []
    for parent in read.parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def _stored(cache: SlotCache, places: list[tuple[int, int]]) -> Tensor:
    slot, column = torch.tensor(places, device=cache.device).unbind(1)
    head = torch.arange(2 * cache.shape.num_heads, device=cache.device)
    return ((slot[:, None] * len(head) + head) * cache.capacity + column[:, None]).flatten()


def _group(cache: SlotCache, reads: list[Read], tokens: slice, window: int | None) -> Group:
    low, high = reads[0].slot, reads[-1].slot + 1
    widths = [len(read.token_ids) for read in reads]
    width, rows = max(widths), high - low
    padded = cells = None
    if sum(widths) < rows * width:
        cells = torch.tensor(
            [(read.slot - low) * width + column for read in reads for column in range(len(read.token_ids))]
        ).to(cache.device)
        padded = torch.zeros(rows * width, dtype=torch.long, device=cache.device)
        padded[cells] = torch.arange(len(cells), device=cache.device)
    num_keys = _num_positions(cache, reads)
    sees_all = rows == 1 and width == 1
    if sees_all and (window is None or num_keys <= window):
        return Group(slice(low, high), width, num_keys, tokens, padded, cells, None, None)
    seen, distance = _visible(cache, reads, low, rows, width, num_keys)
    mask = None if sees_all else _added(seen, cache.shape.dtype)
    # One rectangle serves both kinds of layers while no window is full.
    local = mask if window is None or num_keys <= window else _added(seen & (distance < window), cache.shape.dtype)
    return Group(slice(low, high), width, num_keys, tokens, padded, cells, mask, local)


def _visible(
    cache: SlotCache, reads: list[Read], low: int, rows: int, width: int, num_keys: int
) -> tuple[Tensor, Tensor]:
    """Which cell of [rows, width, num_keys] is seen, and how many positions lie between the two tokens."""
    lengths = torch.zeros(rows, dtype=torch.long)
    lengths[[read.slot - low for read in reads]] = torch.tensor([cache.lengths[read.slot] for read in reads])
    lengths = lengths.to(cache.device)
    keys = torch.arange(num_keys, device=cache.device)
    positions = lengths[:, None] + torch.arange(width, device=cache.device)
    distance = positions[:, :, None] - keys
    # A row that is not read sees its first cell: a softmax over nothing is NaN.
    seen = distance >= 0
    for read in reads:
        if read.parents is None:
            continue
        row, length, num = read.slot - low, cache.lengths[read.slot], len(read.token_ids)
        depths = torch.tensor(_depths(read), device=cache.device)
        seen[row, :num, length : length + num] = _ancestry(read.parents).to(cache.device)
        distance[row, :num, :length] = (length + depths)[:, None] - keys[:length]
        distance[row, :num, length : length + num] = depths[:, None] - depths
    return seen, distance


def _ancestry(parents: Sequence[int]) -> Tensor:
    """[tokens, tokens]: true where the column's token is the row's or one that it hangs on."""
    ancestry = torch.eye(len(parents), dtype=torch.bool)
    for token, parent in enumerate(parents):
        if parent >= 0:
            ancestry[token] |= ancestry[parent]
    return ancestry


def _added(seen: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, -torch.inf)[:, None]
