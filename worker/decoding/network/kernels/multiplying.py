"""Products of bfloat16 weights with a few tokens' inputs as LLVM's instructions: numba cannot hold arrays in registers.

One register holds two weights, of an even input and the odd one behind it, of each of 16 outputs. Where the processor
multiplies pairs of bfloat16 (AVX512-BF16: products and sums in float32), it is used as it lies. Elsewhere the even
weights are its lower halves shifted up and the odd ones its upper halves as they are, a float32 each: twice the
instructions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numba
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba.core import cgutils, types
from numba.extending import intrinsic

_LANES: Final = 16
_HELD: Final = 24  #: registers of sums; there are 32, and weights need some


@dataclass(frozen=True, slots=True)
class Tile:
    """What one multiplication computes together."""

    num_registers: int  #: of outputs side by side

    @property
    def num_outputs(self) -> int:
        """Outputs side by side."""
        return self.num_registers * _LANES

    @property
    def num_rows(self) -> int:
        """Rows, at most, whose sums are held in registers together."""
        return min(8, _HELD // self.num_registers)


class _BFloat(ir.Type):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's bfloat16, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_FLOAT: Final = ir.FloatType()
_FLOATS: Final = ir.VectorType(_FLOAT, _LANES)
_INT: Final = ir.IntType(32)
_INTS: Final = ir.VectorType(_INT, _LANES)
_PAIRS: Final = ir.VectorType(_BFloat(), 2 * _LANES)
_DOT: Final = "llvm.x86.avx512bf16.dpbf16ps.512"
_DOT_TYPE: Final = ir.FunctionType(_FLOATS, [_FLOATS, _PAIRS, _PAIRS])
#: Sums may be reordered, and a product and a sum may be one instruction.
_FUSED: Final = ("contract", "reassoc")


@functools.cache
def has_pair_products() -> bool:
    """Whether numba compiles for a processor that multiplies pairs of bfloat16; not where a user says for which one."""
    config: Any = numba.config
    is_told = config.CPU_NAME is not None or config.CPU_FEATURES is not None or not config.ENABLE_AVX
    return not is_told and bool(get_host_cpu_features().get("avx512bf16"))


@functools.cache
def multiplication(tile: Tile, *, by_pairs: bool) -> Any:
    """`multiply(weights, inputs, num_inputs, num_rows, sums, stride)` for kernels.

    weights, inputs and sums are addresses. weights: [inputs / 2, tile.num_outputs, 2] bfloat16; inputs: [rows, inputs]
    bfloat16; sums: rows of tile.num_outputs float32, `stride` float32 apart, written; rows: 1 to tile.num_rows. A row's
    sums are added up in the same order whatever the number of rows.
    """
    add_products = _by_pairs if by_pairs else _one_by_one

    def multiply(
        typing_context: Any, weights: Any, inputs: Any, num_inputs: Any, num_rows: Any, sums: Any, stride: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            weights, inputs, num_inputs, num_rows, sums, stride = arguments
            weights = builder.inttoptr(weights, _INTS.as_pointer())
            inputs = builder.inttoptr(inputs, _INT.as_pointer())
            sums = builder.inttoptr(sums, _FLOAT.as_pointer())
            num_pairs = builder.sdiv(num_inputs, _like(num_inputs, 2))
            end = builder.append_basic_block("end")
            sizes = builder.switch(num_rows, end)
            for rows in range(1, tile.num_rows + 1):
                block = builder.append_basic_block(f"rows{rows}")
                sizes.add_case(_like(num_rows, rows), block)
                builder.position_at_end(block)
                held = _multiply(builder, weights, inputs, num_pairs, (rows, tile.num_registers), add_products)
                _write(builder, held, sums, stride)
                builder.branch(end)
            builder.position_at_end(end)
            return context.get_dummy_value()

        return types.void(weights, inputs, num_inputs, num_rows, sums, stride), generate

    return intrinsic(multiply)


def _multiply(
    builder: Any, weights: Any, inputs: Any, num_pairs: Any, shape: tuple[int, int], add_products: Callable[..., None]
) -> dict[tuple[int, int], Any]:
    num_rows, num_registers = shape
    places = [(row, register) for row in range(num_rows) for register in range(num_registers)]
    held = {place: cgutils.alloca_once(builder, _FLOATS) for place in places}
    for place in places:
        builder.store(_same(_FLOATS, 0.0), held[place])
    with cgutils.for_range(builder, num_pairs) as loop:
        at = builder.mul(loop.index, _like(loop.index, num_registers))
        pairs = [_load(builder, weights, _plus(builder, at, register)) for register in range(num_registers)]
        values = [
            _load(builder, inputs, builder.add(builder.mul(num_pairs, _like(num_pairs, row)), loop.index))
            for row in range(num_rows)
        ]
        add_products(builder, pairs, values, held)
    return held


def _write(builder: Any, held: dict[tuple[int, int], Any], sums: Any, stride: Any) -> None:
    for (row, register), total in held.items():
        at = builder.add(builder.mul(stride, _like(stride, row)), _like(stride, register * _LANES))
        into = builder.bitcast(builder.gep(sums, [at]), _FLOATS.as_pointer())
        stored = builder.store(builder.load(total), into)
        stored.align = 4


def _by_pairs(builder: Any, pairs: list[Any], values: list[Any], held: dict[tuple[int, int], Any]) -> None:
    dot = builder.module.declare_intrinsic(_DOT, (), _DOT_TYPE)
    weights = [builder.bitcast(both, _PAIRS) for both in pairs]
    for row, value in enumerate(values):
        inputs = builder.bitcast(_spread(builder, value), _PAIRS)
        for register, weight in enumerate(weights):
            place = held[row, register]
            builder.store(builder.call(dot, [builder.load(place), weight, inputs]), place)


def _one_by_one(builder: Any, pairs: list[Any], values: list[Any], held: dict[tuple[int, int], Any]) -> None:
    weights = [_floats(builder, both) for both in pairs]
    for row, value in enumerate(values):
        inputs = _floats(builder, _spread(builder, value))
        for register, both in enumerate(weights):
            place = held[row, register]
            for weight, one in zip(both, inputs, strict=True):
                product = builder.fmul(weight, one, flags=_FUSED)
                builder.store(builder.fadd(builder.load(place), product, flags=_FUSED), place)


def _floats(builder: Any, pairs: Any) -> tuple[Any, Any]:
    """The even and the odd ones of a register's bfloat16, which are the upper halves of float32."""
    even = builder.shl(pairs, _same(_INTS, 16))
    odd = builder.and_(pairs, _same(_INTS, 0xFFFF0000))
    return builder.bitcast(even, _FLOATS), builder.bitcast(odd, _FLOATS)


def _load(builder: Any, address: Any, place: Any) -> Any:
    loaded = builder.load(builder.gep(address, [place]))
    loaded.align = 4
    return loaded


def _spread(builder: Any, value: Any) -> Any:
    """An integer in all lanes."""
    nothing = ir.Constant(_INTS, ir.Undefined)
    one = builder.insert_element(nothing, value, ir.Constant(_INT, 0))
    return builder.shuffle_vector(one, nothing, _same(_INTS, 0))


def _same(vector: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(vector, [ir.Constant(vector.element, value)] * _LANES)


def _like(number: Any, value: int) -> ir.Constant:
    return ir.Constant(number.type, value)


def _plus(builder: Any, number: Any, value: int) -> Any:
    return builder.add(number, _like(number, value))
