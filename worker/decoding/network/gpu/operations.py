"""The operations of a decoder on a GPU: Triton's kernels for short reads, torch's calls for long ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import torch
import triton
from torch import Tensor

from worker.decoding.network.gpu.attention import attend_kernel, combine_kernel
from worker.decoding.network.gpu.pointwise import gate_kernel, norm_kernel, place_kernel
from worker.decoding.network.operations import SILU, Heads
from worker.decoding.network.static_inputs import StaticInputs
from worker.decoding.network.torch_operations import TorchOperations

#: Sums are float32, which float64 does not gain from.
DTYPES: Final = frozenset({torch.bfloat16, torch.float16, torch.float32})
HEAD_DIMS: Final = frozenset({16, 32, 64, 128, 256})
_GATE_BLOCK: Final = 1024
_MOST_ROWS: Final = 64
#: Among how many programs the keys of a slot may be shared out: few numbers, as Triton compiles a kernel for each.
_PARTS: Final = (1, 4, 16)
#: Bytes of keys that a program has before it at once: two of them, as much of values, and 64 rows of queries fit into
#: the 99 KiB of shared memory of the smallest GPUs, in 16 bits.
_KEY_BYTES: Final = 16384


class GpuOperations(TorchOperations):
    """`worker.decoding.network.operations.StaticOperations`. `num_processors`: the GPU's multiprocessors."""

    def __init__(self, num_processors: int) -> None:
        self._num_processors = num_processors
        self._tables: dict[str, Tensor] = {}

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """RMS norm of rows."""
        x = x.contiguous()
        y = torch.empty_like(x)
        num_rows, size = x.shape
        if num_rows:
            with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
                norm_kernel[(num_rows,)](x, y, weight, epsilon, size, BLOCK=triton.next_power_of_2(size))
        return y

    def gate(self, gates_and_ups: Tensor, activation: str) -> Tensor:
        """activation(gates) * ups."""
        x = gates_and_ups.contiguous()
        num_rows, size = len(x), x.shape[1] // 2
        y = x.new_empty((num_rows, size))
        if num_rows:
            grid = (num_rows, triton.cdiv(size, _GATE_BLOCK))
            with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
                gate_kernel[grid](x, y, size, IS_SILU=activation == SILU, BLOCK=_GATE_BLOCK)
        return y

    def static_attention(
        self, inputs: StaticInputs, rotations: Mapping[str, Tensor], window: int | None
    ) -> StaticAttention:
        """Attention of a recorded pass."""
        for kind, table in rotations.items():
            if kind not in self._tables:
                self._tables[kind] = torch.view_as_real(table).contiguous()
        return StaticAttention(inputs, self._tables, window, self._num_processors)


class StaticAttention:
    """`network.operations.Attention`, whose `held` is the address of a layer's memory: int64 [1], on the GPU."""

    def __init__(
        self, inputs: StaticInputs, tables: Mapping[str, Tensor], window: int | None, num_processors: int
    ) -> None:
        self._inputs = inputs
        self._tables = tables
        self._window = window or 0
        self._num_processors = num_processors

    def __call__(self, qkv: Tensor, held: Tensor, heads: Heads) -> Tensor:
        """[tokens, queries * head_dim] of one layer."""
        inputs, num_tokens = self._inputs, self._inputs.shape.num_tokens
        num_queries, num_keys, head_dim = heads.num_queries, heads.num_keys, heads.head_dim
        place_kernel[(num_tokens, num_queries + 2 * num_keys)](
            qkv,
            self._tables[heads.kind],
            qkv if heads.norms is None else heads.norms,
            inputs.positions,
            inputs.slots,
            inputs.columns,
            inputs.capacity,
            held,
            heads.epsilon,
            NUM_QUERIES=num_queries,
            NUM_KEYS=num_keys,
            HALF=head_dim // 2,
            HAS_NORMS=heads.norms is not None,
            num_warps=1,
        )
        num_rows = inputs.shape.width * num_queries // num_keys
        block_rows = min(_MOST_ROWS, max(16, triton.next_power_of_2(num_rows)))
        num_blocks = num_keys * triton.cdiv(num_rows, block_rows)
        num_parts = self._num_parts(num_blocks)
        seen = qkv.new_empty((num_tokens, num_queries * head_dim))
        partial = marks = seen
        if num_parts > 1:
            partial = qkv.new_empty((num_parts, num_tokens, num_queries, head_dim), dtype=torch.float32)
            marks = qkv.new_empty((2, num_parts, num_tokens, num_queries), dtype=torch.float32)
        attend_kernel[(num_tokens, num_blocks, num_parts)](
            qkv,
            seen,
            partial,
            marks,
            inputs.positions,
            inputs.ancestry,
            inputs.read_slots,
            inputs.lengths,
            inputs.firsts,
            inputs.widths,
            inputs.capacity,
            held,
            heads.scaling / math.log(2),
            self._window,
            num_tokens,
            NUM_QUERIES=num_queries,
            NUM_KEYS=num_keys,
            HEAD_DIM=head_dim,
            IS_LOCAL=heads.is_local and self._window > 0,
            NUM_PARTS=num_parts,
            BLOCK_ROWS=block_rows,
            BLOCK_KEYS=min(128, max(16, _KEY_BYTES // (head_dim * qkv.element_size()))),
            num_warps=4 if block_rows < _MOST_ROWS else 8,
            num_stages=2,
        )
        if num_parts > 1:
            combine_kernel[(num_tokens, num_queries)](
                seen,
                partial,
                marks,
                inputs.columns,
                num_tokens,
                NUM_QUERIES=num_queries,
                HEAD_DIM=head_dim,
                NUM_PARTS=num_parts,
                num_warps=1,
            )
        return seen

    def _num_parts(self, num_blocks: int) -> int:
        """Two programs a processor, were there no more reads than the tokens need at least."""
        shape = self._inputs.shape
        programs = num_blocks * max(1, shape.num_tokens // shape.width)
        return next((num for num in _PARTS if num * programs >= 2 * self._num_processors), _PARTS[-1])
