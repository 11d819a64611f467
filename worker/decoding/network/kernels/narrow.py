"""y = x W' + b for one to four tokens in bfloat16, as fast as the weights can be read.

oneDNN reads 17 GB/s of weights for one token where this machine's memory gives 43, and gets faster up to eight tokens
(docs/log.md). Here each thread streams through its part of the weights once: 64 outputs at a time, of each the next two
inputs side by side, so that one register holds two weights of 16 outputs. The even one is its lower half shifted up,
the odd one its upper half as it is: a float32 each. The products with every token's inputs stay in registers.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from enum import IntEnum
from typing import Any, ClassVar, Final

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from torch import Tensor

from worker.decoding.network.kernels.compiling import array, kernel
from worker.decoding.network.kernels.numbers import NUMBERS
from worker.decoding.network.kernels.threads import Kernel, argument_fields, thread_functions

MOST_ROWS: Final = 4  #: tokens; from five on oneDNN is as fast
_LANES: Final = 16
_REGISTERS: Final = 4  #: of outputs side by side
OUTPUTS: Final = _LANES * _REGISTERS

_FLOAT: Final = ir.FloatType()
_FLOATS: Final = ir.VectorType(_FLOAT, _LANES)
_INT: Final = ir.IntType(32)
_INTS: Final = ir.VectorType(_INT, _LANES)
#: Sums may be reordered, and a product and a sum may be one instruction.
_FUSED: Final = ("contract", "reassoc")


class At(IntEnum):
    """Where the arguments lie."""

    X = 0  #: [rows, inputs]
    WEIGHTS = 1  #: of `arranged`
    Y = 2  #: [rows, outputs], written
    NUM_INPUTS = 3
    NUM_OUTPUTS = 4
    BIAS = 5  #: [outputs]; 0 without
    HELD = 6  #: [rows, outputs], added; 0 without


class Arguments(ctypes.Structure):
    """The arguments by name, in lower case."""

    _fields_: ClassVar = argument_fields(At)


NUM_ARGUMENTS: Final = len(At)


def can_arrange(weight: Tensor) -> bool:
    """Whether there are kernels for [outputs, inputs] of this dtype and size."""
    return weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0


def arranged(weight: Tensor) -> Tensor:
    """[outputs / 64, inputs / 2, 64, 2] of a weight [outputs, inputs]; outputs that are lacking are zeros."""
    num_outputs, num_inputs = weight.shape
    lacking = -num_outputs % OUTPUTS
    whole = torch.nn.functional.pad(weight, (0, 0, 0, lacking)) if lacking else weight
    return whole.view(-1, OUTPUTS, num_inputs // 2, 2).transpose(1, 2).contiguous()


@functools.cache
def narrow_kernel(num_rows: int) -> Kernel:
    """For that many tokens, 1 to `MOST_ROWS`."""
    numbers = NUMBERS[torch.bfloat16]
    raw, load, store = numbers.dtype, numbers.load, numbers.store
    multiply = intrinsic(_multiplication(num_rows))
    thread, team = thread_functions()

    @kernel
    def narrow(address: Any) -> None:
        a = numba.carray(address, (NUM_ARGUMENTS,), np.int64)
        num_inputs, num_outputs = a[At.NUM_INPUTS], a[At.NUM_OUTPUTS]
        x = array(a[At.X], (num_rows * num_inputs,), raw)
        y = array(a[At.Y], (num_rows, num_outputs), raw)
        bias = array(a[At.BIAS], (num_outputs,), raw)
        held = array(a[At.HELD], (num_rows, num_outputs), raw)
        inputs = np.empty(num_rows * num_inputs, np.float32)
        for i in range(num_rows * num_inputs):
            inputs[i] = load(x[i])
        sums = np.empty(num_rows * OUTPUTS, np.float32)
        num_blocks = (num_outputs + OUTPUTS - 1) // OUTPUTS
        for block in range(num_blocks * thread() // team(), num_blocks * (thread() + 1) // team()):
            weights = a[At.WEIGHTS] + block * OUTPUTS * num_inputs * 2
            multiply(weights, inputs.ctypes.data, num_inputs, sums.ctypes.data)
            first = block * OUTPUTS
            for row in range(num_rows):
                for output in range(min(OUTPUTS, num_outputs - first)):
                    total = sums[row * OUTPUTS + output]
                    if a[At.BIAS]:
                        total += load(bias[first + output])
                    if a[At.HELD]:
                        total += load(held[row, first + output])
                    y[row, first + output] = store(total)

    return narrow


def _multiplication(num_rows: int) -> Callable[..., Any]:
    """`multiply(weights, inputs, num_inputs, sums)` as LLVM's instructions: numba cannot hold an array in registers."""

    def typed(typing_context: Any, weights: Any, inputs: Any, num_inputs: Any, sums: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            weights, inputs, num_inputs, sums = arguments
            weights = builder.inttoptr(weights, _INTS.as_pointer())
            inputs = builder.inttoptr(inputs, _FLOAT.as_pointer())
            sums = builder.inttoptr(sums, _FLOATS.as_pointer())
            places = [(row, register) for row in range(num_rows) for register in range(_REGISTERS)]
            held = {place: cgutils.alloca_once_value(builder, _same(_FLOATS, 0.0)) for place in places}
            with cgutils.for_range(builder, builder.sdiv(num_inputs, _like(num_inputs, 2))) as loop:
                pairs = [_pair(builder, weights, loop.index, register) for register in range(_REGISTERS)]
                for row in range(num_rows):
                    first = builder.add(builder.mul(num_inputs, _like(num_inputs, row)), _twice(builder, loop.index))
                    for odd in range(2):
                        value = _spread(builder, builder.load(builder.gep(inputs, [_plus(builder, first, odd)])))
                        for register in range(_REGISTERS):
                            product = builder.fmul(pairs[register][odd], value, flags=_FUSED)
                            before = builder.load(held[row, register])
                            builder.store(builder.fadd(before, product, flags=_FUSED), held[row, register])
            for number, place in enumerate(places):
                stored = builder.store(builder.load(held[place]), builder.gep(sums, [_like(num_inputs, number)]))
                stored.align = 4
            return context.get_dummy_value()

        return types.void(weights, inputs, num_inputs, sums), generate

    return typed


def _pair(builder: Any, weights: Any, index: Any, register: int) -> tuple[Any, Any]:
    """The weights of 16 outputs for an even input and the odd one behind it."""
    at = _plus(builder, builder.mul(index, _like(index, _REGISTERS)), register)
    both = builder.load(builder.gep(weights, [at]))
    both.align = 4
    even = builder.shl(both, _same(_INTS, 16))
    odd = builder.and_(both, _same(_INTS, 0xFFFF0000))
    return builder.bitcast(even, _FLOATS), builder.bitcast(odd, _FLOATS)


def _spread(builder: Any, value: Any) -> Any:
    """A float in all lanes."""
    nothing = ir.Constant(_FLOATS, ir.Undefined)
    one = builder.insert_element(nothing, value, ir.Constant(_INT, 0))
    return builder.shuffle_vector(one, nothing, _same(_INTS, 0))


def _same(vector: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(vector, [ir.Constant(vector.element, value)] * _LANES)


def _like(number: Any, value: int) -> ir.Constant:
    return ir.Constant(number.type, value)


def _plus(builder: Any, number: Any, value: int) -> Any:
    return builder.add(number, _like(number, value))


def _twice(builder: Any, number: Any) -> Any:
    return builder.mul(number, _like(number, 2))
