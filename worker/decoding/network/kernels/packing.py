"""Keys and values of a slot, in bfloat16, laid out as `kernels.multiplying` reads weights: by pairs, many side by side.

Keys are transposed, 16 by 16 pairs in registers. Values of two positions are interleaved. As LLVM's instructions,
because numba makes neither of them from loops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from worker.decoding.network.kernels.compiling import compiled

_LANES: Final = 16
_PAIRS: Final = ir.VectorType(ir.IntType(32), _LANES)
_NUMBERS: Final = ir.VectorType(ir.IntType(16), 2 * _LANES)


@functools.cache
def pack_keys(head_dim: int, block: int) -> Callable[..., None]:
    """`pack(keys, first, end, into)`: blocks `first` to `end`, [head_dim / 2, block] pairs each; two addresses.

    `keys`: [positions, head_dim]. head_dim is a multiple of 32, and a block one of 16.
    """
    half, transpose = head_dim // 2, _transposition(head_dim // 2, block)

    @compiled
    def pack(keys: Any, first: Any, end: Any, into: Any) -> None:
        for group in range(first * block // _LANES, end * block // _LANES):
            place = group * _LANES // block * half * block + group * _LANES % block
            for pair in range(0, half, _LANES):
                transpose(keys + (group * _LANES * half + pair) * 4, into + (place + pair * block) * 4)

    return pack


@functools.cache
def pack_values(head_dim: int, width: int, block: int) -> Callable[..., None]:
    """`pack(values, first, end, num_blocks, into)`: blocks `first` to `end` of head_dim / width parts.

    A part is [num_blocks * block / 2, width, 2]. `values`: [positions, head_dim]; two addresses. `width` divides
    head_dim and is a multiple of 32.
    """
    interleave, num_parts = _interleaving(), head_dim // width

    @compiled
    def pack(values: Any, first: Any, end: Any, num_blocks: Any, into: Any) -> None:
        for part in range(num_parts):
            of_part = into + part * num_blocks * block * width * 2
            for two in range(first * block // 2, end * block // 2):
                source = values + (2 * two * head_dim + part * width) * 2
                for at in range(0, width, 2 * _LANES):
                    target = of_part + (two * width + at) * 4
                    interleave(source + at * 2, source + (head_dim + at) * 2, target)

    return pack


@functools.cache
def _transposition(source_stride: int, target_stride: int) -> Any:
    """`transpose(source, target)`: 16 rows of 16 pairs at an address become 16 columns; strides in pairs."""

    def transpose(typing_context: Any, source: Any, target: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            rows = [_load(builder, arguments[0], row * source_stride * 4, _PAIRS) for row in range(_LANES)]
            # Blocks off the diagonal change places, by halves, quarters, eighths, single pairs.
            for size in (8, 4, 2, 1):
                for upper in (row for row in range(_LANES) if not row & size):
                    a, b = rows[upper], rows[upper + size]
                    left = [lane if not lane & size else _LANES + lane - size for lane in range(_LANES)]
                    right = [lane + size if not lane & size else _LANES + lane for lane in range(_LANES)]
                    rows[upper], rows[upper + size] = _shuffled(builder, a, b, left), _shuffled(builder, a, b, right)
            for row, pairs in enumerate(rows):
                _store(builder, pairs, arguments[1], row * target_stride * 4)
            return context.get_dummy_value()

        return types.void(source, target), generate

    return intrinsic(transpose)


@functools.cache
def _interleaving() -> Any:
    """`interleave(first, second, target)`: 32 numbers at each of two addresses become 32 pairs."""

    def interleave(typing_context: Any, first: Any, second: Any, target: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            a, b = (_load(builder, address, 0, _NUMBERS) for address in arguments[:2])
            for half in range(2):
                places = [half * _LANES + lane // 2 + lane % 2 * 2 * _LANES for lane in range(2 * _LANES)]
                _store(builder, _shuffled(builder, a, b, places), arguments[2], half * _LANES * 4)
            return context.get_dummy_value()

        return types.void(first, second, target), generate

    return intrinsic(interleave)


def _shuffled(builder: Any, a: Any, b: Any, places: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), len(places)), places))


def _load(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    loaded = builder.load(_pointer(builder, address, offset, kind))
    loaded.align = 4
    return loaded


def _store(builder: Any, value: Any, address: Any, offset: int) -> None:
    builder.store(value, _pointer(builder, address, offset, value.type)).align = 4


def _pointer(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    return builder.inttoptr(builder.add(address, ir.Constant(address.type, offset)), kind.as_pointer())
