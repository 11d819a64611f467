"""One layer of a decoder of the Llama kind: attention and MLP, with weights that are laid out for few calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from worker.decoding.network.operations import Attention, Heads, Operations
from worker.decoding.network.packed import PackedLinear


class Norm:
    """RMS norm (Zhang and Sennrich 2019); Gemma stores its weights less one."""

    def __init__(self, module: Any, operations: Operations) -> None:
        weight = module.weight.detach()
        self.weight = (1.0 + weight.float()).to(weight.dtype) if "Gemma" in type(module).__name__ else weight
        self.epsilon: float = module.eps if hasattr(module, "eps") else module.variance_epsilon
        self._operations = operations

    def __call__(self, x: Tensor) -> Tensor:
        return self._operations.norm(x, self.weight, self.epsilon)


class Layer:
    """Attention and MLP, each with its norms and its residual."""

    def __init__(self, layer: Any, kind: str, activation: str, operations: Operations, *, is_twice: bool) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        head_dim: int = attention.head_dim
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        weights = [projection.weight.detach() for projection in projections]
        weights[:2] = [_interleaved(weight, head_dim) for weight in weights[:2]]
        biases = None
        if attention.q_proj.bias is not None:
            parts = [projection.bias.detach() for projection in projections]
            parts[:2] = [_interleaved(part, head_dim) for part in parts[:2]]
            biases = torch.cat(parts)
        self.qkv = PackedLinear(torch.cat(weights), biases, is_twice=is_twice)
        self.heads = _heads(attention, kind, operations)
        self.out = PackedLinear(*weights_of(attention.o_proj), is_twice=is_twice)
        self.gate_up = PackedLinear(
            torch.cat((mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach())),
            None if mlp.gate_proj.bias is None else torch.cat((mlp.gate_proj.bias, mlp.up_proj.bias)).detach(),
            is_twice=is_twice,
        )
        self.down = PackedLinear(*weights_of(mlp.down_proj), is_twice=is_twice)
        self.activation = activation
        self._operations = operations
        self.before_attention = Norm(layer.input_layernorm, operations)
        # In Gemma the norm of this name follows attention, and another norm precedes the MLP.
        is_sandwich = hasattr(layer, "pre_feedforward_layernorm")
        second = layer.pre_feedforward_layernorm if is_sandwich else layer.post_attention_layernorm
        self.before_mlp = Norm(second, operations)
        self.behind_attention = Norm(layer.post_attention_layernorm, operations) if is_sandwich else None
        self.behind_mlp = Norm(layer.post_feedforward_layernorm, operations) if is_sandwich else None

    def __call__(self, x: Tensor, held: Tensor, attention: Attention, wanted: Tensor | None = None) -> Tensor:
        """The states of the wanted tokens, or of all. Keys and values of all tokens are written."""
        seen = attention(self.qkv(self.before_attention(x)), held, self.heads)
        if wanted is not None:
            x, seen = x.index_select(0, wanted), seen.index_select(0, wanted)
            if not len(x):
                return x
        x = _residual(x, seen, self.out, self.behind_attention)
        gated = self._operations.gate(self.gate_up(self.before_mlp(x)), self.activation)
        return _residual(x, gated, self.down, self.behind_mlp)


def _heads(attention: Any, kind: str, operations: Operations) -> Heads:
    head_dim: int = attention.head_dim
    num_queries, num_keys = attention.q_proj.out_features // head_dim, attention.k_proj.out_features // head_dim
    norms, epsilon = None, 0.0
    if hasattr(attention, "q_norm"):
        queries, keys = Norm(attention.q_norm, operations), Norm(attention.k_norm, operations)
        weights = torch.cat((queries.weight.expand(num_queries, -1), keys.weight.expand(num_keys, -1)))
        norms = _interleaved(weights.flatten(), head_dim).view(-1, head_dim).contiguous()
        epsilon = queries.epsilon
    is_local = kind == "sliding_attention"
    return Heads(num_queries, num_keys, head_dim, attention.scaling, kind, is_local, norms, epsilon)


def _residual(x: Tensor, y: Tensor, linear: PackedLinear, norm: Norm | None) -> Tensor:
    return linear.added_to(x, y) if norm is None else x + norm(linear(y))


def weights_of(linear: Any) -> tuple[Tensor, Tensor | None]:
    return linear.weight.detach(), None if linear.bias is None else linear.bias.detach()


def _interleaved(rows: Tensor, head_dim: int) -> Tensor:
    """Rows of heads with the two halves of each head interleaved: element i beside element i + head_dim / 2.

    Scores do not change, because queries and keys are reordered in the same way.
    """
    heads = rows.view(-1, 2, head_dim // 2, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)
