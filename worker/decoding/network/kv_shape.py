"""The shape of keys and values, whatever holds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from worker.decoding.text_facts import layer_configs, text_config

BLOCK: Final = 128  #: positions of which memory is planned in multiples; a multiple of `network.paired.BLOCK`


@dataclass(frozen=True, slots=True)
class KvShape:
    """The shape of the keys and values of one token."""

    num_layers: int
    num_heads: int  #: heads of the keys, and as many of the values
    head_dim: int
    dtype: torch.dtype
    is_paired: bool = False  #: whether a slot's keys and values lie as in `network.paired`

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
