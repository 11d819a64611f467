"""A tile of a linear layer as LLVM's instructions: its sums stay in registers until they are rounded to bfloat16.

A loop of numba's that adds and rounds the sums of a tile takes a third of the time of their products.
"""

from __future__ import annotations

import functools
from typing import Any

from numba.core import types
from numba.extending import intrinsic

from worker.decoding.network.kernels.multiplying import Sums, Tile, add_products, for_rows, new_sums
from worker.decoding.network.kernels.vectors import FLOATS, INTS, LANES, SHORTS, like, same


@functools.cache
def linear_tile(tile: Tile, *, by_pairs: bool, prefetches: bool = False, least_rows: int = 1) -> Any:
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
                    _add_bias(builder, sums, bias)
                with _if_given(builder, held):
                    _add_held(builder, sums, held, stride)
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


def _add_bias(builder: Any, sums: Sums, bias: Any) -> None:
    by_register = {register: _floats_at(builder, bias, like(bias, register * LANES)) for _, register in sums}
    for (_, register), total in sums.items():
        builder.store(builder.fadd(builder.load(total), by_register[register]), total)


def _add_held(builder: Any, sums: Sums, held: Any, stride: Any) -> None:
    for place, total in sums.items():
        builder.store(builder.fadd(builder.load(total), _floats_at(builder, held, _at(builder, place, stride))), total)


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
