"""A decoder of the Llama kind over the slot cache, in as few calls a layer as torch allows.

Llama, Mistral, Qwen2, Qwen3 and Gemma 3 differ in biases, in norms of queries and keys, in norms after attention and
MLP, in windows and in scales. This module reads all of these from the transformers model whose weights it takes over.
`LanguageModel` compares a pass with that model's own pass before the model serves.

Measured for SmolLM2 in bf16 on 2 cores: transformers' forward spends more than half of a one-token pass
outside of its matrix products. Here queries, keys and values are one product, gate and up another; both residual
additions happen inside a product; the rotation is one complex product, for which the two halves of a head are
interleaved. The `operations` compute the rest: compiled kernels on a CPU, torch's calls elsewhere.
"""

from __future__ import annotations

from collections.abc import Container
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from engine.device import available_bytes
from engine.network.kv_layout import KvShape
from engine.network.operations import ACTIVATIONS, Attention, Heads, Linear, TorchOperations
from engine.network.passes import Pass
from engine.network.slots import SlotCache
from engine.states import FINAL
from engine.text_facts import text_facts

if TYPE_CHECKING:
    from engine.network.compiled import CompiledPass


VERSION: Final = 5  #: part of the engine's name, so of the key of all evidence: raise it when the arithmetic changes
#: Share of the free memory that a second layout of the weights may take.
TWICE_SHARE: Final = 0.25
FAMILIES: Final = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma3_text"})


def can_fuse(config: Any) -> bool:
    """Whether this module can compute the model."""
    if config.model_type not in FAMILIES or getattr(config, "use_bidirectional_attention", False):
        return False
    softcaps = (getattr(config, "attn_logit_softcapping", None), getattr(config, "final_logit_softcapping", None))
    return _activation_name(config) in ACTIVATIONS and softcaps == (None, None)


class FusedDecoder:
    """Takes over a transformers model's weights, and empties its layers one by one so that no weight is held twice."""

    def __init__(self, model: Any, num_positions: int) -> None:
        config, inner = model.config, model.model
        facts = text_facts(config)
        self.window = facts.window
        self.embeddings: Tensor = inner.embed_tokens.weight.detach()  #: [rows, hidden], as they are stored
        # Rounded as transformers rounds it.
        scale = getattr(inner.embed_tokens, "embed_scale", None)
        self._scale = None if scale is None else scale.to(self.embeddings.dtype)
        self._rotations = {kind: _rotations(inner, config, kind, num_positions) for kind in set(facts.kinds)}
        shape = KvShape.of(config, self.embeddings.dtype)
        self._operations = operations_for(self.embeddings, is_twice=_fits_twice(model))
        self.kv_shape = replace(shape, is_paired=self._operations.holds_pairs(shape.head_dim))
        self.num_outputs: int = model.lm_head.weight.shape[0]
        self._head = _linear(self._operations, model.lm_head)
        self._norm = Norm(inner.norm, self._operations)
        self._layers = []
        for index, layer in enumerate(inner.layers):
            kind, activation = facts.kinds[index], _activation_name(config)
            self._layers.append(Layer(layer, kind, activation, self._operations))
            inner.layers[index] = torch.nn.Identity()
        self._program = self._make_program()
        self._tapped: dict[tuple[int, ...], CompiledPass | None] = {}

    def __call__(self, cache: SlotCache, plan: Pass, taps: tuple[int, ...] = ()) -> tuple[Tensor, dict[int, Tensor]]:
        """Logits [wanted, vocabulary]; keys and values of all tokens are written into the cache.

        And the states of each tap, of a layer for all tokens as they lie; another pass may write into their memory.
        """
        program = self._program_for(taps)
        if program is not None and program.serves(plan):
            self._embed(plan.token_ids, program.reserve(plan.num_tokens))
            return program(cache, plan)
        attention = self._operations.attention(plan, self._rotations, self.window)
        x = self._embed(plan.token_ids)
        states: dict[int, Tensor] = {}
        for index, (layer, held) in enumerate(zip(self._layers, cache.layers, strict=True)):
            if index in taps:
                states[index] = x
            x = layer(x, held, attention, plan.wanted if layer is self._layers[-1] else None)
        normed = self._norm(x) if len(x) else x
        if FINAL in taps:
            states[FINAL] = normed
        return self._head(normed) if len(x) else x.new_empty((0, self.num_outputs)), states

    def without(self, skipped: Container[int]) -> FusedDecoder:
        """The same weights in memory, without these layers, numbered from 0. At least one has to stay."""
        skipping = copy(self)
        skipping._layers = [layer for index, layer in enumerate(self._layers) if index not in skipped]
        skipping.kv_shape = replace(self.kv_shape, num_layers=len(skipping._layers))
        skipping._program, skipping._tapped = skipping._make_program(), {}
        return skipping

    def set_window(self, window: int | None) -> None:
        """The window of sliding layers from now on."""
        self.window = window
        self._program, self._tapped = self._make_program(), {}

    def _embed(self, token_ids: Tensor, out: Tensor | None = None) -> Tensor:
        x = torch.index_select(self.embeddings, 0, token_ids, out=out)
        return x if self._scale is None else torch.mul(x, self._scale, out=out)

    def _program_for(self, taps: tuple[int, ...]) -> CompiledPass | None:
        """The pass as one call that keeps the states of these layers too."""
        layers = tuple(sorted(set(taps) - {FINAL}))
        if self._program is None or not layers:
            return self._program
        if layers not in self._tapped:
            self._tapped[layers] = self._make_program(layers)
        return self._tapped[layers]

    def _make_program(self, taps: tuple[int, ...] = ()) -> CompiledPass | None:
        return self._operations.program(self._layers, self._norm, self._head, self._rotations, self.window, taps)


class Norm:
    """RMS norm (Zhang and Sennrich 2019); Gemma stores its weights less one."""

    def __init__(self, module: Any, operations: TorchOperations) -> None:
        weight = module.weight.detach()
        self.weight = (1.0 + weight.float()).to(weight.dtype) if "Gemma" in type(module).__name__ else weight
        self.epsilon: float = module.eps if hasattr(module, "eps") else module.variance_epsilon
        self._operations = operations

    def __call__(self, x: Tensor) -> Tensor:
        return self._operations.norm(x, self.weight, self.epsilon)


class Layer:
    """Attention and MLP, each with its norms and its residual."""

    def __init__(self, layer: Any, kind: str, activation: str, operations: TorchOperations) -> None:
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
        self.qkv = operations.linear(torch.cat(weights), biases)
        self.heads = _heads(attention, kind, operations)
        self.out = _linear(operations, attention.o_proj)
        self.gate_up = operations.linear(
            torch.cat((mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach())),
            None if mlp.gate_proj.bias is None else torch.cat((mlp.gate_proj.bias, mlp.up_proj.bias)).detach(),
        )
        self.down = _linear(operations, mlp.down_proj)
        self.activation = activation
        self._operations = operations
        self.before_attention = Norm(layer.input_layernorm, operations)
        # In Gemma the norm of this name follows attention, and another norm precedes the MLP.
        is_sandwich = hasattr(layer, "pre_feedforward_layernorm")
        second = layer.pre_feedforward_layernorm if is_sandwich else layer.post_attention_layernorm
        self.before_mlp = Norm(second, operations)
        self.after_attention = Norm(layer.post_attention_layernorm, operations) if is_sandwich else None
        self.after_mlp = Norm(layer.post_feedforward_layernorm, operations) if is_sandwich else None

    def __call__(self, x: Tensor, held: Tensor, attention: Attention, wanted: Tensor | None = None) -> Tensor:
        """The states of the wanted tokens, or of all. Keys and values of all tokens are written."""
        seen = attention(self.qkv(self.before_attention(x)), held, self.heads)
        if wanted is not None:
            x, seen = x.index_select(0, wanted), seen.index_select(0, wanted)
            if not len(x):
                return x
        x = _residual(x, seen, self.out, self.after_attention)
        gated = self._operations.gate(self.gate_up(self.before_mlp(x)), self.activation)
        return _residual(x, gated, self.down, self.after_mlp)


def _fits_twice(model: Any) -> bool:
    """Whether a second copy of all linear layers takes no more than a quarter of the memory that is left."""
    weights = [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)]
    num_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
    return model.device.type == "cpu" and num_bytes <= TWICE_SHARE * available_bytes(model.device)


def operations_for(weight: Tensor, *, is_twice: bool = False) -> TorchOperations:
    """The operations of a model with such weights, where they lie. `is_twice`: see `CompiledOperations`."""
    if weight.device.type == "cpu":
        from engine.network import compiled  # numba's: elsewhere nothing of it is needed

        if compiled.can_compile(weight.dtype):
            return compiled.CompiledOperations(weight.dtype, is_twice=is_twice)
    return TorchOperations()


def _rotations(inner: Any, config: Any, kind: str, num_positions: int) -> Tensor:
    """[positions, head_dim / 2], complex: the model's own rotary embedding of every position."""
    by_kind = (kind,) if config.model_type == "gemma3_text" else ()
    return rotations(inner.rotary_emb, inner.embed_tokens.weight, num_positions, *by_kind)


def rotations(rotary: Any, weight: Tensor, num_positions: int, *by_kind: str) -> Tensor:
    """[positions, head_dim / 2], complex: a rotary embedding of every position, on the device of `weight`."""
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    like = torch.empty(0, dtype=dtype, device=weight.device)
    positions = torch.arange(num_positions, device=like.device)[None]
    cos, sin = rotary(like, positions, *by_kind)
    half = cos.shape[-1] // 2
    return torch.complex(cos[0, :, :half], sin[0, :, :half])


def _activation_name(config: Any) -> str:
    return getattr(config, "hidden_activation", None) or str(config.hidden_act)


def _heads(attention: Any, kind: str, operations: TorchOperations) -> Heads:
    head_dim: int = attention.head_dim
    num_queries, num_keys = attention.q_proj.out_features // head_dim, attention.k_proj.out_features // head_dim
    norms, epsilon = None, 0.0
    if hasattr(attention, "q_norm"):
        queries, keys = Norm(attention.q_norm, operations), Norm(attention.k_norm, operations)
        weights = torch.cat((queries.weight.expand(num_queries, -1), keys.weight.expand(num_keys, -1)))
        norms = _interleaved(weights.flatten(), head_dim).view(-1, head_dim).contiguous()
        epsilon = queries.epsilon
    is_local = kind == "sliding_attention"
    return Heads(
        num_queries,
        num_keys,
        head_dim,
        scaling=attention.scaling,
        kind=kind,
        is_local=is_local,
        norms=norms,
        epsilon=epsilon,
    )


def _residual(x: Tensor, y: Tensor, linear: Linear, norm: Norm | None) -> Tensor:
    return linear(y, x) if norm is None else x + norm(linear(y))


def _linear(operations: TorchOperations, module: Any) -> Linear:
    return operations.linear(module.weight.detach(), None if module.bias is None else module.bias.detach())


def _interleaved(rows: Tensor, head_dim: int) -> Tensor:
    """Rows of heads with the two halves of each head interleaved: element i beside element i + head_dim / 2.

    Scores do not change, because queries and keys are reordered in the same way.
    """
    heads = rows.view(-1, 2, head_dim // 2, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)
