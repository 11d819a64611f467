"""How kernels read and write the numbers of a dtype. They compute in float32.

bfloat16 is the upper half of a float32, which neither numba nor numpy knows: it is read by a shift, and rounded to the
nearest, ties to even, when written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from engine.network.kernels.compiling import compiled, inlined


@dataclass(frozen=True, slots=True)
class Numbers:
    """A dtype inside kernels: functions for numba to compile in."""

    dtype: Any  #: numpy's, as it lies in memory
    load: Callable[[Any], Any]
    store: Callable[[Any], Any]


@inlined
def _same(x: Any) -> Any:
    return x


@inlined
def _from_bfloat16(x: Any) -> Any:
    return np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)


@inlined
def to_bfloat16(x: Any) -> Any:
    """The bits of the nearest one."""
    bits = np.float32(x).view(np.uint32)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@inlined
def exp(x: Any) -> Any:
    """e^x within 2e-7 of itself, in operations that vector units have; 0 below -87.

    2^n times a polynomial of degree 6 on [-1/2, 1/2] (the coefficients of Cephes, S. Moshier, exp2f.c).
    """
    low = x < np.float32(-87.0)
    t = min(max(x, np.float32(-87.0)), np.float32(88.0)) * np.float32(1.4426950408889634)
    n = np.floor(t + np.float32(0.5))
    f = t - n
    p = np.float32(1.535336188319500e-4)
    p = p * f + np.float32(1.339887440266574e-3)
    p = p * f + np.float32(9.618437357674640e-3)
    p = p * f + np.float32(5.550332471162809e-2)
    p = p * f + np.float32(2.402264791363012e-1)
    p = p * f + np.float32(6.931472028550421e-1)
    p = p * f + np.float32(1.0)
    power = np.int32(np.int32(n + np.float32(127.0)) << np.int32(23)).view(np.float32)
    return np.float32(0.0) if low else p * power


@compiled
def largest(x: Any) -> Any:
    """The largest number of one or more, compared as integers: LLVM vectorises their maximum, not that of floats."""
    bits = x.view(np.int32)
    most = np.int32(-(2**31))
    for i in range(len(bits)):
        # The bits of a negative float grow as it falls: they are turned around. Conversions keep it at 32 bits a lane.
        turned = np.int32(bits[i] ^ np.int32((bits[i] >> np.int32(31)) & np.int32(0x7FFFFFFF)))
        if turned > most:
            most = turned
    return np.int32(most ^ np.int32((most >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32)


NUMBERS: Final = {
    torch.bfloat16: Numbers(np.uint16, _from_bfloat16, to_bfloat16),
    torch.float32: Numbers(np.float32, _same, _same),
}
