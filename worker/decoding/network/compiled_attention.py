"""Attention of a pass by compiled kernels: short reads in one, pieces of prompts in a second one behind it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np
import torch
from torch import Tensor

from worker.decoding.network.groups import Placed
from worker.decoding.network.kernels.attention import attention_kernel
from worker.decoding.network.kernels.attention_arguments import Arguments, PassArguments
from worker.decoding.network.kernels.tiles import attends_in_tiles
from worker.decoding.network.kernels.wide_attention import wide_kernel
from worker.decoding.network.operations import Heads
from worker.decoding.network.paired import PAIRED_DIMENSIONS, blocks_of, to_plain
from worker.decoding.network.passes import WIDEST_SHARED, Pass
from worker.decoding.network.torch_operations import attend

#: Tokens of a long read that one thread puts into the cache at a time.
_PIECE: Final = 64


class PlacedReads:
    """The reads of a pass as kernels get them."""

    def __init__(self, plan: Pass) -> None:
        short = [group for group in plan.groups if group.width <= WIDEST_SHARED]
        long = [group.placed[0] for group in plan.wide]
        # The arrays have to live as long as their addresses are used.
        self._short = _rows(placed for group in short for placed in group.placed)
        self._pieces = np.concatenate([_pieces(placed) for placed in long]) if long else _rows(())
        self._wide = _rows(placed for placed in long if placed.read.parents is None)
        self._ancestry = np.zeros(plan.num_tokens, dtype=np.uint64)
        for group in short:
            self._ancestry[group.tokens] = [bits for placed in group.placed for bits in placed.ancestry]
        self._positions = plan.positions
        self.arguments = PassArguments(
            short=self._short.ctypes.data,
            num_short=len(self._short),
            pieces=self._pieces.ctypes.data,
            num_pieces=len(self._pieces),
            wide=self._wide.ctypes.data,
            num_wide=len(self._wide),
            num_tokens=plan.num_tokens,
            positions=plan.positions.data_ptr(),
            ancestry=self._ancestry.ctypes.data,
        )
        self.address = ctypes.addressof(self.arguments)

    def set_cache_layout(self, held: Tensor) -> None:
        """Say how the layers of the cache lie, all like this one: plain, or in pairs (`network.paired`)."""
        a, is_paired = self.arguments, held.dim() == PAIRED_DIMENSIONS
        a.slot_size, a.head_size = held.stride(0), held.stride(2 if is_paired else 1)
        a.block_size = held.stride(1) if is_paired else 0


def layer_arguments(heads: Heads, rotations: Tensor, window: int | None) -> Arguments:
    """What is the same in every pass. rotations: [positions, head_dim / 2, 2]; `window` is that of sliding layers."""
    return Arguments(
        num_queries=heads.num_queries,
        scaling=heads.scaling,
        window=(window or 0) if heads.is_local else 0,
        rotations=rotations.data_ptr(),
        num_positions=len(rotations),
        norms=0 if heads.norms is None else heads.norms.data_ptr(),
        epsilon=heads.epsilon,
    )


class CompiledAttention:
    """`network.operations.Attention`. Where there is no kernel for wide reads, and for wide trees, torch attends."""

    def __init__(self, plan: Pass, tables: Mapping[str, Tensor], window: int | None, dtype: torch.dtype) -> None:
        self._plan, self._tables, self._window, self._dtype = plan, tables, window, dtype
        self._reads = PlacedReads(plan)

    def __call__(self, qkv: Tensor, held: Tensor, heads: Heads) -> Tensor:
        """[tokens, queries * head_dim] of one layer. `held` is in pairs where `attends_in_tiles`."""
        seen = qkv.new_empty((len(qkv), heads.num_queries * heads.head_dim))
        num_shared, num_threads = heads.num_queries // heads.num_keys, torch.get_num_threads()
        is_paired = attends_in_tiles(self._dtype, heads.head_dim)
        self._reads.set_cache_layout(held)
        a = layer_arguments(heads, self._tables[heads.kind], self._window)
        a.qkv, a.held, a.seen, a.of_pass = qkv.data_ptr(), held.data_ptr(), seen.data_ptr(), self._reads.address
        attention_kernel(self._dtype, heads.head_dim, num_shared)(a, num_threads)
        if is_paired and self._reads.arguments.num_wide:
            wide_kernel(heads.head_dim, num_shared)(a, num_threads)
        for group in self._plan.wide_trees if is_paired else self._plan.wide:
            queries = qkv.view(len(qkv), -1, heads.head_dim)[group.tokens, : heads.num_queries]
            plain = to_plain(held[: group.slots.stop, blocks_of(0, group.num_keys)]) if is_paired else held
            seen[group.tokens] = attend(queries, plain, group, heads)
        return seen


def _rows(reads: Iterable[Placed]) -> np.ndarray:
    return np.array([(one.slot, one.length, one.first, one.width) for one in reads], np.int64).reshape(-1, 4)


def _pieces(read: Placed) -> np.ndarray:
    begins = range(0, read.width, _PIECE)
    rows = [(read.slot, read.length + at, read.first + at, min(_PIECE, read.width - at)) for at in begins]
    return np.array(rows, np.int64)
