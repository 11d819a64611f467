"""The operations of a decoder: torch's calls on any device. `compiled` has the kernels of a CPU in their place.

Only the processes that compute on a CPU import `compiled`, and with it numba: a worker with a GPU does without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.network.passes import Pass, ReadGroup

if TYPE_CHECKING:
    from engine.network.compiled import CompiledPass
    from engine.network.fused import Layer, Norm

# cuDNN plans an attention anew for each shape, a millisecond of the host, and each round has other shapes. Without it,
# rounds of a model of 1.1 billion parameters took .25 to .7 of the time on an H200. torch has other kernels.
torch.backends.cuda.enable_cudnn_sdp(False)

SILU: Final = "silu"
GELU_TANH: Final = "gelu_pytorch_tanh"
ACTIVATIONS: Final = frozenset({SILU, GELU_TANH})


#: Attention of one pass: [tokens, queries * head_dim] of one layer, from `qkv` [tokens, (queries + 2 keys) * head_dim],
#: which may be changed; `held` [slots, 2 * keys, capacity, head_dim], where keys and values of the tokens are written;
#: and the layer's heads. The two elements of a rotated pair are neighbours.
Attention = Callable[[Tensor, Tensor, "Heads"], Tensor]


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


class Linear(Protocol):
    """y = x W' + b, once prepared for many calls."""

    num_outputs: int

    def __call__(self, x: Tensor, held: Tensor | None = None) -> Tensor:
        """[tokens, in] → [tokens, out]; `held` is added, in the same kernel if there is one."""


_ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    SILU: functional.silu,
    GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
}


class TorchOperations:
    """The operations of one model as torch's calls: on any device, in any dtype."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """A linear layer of these weights [out, in], in the layout that the device reads fastest."""
        return TorchLinear(weight, bias)

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """RMS norm of rows [rows, size] (Zhang and Sennrich 2019)."""
        return functional.rms_norm(x, tuple(weight.shape), weight, epsilon)

    def gate(self, gates_and_ups: Tensor, activation: str) -> Tensor:
        """activation(gates) * ups, [rows, size], from both side by side, [rows, 2 * size]."""
        gates, ups = gates_and_ups.chunk(2, dim=-1)
        return _ACTIVATIONS[activation](gates) * ups

    def attention(self, plan: Pass, rotations: Mapping[str, Tensor], window: int | None) -> Attention:
        """Attention of a pass; rotations by kind, complex [positions, head_dim / 2]."""
        del window  # the masks of the pass include the window
        return TorchAttention(plan, {kind: table[plan.positions][:, None] for kind, table in rotations.items()})

    def holds_pairs(self, head_dim: int) -> bool:
        """Whether keys and values of such heads lie in pairs (`kv_layout`)."""
        return False

    def program(
        self,
        layers: Sequence[Layer],
        norm: Norm,
        head: Linear,
        rotations: Mapping[str, Tensor],
        window: int | None,
        taps: Sequence[int] = (),
    ) -> CompiledPass | None:
        """All of a pass in one call, made of these operations' own layers; None where that is not possible.

        `taps`: layers whose input states are kept.
        """
        return None


#: Tokens up to which torch's own bfloat16 product is faster than a float32 product. The weights of a block stay in the
#: cache while they are multiplied. All layers of SmolLM2 in bf16 on 2 cores with AVX2, milliseconds: 8 tokens 137 → 89,
#: 13 193 → 105, 104 1,608 → 267, 256 4,239 → 682.
_FEW_ROWS: Final = 5
_BLOCK_WEIGHTS: Final = 1 << 20


class TorchLinear:
    """`Linear` by oneDNN where that has a kernel, with weights reordered once; else by torch's own linear.

    torch's own linear reorders the weights in every call on a CPU. On processors for which oneDNN
    has no 16-bit kernel, torch's is slow for many tokens: these are multiplied in float32, one block of weights after
    the other.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.num_outputs: int = weight.shape[0]
        self._is_packed = can_pack(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, 1) if self._is_packed else weight
        self._bias = None if bias is None else bias.contiguous()
        self._is_widened = not self._is_packed and weight.device.type == "cpu" and weight.dtype.itemsize == 2

    def __call__(self, x: Tensor, held: Tensor | None = None) -> Tensor:
        """[tokens, in] → [tokens, out]; `held` is added."""
        if not self._is_packed:
            is_wide = self._is_widened and len(x) > _FEW_ROWS
            plain = self._in_float32(x) if is_wide else functional.linear(x, self._weight, self._bias)
            return plain if held is None else held + plain
        y: Tensor
        if held is None:
            y = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        else:
            y = torch.ops.mkldnn._linear_pointwise.binary(x, held, self._weight, self._bias, "add")
        return y

    def _in_float32(self, x: Tensor) -> Tensor:
        blocks = self._weight.split(max(1, _BLOCK_WEIGHTS // self._weight.shape[1]))
        wide = x.float()
        y = torch.cat([functional.linear(wide, block.float()) for block in blocks], dim=1)
        return (y if self._bias is None else y + self._bias).to(x.dtype)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN has a kernel for this weight's device and dtype."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


class TorchAttention:
    """`Attention`: the rotation is one complex product, keys and values are one copy."""

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


def attend(queries: Tensor, held: Tensor, group: ReadGroup, heads: Heads) -> Tensor:
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


def best_tokens(logits: Tensor) -> tuple[list[int], bool]:
    """The first largest of each row [rows, vocabulary]; with one wait for a device. And whether they can be compared.

    They cannot where a largest logit is infinite, or some logit is not a number.
    """
    if logits.dtype == torch.bfloat16 and logits.device.type == "cpu" and len(logits):
        from engine.network import compiled

        if compiled.can_compile(logits.dtype):
            return compiled.best_tokens(logits)
    values, best = logits.max(dim=-1)
    is_finite, *tokens_of_rows = torch.cat((values.isfinite().all()[None].to(best.dtype), best)).tolist()
    return tokens_of_rows, bool(is_finite)
