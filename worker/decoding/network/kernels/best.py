"""The largest of each row of bfloat16 numbers, and whether it is a finite one of comparable numbers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from enum import IntEnum
from typing import Any, ClassVar, Final

import numba
import numpy as np

from worker.decoding.network.kernels.compiling import array, compiled, kernel, take
from worker.decoding.network.kernels.threads import argument_fields


class At(IntEnum):
    """Where the arguments lie."""

    TAKEN = 0
    X = 1  #: [rows, size]
    NUM_ROWS = 2
    SIZE = 3
    FOUND = 4  #: int64 [rows, 2], written: the first place of the largest number, and 1 where that is finite, no NaN


class Arguments(ctypes.Structure):
    """The arguments by name, in lower case."""

    _fields_: ClassVar = argument_fields(At)


_NUM_ARGUMENTS: Final = len(At)
#: Numbers whose largest is found at a time; it is looked for in one such block only.
_BLOCK: Final = 2048
_LEAST: Final = np.int16(-(2**15))
#: The bits of an infinity. Those of NaN are larger, its sign apart.
_INFINITE: Final = np.int16(0x7F80)
#: Minus infinity, ordered.
_LOWEST: Final = np.int16(-0x7F81)
_MAGNITUDE: Final = np.int16(0x7FFF)
_SIGN_SHIFT: Final = np.int16(15)


@compiled
def _ordered(bits: Any) -> Any:
    """An integer that is larger where the number is."""
    return np.int16(bits ^ np.int16(np.int16(bits >> _SIGN_SHIFT) & _MAGNITUDE))


@compiled
def _largest(x: Any) -> Any:
    """The largest number, ordered, and the largest bits without a sign."""
    most, magnitude = _LEAST, np.int16(0)
    for i in range(len(x)):
        most = max(most, _ordered(x[i]))
        magnitude = max(magnitude, np.int16(x[i] & _MAGNITUDE))
    return most, magnitude


@kernel
def best_kernel() -> Callable[[Any], None]:
    """Of each row."""

    def best(address: Any) -> None:
        a = numba.carray(address, (_NUM_ARGUMENTS,), np.int64)
        num_rows, size = a[At.NUM_ROWS], a[At.SIZE]
        x = array(a[At.X], (num_rows, size), np.int16)
        found = array(a[At.FOUND], (num_rows, 2), np.int64)
        row = take(a.ctypes.data)
        while row < num_rows:
            numbers = x[row]
            most, begin, has_nan = _LEAST, 0, False
            for block in range(0, size, _BLOCK):
                largest, magnitude = _largest(numbers[block : min(block + _BLOCK, size)])
                has_nan = has_nan or magnitude > _INFINITE
                if largest > most:
                    most, begin = largest, block
            place = begin
            while place < size - 1 and _ordered(numbers[place]) != most:
                place += 1
            found[row, 0], found[row, 1] = place, not has_nan and _LOWEST < most < _INFINITE
            row = take(a.ctypes.data)

    return best
