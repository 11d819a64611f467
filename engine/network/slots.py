"""A key/value cache in which every sequence has a slot and a length of its own, and the two kinds of memory under it.

A pass writes its columns after the length of each of its slots. Columns beyond the length do not count. So rejected
columns need no deletion: the length does not include them, and the next pass overwrites them. Rows may have different
lengths. They may join or leave without a change to the others.

`PlainSlots` serve torch: all slots have as much memory as the longest text needs. It grows by rows and by positions, by
half of either at least, and keeps the greatest size that it ever had. `PairedSlots` serve the kernels of a CPU: every
slot has addresses for the longest text, and memory for what was written. Addresses cost nothing: Linux gives a page
memory at the first write to it. So a slot grows where it lies, nothing is copied, and a long text beside short ones
takes the memory of its own length. A slot's blocks lie in a row, each with all its layers, so that huge
pages hold little that is not used.

Prefixes that texts share are read once, and copied into the slots of the others (`copy_prefixes`). Jobs of a task
mostly begin alike, with a chat template's system message or the task's instructions. What stands at a position depends
on the tokens up to there alone, so a copy is what reading would have given, to within rounding.
"""

from __future__ import annotations

import errno
import math
import mmap
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from engine.network.kv_layout import (
    PAIR_BLOCK,
    KvShape,
    blocks_of,
    copy_positions,
    in_blocks,
    to_paired,
    to_plain,
)

#: Tokens that are not worth a copy of their own.
SHORTEST: Final = 8
#: Tokens of prompts that take longer than the least that a pass takes, which is to read all weights: on 2 cores a dozen
#: of SmolLM2's, on a GPU hundreds. Where that many can be copied, texts wait for one that begins like them.
WORTH_A_PASS: Final = {"cpu": 64, "cuda": 512}


class Holder(Protocol):
    """The owner of a slot, whose slot may change."""

    slot: int


@dataclass(eq=False)
class SlotCache:
    """Slots, and how many positions of each count.

    With `max_bytes` it releases memory that no slot in use needs before it holds more.
    """

    shape: KvShape
    num_slots: int
    device: torch.device
    _: KW_ONLY
    max_bytes: int | None = None
    most_positions: int | None = None  #: of a text; None: not known

    def __post_init__(self) -> None:
        self.lengths = [0] * self.num_slots
        self._memory = (
            PairedSlots(self.shape, self.num_slots, self.most_positions)
            if self.shape.is_paired
            else PlainSlots(self.shape, self.num_slots, self.device)
        )
        self._free = sorted(range(self.num_slots), reverse=True)

    @property
    def layers(self) -> list[Tensor]:
        """One a layer, as `PlainSlots` or `PairedSlots` says."""
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
            if (slot := self.lower(holder.slot)) == holder.slot:
                return
            holder.slot = slot

    def keep(self, slot: int, columns: Sequence[int]) -> None:
        """Count `columns` of the last pass, ascending from its first (0), after the slot's length; drop the others.

        Only columns that are out of place are copied: the accepted path of a tree, never of a chain.
        """
        length = self.lengths[slot]
        if columns and columns[-1] != len(columns) - 1:
            moved = {length + to: length + column for to, column in enumerate(columns) if to != column}
            with torch.inference_mode():
                self._memory.move_columns(slot, moved)
        self.lengths[slot] = length + len(columns)

    @torch.inference_mode()
    def copy(self, source: int, slots: Sequence[int], begin: int, end: int) -> None:
        """Copy positions `begin` to `end` of `source` into `slots`, which hold `begin` positions, and count them."""
        self.reserve(dict.fromkeys(slots, end))
        self._memory.copy(source, slots, begin, end)
        for slot in slots:
            self.lengths[slot] = end

    def bytes_out(self, num_positions: int) -> int:
        """Bytes of what `take_out` gives, at most."""
        return in_blocks(num_positions) * self.shape.bytes_per_token

    @torch.inference_mode()
    def take_out(self, slot: int, num_positions: int) -> Tensor:
        """A copy of a slot's first positions, for `put_in`: as they lie, all layers in one tensor."""
        return self._memory.take_out(slot, num_positions)

    @torch.inference_mode()
    def put_in(self, states: Tensor, slots: Sequence[int], num_positions: int) -> None:
        """Copy the first positions of what `take_out` gave into empty slots, and count them."""
        self.reserve(dict.fromkeys(slots, num_positions))
        self._memory.put_in(states, slots, num_positions)
        for slot in slots:
            self.lengths[slot] = num_positions

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


def num_shared(a: Sequence[int], b: Sequence[int], most: int) -> int:
    """Leading tokens that two lists have in common, `most` at most."""
    low, high = 0, min(len(a), len(b), most)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


class Reader(Holder, Protocol):
    """What reads a text into a slot."""

    @property
    def text(self) -> Sequence[int]:
        """The live list."""


def copy_prefixes(cache: SlotCache, unread: Sequence[Reader], batch: Sequence[Reader]) -> None:
    """Give the slots of `unread` what another slot of `batch` holds of their texts, always short of the last token.

    What slots of `batch` hold has to be their texts, as far as their lengths go.
    """
    copies: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
    for reader in unread:
        begin = cache.lengths[reader.slot]
        end, source = max((_shared(reader, other, cache.lengths[other.slot]), other.slot) for other in batch)
        if end - begin >= SHORTEST:
            copies[source, begin, end].append(reader.slot)
    for (source, begin, end), slots in copies.items():
        cache.copy(source, slots, begin, end)


def who_waits(cache: SlotCache, unread: Sequence[Reader], num_read: int) -> set[int]:
    """Slots of those of `unread` that should wait until an earlier one has read a prefix that they share.

    `num_read`: tokens that a pass reads at most. None waits unless all together save a pass's worth.
    """
    readers: list[Reader] = []
    spared: dict[int, int] = {}
    for waiting in unread:
        held = cache.lengths[waiting.slot]
        shared = max((_shared(waiting, reader, cache.lengths[reader.slot] + num_read) for reader in readers), default=0)
        if shared - held >= SHORTEST:
            spared[waiting.slot] = shared - held
        else:
            readers.append(waiting)
    return set(spared) if sum(spared.values()) >= WORTH_A_PASS.get(cache.device.type, 512) else set()


def _shared(reader: Reader, other: Reader, most: int) -> int:
    return num_shared(reader.text, other.text, min(most, len(reader.text) - 1))


class PlainSlots:
    """Keys and values of all slots as torch reads them: one tensor a layer. `lengths`: of the slots in use, by slot."""

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
            # A clone, because torch refuses a source within the tensor where both are as wide as the memory.
            layer[list(slots), :, begin:end] = layer[source, :, begin:end].clone()

    def take_out(self, slot: int, num_positions: int) -> Tensor:
        """[layers, 2 * heads, positions, head_dim]: a copy."""
        return torch.stack([layer[slot, :, :num_positions] for layer in self.layers])

    def put_in(self, states: Tensor, slots: Sequence[int], num_positions: int) -> None:
        """Copy the first positions of `states` into `slots`, which have the memory."""
        for layer, held in zip(self.layers, states, strict=True):
            layer[list(slots), :, :num_positions] = held[:, :num_positions]

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
        shape = (rows, 2 * self._shape.num_heads, capacity, self._shape.head_dim)
        for index in range(self._shape.num_layers):
            # Zeros, not empty memory: a masked column has the weight 0, but 0 times NaN is NaN.
            resized = zeros(shape, self._shape.dtype, self._device)
            if index < len(self.layers):
                for slot, length in lengths.items():
                    if slot < self.num_rows:
                        resized[slot, :, :length] = self.layers[index][slot, :, :length]
                self.layers[index] = resized
            else:
                self.layers.append(resized)
        self.num_rows, self.capacity = rows, capacity


def _needed(lengths: Mapping[int, int]) -> tuple[int, int]:
    """Rows and capacity that hold all slots in use."""
    return max(lengths, default=-1) + 1, in_blocks(max(lengths.values(), default=0))


#: Positions that a slot has addresses for, where its model's context is not known.
_MOST_POSITIONS: Final = 1 << 17


class PairedSlots:
    """The same as `PlainSlots` for compiled kernels in bfloat16 on a CPU."""

    def __init__(self, shape: KvShape, num_slots: int, most_positions: int | None = None) -> None:
        """`most_positions`: of a text; None: not known."""
        self._shape = shape
        self._num_slots = num_slots
        self._most_blocks = blocks_of(0, most_positions or _MOST_POSITIONS).stop
        self._mapped: _Mapped | None = None
        self._num_blocks = [0] * num_slots  # that may have been written
        self.layers: list[Tensor] = []  #: [slots, blocks, 2 * heads, BLOCK, head_dim] each, of one tensor

    @property
    def capacity(self) -> int:
        """Positions that every slot has addresses for."""
        return self._room * PAIR_BLOCK

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

    def take_out(self, slot: int, num_positions: int) -> Tensor:
        """[blocks, layers, 2 * heads, BLOCK, head_dim]: a copy."""
        return self._held[slot, blocks_of(0, num_positions)].clone()

    def put_in(self, states: Tensor, slots: Sequence[int], num_positions: int) -> None:
        """Copy the first positions of `states` into `slots`, which have the memory."""
        for slot in slots:
            copy_positions(states, self._held[slot], 0, num_positions)

    def move_columns(self, slot: int, columns: Mapping[int, int]) -> None:
        """Move positions of a slot: {where to: from where}."""
        blocks = blocks_of(min(columns), max(columns.values()) + 1)
        first = blocks.start * PAIR_BLOCK
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
        return PAIR_BLOCK * self._shape.bytes_per_token

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
        """Release a slot's blocks but for the first `num_blocks`."""
        num = self._num_blocks[slot]
        if self._mapped is not None and num > num_blocks:
            begin, end = ((slot * self._room + block) * self._block_bytes for block in (num_blocks, num))
            self._mapped.release(begin, end)
            self._num_blocks[slot] = num_blocks

    def _map(self, num_blocks: int, lengths: Mapping[int, int]) -> None:
        """Addresses for `num_blocks` blocks a slot at least. What slots in use hold is copied."""
        shape = self._shape
        of_block = (shape.num_layers, 2 * shape.num_heads, PAIR_BLOCK, shape.head_dim)
        room = max(num_blocks + (num_blocks // 2 if self.layers else 0), self._most_blocks)
        while (mapped := _map_zeros((self._num_slots, room, *of_block), shape.dtype)) is None:
            if room == num_blocks:
                num = num_blocks * PAIR_BLOCK
                raise MemoryError(f"the system has no addresses for {num} positions in each of {self._num_slots} slots")
            room = max(num_blocks, room // 2)
        for slot, length in lengths.items():
            blocks = blocks_of(0, length)
            if length:
                mapped.tensor[slot, blocks] = self._held[slot, blocks]
        self._mapped = mapped
        self.layers = list(mapped.tensor.unbind(2))


#: Bytes of memory that are worth pages of their own.
_LEAST_BYTES: Final = 1 << 20
#: Linux's MAP_NORESERVE, which Python 3.11 does not name: pages that may never be written need not be promised.
_NO_RESERVE: Final = 0x4000 if hasattr(mmap, "MADV_HUGEPAGE") else 0


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Like torch.zeros. On a CPU pages are taken at the first write to them, as huge ones where the system has those.

    torch fills its zeros at once: a gigabyte takes .2 s, and ordinary pages that are new to the process a second more.
    Raises MemoryError where there is not enough memory.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes < _LEAST_BYTES:
        return torch.zeros(shape, dtype=dtype, device=device)
    if (mapped := _map_zeros(shape, dtype)) is None:
        raise MemoryError(f"the system has no {num_bytes} bytes")
    return mapped.tensor  # which keeps the memory


@dataclass(frozen=True, slots=True)
class _Mapped:
    """A tensor of zeros whose pages take memory at the first write to them."""

    tensor: Tensor
    _memory: mmap.mmap

    def release(self, begin: int, end: int) -> None:
        """Give the pages between two bytes back to the system. They are zeros again."""
        first, last = (-(-begin // mmap.PAGESIZE)) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first and hasattr(mmap, "MADV_DONTNEED"):
            self._memory.madvise(mmap.MADV_DONTNEED, first, last - first)


def _map_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> _Mapped | None:
    """Zeros on a CPU; None where the system lacks the addresses.

    Private to this process, because shared memory gets no huge pages by default.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    except OSError as error:
        if error.errno == errno.ENOMEM:
            return None
        raise
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return _Mapped(torch.frombuffer(memory, dtype=dtype).view(shape), memory)
