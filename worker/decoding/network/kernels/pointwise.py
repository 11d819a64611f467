"""RMS norm and gated activation, each in one call."""

from __future__ import annotations

import ctypes
import functools
from enum import IntEnum
from typing import Any, ClassVar, Final

import numba
import numpy as np
import torch

from worker.decoding.network.kernels.compiling import array, float_of, kernel
from worker.decoding.network.kernels.numbers import NUMBERS
from worker.decoding.network.kernels.threads import Kernel, argument_fields, thread_functions


class At(IntEnum):
    """Where the arguments of both lie."""

    X = 0  #: [rows, size]; of the gate [rows, 2 * size]: gates, then what they let through
    Y = 1  #: [rows, size], written
    NUM_ROWS = 2
    SIZE = 3
    WEIGHT = 4  #: [size], of the norm
    EPSILON = 5  #: of the norm, the bits of a float64


class Arguments(ctypes.Structure):
    """The arguments by name, in lower case."""

    _fields_: ClassVar = argument_fields(At, At.EPSILON)


NUM_ARGUMENTS: Final = len(At)


@functools.cache
def norm_kernel(dtype: torch.dtype) -> Kernel:
    """y = x / sqrt(mean(x²) + ε) · weight (Zhang and Sennrich 2019), by rows."""
    numbers = NUMBERS[dtype]
    raw, real, load, store = numbers.dtype, numbers.real, numbers.load, numbers.store
    thread, team = thread_functions()

    @kernel
    def norm(address: Any) -> None:
        a = numba.carray(address, (NUM_ARGUMENTS,), np.int64)
        size, epsilon = a[At.SIZE], real(float_of(a[At.EPSILON]))
        x = array(a[At.X], (a[At.NUM_ROWS], size), raw)
        y = array(a[At.Y], (a[At.NUM_ROWS], size), raw)
        weight = array(a[At.WEIGHT], (size,), raw)
        for row in range(thread(), a[At.NUM_ROWS], team()):
            # Views of one row: over two dimensions the loops are not vectorised.
            values, out = x[row], y[row]
            squares = real(0)
            for i in range(size):
                value = load(values[i])
                squares += value * value
            factor = real(1) / np.sqrt(squares / real(size) + epsilon)
            for i in range(size):
                out[i] = store(load(values[i]) * factor * load(weight[i]))

    return norm


@functools.cache
def gate_kernel(dtype: torch.dtype, activation: str) -> Kernel:
    """y = activation(gate) · up; SiLU, or GELU in its tanh form, which is x · sigmoid(2 √(2/π) (x + .044715 x³))."""
    numbers = NUMBERS[dtype]
    raw, real, load, store, exp = numbers.dtype, numbers.real, numbers.load, numbers.store, numbers.exp
    is_gelu = activation == "gelu_pytorch_tanh"
    slope, cubic = real(2 * np.sqrt(2 / np.pi)), real(0.044715)
    thread, team = thread_functions()

    @kernel
    def gate(address: Any) -> None:
        a = numba.carray(address, (NUM_ARGUMENTS,), np.int64)
        num_rows, size = a[At.NUM_ROWS], a[At.SIZE]
        x = array(a[At.X], (num_rows, 2 * size), raw)
        y = array(a[At.Y], (num_rows, size), raw)
        num_threads = team()
        begin, end = size * thread() // num_threads, size * (thread() + 1) // num_threads
        for row in range(num_rows):
            gates, ups, out = x[row, begin:end], x[row, size + begin : size + end], y[row, begin:end]
            for i in range(end - begin):
                gate = load(gates[i])
                inner = slope * (gate + cubic * gate * gate * gate) if is_gelu else gate
                out[i] = store(gate / (real(1) + exp(-inner)) * load(ups[i]))

    return gate
