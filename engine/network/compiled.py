"""What a decoder computes on a CPU, by the kernels of `kernels`: linear layers, attention, a whole pass in one call.

SmolLM2 in bf16 on 2 cores, one layer, microseconds, torch → compiled: norm of one token 13 → .3, gate 7 → .9, attention
of 16 sequences with 300 tokens, rotation and cache included, 1,000 → 180, of 512 tokens of a prompt 4,200 → 900; the
likeliest of 49,152 logits 40 → 4. One call instead of 270 saves 3 to 4 ms a pass, and the interpreter is free meanwhile
(docs/decisions/0007-own-kernels.md). Where the processor has no products of pairs, wide reads, pieces of prompts,
are attended to by torch, whose matrix products win there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor

from engine.network.kernels.attending import attends_in_tiles
from engine.network.kernels.attention import AttentionArguments, PassArguments, attention_kernel, wide_kernel
from engine.network.kernels.linear import (
    LinearArguments,
    arranged,
    arranged_bias,
    can_arrange,
    linear_kernel,
    most_rows,
)
from engine.network.kernels.multiplying import has_pair_products
from engine.network.kernels.numbers import NUMBERS
from engine.network.kernels.pointwise import (
    PointwiseArguments,
    best_kernel,
    choice_kernel,
    gate_kernel,
    norm_kernel,
)
from engine.network.kernels.program import Program
from engine.network.kernels.threads import Kernel, openmp
from engine.network.kv_layout import PAIRED_DIMENSIONS, blocks_of, to_plain
from engine.network.operations import Heads, Linear, TorchLinear, TorchOperations, attend, can_pack
from engine.network.passes import WIDEST_SHARED, Pass, Placed
from engine.network.slots import SlotCache
from engine.states import FINAL

if TYPE_CHECKING:
    from engine.network.fused import Layer, Norm

#: Elements below which waking other threads costs more than they save.
_WORTH_SHARING: Final = 16_384


def can_compile(dtype: torch.dtype) -> bool:
    """Whether there are kernels for this dtype on this machine."""
    return dtype in NUMBERS and openmp() is not None


class CompiledOperations(TorchOperations):
    """The operations on a CPU. Kernels are compiled when a machine first needs them, which takes seconds."""

    def __init__(self, dtype: torch.dtype, *, is_twice: bool = False) -> None:
        """`is_twice`: whether linear layers may be held in a second layout, where both have widths they are faster at.

        That is on processors without products of pairs, where the kernel is faster than oneDNN up to four tokens, and
        on those with AMX.
        """
        self._dtype = dtype
        self._is_twice = is_twice
        self._arguments = PointwiseArguments()
        self._tables: dict[str, Tensor] = {}

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """A linear layer: by the kernel if that is faster for some number of tokens, else by oneDNN."""
        is_always = most_rows() is None
        if can_pack(weight) and can_arrange(weight) and (is_always or self._is_twice):
            return CompiledLinear(weight, bias, None if is_always else TorchLinear(weight, bias))
        return TorchLinear(weight, bias)

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
        return CompiledAttention(plan, self._tables_of(rotations), window, self._dtype)

    def holds_pairs(self, head_dim: int) -> bool:
        """Where attention runs in tiles."""
        return attends_in_tiles(self._dtype, head_dim)

    def program(
        self,
        layers: Sequence[Layer],
        norm: Norm,
        head: Linear,
        rotations: Mapping[str, Tensor],
        window: int | None,
        taps: Sequence[int] = (),
    ) -> CompiledPass | None:
        """A pass as one call, if there are kernels for all of it."""
        linears = [linear for layer in layers for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        has_kernels = all(isinstance(linear, CompiledLinear) for linear in (*linears, head))
        if not has_kernels or not self.holds_pairs(layers[0].heads.head_dim):
            return None
        return CompiledPass(layers, norm, head, self._tables_of(rotations), window, taps)

    def _tables_of(self, rotations: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Rotations as kernels read them, by kind: [positions, head_dim / 2, 2]."""
        for kind, table in rotations.items():
            if kind not in self._tables:
                self._tables[kind] = torch.view_as_real(table).contiguous()
        return self._tables


def _num_threads(num_elements: int) -> int:
    return 1 if num_elements < _WORTH_SHARING else torch.get_num_threads()


def best_tokens(logits: Tensor) -> tuple[list[int], bool]:
    """As `operations.best_tokens`, of bfloat16; one row at least."""
    logits = logits.contiguous()
    best = torch.empty((len(logits), 2), dtype=torch.int64)
    num_rows, size = logits.shape
    arguments = PointwiseArguments(x=logits.data_ptr(), num_rows=num_rows, size=size, best=best.data_ptr())
    best_kernel()(arguments, min(torch.get_num_threads(), num_rows))
    tokens, are_finite = best.unbind(1)
    return tokens.tolist(), bool(are_finite.all())


class CompiledLinear:
    """`Linear` by `kernels.linear`."""

    def __init__(self, weight: Tensor, bias: Tensor | None, wider: TorchLinear | None = None) -> None:
        """`wider` computes more tokens than those for which the kernel is faster."""
        self._most_rows = None if wider is None else most_rows()
        self._wider = wider
        self._weight = arranged(weight)
        self._bias = None if bias is None else arranged_bias(bias)  # its address is below
        self.num_outputs, self._num_inputs = weight.shape
        self.kernel = linear_kernel(by_pairs=has_pair_products())
        self._arguments = self.arguments()

    def serves(self, num_rows: int) -> bool:
        """Whether the kernel computes that many tokens."""
        return self._most_rows is None or num_rows <= self._most_rows

    def arguments(self) -> LinearArguments:
        """For the kernel; x, y, held and the number of rows are lacking."""
        return LinearArguments(
            weights=self._weight.data_ptr(),
            num_inputs=self._num_inputs,
            num_outputs=self.num_outputs,
            bias=0 if self._bias is None else self._bias.data_ptr(),
        )

    def __call__(self, x: Tensor, held: Tensor | None = None) -> Tensor:
        """[tokens, in] → [tokens, out]; `held` is added."""
        if self._wider is not None and not self.serves(len(x)):
            return self._wider(x, held)
        x = x.contiguous()
        y = x.new_empty((len(x), self.num_outputs))
        if not len(x):
            return y
        held = None if held is None else held.contiguous()
        a = self._arguments
        a.x, a.y, a.held = x.data_ptr(), y.data_ptr(), 0 if held is None else held.data_ptr()
        a.num_rows = len(x)
        self.kernel(a, torch.get_num_threads())
        return y


#: Tokens of a long read that one thread puts into the cache at a time.
_PIECE: Final = 64


class PlacedReads:
    """The reads of a pass as kernels get them."""

    def __init__(self, plan: Pass) -> None:
        short = [group for group in plan.groups if group.width <= WIDEST_SHARED]
        long = [group.placed[0] for group in plan.wide]
        # The arrays have to live as long as their addresses are used.
        self._short = _rows(placed for group in short for placed in group.placed)
        self._pieces = np.concatenate([_pieces(placed) for placed in long]) if long else _rows(())
        self._wide = _rows(placed for placed in long if placed.read.parents is None)
        self._ancestry = np.zeros(plan.num_tokens, dtype=np.uint64)
        for group in short:
            self._ancestry[group.tokens] = [bits for placed in group.placed for bits in placed.ancestry]
        self._positions = plan.positions
        self.arguments = PassArguments(
            short=self._short.ctypes.data,
            num_short=len(self._short),
            pieces=self._pieces.ctypes.data,
            num_pieces=len(self._pieces),
            wide=self._wide.ctypes.data,
            num_wide=len(self._wide),
            num_tokens=plan.num_tokens,
            positions=plan.positions.data_ptr(),
            ancestry=self._ancestry.ctypes.data,
        )
        self.address = ctypes.addressof(self.arguments)

    def set_cache_layout(self, held: Tensor) -> None:
        """Say how the layers of the cache lie, all like this one: plain, or in pairs."""
        a, is_paired = self.arguments, held.dim() == PAIRED_DIMENSIONS
        a.slot_size, a.head_size = held.stride(0), held.stride(2 if is_paired else 1)
        a.block_size = held.stride(1) if is_paired else 0


def layer_arguments(heads: Heads, rotations: Tensor, window: int | None) -> AttentionArguments:
    """What is the same in every pass. rotations: [positions, head_dim / 2, 2]; `window` is that of sliding layers."""
    return AttentionArguments(
        num_queries=heads.num_queries,
        scaling=heads.scaling,
        window=(window or 0) if heads.is_local else 0,
        rotations=rotations.data_ptr(),
        num_positions=len(rotations),
        norms=0 if heads.norms is None else heads.norms.data_ptr(),
        epsilon=heads.epsilon,
    )


class CompiledAttention:
    """Attention of one pass. Where there is no kernel for wide reads, and for wide trees, torch attends."""

    def __init__(self, plan: Pass, tables: Mapping[str, Tensor], window: int | None, dtype: torch.dtype) -> None:
        self._plan, self._tables, self._window, self._dtype = plan, tables, window, dtype
        self._reads = PlacedReads(plan)

    def __call__(self, qkv: Tensor, held: Tensor, heads: Heads) -> Tensor:
        """[tokens, queries * head_dim] of one layer. `held` is in pairs where `attends_in_tiles`."""
        seen = qkv.new_empty((len(qkv), heads.num_queries * heads.head_dim))
        num_shared, num_threads = heads.num_queries // heads.num_keys, torch.get_num_threads()
        is_paired = attends_in_tiles(self._dtype, heads.head_dim)
        self._reads.set_cache_layout(held)
        a = layer_arguments(heads, self._tables[heads.kind], self._window)
        a.qkv, a.held, a.seen, a.of_pass = qkv.data_ptr(), held.data_ptr(), seen.data_ptr(), self._reads.address
        attention_kernel(self._dtype, heads.head_dim, num_shared)(a, num_threads)
        if is_paired and self._reads.arguments.num_wide:
            wide_kernel(heads.head_dim, num_shared)(a, num_threads)
        for group in self._plan.wide_trees if is_paired else self._plan.wide:
            queries = qkv.view(len(qkv), -1, heads.head_dim)[group.tokens, : heads.num_queries]
            plain = to_plain(held[: group.slots.stop, blocks_of(0, group.num_keys)]) if is_paired else held
            seen[group.tokens] = attend(queries, plain, group, heads)
        return seen


def _rows(reads: Iterable[Placed]) -> np.ndarray:
    return np.array([(read.slot, read.length, read.first, read.width) for read in reads], np.int64).reshape(-1, 4)


def _pieces(read: Placed) -> np.ndarray:
    begins = range(0, read.width, _PIECE)
    rows = [(read.slot, read.length + at, read.first + at, min(_PIECE, read.width - at)) for at in begins]
    return np.array(rows, np.int64)


#: Tokens of which the memory is a multiple.
_ROWS: Final = 64


class CompiledPass:
    """Passes of a decoder whose parts have kernels: the kernels of all layers as one program over memory of its own.

    Python prepares a pass and reads its logits. No Python runs in between, so other threads have the interpreter.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        norm: Norm,
        head: Linear,
        tables: Mapping[str, Tensor],
        window: int | None,
        taps: Sequence[int] = (),
    ) -> None:
        """`tables`: rotations by kind, [positions, head_dim / 2, 2]; `window`: of sliding layers.

        `taps`: layers whose input states are kept.
        """
        self._layers, self._norm, self._head = layers, norm, _compiled(head)
        self._tables, self._window, self._taps = tables, window, taps
        self._lay_out(0)

    def serves(self, plan: Pass) -> bool:
        """Whether this is how a pass is computed: not with a wide tree, nor where other linear layers are faster."""
        return self._head.serves(plan.num_tokens) and not plan.wide_trees

    def reserve(self, num_tokens: int) -> Tensor:
        """[num_tokens, hidden_size]: where the next pass finds its tokens' embeddings."""
        if num_tokens > len(self._x):
            self._lay_out(-(-num_tokens // _ROWS) * _ROWS)
        return self._x[:num_tokens]

    def _lay_out(self, num_rows: int) -> None:
        """The calls of a pass, over memory for `num_rows` tokens."""
        layers, norm = self._layers, self._norm
        heads = layers[0].heads
        hidden, size_qkv, size_gates = len(norm.weight), layers[0].qkv.num_outputs, layers[0].gate_up.num_outputs

        def rows(size: int) -> Tensor:
            return torch.zeros((num_rows, size), dtype=norm.weight.dtype)

        self._x, self._chosen_x, self._normed, self._unnormed = (rows(hidden) for _ in range(4))
        self._seen, self._chosen_seen = (rows(heads.num_queries * heads.head_dim) for _ in range(2))
        self._qkv, self._gates, self._gated = rows(size_qkv), rows(size_gates), rows(size_gates // 2)
        self._all = torch.arange(num_rows)
        self._attentions: list[tuple[AttentionArguments, AttentionArguments]] = []  # one a layer
        self._program = Program()
        self._of_all, self._of_wanted = _RowCalls(self._program), _RowCalls(self._program)
        self._states = {tap: rows(hidden) for tap in self._taps}
        for index, layer in enumerate(layers):
            if index in self._states:
                self._of_all.choose(self._x, self._states[index]).chosen = self._all.data_ptr()
            self._attend(layer)
            if index < len(layers) - 1:
                self._finish(layer, self._x, self._seen, self._of_all)
        self._num_calls_of_all = len(self._program)
        self._choices = (
            self._of_wanted.choose(self._x, self._chosen_x),
            self._of_wanted.choose(self._seen, self._chosen_seen),
        )
        self._finish(layers[-1], self._chosen_x, self._chosen_seen, self._of_wanted)
        self._of_wanted.norm(norm, self._chosen_x, self._normed)
        self._of_head = self._of_wanted.linear(self._head, self._normed, None)

    def __call__(self, cache: SlotCache, plan: Pass) -> tuple[Tensor, dict[int, Tensor]]:
        """Logits [wanted, vocabulary] of the tokens in memory that was reserved; keys and values are written.

        And the states of the taps and the final ones, in memory that the next pass writes to.
        """
        wanted = self._all[: plan.num_tokens] if plan.wanted is None else plan.wanted
        logits = self._x.new_empty((len(wanted), self._head.num_outputs))
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
        states = {tap: x[: plan.num_tokens] for tap, x in self._states.items()}
        return logits, states | {FINAL: self._normed[: len(wanted)]}

    def _attend(self, layer: Layer) -> None:
        """From x to what its tokens have seen; keys and values are written."""
        self._of_all.norm(layer.before_attention, self._x, self._normed)
        self._of_all.linear(layer.qkv, self._normed, self._qkv)
        heads = layer.heads
        num_shared = heads.num_queries // heads.num_keys
        short, wide = (layer_arguments(heads, self._tables[heads.kind], self._window) for _ in range(2))
        for a in (short, wide):
            a.qkv, a.seen = self._qkv.data_ptr(), self._seen.data_ptr()
        self._program.add(attention_kernel(self._qkv.dtype, heads.head_dim, num_shared), short)
        self._program.add(wide_kernel(heads.head_dim, num_shared), wide)
        self._attentions.append((short, wide))

    def _finish(self, layer: Layer, x: Tensor, seen: Tensor, calls: _RowCalls) -> None:
        """The rest of the layer, added to x."""
        self._add(x, layer.out, seen, layer.after_attention, calls)
        calls.norm(layer.before_mlp, x, self._normed)
        calls.linear(layer.gate_up, self._normed, self._gates)
        calls.gate(self._gates, self._gated, layer.activation)
        self._add(x, layer.down, self._gated, layer.after_mlp, calls)

    def _add(self, x: Tensor, linear: Linear, y: Tensor, norm: Norm | None, calls: _RowCalls) -> None:
        if norm is None:
            calls.linear(linear, y, x, held=x)
        else:
            calls.linear(linear, y, self._unnormed)
            calls.norm(norm, self._unnormed, x, held=x)


def _compiled(linear: Linear) -> CompiledLinear:
    if not isinstance(linear, CompiledLinear):
        raise TypeError(f"expected a linear layer with a kernel, found {type(linear).__name__}")
    return linear


class _RowCalls:
    """Adds calls to a program that compute the same rows.

    Tensors are [rows, size]; a pass computes their first rows, and they have to live.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._arguments: list[ctypes.Structure] = []

    def set_num_rows(self, num_rows: int) -> None:
        """How many rows the next pass computes."""
        for arguments in self._arguments:
            arguments.num_rows = num_rows

    def norm(self, norm: Norm, x: Tensor, y: Tensor, *, held: Tensor | None = None) -> None:
        """y = norm(x) + held."""
        weight, epsilon = norm.weight.data_ptr(), norm.epsilon
        a = PointwiseArguments(x=x.data_ptr(), y=y.data_ptr(), size=x.shape[1], weight=weight, epsilon=epsilon)
        a.held = _address(held)
        self._add(norm_kernel(x.dtype), a)

    def linear(self, linear: Linear, x: Tensor, y: Tensor | None, *, held: Tensor | None = None) -> LinearArguments:
        """y = linear(x) + held. Without y its address is set in the arguments, which are returned, for each pass."""
        compiled = _compiled(linear)
        a = compiled.arguments()
        a.x, a.y, a.held = x.data_ptr(), _address(y), _address(held)
        self._add(compiled.kernel, a)
        return a

    def gate(self, gates_and_ups: Tensor, y: Tensor, activation: str) -> None:
        """y = activation(gates) * ups."""
        a = PointwiseArguments(x=gates_and_ups.data_ptr(), y=y.data_ptr(), size=y.shape[1])
        self._add(gate_kernel(y.dtype, activation), a)

    def choose(self, x: Tensor, y: Tensor) -> PointwiseArguments:
        """Rows of x. The address of their numbers is set in the arguments, which are returned, for each pass."""
        a = PointwiseArguments(x=x.data_ptr(), y=y.data_ptr(), size=x.shape[1])
        self._add(choice_kernel(x.dtype), a)
        return a

    def _add(self, kernel: Kernel, arguments: ctypes.Structure) -> None:
        self._program.add(kernel, arguments)
        self._arguments.append(arguments)


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
