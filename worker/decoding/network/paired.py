"""The layout in which compiled kernels hold keys and values in bfloat16: as their products read them, by pairs.

A product of pairs multiplies two neighbouring numbers of each of 16 outputs. For scores the outputs are positions, so
a block's keys lie as [head_dim / 2, 64, 2]: a pair of elements of 64 positions side by side. For sums of values the
outputs are elements, so a block's values lie as [32, head_dim, 2]: two positions' numbers of each element side by side.
A layer of all slots is [slots, blocks, 2 * heads, 64, head_dim], a block's keys before its values.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

BLOCK: Final = 64  #: positions of a block
PAIRED_DIMENSIONS: Final = 5  #: of a layer; in the plain layout it has 4


def to_paired(held: Tensor) -> Tensor:
    """A copy of [slots, 2 * heads, positions, head_dim], keys first, in pairs; positions are whole blocks."""
    slots, heads, positions, head_dim = held.shape
    blocks = held.view(slots, heads, positions // BLOCK, BLOCK, head_dim).transpose(1, 2)
    keys, values = blocks.chunk(2, dim=2)
    paired = held.new_empty(blocks.shape)
    shape = keys.shape[:3]
    paired[:, :, : heads // 2] = keys.reshape(*shape, BLOCK, head_dim // 2, 2).transpose(3, 4).reshape(keys.shape)
    paired[:, :, heads // 2 :] = values.reshape(*shape, BLOCK // 2, 2, head_dim).transpose(4, 5).reshape(keys.shape)
    return paired


def to_plain(paired: Tensor) -> Tensor:
    """The inverse of `to_paired`."""
    slots, blocks, heads, _, head_dim = paired.shape
    keys, values = paired.chunk(2, dim=2)
    held = paired.new_empty(paired.shape)
    shape = keys.shape[:3]
    held[:, :, : heads // 2] = keys.reshape(*shape, head_dim // 2, BLOCK, 2).transpose(3, 4).reshape(keys.shape)
    held[:, :, heads // 2 :] = values.reshape(*shape, BLOCK // 2, head_dim, 2).transpose(4, 5).reshape(keys.shape)
    return held.transpose(1, 2).reshape(slots, heads, blocks * BLOCK, head_dim)


def blocks_of(begin: int, end: int) -> slice:
    """The blocks in which positions `begin` to `end` lie."""
    return slice(begin // BLOCK, -(-end // BLOCK))


def copy_positions(source: Tensor, into: Tensor, begin: int, end: int) -> None:
    """Copy positions `begin` to `end` of a slot's [blocks, ..., 2 * heads, BLOCK, head_dim]; those before stay.

    Positions behind, up to the end of a block, are copied too: nothing counts there.
    """
    blocks = blocks_of(begin, end)
    if begin % BLOCK:
        _copy_rest(source[blocks.start], into[blocks.start], begin % BLOCK)
        blocks = slice(blocks.start + 1, blocks.stop)
    into[blocks] = source[blocks]


def _copy_rest(source: Tensor, into: Tensor, begin: int) -> None:
    """The positions of one block [..., 2 * heads, BLOCK, head_dim] from its position `begin` on."""
    (keys, values), (to_keys, to_values) = (block.chunk(2, dim=-3) for block in (source, into))
    head_dim = source.shape[-1]
    elements, to_elements = (part.view(*part.shape[:-2], head_dim // 2, BLOCK, 2) for part in (keys, to_keys))
    to_elements[..., begin:, :] = elements[..., begin:, :]
    pairs, to_pairs = (part.view(*part.shape[:-2], BLOCK // 2, head_dim, 2) for part in (values, to_values))
    if begin % 2:
        to_pairs[..., begin // 2, :, 1] = pairs[..., begin // 2, :, 1]
    whole = (begin + 1) // 2
    to_pairs[..., whole:, :, :] = pairs[..., whole:, :, :]
