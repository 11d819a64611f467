"""The layout in which compiled kernels hold keys and values in bfloat16: as their products read them, by pairs.

A product of pairs multiplies two neighbouring numbers of each of 16 outputs. For scores the outputs are positions, so
keys lie as [blocks, head_dim / 2, 64, 2]: a pair of elements of 64 positions side by side. For sums of values the
outputs are elements, so values lie as [positions / 2, head_dim, 2]: two positions' numbers of each element side by
side. A block of 64 positions takes the same memory as in the plain layout [positions, head_dim], and lies in the same
place. So whole blocks are copied alike in both layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import Tensor

BLOCK: Final = 64  #: positions of a block


def to_paired(held: Tensor) -> Tensor:
    """A copy of [slots, 2 * heads, positions, head_dim], keys first, in pairs; positions are whole blocks."""
    keys, values = held.chunk(2, dim=1)
    slots, heads, positions, head_dim = keys.shape
    paired = held.new_empty(held.shape)
    blocks = keys.reshape(slots, heads, positions // BLOCK, BLOCK, head_dim // 2, 2)
    paired[:, :heads] = blocks.transpose(3, 4).reshape(keys.shape)
    paired[:, heads:] = values.reshape(slots, heads, positions // 2, 2, head_dim).transpose(3, 4).reshape(values.shape)
    return paired


def to_plain(paired: Tensor) -> Tensor:
    """The inverse of `to_paired`."""
    keys, values = paired.chunk(2, dim=1)
    slots, heads, positions, head_dim = keys.shape
    held = paired.new_empty(paired.shape)
    blocks = keys.reshape(slots, heads, positions // BLOCK, head_dim // 2, BLOCK, 2)
    held[:, :heads] = blocks.transpose(3, 4).reshape(keys.shape)
    held[:, heads:] = values.reshape(slots, heads, positions // 2, head_dim, 2).transpose(3, 4).reshape(values.shape)
    return held


def whole_blocks(begin: int, end: int) -> slice:
    """The positions of the blocks in which positions `begin` to `end` lie."""
    return slice(begin // BLOCK * BLOCK, -(-end // BLOCK) * BLOCK)


def copy_paired(layer: Tensor, source: int, slots: Sequence[int], begin: int, end: int) -> None:
    """Positions `begin` to `end` of slot `source` into `slots`, whose positions before stay what they are.

    Positions behind, up to the end of a block, are copied too: nothing counts there.
    """
    first, copied = begin // BLOCK, whole_blocks(begin, end)
    if begin % BLOCK:
        copied = slice(copied.start + BLOCK, copied.stop)
    for slot in slots:  # an index of several slots would take four times as long
        if begin % BLOCK:
            _copy_rest(layer, source, slot, first, begin % BLOCK)
        layer[slot, :, copied] = layer[source, :, copied]


def _copy_rest(layer: Tensor, source: int, slot: int, block: int, begin: int) -> None:
    """The positions of one block from its position `begin` on."""
    keys, values = layer[:, :, block * BLOCK : (block + 1) * BLOCK].chunk(2, dim=1)
    slots, heads, _, head_dim = keys.shape
    elements = keys.view(slots, heads, head_dim // 2, BLOCK, 2)
    elements[slot, :, :, begin:] = elements[source, :, :, begin:]
    pairs = values.view(slots, heads, BLOCK // 2, head_dim, 2)
    if begin % 2:
        pairs[slot, :, begin // 2, :, 1] = pairs[source, :, begin // 2, :, 1]
    pairs[slot, :, (begin + 1) // 2 :] = pairs[source, :, (begin + 1) // 2 :]
