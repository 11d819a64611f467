"""A key/value cache in which every sequence has a slot and a length of its own.

Each layer holds [slots, 2 * heads, capacity, head_dim], a slot's keys before its values; inside a head the numbers may
lie in pairs (`network.paired`). A pass writes its columns
behind the length of each of its slots. Columns behind the length do not count. So rejected columns need no deletion:
the length does not include them, and the next pass overwrites them. Rows may have different lengths. They may join or
leave without a change to the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from worker.decoding.network.paired import copy_paired, to_paired, to_plain, whole_blocks
from worker.decoding.network.zeros import with_rows, zeros

BLOCK: Final = 128  #: positions of which the capacity is a multiple; a multiple of `network.paired.BLOCK`


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


class Holder(Protocol):
    """The owner of a slot, whose slot may change."""

    slot: int


class SlotCache:
    """Slots of all layers, and how many positions of each count.

    The cache grows by rows and by positions, by half of either at least, and keeps the greatest size that it ever had.
    With `max_bytes` it releases memory that no slot in use needs before it holds more.
    """

    def __init__(self, shape: KvShape, num_slots: int, device: torch.device, *, max_bytes: int | None = None) -> None:
        self.shape = shape
        self.max_bytes = max_bytes
        self.num_slots = num_slots
        self.device = device
        self.lengths = [0] * num_slots
        self.capacity = 0
        self.num_rows = 0  #: slots that have memory
        self.layers: list[Tensor] = []  #: one a layer, [num_rows, 2 * heads, capacity, head_dim]
        self._free = sorted(range(num_slots), reverse=True)

    @property
    def computes_gaps(self) -> bool:
        """Whether a pass also computes slots between two that it reads. Kernels that read pairs do not."""
        return not self.shape.is_paired

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that is held now."""
        return self.num_rows * self.capacity * self.shape.bytes_per_token

    def num_bytes_with(self, num_rows: int, num_positions: int) -> int:
        """Bytes that `num_rows` slots would hold, the longest of them with `num_positions`."""
        return num_rows * _in_blocks(num_positions) * self.shape.bytes_per_token

    def acquire(self) -> int:
        """The lowest free slot, empty."""
        slot = self._free.pop()
        self.lengths[slot] = 0
        return slot

    def release(self, slot: int) -> None:
        """Release a slot; its content does not count from then on. If no slot is in use, the memory is freed too."""
        self._free = sorted([*self._free, slot], reverse=True)
        if len(self._free) == self.num_slots:
            self.clear()

    def clear(self) -> None:
        """Free every slot and drop the memory, whatever state a failed pass left it in."""
        self.lengths = [0] * self.num_slots
        self._free = sorted(range(self.num_slots), reverse=True)
        self.capacity = self.num_rows = 0
        self.layers = []

    @torch.inference_mode()
    def lower(self, slot: int) -> int:
        """Move a slot's content into the lowest free slot, if that is lower; returns where it is now."""
        if not self._free or self._free[-1] > slot:
            return slot
        lowest, length = self._free.pop(), self.lengths[slot]
        if length:
            # A slot that was never written may have no memory yet. The slot that it moves into may have none either.
            # Whole blocks, of which there is memory, lie alike in both layouts.
            held = whole_blocks(0, length)
            for layer in self.layers:
                layer[lowest, :, held] = layer[slot, :, held]
        self.lengths[lowest] = length
        self._free = sorted([*self._free, slot], reverse=True)
        return lowest

    def close_gaps(self, holders: Iterable[Holder]) -> None:
        """Move the slots of all `holders` side by side."""
        for holder in sorted(holders, key=lambda holder: -holder.slot):
            slot = self.lower(holder.slot)
            if slot == holder.slot:
                return
            holder.slot = slot

    @torch.inference_mode()
    def keep(self, slot: int, columns: Sequence[int]) -> None:
        """Count `columns` of the last pass, ascending from its first (0), behind the slot's length; drop the others.

        Only columns that are out of place are copied: the accepted path of a tree, never of a chain.
        """
        length = self.lengths[slot]
        moved = [(to, column) for to, column in enumerate(columns) if to != column]
        if moved:
            to, column = (torch.tensor(places, device=self.device) + length for places in zip(*moved, strict=True))
            for layer in self.layers:
                own = layer[slot : slot + 1]
                plain = to_plain(own) if self.shape.is_paired else own
                plain.index_copy_(2, to, plain.index_select(2, column))
                if self.shape.is_paired:
                    own.copy_(to_paired(plain))
        self.lengths[slot] = length + len(columns)

    @torch.inference_mode()
    def copy(self, source: int, slots: Sequence[int], begin: int, end: int) -> None:
        """Copy positions `begin` to `end` of `source` into `slots`, which hold `begin` positions, and count them."""
        self.reserve(max(slots) + 1, end)
        for layer in self.layers:
            if self.shape.is_paired:
                copy_paired(layer, source, slots, begin, end)
            else:
                layer[list(slots), :, begin:end] = layer[source, :, begin:end]
        for slot in slots:
            self.lengths[slot] = end

    def trim(self) -> None:
        """Release the memory that no slot in use needs. A lack of memory has the same effect as in `reserve`."""
        self._resize(*self._needed())

    def reserve(self, num_rows: int, num_positions: int) -> None:
        """Reserve memory for slots 0 to `num_rows` - 1 with `num_positions` each.

        If there is not enough, all memory is freed, every length becomes 0, and torch's error is raised. The slots stay
        in use, and their texts have to be read again.
        """
        rows, capacity = self._grown(num_rows, _in_blocks(num_positions))
        if self.max_bytes is not None and rows * capacity * self.shape.bytes_per_token > self.max_bytes:
            used_rows, used_capacity = self._needed()
            rows, capacity = max(num_rows, used_rows), max(_in_blocks(num_positions), used_capacity)
        self._resize(rows, capacity)

    def _grown(self, num_rows: int, capacity: int) -> tuple[int, int]:
        """Rows and capacity for these and what there is: by half at least, because growing copies everything."""
        rows = self.num_rows
        if num_rows > rows:
            rows = min(self.num_slots, max(num_rows, rows + rows // 2))
        if capacity > self.capacity:
            capacity = max(capacity, _in_blocks(self.capacity + self.capacity // 2))
        return rows, max(capacity, self.capacity)

    def _needed(self) -> tuple[int, int]:
        """Rows and capacity that hold all slots in use."""
        used = self._used
        return max(used, default=-1) + 1, _in_blocks(max((self.lengths[slot] for slot in used), default=0))

    @property
    def _used(self) -> list[int]:
        return [slot for slot in range(self.num_slots) if slot not in self._free]

    @torch.inference_mode()
    def _resize(self, rows: int, capacity: int) -> None:
        if (rows, capacity) == (self.num_rows, self.capacity):
            return
        if capacity == self.capacity and rows > self.num_rows and self._extend(rows):
            return
        shape = (rows, 2 * self.shape.num_heads, capacity, self.shape.head_dim)
        used = [slot for slot in self._used if slot < self.num_rows]
        try:
            for index in range(self.shape.num_layers):
                # Zeros, not empty memory: a masked column has the weight 0, but 0 times NaN is NaN.
                resized = zeros(shape, self.shape.dtype, self.device, most_rows=self.num_slots)
                if index < len(self.layers):
                    for slot in used:
                        held = whole_blocks(0, self.lengths[slot])
                        resized[slot, :, held] = self.layers[index][slot, :, held]
                    self.layers[index] = resized
                else:
                    self.layers.append(resized)
        except BaseException:
            # After an error layers may have different sizes, but a pass reads all with one size.
            self.layers = []
            self.num_rows = self.capacity = 0
            self.lengths = [0] * self.num_slots
            raise
        self.num_rows, self.capacity = rows, capacity

    def _extend(self, rows: int) -> bool:
        """Give every layer more rows where it lies; whether all have the room."""
        extended = [with_rows(layer, rows) for layer in self.layers]
        layers = [layer for layer in extended if layer is not None]
        if len(layers) < len(self.layers):
            return False
        self.layers, self.num_rows = layers, rows
        return True


def _in_blocks(num_positions: int) -> int:
    return -(-num_positions // BLOCK) * BLOCK
