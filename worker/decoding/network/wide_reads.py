"""Long reads, pieces of prompts, as `kernels.wide_attention` attends to them."""

from __future__ import annotations

import ctypes
from typing import Final

import torch
from torch import Tensor

from worker.decoding.network.groups import Placed
from worker.decoding.network.kernels import attention, wide_attention
from worker.decoding.network.kernels.tiles import BLOCK
from worker.decoding.network.kernels.wide_attention import arranging_kernel, num_blocks, wide_kernel
from worker.decoding.network.operations import Heads

#: Arguments that this kernel and that of short reads have in common.
_SHARED: Final = ("qkv", "held", "seen", "num_tokens", "num_queries", "capacity", "num_slots", "scaling", "window")


class WideRead:
    """One read in all layers of a pass, where attention runs in tiles; not of a tree.

    Its keys and values of a layer are copied into room that the layers share.
    """

    def __init__(self, placed: Placed) -> None:
        self._placed = placed
        self._room: Tensor | None = None
        self._arguments = wide_attention.Arguments(
            slot=placed.slot, length=placed.length, first=placed.first, width=placed.width
        )
        self._address = ctypes.addressof(self._arguments)

    def attend(self, of_layer: attention.Arguments, heads: Heads, held: Tensor) -> None:
        """Write what the read's tokens attend to. `of_layer`: the arguments of the kernel for short reads.

        That kernel has rotated the queries, and put the read's own keys and values into the cache.
        """
        size, num_shared = heads.head_dim, heads.num_queries // heads.num_keys
        num_held = num_blocks(self._placed.length + self._placed.width) * BLOCK * size * heads.num_keys
        if self._room is None or len(self._room) < 2 * num_held:
            self._room = held.new_empty(2 * num_held)
        a = self._arguments
        for name in _SHARED:
            setattr(a, name, getattr(of_layer, name))
        a.keys, a.values = self._room.data_ptr(), self._room[num_held:].data_ptr()
        num_threads = torch.get_num_threads()
        arranging_kernel(size, num_shared)(self._address, num_threads)
        wide_kernel(size, num_shared)(self._address, num_threads)
