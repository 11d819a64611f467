"""The operations of a decoder as compiled kernels: on a CPU, one call where torch needs five to fifteen.

SmolLM2 in bf16 on 2 cores, one layer, microseconds, torch → compiled: norm of one token 13 → .3, gate 7 → .9, attention
of 16 sequences with 300 tokens, rotation and cache included, 1,000 → 180, of 512 tokens of a prompt 4,200 → 900
(docs/log.md). Where the processor has no products of pairs, wide reads, pieces of prompts, are attended to by torch,
whose matrix products win there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Final

import numpy as np
import torch
from torch import Tensor

from worker.decoding.network.groups import Group
from worker.decoding.network.kernels import attention as attending
from worker.decoding.network.kernels import pointwise
from worker.decoding.network.kernels.attention import attention_kernel
from worker.decoding.network.kernels.numbers import NUMBERS
from worker.decoding.network.kernels.pointwise import gate_kernel, norm_kernel
from worker.decoding.network.kernels.threads import openmp
from worker.decoding.network.kernels.tiles import attends_in_tiles
from worker.decoding.network.operations import Heads
from worker.decoding.network.paired import to_plain
from worker.decoding.network.passes import WIDEST_SHARED, Pass
from worker.decoding.network.torch_operations import attend
from worker.decoding.network.wide_reads import WideRead

#: Elements below which waking other threads costs more than they save.
_WORTH_SHARING: Final = 16_384


def can_compile(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are kernels for this device and dtype."""
    return device.type == "cpu" and dtype in NUMBERS and openmp() is not None


class CompiledOperations:
    """`worker.decoding.network.operations.Operations`. Kernels are compiled when first needed, which takes seconds."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._arguments = pointwise.Arguments()
        self._address = ctypes.addressof(self._arguments)
        self._tables: dict[str, Tensor] = {}

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """RMS norm of rows."""
        y = torch.empty_like(x)
        a = self._arguments
        a.x, a.y, a.weight, a.epsilon = x.data_ptr(), y.data_ptr(), weight.data_ptr(), epsilon
        a.num_rows, a.size = x.shape
        norm_kernel(self._dtype)(self._address, _num_threads(x.numel()))
        return y

    def gate(self, gates_and_ups: Tensor, activation: str) -> Tensor:
        """activation(gates) * ups."""
        num_rows, double = gates_and_ups.shape
        y = gates_and_ups.new_empty((num_rows, double // 2))
        a = self._arguments
        a.x, a.y, a.num_rows, a.size = gates_and_ups.data_ptr(), y.data_ptr(), num_rows, double // 2
        gate_kernel(self._dtype, activation)(self._address, _num_threads(gates_and_ups.numel()))
        return y

    def attention(self, plan: Pass, rotations: Mapping[str, Tensor], window: int | None) -> CompiledAttention:
        """Attention of a pass."""
        for kind, table in rotations.items():
            if kind not in self._tables:
                self._tables[kind] = torch.view_as_real(table).contiguous()
        return CompiledAttention(plan, self._tables, window, self._dtype)


class CompiledAttention:
    """`network.operations.Attention`: short reads in one kernel; of wide ones the rotation and the cache."""

    def __init__(self, plan: Pass, tables: Mapping[str, Tensor], window: int | None, dtype: torch.dtype) -> None:
        self._tables, self._window, self._dtype = tables, window or 0, dtype
        self._parts = [_Part(group, plan) for group in plan.groups]

    def __call__(self, qkv: Tensor, held: Tensor, heads: Heads) -> Tensor:
        """[tokens, queries * head_dim] of one layer. `held` is in pairs where `attends_in_tiles`."""
        kernel = attention_kernel(self._dtype, heads.head_dim, heads.num_queries // heads.num_keys)
        seen = qkv.new_empty((len(qkv), heads.num_queries * heads.head_dim))
        table, is_paired = self._tables[heads.kind], attends_in_tiles(self._dtype, heads.head_dim)
        for part in self._parts:
            a = part.arguments
            a.qkv, a.held, a.seen, a.rotations = qkv.data_ptr(), held.data_ptr(), seen.data_ptr(), table.data_ptr()
            a.num_slots, a.capacity, a.num_positions = held.shape[0], held.shape[2], len(table)
            a.num_queries, a.scaling = heads.num_queries, heads.scaling
            a.window = self._window if heads.is_local else 0
            if heads.norms is not None:
                a.norms, a.epsilon = heads.norms.data_ptr(), heads.epsilon
            kernel(part.address, part.num_threads)
            if part.wide is not None and is_paired:
                part.wide.attend(a, heads)
            elif part.is_wide:
                tokens = part.group.tokens
                queries = qkv.view(len(qkv), -1, heads.head_dim)[tokens, : heads.num_queries]
                seen[tokens] = attend(queries, to_plain(held) if is_paired else held, part.group, heads)
        return seen


class _Part:
    """A group of reads as a kernel's arguments; those of a layer are filled in when it is computed."""

    def __init__(self, group: Group, plan: Pass) -> None:
        self.group = group
        self.is_wide = group.width > WIDEST_SHARED
        is_tree = group.placed[0].read.parents is not None
        self.wide = WideRead(group.placed[0]) if self.is_wide and not is_tree else None
        self.num_threads = torch.get_num_threads()
        rows = [(placed.slot, placed.length, placed.first, placed.width) for placed in group.placed]
        # Both arrays have to live as long as their addresses are used.
        self._reads = np.array(rows, dtype=np.int64)
        self._ancestry = np.zeros(plan.num_tokens, dtype=np.uint64)
        if not self.is_wide:
            self._ancestry[group.tokens] = [bits for placed in group.placed for bits in placed.ancestry]
        self.arguments = attending.Arguments(
            reads=self._reads.ctypes.data,
            num_reads=len(rows),
            num_tokens=plan.num_tokens,
            positions=plan.positions.data_ptr(),
            ancestry=self._ancestry.ctypes.data,
            only_rotate=self.is_wide,
        )
        self.address = ctypes.addressof(self.arguments)


def _num_threads(num_elements: int) -> int:
    return 1 if num_elements < _WORTH_SHARING else torch.get_num_threads()
