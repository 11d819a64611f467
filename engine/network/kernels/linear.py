"""y = x W' + b in bfloat16: few tokens at the speed of the memory, many at the speed of the processor.

A thread takes one block of 48 outputs after the other. It multiplies its weights with groups of at most eight tokens. A
group's sums stay in registers until bias and residual are added and they are rounded: a loop of numba's that does this
takes a third of the time of the products.

Two variants, and what each gains, the time of oneDNN with reordered weights is 1):

- *With products of pairs* (AVX512-BF16): .55 to .76 up to 64 tokens, .87 to .95 up to 700. It serves every width.
- *Without*: one token 17 GB/s by oneDNN, 42 by this kernel. Each product is an instruction, so it serves four tokens.

With one group the memory sets the pace, and the processor prefetches by itself. With three groups or more, products
take longer than reading, so the first three groups prefetch the thread's next block beside their products. With one or
two groups that costs more than it saves (12 tokens 17.4 → 21.2 ms).

A token's sums are added up in one order: they are bit for bit the same alone and among others.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, Final

import numba
import numpy as np
import torch
from numba.core import types
from numba.extending import intrinsic
from torch import Tensor

from engine.network.kernels.compiling import array, compiled, kernel, take
from engine.network.kernels.multiplying import (
    FLOATS,
    INTS,
    LANES,
    LINE_BYTES,
    SHORTS,
    Sums,
    Tile,
    add_products,
    for_rows,
    has_matrix_products,
    has_pair_products,
    like,
    new_sums,
    same,
)
from engine.network.kernels.threads import arguments, team_functions


@arguments
class LinearArguments(ctypes.Structure):
    """Addresses and numbers."""

    taken: int
    x: int  #: [rows, inputs]
    weights: int  #: of `arranged`
    y: int  #: [rows, outputs], written
    num_rows: int
    num_inputs: int
    num_outputs: int
    bias: int  #: of `arranged_bias`; 0 without
    held: int  #: [rows, outputs], added; 0 without; may be y


_LAYOUT: Final = np.dtype(LinearArguments)
_TILE: Final = Tile(3)
OUTPUTS: Final = _TILE.num_outputs
#: Groups of rows that prefetch the next block, each its share of the lines.
_NUM_PREFETCHING: Final = _TILE.num_registers
#: Rows that a group has at least where there are `_NUM_PREFETCHING` groups: 17 rows make 5, 6 and 6.
_LEAST_PREFETCHING_ROWS: Final = 5
#: Rows of an item, at most: their inputs stay in the L2 cache while the weights pass.
MOST_ROWS: Final = 256
#: Rows of an item, at least, where threads share the rows too.
LEAST_ROWS: Final = 32


def most_rows() -> int | None:
    """Tokens up to which this is faster than oneDNN; None: it always is.

    Without products of pairs each product is an instruction. With AMX, which was not measured, oneDNN has many more
    tokens' products in an instruction.
    """
    if not has_pair_products():
        return 4
    return 32 if has_matrix_products() else None


def can_arrange(weight: Tensor) -> bool:
    """Whether there is a kernel for [outputs, inputs] of this dtype and size."""
    return weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0


def arranged(weight: Tensor) -> Tensor:
    """[outputs / 48, inputs / 2, 48, 2] of a weight [outputs, inputs]; outputs that are lacking are zeros."""
    num_outputs, num_inputs = weight.shape
    lacking = -num_outputs % OUTPUTS
    whole = torch.nn.functional.pad(weight, (0, 0, 0, lacking)) if lacking else weight
    return whole.view(-1, OUTPUTS, num_inputs // 2, 2).transpose(1, 2).contiguous()


def arranged_bias(bias: Tensor) -> Tensor:
    """A bias [outputs] with zeros for the outputs that are lacking."""
    return torch.nn.functional.pad(bias, (0, -len(bias) % OUTPUTS)).contiguous()


@compiled
def num_parts_of(num_rows: Any, num_blocks: Any, num_threads: Any) -> Any:
    """In how many parts the rows are computed. An item of work is one block of one part.

    Threads share the rows only where there are fewer than two blocks a thread.
    """
    wanted = (2 * num_threads + num_blocks - 1) // num_blocks
    return max(1, (num_rows + MOST_ROWS - 1) // MOST_ROWS, min(wanted, num_rows // LEAST_ROWS))


@compiled
def _copy(source: Any, num_rows: Any, into: Any) -> None:
    for row in range(num_rows):
        from_row, to_row = source[row], into[row]
        for output in range(min(len(from_row), len(to_row))):
            to_row[output] = from_row[output]


@kernel
def linear_kernel(*, by_pairs: bool) -> Callable[[Any], None]:
    """For any number of tokens. `by_pairs`: on processors where `has_pair_products` only."""
    compute = _linear_tile(_TILE, by_pairs=by_pairs)
    compute_and_prefetch = _linear_tile(_TILE, by_pairs=by_pairs, prefetches=True, least_rows=_LEAST_PREFETCHING_ROWS)
    together = _TILE.num_rows
    _, team, _ = team_functions()

    def linear(address: Any) -> None:
        a = numba.carray(address, (1,), _LAYOUT)[0]
        num_rows, num_inputs, num_outputs = a.num_rows, a.num_inputs, a.num_outputs
        y = array(a.y, (num_rows, num_outputs), np.uint16)
        held = array(a.held, (num_rows, num_outputs), np.uint16)
        # The last block, where outputs are lacking.
        last_y, last_held = np.empty((together, OUTPUTS), np.uint16), np.zeros((together, OUTPUTS), np.uint16)
        num_blocks, block_size = (num_outputs + OUTPUTS - 1) // OUTPUTS, OUTPUTS * num_inputs * 2
        num_parts = num_parts_of(num_rows, num_blocks, team())
        item = take(address)
        while item < num_parts * num_blocks:
            next_item = take(address)
            part = item // num_blocks
            block, next_block = item - part * num_blocks, next_item % num_blocks
            begin = num_rows * part // num_parts
            num = num_rows * (part + 1) // num_parts - begin
            num_groups = (num + together - 1) // together
            weights, first = a.weights + block * block_size, block * OUTPUTS
            bias, is_whole = a.bias + first * 2 if a.bias else 0, first + OUTPUTS <= num_outputs
            for group in range(num_groups):
                row, end = begin + num * group // num_groups, begin + num * (group + 1) // num_groups
                x, place, stride = a.x + row * num_inputs * 2, (row * num_outputs + first) * 2, num_outputs
                into, added = a.y + place, a.held + place if a.held else 0
                if not is_whole:
                    into, stride = np.int64(last_y.ctypes.data), OUTPUTS
                    if added:
                        _copy(held[row:, first:], end - row, last_held)
                        added = np.int64(last_held.ctypes.data)
                if num_groups >= _NUM_PREFETCHING and group < _NUM_PREFETCHING:
                    ahead = a.weights + next_block * block_size + group * LINE_BYTES
                    compute_and_prefetch(weights, x, num_inputs, end - row, into, stride, bias, added, ahead)
                else:
                    compute(weights, x, num_inputs, end - row, into, stride, bias, added, 0)
                if not is_whole:
                    _copy(last_y, end - row, y[row:, first:])
            item = next_item

    return linear


@functools.cache
def _linear_tile(tile: Tile, *, by_pairs: bool, prefetches: bool = False, least_rows: int = 1) -> Any:
    """`compute(weights, inputs, num_inputs, num_rows, y, stride, bias, held, ahead)` for kernels.

    All but the numbers of inputs and rows, and `stride`, are addresses of bfloat16. weights, inputs: as
    `multiplying.multiplication` has them. y: rows of tile.num_outputs, `stride` numbers apart, written. bias:
    [tile.num_outputs]; held: rows as of y. Both are added; 0 is none. num_rows: least_rows to tile.num_rows.

    `prefetches`: beside the products, one cache line out of each `tile.num_registers` is prefetched from `ahead` on. So
    that many calls, 64 bytes apart, prefetch a whole block of weights.
    """

    def compute(
        typing_context: Any,
        weights: Any,
        inputs: Any,
        num_inputs: Any,
        num_rows: Any,
        y: Any,
        stride: Any,
        bias: Any,
        held: Any,
        ahead: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            weights, inputs, num_inputs, num_rows, y, stride, bias, held, ahead = arguments

            def compute_rows(rows: int) -> None:
                sums = new_sums(builder, tile, rows)
                with _if_given(builder, bias):
                    _add(builder, sums, bias, like(stride, 0))  # the same for all rows
                with _if_given(builder, held):
                    _add(builder, sums, held, stride)
                prefetched = ahead if prefetches else None
                num_pairs = builder.sdiv(num_inputs, like(num_inputs, 2))
                add_products(
                    builder,
                    sums,
                    tile,
                    weights,
                    inputs,
                    num_pairs,
                    num_pairs,
                    by_pairs=by_pairs,
                    num_outputs=tile.num_outputs,
                    ahead=prefetched,
                )
                _write(builder, sums, y, stride)

            for_rows(builder, num_rows, range(least_rows, tile.num_rows + 1), compute_rows)
            return context.get_dummy_value()

        return types.void(weights, inputs, num_inputs, num_rows, y, stride, bias, held, ahead), generate

    return intrinsic(compute)


def _if_given(builder: Any, address: Any) -> Any:
    return builder.if_then(builder.icmp_signed("!=", address, like(address, 0)))


def _add(builder: Any, sums: Sums, added: Any, stride: Any) -> None:
    for place, total in sums.items():
        floats = _floats_at(builder, added, _at(builder, place, stride))
        builder.store(builder.fadd(builder.load(total), floats), total)


def _write(builder: Any, sums: Sums, y: Any, stride: Any) -> None:
    """Rounded to the nearest, ties to even, as `numbers.NUMBERS` rounds."""
    for place, total in sums.items():
        bits = builder.bitcast(builder.load(total), INTS)
        is_odd = builder.and_(builder.lshr(bits, same(INTS, 16)), same(INTS, 1))
        up = builder.add(builder.add(bits, same(INTS, 0x7FFF)), is_odd)
        shorts = builder.trunc(builder.lshr(up, same(INTS, 16)), SHORTS)
        builder.store(shorts, _shorts(builder, y, _at(builder, place, stride))).align = 2


def _floats_at(builder: Any, address: Any, at: Any) -> Any:
    loaded = builder.load(_shorts(builder, address, at))
    loaded.align = 2
    return builder.bitcast(builder.shl(builder.zext(loaded, INTS), same(INTS, 16)), FLOATS)


def _shorts(builder: Any, address: Any, at: Any) -> Any:
    """Where 16 bfloat16 lie from number `at` on."""
    return builder.inttoptr(builder.add(address, builder.mul(at, like(at, 2))), SHORTS.as_pointer())


def _at(builder: Any, place: tuple[int, int], stride: Any) -> Any:
    row, register = place
    return builder.add(builder.mul(stride, like(stride, row)), like(stride, register * LANES))
