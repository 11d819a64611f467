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
    """What makes a computation repeatable at once."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """What repeats `run` over the same memory, in which everything but the contents stays. Has run it, too."""

    def forget(self) -> None:
        """Nothing that was recorded will be repeated again."""


class CudaRecorder:
    """`Recorder` by CUDA graphs, which share their memory: only one runs at a time, and none keeps anything."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._num_bytes = 0
        self._pool: Any = None

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Raises RuntimeError, and what it is for memory, where CUDA cannot."""
        with torch.cuda.device(self._index):
            # Kernels are compiled, and libraries take their workspaces, before anything is recorded.
            here = torch.cuda.current_stream()
            aside = torch.cuda.Stream(self._index)  # type: ignore[no-untyped-call]
            aside.wait_stream(here)
            with torch.cuda.stream(aside):
                run()
            here.wait_stream(aside)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # as the recording does, which would otherwise look as if it gave memory back
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
        """Nothing that was recorded will be repeated again: its memory is anybody's."""
        _held[self._index] -= self._num_bytes
        self._num_bytes, self._pool = 0, None


def recorded_bytes(device: torch.device) -> int:
    """Bytes that torch holds on `device` for recordings and can give to nothing else."""
    return _held[torch.cuda.current_device() if device.index is None else device.index]
