"""A whole pass in one call: the kernels of all layers as one program over memory of its own.

Python prepares a pass and reads its logits. No Python runs in between, so other threads have the interpreter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from worker.decoding.network.compiled_attention import PlacedReads, layer_arguments
from worker.decoding.network.kernels.attention import attention_kernel
from worker.decoding.network.kernels.attention_arguments import Arguments
from worker.decoding.network.kernels.program import Program
from worker.decoding.network.kernels.tiles import attends_in_tiles
from worker.decoding.network.kernels.wide_attention import wide_kernel
from worker.decoding.network.layers import Layer, Norm
from worker.decoding.network.packed import PackedLinear
from worker.decoding.network.passes import Pass
from worker.decoding.network.row_calls import RowCalls
from worker.decoding.network.slots import SlotCache

#: Tokens of which the memory is a multiple.
_ROWS: Final = 64


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """What a pass computes."""

    layers: Sequence[Layer]
    norm: Norm  #: behind the last layer
    head: PackedLinear
    tables: Mapping[str, Tensor]  #: rotations by kind, [positions, head_dim / 2, 2]
    window: int | None  #: of sliding layers

    @property
    def have_kernels(self) -> bool:
        """Whether there are kernels for all of it."""
        is_tiled = attends_in_tiles(self.norm.weight.dtype, self.layers[0].heads.head_dim)
        linears = [linear for layer in self.layers for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        return is_tiled and all(linear.compiled is not None for linear in (*linears, self.head))


class CompiledPass:
    """Passes of a decoder whose parts have kernels."""

    def __init__(self, parts: DecoderParts) -> None:
        self._parts = parts
        self._laid_out: _LaidOut | None = None

    def serves(self, plan: Pass) -> bool:
        """Whether this is how a pass is computed: not with a wide tree, nor where other linear layers are faster."""
        compiled = self._parts.head.compiled
        return compiled is not None and compiled.serves(plan.num_tokens) and not plan.wide_trees

    def reserve(self, num_tokens: int) -> Tensor:
        """[num_tokens, hidden_size]: where the next pass finds its tokens' embeddings."""
        if self._laid_out is None or num_tokens > len(self._laid_out.x):
            self._laid_out = _LaidOut(self._parts, -(-num_tokens // _ROWS) * _ROWS)
        return self._laid_out.x[:num_tokens]

    def __call__(self, cache: SlotCache, plan: Pass) -> Tensor:
        """Logits [wanted, vocabulary] of the tokens in memory that was reserved; keys and values are written."""
        if self._laid_out is None:
            raise RuntimeError("expected embeddings in memory that was reserved")
        return self._laid_out.run(cache, plan)


class _LaidOut:
    """The calls of a pass, over memory for `num_rows` tokens."""

    def __init__(self, parts: DecoderParts, num_rows: int) -> None:
        layers, norm, head, heads = parts.layers, parts.norm, parts.head, parts.layers[0].heads
        hidden, size_qkv, size_gates = len(norm.weight), layers[0].qkv.num_outputs, layers[0].gate_up.num_outputs

        def rows(size: int) -> Tensor:
            return torch.zeros((num_rows, size), dtype=norm.weight.dtype)

        self.x, self._chosen_x, self._normed, self._behind = (rows(hidden) for _ in range(4))
        self._seen, self._chosen_seen = (rows(heads.num_queries * heads.head_dim) for _ in range(2))
        self._qkv, self._gates, self._gated = rows(size_qkv), rows(size_gates), rows(size_gates // 2)
        self._all = torch.arange(num_rows)
        self._tables, self._window = parts.tables, parts.window
        self._attentions: list[tuple[Arguments, Arguments]] = []  # one a layer
        self._program = Program()
        self._of_all, self._of_wanted = RowCalls(self._program), RowCalls(self._program)
        for layer in layers[:-1]:
            self._attend(layer)
            self._finish(layer, self.x, self._seen, self._of_all)
        self._attend(layers[-1])
        self._num_calls_of_all = len(self._program)
        self._choices = (
            self._of_wanted.choose(self.x, self._chosen_x),
            self._of_wanted.choose(self._seen, self._chosen_seen),
        )
        self._finish(layers[-1], self._chosen_x, self._chosen_seen, self._of_wanted)
        self._of_wanted.norm(norm, self._chosen_x, self._normed)
        self._of_head = self._of_wanted.linear(head, self._normed, None)
        self._num_outputs = head.num_outputs

    def run(self, cache: SlotCache, plan: Pass) -> Tensor:
        wanted = self._all[: plan.num_tokens] if plan.wanted is None else plan.wanted
        logits = self.x.new_empty((len(wanted), self._num_outputs))
        reads = PlacedReads(plan)
        reads.set_cache_layout(cache.layers[0])
        self._of_all.set_num_rows(plan.num_tokens)
        self._of_wanted.set_num_rows(len(wanted))
        self._of_head.y = logits.data_ptr()
        for choice in self._choices:
            choice.chosen = wanted.data_ptr()
        for both, held in zip(self._attentions, cache.layers, strict=True):
            for attention in both:
                attention.held, attention.of_pass = held.data_ptr(), reads.address
        self._program.run(len(self._program) if len(wanted) else self._num_calls_of_all)
        return logits

    def _attend(self, layer: Layer) -> None:
        """From x to what its tokens have seen; keys and values are written."""
        self._of_all.norm(layer.before_attention, self.x, self._normed)
        self._of_all.linear(layer.qkv, self._normed, self._qkv)
        heads = layer.heads
        num_shared = heads.num_queries // heads.num_keys
        short, wide = (layer_arguments(heads, self._tables[heads.kind], self._window) for _ in range(2))
        for a in (short, wide):
            a.qkv, a.seen = self._qkv.data_ptr(), self._seen.data_ptr()
        self._program.add(attention_kernel(self._qkv.dtype, heads.head_dim, num_shared), short)
        self._program.add(wide_kernel(heads.head_dim, num_shared), wide)
        self._attentions.append((short, wide))

    def _finish(self, layer: Layer, x: Tensor, seen: Tensor, calls: RowCalls) -> None:
        """The rest of the layer, added to x."""
        self._add(x, layer.out, seen, layer.behind_attention, calls)
        calls.norm(layer.before_mlp, x, self._normed)
        calls.linear(layer.gate_up, self._normed, self._gates)
        calls.gate(self._gates, self._gated, layer.activation)
        self._add(x, layer.down, self._gated, layer.behind_mlp, calls)

    def _add(self, x: Tensor, linear: PackedLinear, y: Tensor, norm: Norm | None, calls: RowCalls) -> None:
        if norm is None:
            calls.linear(linear, y, x, held=x)
        else:
            calls.linear(linear, y, self._behind)
            calls.norm(norm, self._behind, x, held=x)
