"""Zeros that take no memory until something is written to them."""

from __future__ import annotations

import errno
import math
import mmap
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

#: Bytes of memory that are worth pages of their own.
_LEAST_BYTES: Final = 1 << 20
#: Linux's MAP_NORESERVE, which Python 3.11 does not name: pages that may never be written need not be promised.
_NO_RESERVE: Final = 0x4000 if hasattr(mmap, "MADV_HUGEPAGE") else 0


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, most_rows: int = 0) -> Tensor:
    """Like torch.zeros. On a CPU pages are taken at the first write to them, as huge ones where the system has those.

    torch fills its zeros at once: a gigabyte takes .2 s, and ordinary pages that are new to the process a second more
    (docs/log.md). There may be room for up to `most_rows` of the first dimension, see `with_rows`. Raises MemoryError
    where there is not enough memory for `shape`.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes < _LEAST_BYTES:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = _mapped(num_bytes // shape[0] * most_rows) if most_rows > shape[0] else None
    memory = memory or _mapped(num_bytes)
    if memory is None:
        raise MemoryError(f"the system has no {num_bytes} bytes")
    return torch.frombuffer(memory, dtype=dtype)[: math.prod(shape)].view(shape)  # which keeps `memory`


def with_rows(held: Tensor, num_rows: int) -> Tensor | None:
    """`held` with more rows behind its own, in the same memory; None where there is no room for them.

    The rows are zeros unless another tensor of this memory had them and wrote to them.
    """
    shape = (num_rows, *held.shape[1:])
    has_room = held.is_contiguous() and math.prod(shape) * held.dtype.itemsize <= held.untyped_storage().nbytes()
    return held.as_strided(shape, held.stride()) if has_room else None


@dataclass(frozen=True, slots=True)
class Mapped:
    """A tensor of zeros whose pages take memory at the first write to them."""

    tensor: Tensor
    _memory: mmap.mmap

    def release(self, begin: int, end: int) -> None:
        """Give the pages between two bytes back to the system. They are zeros again."""
        first, last = (-(-begin // mmap.PAGESIZE)) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first and hasattr(mmap, "MADV_DONTNEED"):
            self._memory.madvise(mmap.MADV_DONTNEED, first, last - first)


def map_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Mapped | None:
    """Zeros of this process alone, on a CPU; None where the system has not so many addresses."""
    memory = _mapped(math.prod(shape) * dtype.itemsize)
    return None if memory is None else Mapped(torch.frombuffer(memory, dtype=dtype).view(shape), memory)


def _mapped(num_bytes: int) -> mmap.mmap | None:
    """Memory of this process alone: the system gives shared memory no huge pages unless told to. None: not enough."""
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    except OSError as error:
        if error.errno == errno.ENOMEM:
            return None
        raise
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
