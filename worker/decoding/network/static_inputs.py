"""The input of a recorded pass: one block of numbers at one address, filled for each pass and sent in one copy.

A recorded pass (`recorded`) runs the same kernels over the same memory every time. Everything that differs between
passes is therefore a number in this block: tokens and their places, the length of each slot, what a tree's tokens see,
and also the cache's address. So a cache may grow or move without a new recording.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from worker.decoding.network.groups import Placed, Read
from worker.decoding.network.passes import WIDEST_SHARED
from worker.decoding.network.slots import SlotCache

#: Tokens of a recorded pass: a pass of fewer is filled up. Filling up by at most a half costs a pass that is bound by
#: reading weights next to nothing. Longer passes keep a GPU busy without being recorded.
NUM_TOKENS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
WIDTHS: Final = (1, 2, 4, 8, 16, WIDEST_SHARED)
#: Rows of the block, each as long as the pass has tokens.
_PER_TOKEN: Final = ("token_ids", "positions", "slots", "columns", "ancestry")
_PER_READ: Final = ("read_slots", "lengths", "firsts", "widths")
_ROWS: Final = (*_PER_TOKEN, *_PER_READ, "wanted")


@dataclass(frozen=True, slots=True)
class StaticShape:
    """The properties that passes must share to use one recording."""

    num_tokens: int  #: tokens of all reads together, filled up
    width: int  #: at least the tokens of the widest read

    @classmethod
    def of(cls, reads: Sequence[Read]) -> StaticShape | None:
        """The smallest shape that holds `reads`; None if no shape does, for example for a long piece of a prompt."""
        widths = [len(read.token_ids) for read in reads]
        num_tokens = next((num for num in NUM_TOKENS if num >= sum(widths)), None)
        width = next((width for width in WIDTHS if width >= max(widths)), None)
        return None if num_tokens is None or width is None else cls(num_tokens, width)


@dataclass(frozen=True, slots=True, eq=False)
class StaticInputs:
    """One shape's view of the block; all int64. The comments name the value behind the last token or read."""

    shape: StaticShape
    token_ids: Tensor  #: [tokens]; 0 behind the last
    positions: Tensor  #: [tokens]; 0
    slots: Tensor  #: [tokens] rows of the cache; 0
    columns: Tensor  #: [tokens] where in its slot a token is written; -1: nowhere
    ancestry: Tensor  #: [tokens] which tokens of its own read each sees, as bits; 0
    read_slots: Tensor  #: [reads], as many as tokens
    lengths: Tensor  #: [reads] tokens that the slot held before
    firsts: Tensor  #: [reads] flat token
    widths: Tensor  #: [reads]; 0: no read
    wanted: Tensor  #: [tokens] flat tokens whose logits are wanted
    capacity: Tensor  #: [1] positions that every slot has memory for
    addresses: Tensor  #: [layers] where the layers' keys and values lie


class InputBlock:
    """The block's memory on host and device. All shapes share it: one is filled and run at a time."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self._num_layers = num_layers
        num = len(_ROWS) * NUM_TOKENS[-1] + 1 + num_layers
        is_gpu = device.type == "cuda"
        # Only a copy from pinned memory is queued behind earlier work without waiting for that work.
        self._host = torch.zeros(num, dtype=torch.int64, pin_memory=is_gpu)
        self._device = torch.zeros(num, dtype=torch.int64, device=device)
        self._sent = torch.cuda.Event() if is_gpu else None  # type: ignore[no-untyped-call]
        self._views: dict[StaticShape, StaticInputs] = {}

    def views(self, shape: StaticShape) -> StaticInputs:
        """Where a pass of this shape finds its numbers on the device."""
        if shape not in self._views:
            behind = len(_ROWS) * shape.num_tokens
            named = dict(zip(_ROWS, self._device[:behind].view(len(_ROWS), -1).unbind(), strict=True))
            capacity, addresses = self._device[behind : behind + 1], self._device[behind + 1 : self._length(shape)]
            self._views[shape] = StaticInputs(shape, **named, capacity=capacity, addresses=addresses)
        return self._views[shape]

    def fill(self, shape: StaticShape, reads: Sequence[Read], cache: SlotCache) -> int:
        """Lay out `reads`, whose memory the cache has, and send them; returns how many logits are wanted."""
        if self._sent is not None:
            self._sent.synchronize()  # wait for the copy of the pass before, which usually ended long ago
        num, behind = self._length(shape), len(_ROWS) * shape.num_tokens
        numbers = self._host.numpy()[:num]
        rows = numbers[:behind].reshape(len(_ROWS), -1)
        rows.fill(0)
        named = dict(zip(_ROWS, rows, strict=True))
        named["columns"].fill(-1)
        first = 0
        wanted: list[int] = []
        for index, read in enumerate(reads):
            placed = Placed(read, cache.lengths[read.slot], first)
            width = placed.width
            here = slice(first, first + width)
            named["token_ids"][here] = read.token_ids
            named["positions"][here] = [placed.length + depth for depth in placed.depths]
            named["slots"][here] = read.slot
            named["columns"][here] = np.arange(placed.length, placed.length + width)
            named["ancestry"][here] = placed.ancestry
            for name, number in zip(_PER_READ, (read.slot, placed.length, first, width), strict=True):
                named[name][index] = number
            wanted += range(first + width - read.num_logits, first + width)
            first += width
        named["wanted"][: len(wanted)] = wanted
        numbers[behind] = cache.capacity
        numbers[behind + 1 :] = [layer.data_ptr() for layer in cache.layers]
        self._device[:num].copy_(self._host[:num], non_blocking=True)
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(self._device.device))
        return len(wanted)

    def _length(self, shape: StaticShape) -> int:
        return len(_ROWS) * shape.num_tokens + 1 + self._num_layers
