"""The operations of a decoder between its matrix products, behind one interface: torch's calls, or compiled kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from torch import Tensor

from worker.decoding.network.passes import Pass

SILU: Final = "silu"
GELU_TANH: Final = "gelu_pytorch_tanh"
ACTIVATIONS: Final = frozenset({SILU, GELU_TANH})


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """The heads of one layer."""

    num_queries: int
    num_keys: int
    head_dim: int
    scaling: float
    kind: str  #: which rotation
    is_local: bool  #: a sliding window
    norms: Tensor | None  #: [queries + keys, head_dim]: weights of the norms of each head
    epsilon: float


class Attention(Protocol):
    """Attention of one pass."""

    def __call__(self, qkv: Tensor, held: Tensor, heads: Heads) -> Tensor:
        """[tokens, queries * head_dim] of one layer; its keys and values are written into `held`.

        `qkv` [tokens, (queries + 2 keys) * head_dim] may be changed. The two elements of a rotated
        pair are neighbours. `held` [slots, 2 * keys, capacity, head_dim].
        """


class Operations(Protocol):
    """For one model on one device."""

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """RMS norm of rows [rows, size] (Zhang and Sennrich 2019)."""

    def gate(self, gates_and_ups: Tensor, activation: str) -> Tensor:
        """activation(gates) * ups, [rows, size], from both side by side, [rows, 2 * size]."""

    def attention(self, plan: Pass, rotations: Mapping[str, Tensor], window: int | None) -> Attention:
        """Attention of a pass; rotations by kind, complex [positions, head_dim / 2]."""
