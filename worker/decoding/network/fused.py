"""A decoder of the Llama kind over the slot cache, in as few calls a layer as torch allows.

Llama, Mistral, Qwen2, Qwen3 and Gemma 3 differ in biases, in norms of queries and keys, in norms behind attention and
MLP, in windows and in scales. This module reads all of these from the transformers model whose weights it takes over.
`LanguageModel` compares a pass with that model's own pass before the model serves.

Measured for SmolLM2 in bf16 on 2 cores (docs/log.md): transformers' forward spends more than half of a one-token pass
outside of its matrix products. Here queries, keys and values are one product, gate and up another; both residual
additions happen inside a product; the rotation is one complex product, for which the two halves of a head are
interleaved. The `operations` compute the rest: compiled kernels on a CPU, torch's calls elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from worker.decoding.device import available_bytes
from worker.decoding.network.compiled_operations import CompiledOperations, can_compile
from worker.decoding.network.compiled_pass import CompiledPass, DecoderParts
from worker.decoding.network.gpu import gpu_operations
from worker.decoding.network.kernels.tiles import attends_in_tiles
from worker.decoding.network.kv_shape import KvShape
from worker.decoding.network.layers import Layer, Norm, weights_of
from worker.decoding.network.operations import ACTIVATIONS, Attention, Operations, StaticOperations
from worker.decoding.network.packed import PackedLinear
from worker.decoding.network.passes import Pass
from worker.decoding.network.slots import SlotCache
from worker.decoding.network.static_inputs import StaticInputs
from worker.decoding.network.torch_operations import TorchOperations
from worker.decoding.text_facts import text_facts

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

    def __init__(self, model: Any, num_positions: int, *, gpu_kernels: bool = False) -> None:
        config, inner = model.config, model.model
        facts = text_facts(config)
        self.window = facts.window
        self._embeddings: Tensor = inner.embed_tokens.weight.detach()
        # Rounded as transformers rounds it.
        scale = getattr(inner.embed_tokens, "embed_scale", None)
        self._scale = None if scale is None else scale.to(self._embeddings.dtype)
        self._rotations = {kind: _rotations(inner, config, kind, num_positions) for kind in set(facts.kinds)}
        shape = KvShape.of(config, self._embeddings.dtype)
        self._operations = _operations(self._embeddings, shape.head_dim, gpu_kernels)
        is_compiled = isinstance(self._operations, CompiledOperations)
        self.kv_shape = replace(shape, is_paired=is_compiled and attends_in_tiles(shape.dtype, shape.head_dim))
        self.num_outputs: int = model.lm_head.weight.shape[0]
        is_twice = _fits_twice(model)
        self._head = PackedLinear(*weights_of(model.lm_head), is_twice=is_twice)
        self._norm = Norm(inner.norm, self._operations)
        self._layers = []
        for index, layer in enumerate(inner.layers):
            kind, activation = facts.kinds[index], _activation_name(config)
            self._layers.append(Layer(layer, kind, activation, self._operations, is_twice=is_twice))
            inner.layers[index] = torch.nn.Identity()
        self._compiled = self._compiled_pass()

    def __call__(self, cache: SlotCache, plan: Pass) -> Tensor:
        """Logits [wanted, vocabulary]; keys and values of all tokens are written into the cache."""
        if self._compiled is not None and self._compiled.serves(plan):
            self._embed(plan.token_ids, self._compiled.reserve(plan.num_tokens))
            return self._compiled(cache, plan)
        attention = self._operations.attention(plan, self._rotations, self.window)
        x = self._read(plan.token_ids, cache.layers, attention, plan.wanted)
        if not len(x):
            return x.new_empty((0, self.num_outputs))
        return self._head(self._norm(x))

    def set_window(self, window: int | None) -> None:
        """The window of sliding layers from now on."""
        self.window = window
        self._compiled = self._compiled_pass()

    @property
    def is_recordable(self) -> bool:
        """Whether `compute_static` can be used."""
        return isinstance(self._operations, StaticOperations)

    def compute_static(self, inputs: StaticInputs) -> Tensor:
        """Logits [tokens, vocabulary], by the same calls over the same memory whatever the inputs hold."""
        if not isinstance(self._operations, StaticOperations):
            raise TypeError(f"{type(self._operations).__name__} cannot be recorded")
        attention = self._operations.static_attention(inputs, self._rotations, self.window)
        return self._head(self._norm(self._read(inputs.token_ids, inputs.addresses.view(-1, 1).unbind(), attention)))

    def _read(
        self, token_ids: Tensor, held: Sequence[Tensor], attention: Attention, wanted: Tensor | None = None
    ) -> Tensor:
        """The hidden states that the head reads: [wanted, hidden_size], or those of all tokens."""
        x = self._embed(token_ids)
        for layer, own in zip(self._layers[:-1], held[:-1], strict=True):
            x = layer(x, own, attention)
        return self._layers[-1](x, held[-1], attention, wanted)

    def _embed(self, token_ids: Tensor, out: Tensor | None = None) -> Tensor:
        x = torch.index_select(self._embeddings, 0, token_ids, out=out)
        return x if self._scale is None else torch.mul(x, self._scale, out=out)

    def _compiled_pass(self) -> CompiledPass | None:
        if not isinstance(self._operations, CompiledOperations):
            return None
        tables = self._operations.tables(self._rotations)
        parts = DecoderParts(self._layers, self._norm, self._head, tables, self.window)
        return CompiledPass(parts) if parts.have_kernels else None


def _fits_twice(model: Any) -> bool:
    """Whether a second copy of all linear layers takes no more than a quarter of the memory that is left."""
    weights = [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)]
    num_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
    return model.device.type == "cpu" and num_bytes <= TWICE_SHARE * available_bytes(model.device)


def _operations(weight: Tensor, head_dim: int, gpu_kernels: bool) -> Operations:
    if can_compile(weight.device, weight.dtype):
        return CompiledOperations(weight.dtype)
    found = gpu_operations(weight.device, weight.dtype, head_dim) if gpu_kernels else None
    return found or TorchOperations()


def _rotations(inner: Any, config: Any, kind: str, num_positions: int) -> Tensor:
    """[positions, head_dim / 2], complex: the model's own rotary embedding of every position."""
    dtype = torch.float64 if inner.embed_tokens.weight.dtype == torch.float64 else torch.float32
    like = torch.empty(0, dtype=dtype, device=inner.embed_tokens.weight.device)
    positions = torch.arange(num_positions, device=like.device)[None]
    by_kind = (kind,) if config.model_type == "gemma3_text" else ()
    cos, sin = inner.rotary_emb(like, positions, *by_kind)
    half = cos.shape[-1] // 2
    return torch.complex(cos[0, :, :half], sin[0, :, :half])


def _activation_name(config: Any) -> str:
    return getattr(config, "hidden_activation", None) or str(config.hidden_act)
