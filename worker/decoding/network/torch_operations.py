"""The operations of a decoder as torch's calls: on any device, in any dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from worker.decoding.network.groups import Group
from worker.decoding.network.operations import GELU_TANH, SILU, Heads
from worker.decoding.network.passes import Pass

_ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    SILU: functional.silu,
    GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
}


class TorchOperations:
    """`worker.decoding.network.operations.Operations`."""

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """RMS norm of rows."""
        return functional.rms_norm(x, tuple(weight.shape), weight, epsilon)

    def gate(self, gates_and_ups: Tensor, activation: str) -> Tensor:
        """activation(gates) * ups."""
        gates, ups = gates_and_ups.chunk(2, dim=-1)
        return _ACTIVATIONS[activation](gates) * ups

    def attention(self, plan: Pass, rotations: Mapping[str, Tensor], window: int | None) -> TorchAttention:
        """Attention of a pass."""
        del window  # the masks of the pass include the window
        return TorchAttention(plan, {kind: table[plan.positions][:, None] for kind, table in rotations.items()})


class TorchAttention:
    """`network.operations.Attention`: the rotation is one complex product, keys and values are one copy."""

    def __init__(self, plan: Pass, rotations: Mapping[str, Tensor]) -> None:
        self._plan = plan
        self._rotations = rotations

    def __call__(self, qkv: Tensor, held: Tensor, heads: Heads) -> Tensor:
        """[tokens, queries * head_dim] of one layer."""
        rotation = self._rotations[heads.kind]
        num_rotated = heads.num_queries + heads.num_keys
        qkv = qkv.view(len(qkv), -1, heads.head_dim)
        rotated = qkv[:, :num_rotated]
        if heads.norms is not None:
            rotated = functional.rms_norm(rotated, (heads.head_dim,), None, heads.epsilon) * heads.norms
        real = torch.float64 if rotation.dtype == torch.complex128 else torch.float32
        pairs = rotated.to(real).reshape(len(qkv), num_rotated, -1, 2)
        qkv[:, :num_rotated] = torch.view_as_real(torch.view_as_complex(pairs) * rotation).flatten(-2)
        new = qkv[:, heads.num_queries :]
        held.view(-1, heads.head_dim).index_copy_(0, self._plan.stored, new.reshape(-1, heads.head_dim))
        queries = qkv[:, : heads.num_queries]
        if len(self._plan.groups) == 1:
            return attend(queries, held, self._plan.groups[0], heads)
        return torch.cat([attend(queries[group.tokens], held, group, heads) for group in self._plan.groups])


def attend(queries: Tensor, held: Tensor, group: Group, heads: Heads) -> Tensor:
    """[tokens, heads * head_dim] of one group, from `queries` [tokens, heads, head_dim]; `held`: keys and values."""
    rows, width = group.slots.stop - group.slots.start, group.width
    padded = queries if group.padded is None else queries.index_select(0, group.padded)
    # Query heads that share a key head become further queries of it, so that keys are neither copied nor read again:
    # [rows, width, key heads, shared, head_dim] → [rows, key heads, shared * width, head_dim].
    shared = heads.num_queries // heads.num_keys
    grouped = padded.view(rows, width, heads.num_keys, shared, heads.head_dim).permute(0, 2, 3, 1, 4)
    mask = group.local_mask if heads.is_local else group.mask
    if mask is not None and shared > 1:
        mask = mask[:, :, None].expand(-1, -1, shared, -1, -1).reshape(rows, 1, shared * width, group.num_keys)
    seen = functional.scaled_dot_product_attention(
        grouped.reshape(rows, heads.num_keys, shared * width, heads.head_dim),
        held[group.slots, : heads.num_keys, : group.num_keys],
        held[group.slots, heads.num_keys :, : group.num_keys],
        attn_mask=mask,
        scale=heads.scaling,
    )
    seen = seen.view(rows, heads.num_keys, shared, width, heads.head_dim).permute(0, 3, 1, 2, 4)
    flat = seen.reshape(rows * width, heads.num_queries * heads.head_dim)
    return flat if group.cells is None else flat.index_select(0, group.cells)
