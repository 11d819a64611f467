"""CUDA graphs: a pass's kernels, recorded once and launched together.

Outside of a recording Python launches a pass kernel by kernel: some 12 a layer. A small draft model computes a token in
less time than that takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final, Protocol

import torch

#: Bytes that recordings keep from everything else, by device.
_held: Final[dict[int, int]] = defaultdict(int)


class Recorder(Protocol):
    """Records computations, so that one call repeats each of them."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Calls `run`, and returns what repeats it over the same memory. Only the memory's contents may change."""

    def forget(self) -> None:
        """The caller promises not to repeat any recording again."""


class CudaRecorder:
    """`Recorder` by CUDA graphs, which share their memory: only one runs at a time, and no result stays in it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._num_bytes = 0
        self._pool: Any = None

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Raises RuntimeError where CUDA cannot record, and torch's error for a lack of memory."""
        with torch.cuda.device(self._index):
            # Kernels are compiled, and libraries take their workspaces, before anything is recorded.
            here = torch.cuda.current_stream()
            aside = torch.cuda.Stream(self._index)  # type: ignore[no-untyped-call]
            aside.wait_stream(here)
            with torch.cuda.stream(aside):
                run()
            here.wait_stream(aside)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # the recording does this too, and would otherwise seem to release memory
            before = torch.cuda.memory_reserved()
            graph = torch.cuda.CUDAGraph()
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            # Other threads of a worker may use CUDA meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                run()
            taken = max(0, torch.cuda.memory_reserved() - before)
        self._num_bytes += taken
        _held[self._index] += taken
        return graph.replay

    def forget(self) -> None:
        """The caller promises not to repeat any recording again, so its memory may be reused."""
        _held[self._index] -= self._num_bytes
        self._num_bytes, self._pool = 0, None


def recorded_bytes(device: torch.device) -> int:
    """Bytes that torch holds on `device` for recordings and can give to nothing else."""
    return _held[torch.cuda.current_device() if device.index is None else device.index]
