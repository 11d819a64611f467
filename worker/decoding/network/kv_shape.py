"""The shape of keys and values, whatever holds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

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
        """The shape that a transformers config describes."""
        text = config.get_text_config()
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        num_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        return cls(int(text.num_hidden_layers), int(num_heads), int(head_dim), dtype)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers."""
        return self.num_layers * 2 * self.num_heads * self.head_dim * self.dtype.itemsize


def in_blocks(num_positions: int) -> int:
    """The next multiple of BLOCK."""
    return -(-num_positions // BLOCK) * BLOCK
