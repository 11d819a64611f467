"""Zeros that take no memory until something is written to them."""

from __future__ import annotations

import errno
import math
import mmap
from contextlib import suppress
from typing import Final

import torch
from torch import Tensor

#: Bytes of memory that are worth pages of their own.
_LEAST_BYTES: Final = 1 << 20


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Like torch.zeros. On a CPU pages are taken at the first write to them, as huge ones where the system has those.

    torch fills its zeros at once: a gigabyte takes .2 s, and ordinary pages that are new to the process a second more
    (docs/log.md). Raises MemoryError where there is not enough.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes < _LEAST_BYTES:
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, num_bytes)
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise MemoryError(f"the system has no {num_bytes} bytes") from error
        raise
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)  # which keeps `memory`
