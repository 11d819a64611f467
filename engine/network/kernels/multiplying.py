"""Products of bfloat16 weights with tokens' inputs as LLVM's instructions: numba cannot hold arrays in registers.

One register holds two weights, of an even input and the odd one after it, of each of 16 outputs. Where the processor
multiplies pairs of bfloat16 (AVX512-BF16: products and sums in float32), it is used as it lies. Elsewhere the even
weights are its lower halves shifted up and the odd ones its upper halves as they are, a float32 each: twice the
instructions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import numba
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba.core import cgutils, types
from numba.extending import intrinsic

LANES: Final = 16
LINE_BYTES: Final = 64  #: of a cache line


class _BFloat(ir.Type):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's bfloat16, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


INT: Final = ir.IntType(32)
INTS: Final = ir.VectorType(INT, LANES)
SHORTS: Final = ir.VectorType(ir.IntType(16), LANES)
FLOATS: Final = ir.VectorType(ir.FloatType(), LANES)
PAIRS: Final = ir.VectorType(_BFloat(), 2 * LANES)

_BYTES: Final = ir.IntType(8).as_pointer()
_PREFETCH_TYPE: Final = ir.FunctionType(ir.VoidType(), [_BYTES, INT, INT, INT])
#: To be read, soon and often enough for the L2 cache, data.
_PREFETCH_HOW: Final = (0, 2, 1)


def same(vector: ir.VectorType, value: float) -> ir.Constant:
    """The value in all lanes."""
    return ir.Constant(vector, [ir.Constant(vector.element, value)] * LANES)


def like(number: Any, value: int) -> ir.Constant:
    """The value as an integer of the number's type."""
    return ir.Constant(number.type, value)


def prefetch(builder: Any, address: Any) -> None:
    """Begin to bring the line at an address, an integer, into the L2 cache. No address is wrong."""
    order = builder.module.declare_intrinsic("llvm.prefetch", (_BYTES,), _PREFETCH_TYPE)
    how = [ir.Constant(INT, value) for value in _PREFETCH_HOW]
    builder.call(order, [builder.inttoptr(address, _BYTES), *how])


_HELD: Final = 24  #: registers of sums; there are 32, and weights need some


@dataclass(frozen=True, slots=True)
class Tile:
    """What one multiplication computes together."""

    num_registers: int  #: of outputs side by side

    @property
    def num_outputs(self) -> int:
        """Outputs side by side."""
        return self.num_registers * LANES

    @property
    def num_rows(self) -> int:
        """Rows, at most, whose sums are held in registers together."""
        return min(8, _HELD // self.num_registers)


#: Where the sums of a tile lie, by row and register.
Sums = dict[tuple[int, int], Any]

_DOT: Final = "llvm.x86.avx512bf16.dpbf16ps.512"
_DOT_TYPE: Final = ir.FunctionType(FLOATS, [FLOATS, PAIRS, PAIRS])
#: Sums may be reordered, and a product and a sum may be one instruction.
_FUSED: Final = ("contract", "reassoc")


@functools.cache
def has_pair_products() -> bool:
    """Whether numba compiles for a processor that multiplies pairs of bfloat16; not where a user says for which one."""
    config: Any = numba.config
    is_told = config.CPU_NAME is not None or config.CPU_FEATURES is not None or not config.ENABLE_AVX
    return not is_told and bool(get_host_cpu_features().get("avx512bf16"))


@functools.cache
def has_matrix_products() -> bool:
    """Whether the processor multiplies whole matrices of bfloat16 (AMX), which oneDNN uses and these kernels do not."""
    return bool(get_host_cpu_features().get("amx-bf16"))


@functools.cache
def multiplication(tile: Tile, num_inputs: int, num_outputs: int) -> Any:
    """`multiply(weights, block_bytes, num_blocks, ahead, inputs, num_rows, sums, stride)` for kernels, by pairs.

    weights, inputs and sums are addresses. weights: blocks of `num_inputs` inputs each, `block_bytes` bytes from one to
    the next; of each block the first tile.num_outputs of each row of [num_inputs / 2, num_outputs, 2] bfloat16. inputs:
    [rows, num_blocks * num_inputs] bfloat16; sums: rows of tile.num_outputs float32, `stride` float32 apart, written;
    rows: 1 to tile.num_rows. A row's sums are added up in the same order whatever the number of rows. Beside the
    products of a block the next one is prefetched, beside the last one's what lies `ahead`.
    """

    def multiply(
        typing_context: Any,
        weights: Any,
        block_bytes: Any,
        num_blocks: Any,
        ahead: Any,
        inputs: Any,
        num_rows: Any,
        sums: Any,
        stride: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            weights, block_bytes, num_blocks, ahead, inputs, num_rows, sums, stride = arguments
            sums = builder.inttoptr(sums, ir.FloatType().as_pointer())
            row_pairs = builder.mul(num_blocks, like(num_blocks, num_inputs // 2))

            def compute(rows: int) -> None:
                held = new_sums(builder, tile, rows)
                with cgutils.for_range(builder, num_blocks) as blocks:
                    block = builder.add(weights, builder.mul(blocks.index, block_bytes))
                    is_last = builder.icmp_signed("==", builder.add(blocks.index, like(num_blocks, 1)), num_blocks)
                    add_products(
                        builder,
                        held,
                        tile,
                        block,
                        builder.add(inputs, builder.mul(blocks.index, like(blocks.index, num_inputs * 2))),
                        like(num_blocks, num_inputs // 2),
                        row_pairs,
                        by_pairs=True,
                        num_outputs=num_outputs,
                        ahead=builder.select(is_last, ahead, builder.add(block, block_bytes)),
                        num_ahead=tile.num_registers,
                    )
                _write(builder, held, sums, stride)

            for_rows(builder, num_rows, range(1, tile.num_rows + 1), compute)
            return context.get_dummy_value()

        return types.void(weights, block_bytes, num_blocks, ahead, inputs, num_rows, sums, stride), generate

    return intrinsic(multiply)


def for_rows(builder: Any, num_rows: Any, cases: Iterable[int], compute: Callable[[int], None]) -> None:
    """Code for each number of rows: which registers hold their sums is fixed in the code."""
    end = builder.append_basic_block("end")
    sizes = builder.switch(num_rows, end)
    for rows in cases:
        block = builder.append_basic_block(f"rows{rows}")
        sizes.add_case(like(num_rows, rows), block)
        builder.position_at_end(block)
        compute(rows)
        builder.branch(end)
    builder.position_at_end(end)


def new_sums(builder: Any, tile: Tile, rows: int) -> Sums:
    """Zeros."""
    places = [(row, register) for row in range(rows) for register in range(tile.num_registers)]
    sums = {place: cgutils.alloca_once(builder, FLOATS) for place in places}
    for total in sums.values():
        builder.store(same(FLOATS, 0.0), total)
    return sums


def add_products(
    builder: Any,
    sums: Sums,
    tile: Tile,
    weights: Any,
    inputs: Any,
    num_pairs: Any,
    row_pairs: Any,
    *,
    by_pairs: bool,
    num_outputs: int,
    ahead: Any = None,
    num_ahead: int = 1,
) -> None:
    """Add the products of the first `num_pairs` pairs of inputs of as many rows as `sums` has.

    weights, inputs: addresses, of one block as in `multiplication`. `row_pairs`: pairs from one row of inputs to the
    next.

    `ahead`: an address, from which on as many cache lines as the weights have are prefetched: `num_ahead` out of each
    `tile.num_registers`.
    """
    add, rows = _by_pairs if by_pairs else _one_by_one, len(sums) // tile.num_registers
    weights, inputs = builder.inttoptr(weights, INTS.as_pointer()), builder.inttoptr(inputs, INT.as_pointer())
    with cgutils.for_range(builder, num_pairs) as loop:
        at = builder.mul(loop.index, like(loop.index, num_outputs // LANES))
        if ahead is not None:
            for line in range(num_ahead):
                prefetch(builder, builder.add(ahead, builder.mul(_plus(builder, at, line), like(at, LINE_BYTES))))
        pairs = [_load(builder, weights, _plus(builder, at, register)) for register in range(tile.num_registers)]
        values = [
            _load(builder, inputs, builder.add(builder.mul(row_pairs, like(row_pairs, row)), loop.index))
            for row in range(rows)
        ]
        add(builder, pairs, values, sums)


def _write(builder: Any, held: Sums, sums: Any, stride: Any) -> None:
    for (row, register), total in held.items():
        at = builder.add(builder.mul(stride, like(stride, row)), like(stride, register * LANES))
        into = builder.bitcast(builder.gep(sums, [at]), FLOATS.as_pointer())
        stored = builder.store(builder.load(total), into)
        stored.align = 4


def _by_pairs(builder: Any, pairs: list[Any], values: list[Any], held: Sums) -> None:
    dot = builder.module.declare_intrinsic(_DOT, (), _DOT_TYPE)
    weights = [builder.bitcast(both, PAIRS) for both in pairs]
    for row, value in enumerate(values):
        inputs = builder.bitcast(_spread(builder, value), PAIRS)
        for register, weight in enumerate(weights):
            place = held[row, register]
            builder.store(builder.call(dot, [builder.load(place), weight, inputs]), place)


def _one_by_one(builder: Any, pairs: list[Any], values: list[Any], held: Sums) -> None:
    weights = [_floats(builder, both) for both in pairs]
    for row, value in enumerate(values):
        inputs = _floats(builder, _spread(builder, value))
        for register, both in enumerate(weights):
            place = held[row, register]
            for weight, value_lanes in zip(both, inputs, strict=True):
                product = builder.fmul(weight, value_lanes, flags=_FUSED)
                builder.store(builder.fadd(builder.load(place), product, flags=_FUSED), place)


def _floats(builder: Any, pairs: Any) -> tuple[Any, Any]:
    """The even and the odd ones of a register's bfloat16, which are the upper halves of float32."""
    even = builder.shl(pairs, same(INTS, 16))
    odd = builder.and_(pairs, same(INTS, 0xFFFF0000))
    return builder.bitcast(even, FLOATS), builder.bitcast(odd, FLOATS)


def _load(builder: Any, address: Any, place: Any) -> Any:
    loaded = builder.load(builder.gep(address, [place]))
    loaded.align = 4
    return loaded


def _spread(builder: Any, value: Any) -> Any:
    """An integer in all lanes."""
    nothing = ir.Constant(INTS, ir.Undefined)
    first_lane = builder.insert_element(nothing, value, ir.Constant(INT, 0))
    return builder.shuffle_vector(first_lane, nothing, same(INTS, 0))


def _plus(builder: Any, number: Any, value: int) -> Any:
    return builder.add(number, like(number, value))
