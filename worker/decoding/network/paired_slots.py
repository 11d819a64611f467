"""The memory of a cache in pairs: every slot has addresses for the longest text, and memory for what was written.

Addresses cost nothing: Linux gives a page memory at the first write to it. So a slot grows where it lies, nothing is
copied, and a long text beside short ones takes the memory of its own length. A slot's blocks lie one behind the other,
each with all its layers, so that huge pages hold little that is not used.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from worker.decoding.network.kv_shape import KvShape, in_blocks
from worker.decoding.network.paired import BLOCK, blocks_of, copy_positions, to_paired, to_plain
from worker.decoding.network.zeros import Mapped, map_zeros

#: Positions that a slot has addresses for, where its model's context is not known.
_MOST_POSITIONS: Final = 1 << 17


class PairedSlots:
    """`network.slots.SlotMemory` for compiled kernels in bfloat16 on a CPU."""

    def __init__(self, shape: KvShape, num_slots: int, most_positions: int | None = None) -> None:
        """`most_positions`: of a text; None: not known."""
        self._shape = shape
        self._num_slots = num_slots
        self._most_blocks = blocks_of(0, most_positions or _MOST_POSITIONS).stop
        self._mapped: Mapped | None = None
        self._num_blocks = [0] * num_slots  # that may have been written
        self.layers: list[Tensor] = []  #: [slots, blocks, 2 * heads, BLOCK, head_dim] each, of one tensor

    @property
    def capacity(self) -> int:
        """Positions that every slot has addresses for."""
        return self._room * BLOCK

    @property
    def num_bytes(self) -> int:
        """Bytes that are held now, to within a page a slot."""
        return sum(self._num_blocks) * self._block_bytes

    def num_bytes_with(self, num_rows: int, positions: Collection[int]) -> int:
        """Bytes that are needed at most for texts of that many positions each, whatever slots they are in."""
        return sum(map(in_blocks, positions)) * self._shape.bytes_per_token

    def reserve(self, positions: Mapping[int, int], lengths: Mapping[int, int], max_bytes: int | None) -> None:
        """Memory for these positions by slot. After an error the memory may be in any state: `clear` it."""
        wanted = self._with(positions)
        if max_bytes is not None and sum(wanted) * self._block_bytes > max_bytes:
            self.trim(lengths)
            wanted = self._with(positions)
        if (longest := max(wanted)) > self._room:
            self._map(longest, lengths)
        self._num_blocks = wanted

    def trim(self, lengths: Mapping[int, int]) -> None:
        """Release the memory that no slot in use needs."""
        for slot in range(self._num_slots):
            self._release(slot, blocks_of(0, lengths.get(slot, 0)).stop)

    def clear(self) -> None:
        """Release everything."""
        self._mapped, self.layers = None, []
        self._num_blocks = [0] * self._num_slots

    def move(self, slot: int, into: int, length: int) -> None:
        """Move all that a slot holds into another one."""
        if length:
            blocks = blocks_of(0, length)
            self._held[into, blocks] = self._held[slot, blocks]
            self._num_blocks[into] = max(self._num_blocks[into], blocks.stop)
        self._release(slot, 0)

    def copy(self, source: int, slots: Sequence[int], begin: int, end: int) -> None:
        """Copy positions `begin` to `end` of `source` into `slots`, which have the memory."""
        for slot in slots:
            copy_positions(self._held[source], self._held[slot], begin, end)

    def move_columns(self, slot: int, columns: Mapping[int, int]) -> None:
        """Move positions of a slot: {where to: from where}."""
        blocks = blocks_of(min(columns), max(columns.values()) + 1)
        first = blocks.start * BLOCK
        own = self._held[slot, blocks].transpose(0, 1)  # [layers, blocks, ...]
        plain = to_plain(own)
        to, column = (torch.tensor(list(places)) - first for places in zip(*columns.items(), strict=True))
        plain.index_copy_(2, to, plain.index_select(2, column))
        own.copy_(to_paired(plain))

    def write_zeros(self, num_rows: int, num_positions: int) -> None:
        """Write zeros to that many positions of the first slots, at least."""
        self._held[:num_rows, blocks_of(0, num_positions)] = 0

    @property
    def _room(self) -> int:
        """Blocks that every slot has addresses for."""
        return self.layers[0].shape[1] if self.layers else 0

    @property
    def _block_bytes(self) -> int:
        return BLOCK * self._shape.bytes_per_token

    @property
    def _held(self) -> Tensor:
        """[slots, blocks, layers, 2 * heads, BLOCK, head_dim]."""
        if self._mapped is None:
            raise RuntimeError("expected reserved memory")
        return self._mapped.tensor

    def _with(self, positions: Mapping[int, int]) -> list[int]:
        """Blocks by slot that hold these positions too."""
        return [max(num, blocks_of(0, positions.get(slot, 0)).stop) for slot, num in enumerate(self._num_blocks)]

    def _release(self, slot: int, num_blocks: int) -> None:
        """Release a slot's blocks behind the first `num_blocks`."""
        num = self._num_blocks[slot]
        if self._mapped is not None and num > num_blocks:
            begin, end = ((slot * self._room + block) * self._block_bytes for block in (num_blocks, num))
            self._mapped.release(begin, end)
            self._num_blocks[slot] = num_blocks

    def _map(self, num_blocks: int, lengths: Mapping[int, int]) -> None:
        """Addresses for `num_blocks` blocks a slot at least. What slots in use hold is copied."""
        shape = self._shape
        of_block = (shape.num_layers, 2 * shape.num_heads, BLOCK, shape.head_dim)
        room = max(num_blocks + (num_blocks // 2 if self.layers else 0), self._most_blocks)
        while (mapped := map_zeros((self._num_slots, room, *of_block), shape.dtype)) is None:
            if room == num_blocks:
                num = num_blocks * BLOCK
                raise MemoryError(f"the system has no addresses for {num} positions in each of {self._num_slots} slots")
            room = max(num_blocks, room // 2)
        for slot, length in lengths.items():
            blocks = blocks_of(0, length)
            if length:
                mapped.tensor[slot, blocks] = self._held[slot, blocks]
        self._mapped = mapped
        self.layers = list(mapped.tensor.unbind(2))
