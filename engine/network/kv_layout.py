"""The shape of keys and values, and the two layouts in which they lie in memory.

In the plain layout a layer of all slots is [slots, 2 * heads, positions, head_dim]. Kernels of a CPU hold bfloat16 in
pairs, as their products read them. A product of pairs multiplies two neighbouring numbers of each of 16 outputs. For
scores the outputs are positions, so a block's keys lie as [head_dim / 2, 64, 2]: a pair of elements of 64 positions
side by side. For sums of values the outputs are elements, so a block's values lie as [32, head_dim, 2]: two positions'
numbers of each element side by side. A layer of all slots is [slots, blocks, 2 * heads, 64, head_dim], a block's keys
before its values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from engine.text_facts import layer_configs, text_config

BLOCK: Final = 128  #: positions of which memory is planned in multiples; a multiple of PAIR_BLOCK


@dataclass(frozen=True, slots=True)
class KvShape:
    """The shape of the keys and values of one token."""

    num_layers: int
    num_heads: int  #: heads of the keys, and as many of the values
    head_dim: int
    dtype: torch.dtype
    is_paired: bool = False  #: whether a slot's keys and values lie in pairs

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype) -> KvShape:
        """The shape that a transformers config describes: of its largest layer, where layers differ."""
        shapes = [_heads(layer) for layer in layer_configs(config)]
        num_heads, head_dim = (max(sizes) for sizes in zip(*shapes, strict=True))
        return cls(int(text_config(config).num_hidden_layers), num_heads, head_dim, dtype)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers."""
        return self.num_layers * 2 * self.num_heads * self.head_dim * self.dtype.itemsize


def _heads(layer: Any) -> tuple[int, int]:
    """Heads of the keys of a layer, and their size: the larger one, where keys and values differ."""
    if rank := getattr(layer, "kv_lora_rank", None):  # latent attention keeps one latent and one rotated part a token
        return 1, max(int(rank), int(layer.qk_rope_head_dim))
    size = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
    sizes = (size, getattr(layer, "v_head_dim", None) or 0)
    if getattr(layer, "multi_query", False) and not getattr(layer, "new_decoder_architecture", False):
        return 1, int(size)
    num_heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
    return int(num_heads), int(max(sizes))


def in_blocks(num_positions: int) -> int:
    """The next multiple of BLOCK."""
    return -(-num_positions // BLOCK) * BLOCK


PAIR_BLOCK: Final = 64  #: positions of a block
PAIRED_DIMENSIONS: Final = 5  #: of a layer; in the plain layout it has 4


def to_paired(held: Tensor) -> Tensor:
    """A copy of [slots, 2 * heads, positions, head_dim], keys first, in pairs; positions are whole blocks."""
    slots, heads, positions, head_dim = held.shape
    blocks = held.view(slots, heads, positions // PAIR_BLOCK, PAIR_BLOCK, head_dim).transpose(1, 2)
    keys, values = blocks.chunk(2, dim=2)
    paired = held.new_empty(blocks.shape)
    shape = keys.shape[:3]
    paired[:, :, : heads // 2] = keys.reshape(*shape, PAIR_BLOCK, head_dim // 2, 2).transpose(3, 4).reshape(keys.shape)
    paired[:, :, heads // 2 :] = (
        values.reshape(*shape, PAIR_BLOCK // 2, 2, head_dim).transpose(4, 5).reshape(keys.shape)
    )
    return paired


def to_plain(paired: Tensor) -> Tensor:
    """The inverse of `to_paired`."""
    slots, blocks, heads, _, head_dim = paired.shape
    keys, values = paired.chunk(2, dim=2)
    held = paired.new_empty(paired.shape)
    shape = keys.shape[:3]
    held[:, :, : heads // 2] = keys.reshape(*shape, head_dim // 2, PAIR_BLOCK, 2).transpose(3, 4).reshape(keys.shape)
    held[:, :, heads // 2 :] = values.reshape(*shape, PAIR_BLOCK // 2, head_dim, 2).transpose(4, 5).reshape(keys.shape)
    return held.transpose(1, 2).reshape(slots, heads, blocks * PAIR_BLOCK, head_dim)


def blocks_of(begin: int, end: int) -> slice:
    """The blocks in which positions `begin` to `end` lie."""
    return slice(begin // PAIR_BLOCK, -(-end // PAIR_BLOCK))


def copy_positions(source: Tensor, into: Tensor, begin: int, end: int) -> None:
    """Copy positions `begin` to `end` of a slot's [blocks, ..., 2 * heads, BLOCK, head_dim]; those before stay.

    Positions after `end`, up to the end of a block, are copied too: nothing counts there.
    """
    blocks = blocks_of(begin, end)
    if begin % PAIR_BLOCK:
        _copy_rest(source[blocks.start], into[blocks.start], begin % PAIR_BLOCK)
        blocks = slice(blocks.start + 1, blocks.stop)
    into[blocks] = source[blocks]


def _copy_rest(source: Tensor, into: Tensor, begin: int) -> None:
    """The positions of one block [..., 2 * heads, BLOCK, head_dim] from its position `begin` on."""
    (keys, values), (to_keys, to_values) = (block.chunk(2, dim=-3) for block in (source, into))
    head_dim = source.shape[-1]
    elements, to_elements = (part.view(*part.shape[:-2], head_dim // 2, PAIR_BLOCK, 2) for part in (keys, to_keys))
    to_elements[..., begin:, :] = elements[..., begin:, :]
    pairs, to_pairs = (part.view(*part.shape[:-2], PAIR_BLOCK // 2, head_dim, 2) for part in (values, to_values))
    if begin % 2:
        to_pairs[..., begin // 2, :, 1] = pairs[..., begin // 2, :, 1]
    whole = (begin + 1) // 2
    to_pairs[..., whole:, :, :] = pairs[..., whole:, :, :]
