"""The operations of a decoder as compiled kernels: on a CPU, one call where torch needs five to fifteen.

SmolLM2 in bf16 on 2 cores, one layer, microseconds, torch → compiled: norm of one token 13 → .3, gate 7 → .9, attention
of 16 sequences with 300 tokens, rotation and cache included, 1,000 → 180, of 512 tokens of a prompt 4,200 → 900
(docs/log.md). Where the processor has no products of pairs, wide reads, pieces of prompts, are attended to by torch,
whose matrix products win there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from worker.decoding.network.compiled_attention import CompiledAttention
from worker.decoding.network.kernels import pointwise
from worker.decoding.network.kernels.numbers import NUMBERS
from worker.decoding.network.kernels.pointwise import gate_kernel, norm_kernel
from worker.decoding.network.kernels.threads import openmp
from worker.decoding.network.passes import Pass

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
        self._tables: dict[str, Tensor] = {}

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """RMS norm of rows."""
        y = torch.empty_like(x)
        a = self._arguments
        a.x, a.y, a.weight, a.epsilon = x.data_ptr(), y.data_ptr(), weight.data_ptr(), epsilon
        a.num_rows, a.size = x.shape
        norm_kernel(self._dtype)(a, _num_threads(x.numel()))
        return y

    def gate(self, gates_and_ups: Tensor, activation: str) -> Tensor:
        """activation(gates) * ups."""
        num_rows, double = gates_and_ups.shape
        y = gates_and_ups.new_empty((num_rows, double // 2))
        a = self._arguments
        a.x, a.y, a.num_rows, a.size = gates_and_ups.data_ptr(), y.data_ptr(), num_rows, double // 2
        gate_kernel(self._dtype, activation)(a, _num_threads(gates_and_ups.numel()))
        return y

    def attention(self, plan: Pass, rotations: Mapping[str, Tensor], window: int | None) -> CompiledAttention:
        """Attention of a pass."""
        return CompiledAttention(plan, self.tables(rotations), window, self._dtype)

    def tables(self, rotations: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Rotations as kernels read them, by kind: [positions, head_dim / 2, 2]."""
        for kind, table in rotations.items():
            if kind not in self._tables:
                self._tables[kind] = torch.view_as_real(table).contiguous()
        return self._tables


def _num_threads(num_elements: int) -> int:
    return 1 if num_elements < _WORTH_SHARING else torch.get_num_threads()
