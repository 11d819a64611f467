"""A key/value cache in which every sequence has a slot and a length of its own.

A pass writes its columns behind the length of each of its slots. Columns behind the length do not count. So rejected
columns need no deletion: the length does not include them, and the next pass overwrites them. Rows may have different
lengths. They may join or leave without a change to the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from worker.decoding.network.kv_shape import KvShape
from worker.decoding.network.paired_slots import PairedSlots
from worker.decoding.network.plain_slots import PlainSlots


class SlotMemory(Protocol):
    """Keys and values of all slots. `lengths`: of the slots in use, by slot."""

    layers: list[Tensor]  #: one a layer; empty without memory

    @property
    def capacity(self) -> int:
        """Positions of each slot."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes that are held now."""
        ...

    def num_bytes_with(self, num_rows: int, positions: Collection[int]) -> int:
        """Bytes that are needed at most for texts of that many positions each, in the first `num_rows` slots."""
        ...

    def reserve(self, positions: Mapping[int, int], lengths: Mapping[int, int], max_bytes: int | None) -> None:
        """Memory for these positions by slot. After an error the memory may be in any state: `clear` it."""
        ...

    def trim(self, lengths: Mapping[int, int]) -> None:
        """Release the memory that no slot in use needs."""
        ...

    def clear(self) -> None:
        """Release everything."""
        ...

    def move(self, slot: int, into: int, length: int) -> None:
        """Move all that a slot holds into another one."""
        ...

    def copy(self, source: int, slots: Sequence[int], begin: int, end: int) -> None:
        """Copy positions `begin` to `end` of `source` into `slots`, which have the memory."""
        ...

    def move_columns(self, slot: int, columns: Mapping[int, int]) -> None:
        """Move positions of a slot: {where to: from where}."""
        ...

    def write_zeros(self, num_rows: int, num_positions: int) -> None:
        """Write zeros to that many positions of the first slots, at least."""
        ...


class Holder(Protocol):
    """The owner of a slot, whose slot may change."""

    slot: int


class SlotCache:
    """Slots, and how many positions of each count.

    With `max_bytes` it releases memory that no slot in use needs before it holds more.
    """

    def __init__(
        self,
        shape: KvShape,
        num_slots: int,
        device: torch.device,
        *,
        max_bytes: int | None = None,
        most_positions: int | None = None,
    ) -> None:
        """`most_positions`: of a text; None: not known."""
        self.shape = shape
        self.max_bytes = max_bytes
        self.num_slots = num_slots
        self.device = device
        self.lengths = [0] * num_slots
        self._memory: SlotMemory = (
            PairedSlots(shape, num_slots, most_positions) if shape.is_paired else PlainSlots(shape, num_slots, device)
        )
        self._free = sorted(range(num_slots), reverse=True)

    @property
    def layers(self) -> list[Tensor]:
        """One a layer, as `network.plain_slots` or `network.paired_slots` says."""
        return self._memory.layers

    @property
    def capacity(self) -> int:
        """Positions of each slot."""
        return self._memory.capacity

    @property
    def computes_gaps(self) -> bool:
        """Whether a pass also computes slots between two that it reads. Kernels that read pairs do not."""
        return not self.shape.is_paired

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that is held now."""
        return self._memory.num_bytes

    def num_bytes_with(self, num_rows: int, positions: Collection[int]) -> int:
        """Bytes that are needed at most for texts of that many positions each, in the first `num_rows` slots."""
        return self._memory.num_bytes_with(num_rows, positions)

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
        self._free = sorted(range(self.num_slots), reverse=True)
        self._drop_memory()

    @torch.inference_mode()
    def lower(self, slot: int) -> int:
        """Move a slot's content into the lowest free slot, if that is lower; returns where it is now."""
        if not self._free or self._free[-1] > slot:
            return slot
        lowest = self._free.pop()
        self.lengths[lowest] = self.lengths[slot]
        self._memory.move(slot, lowest, self.lengths[slot])
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
        moved = {length + to: length + column for to, column in enumerate(columns) if to != column}
        if moved:
            self._memory.move_columns(slot, moved)
        self.lengths[slot] = length + len(columns)

    @torch.inference_mode()
    def copy(self, source: int, slots: Sequence[int], begin: int, end: int) -> None:
        """Copy positions `begin` to `end` of `source` into `slots`, which hold `begin` positions, and count them."""
        self.reserve(dict.fromkeys(slots, end))
        self._memory.copy(source, slots, begin, end)
        for slot in slots:
            self.lengths[slot] = end

    @torch.inference_mode()
    def trim(self) -> None:
        """Release the memory that no slot in use needs. A lack of memory has the same effect as in `reserve`."""
        with self._dropped_after_an_error():
            self._memory.trim(self._lengths_in_use())

    @torch.inference_mode()
    def reserve(self, positions: Mapping[int, int]) -> None:
        """Reserve memory for that many positions, by slot.

        If there is not enough, all memory is freed, every length becomes 0, and torch's error is raised. The slots stay
        in use, and their texts have to be read again.
        """
        with self._dropped_after_an_error():
            self._memory.reserve(positions, self._lengths_in_use(), self.max_bytes)

    @torch.inference_mode()
    def write_zeros(self, num_rows: int, num_positions: int) -> None:
        """Reserve that many positions of the first slots, and write zeros to them: memory that is really there."""
        self.reserve(dict.fromkeys(range(num_rows), num_positions))
        self._memory.write_zeros(num_rows, num_positions)

    @contextmanager
    def _dropped_after_an_error(self) -> Iterator[None]:
        """After an error layers may have different sizes, but a pass reads all with one size."""
        try:
            yield
        except BaseException:
            self._drop_memory()
            raise

    def _drop_memory(self) -> None:
        self._memory.clear()
        self.lengths = [0] * self.num_slots

    def _lengths_in_use(self) -> dict[int, int]:
        free = set(self._free)
        return {slot: length for slot, length in enumerate(self.lengths) if slot not in free}
