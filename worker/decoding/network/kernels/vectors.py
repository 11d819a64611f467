"""LLVM's registers of 16 numbers, constants, and the order to prefetch a cache line."""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir

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
