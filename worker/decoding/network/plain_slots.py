"""The memory of a cache in the plain layout: each layer holds [slots, 2 * heads, capacity, head_dim].

All slots have as much memory as the longest text needs. The memory grows by rows and by positions, by half of either at
least, and keeps the greatest size that it ever had.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from worker.decoding.network.kv_shape import KvShape, in_blocks
from worker.decoding.network.zeros import with_rows, zeros


class PlainSlots:
    """`network.slots.SlotMemory` for kernels of torch and of GPUs."""

    def __init__(self, shape: KvShape, num_slots: int, device: torch.device) -> None:
        self._shape = shape
        self._num_slots = num_slots
        self._device = device
        self.capacity = 0
        self.num_rows = 0  #: slots that have memory
        self.layers: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Bytes that are held now."""
        return self.num_rows * self.capacity * self._shape.bytes_per_token

    def num_bytes_with(self, num_rows: int, positions: Collection[int]) -> int:
        """Bytes that are needed at most for texts of that many positions each, in the first `num_rows` slots."""
        return num_rows * in_blocks(max(positions)) * self._shape.bytes_per_token

    def reserve(self, positions: Mapping[int, int], lengths: Mapping[int, int], max_bytes: int | None) -> None:
        """Memory for these positions by slot. After an error the memory may be in any state: `clear` it."""
        num_rows, capacity = max(positions) + 1, in_blocks(max(positions.values()))
        rows, wide = self._grown(num_rows, capacity)
        if max_bytes is not None and rows * wide * self._shape.bytes_per_token > max_bytes:
            used_rows, used_capacity = _needed(lengths)
            rows, wide = max(num_rows, used_rows), max(capacity, used_capacity)
        self._resize(rows, wide, lengths)

    def trim(self, lengths: Mapping[int, int]) -> None:
        """Release the memory that no slot in use needs."""
        self._resize(*_needed(lengths), lengths)

    def clear(self) -> None:
        """Release everything."""
        self.capacity = self.num_rows = 0
        self.layers = []

    def move(self, slot: int, into: int, length: int) -> None:
        """Move all that a slot holds into another one."""
        # A slot that was never written may have no memory yet. The slot that it moves into may have none either.
        if length:
            for layer in self.layers:
                layer[into, :, :length] = layer[slot, :, :length]

    def copy(self, source: int, slots: Sequence[int], begin: int, end: int) -> None:
        """Copy positions `begin` to `end` of `source` into `slots`, which have the memory."""
        for layer in self.layers:
            layer[list(slots), :, begin:end] = layer[source, :, begin:end]

    def move_columns(self, slot: int, columns: Mapping[int, int]) -> None:
        """Move positions of a slot: {where to: from where}."""
        to, column = (torch.tensor(list(places), device=self._device) for places in zip(*columns.items(), strict=True))
        for layer in self.layers:
            own = layer[slot : slot + 1]
            own.index_copy_(2, to, own.index_select(2, column))

    def write_zeros(self, num_rows: int, num_positions: int) -> None:
        """Write zeros to that many positions of the first slots, at least."""
        for layer in self.layers:
            layer[:num_rows, :, :num_positions] = 0

    def _grown(self, num_rows: int, capacity: int) -> tuple[int, int]:
        """Rows and capacity for these and what there is: by half at least, because growing copies everything."""
        rows = self.num_rows
        if num_rows > rows:
            rows = min(self._num_slots, max(num_rows, rows + rows // 2))
        if capacity > self.capacity:
            capacity = max(capacity, in_blocks(self.capacity + self.capacity // 2))
        return rows, max(capacity, self.capacity)

    def _resize(self, rows: int, capacity: int, lengths: Mapping[int, int]) -> None:
        if (rows, capacity) == (self.num_rows, self.capacity):
            return
        if capacity == self.capacity and rows > self.num_rows and self._extend(rows):
            return
        shape = (rows, 2 * self._shape.num_heads, capacity, self._shape.head_dim)
        for index in range(self._shape.num_layers):
            # Zeros, not empty memory: a masked column has the weight 0, but 0 times NaN is NaN.
            resized = zeros(shape, self._shape.dtype, self._device, most_rows=self._num_slots)
            if index < len(self.layers):
                for slot, length in lengths.items():
                    if slot < self.num_rows:
                        resized[slot, :, :length] = self.layers[index][slot, :, :length]
                self.layers[index] = resized
            else:
                self.layers.append(resized)
        self.num_rows, self.capacity = rows, capacity

    def _extend(self, rows: int) -> bool:
        """Give every layer more rows where it lies; whether all have the room."""
        extended = [with_rows(layer, rows) for layer in self.layers]
        layers = [layer for layer in extended if layer is not None]
        if len(layers) < len(self.layers):
            return False
        self.layers, self.num_rows = layers, rows
        return True


def _needed(lengths: Mapping[int, int]) -> tuple[int, int]:
    """Rows and capacity that hold all slots in use."""
    return max(lengths, default=-1) + 1, in_blocks(max(lengths.values(), default=0))
