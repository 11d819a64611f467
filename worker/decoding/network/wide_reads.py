"""Long reads, pieces of prompts, as `kernels.wide_attention` attends to them."""

from __future__ import annotations

import ctypes
from typing import Final

import torch

from worker.decoding.network.groups import Placed
from worker.decoding.network.kernels import attention, wide_attention
from worker.decoding.network.kernels.wide_attention import wide_kernel
from worker.decoding.network.operations import Heads

#: Arguments that this kernel and that of short reads have in common.
_SHARED: Final = ("qkv", "held", "seen", "num_tokens", "num_queries", "capacity", "num_slots", "scaling", "window")


class WideRead:
    """One read in all layers of a pass, where attention runs in tiles; not of a tree."""

    def __init__(self, placed: Placed) -> None:
        self._arguments = wide_attention.Arguments(
            slot=placed.slot, length=placed.length, first=placed.first, width=placed.width
        )
        self._address = ctypes.addressof(self._arguments)

    def attend(self, of_layer: attention.Arguments, heads: Heads) -> None:
        """Write what the read's tokens attend to. `of_layer`: the arguments of the kernel for short reads.

        That kernel has rotated the queries, and put the read's own keys and values into the cache.
        """
        for name in _SHARED:
            setattr(self._arguments, name, getattr(of_layer, name))
        num_shared = heads.num_queries // heads.num_keys
        wide_kernel(heads.head_dim, num_shared)(self._address, torch.get_num_threads())
