"""RMS norm, gated activation, a choice of rows, and the largest of each row: kernels that take rows one by one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

import numba
import numpy as np
import torch

from engine.network.kernels.compiling import array, compiled, kernel, take
from engine.network.kernels.numbers import NUMBERS, exp
from engine.network.kernels.threads import arguments, team_functions


@arguments
class PointwiseArguments(ctypes.Structure):
    """The arguments of all: addresses and numbers."""

    taken: int
    x: int  #: [rows, size]; of the gate [rows, 2 * size]: gates, then what they let through
    y: int  #: [rows, size], written
    num_rows: int
    size: int
    weight: int  #: [size], of the norm
    epsilon: float  #: of the norm
    held: int  #: [rows, size], of the norm: added to the rounded result; 0 without; may be y
    chosen: int  #: int64 [rows], of the choice: rows of x
    #: int64 [rows, 2], of the best, written: the first place of the largest number, and 1 where that is finite.
    best: int


LAYOUT: Final = np.dtype(PointwiseArguments)
#: Items of work a thread, about: a call of few rows has an item a row.
_ITEMS: Final = 8
#: Numbers of a row that are gated together.
_GATED: Final = 512


@kernel
def norm_kernel(dtype: torch.dtype) -> Callable[[Any], None]:
    """y = x / sqrt(mean(x²) + ε) · weight (Zhang and Sennrich 2019) by rows, + held."""
    numbers = NUMBERS[dtype]
    raw, load, store = numbers.dtype, numbers.load, numbers.store
    _, team, _ = team_functions()

    # Functions of one row: over two dimensions loops are not vectorised.
    @compiled
    def norm_row(x: Any, weight: Any, epsilon: Any, y: Any) -> None:
        squares = np.float32(0)
        for i in range(len(weight)):
            value = load(x[i])
            squares += value * value
        factor = np.float32(1) / np.sqrt(squares / np.float32(len(weight)) + epsilon)
        for i in range(len(weight)):
            y[i] = store(load(x[i]) * factor * load(weight[i]))

    @compiled
    def norm_row_and_add(x: Any, weight: Any, epsilon: Any, held: Any, y: Any) -> None:
        normed = np.empty_like(x)
        norm_row(x, weight, epsilon, normed)
        for i in range(len(weight)):
            y[i] = store(load(held[i]) + load(normed[i]))

    def norm(address: Any) -> None:
        a = numba.carray(address, (1,), LAYOUT)[0]
        num_rows, size, epsilon = a.num_rows, a.size, np.float32(a.epsilon)
        x = array(a.x, (num_rows, size), raw)
        y = array(a.y, (num_rows, size), raw)
        held = array(a.held, (num_rows, size), raw)
        weight = array(a.weight, (size,), raw)
        num_items = min(num_rows, _ITEMS * team())
        item = take(address)
        while item < num_items:
            for row in range(num_rows * item // num_items, num_rows * (item + 1) // num_items):
                if a.held:
                    norm_row_and_add(x[row], weight, epsilon, held[row], y[row])
                else:
                    norm_row(x[row], weight, epsilon, y[row])
            item = take(address)

    return norm


@kernel
def gate_kernel(dtype: torch.dtype, activation: str) -> Callable[[Any], None]:
    """y = activation(gate) · up; SiLU, or GELU in its tanh form, which is x · sigmoid(2 √(2/π) (x + .044715 x³))."""
    numbers = NUMBERS[dtype]
    raw, load, store = numbers.dtype, numbers.load, numbers.store
    is_gelu = activation == "gelu_pytorch_tanh"
    slope, cubic = np.float32(2 * np.sqrt(2 / np.pi)), np.float32(0.044715)
    _, team, _ = team_functions()

    @compiled
    def gate_part(gates: Any, ups: Any, y: Any) -> None:
        for i in range(len(y)):
            gate = load(gates[i])
            inner = slope * (gate + cubic * gate * gate * gate) if is_gelu else gate
            y[i] = store(gate / (np.float32(1) + exp(-inner)) * load(ups[i]))

    def gate(address: Any) -> None:
        a = numba.carray(address, (1,), LAYOUT)[0]
        num_rows, size = a.num_rows, a.size
        x = array(a.x, (num_rows, 2 * size), raw)
        y = array(a.y, (num_rows, size), raw)
        of_row = (size + _GATED - 1) // _GATED
        num_parts = num_rows * of_row
        num_items = min(num_parts, _ITEMS * team())
        item = take(address)
        while item < num_items:
            for part in range(num_parts * item // num_items, num_parts * (item + 1) // num_items):
                row = part // of_row
                begin = (part - row * of_row) * _GATED
                end = min(begin + _GATED, size)
                gate_part(x[row, begin:end], x[row, size + begin : size + end], y[row, begin:end])
            item = take(address)

    return gate


@kernel
def choice_kernel(dtype: torch.dtype) -> Callable[[Any], None]:
    """y[i] = x[chosen[i]]."""
    raw, itemsize = NUMBERS[dtype].dtype, dtype.itemsize

    @compiled
    def copy(x: Any, y: Any) -> None:
        for i in range(len(y)):
            y[i] = x[i]

    def choose(address: Any) -> None:
        a = numba.carray(address, (1,), LAYOUT)[0]
        num_rows, size = a.num_rows, a.size
        chosen = array(a.chosen, (num_rows,), np.int64)
        y = array(a.y, (num_rows, size), raw)
        row = take(address)
        while row < num_rows:
            copy(array(a.x + chosen[row] * size * itemsize, (size,), raw), y[row])
            row = take(address)

    return choose


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
    """The largest of each row of bfloat16 numbers, and whether it is a finite one of comparable numbers."""

    def best(address: Any) -> None:
        a = numba.carray(address, (1,), LAYOUT)[0]
        num_rows, size = a.num_rows, a.size
        x = array(a.x, (num_rows, size), np.int16)
        best_tokens = array(a.best, (num_rows, 2), np.int64)
        row = take(address)
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
            best_tokens[row, 0], best_tokens[row, 1] = place, not has_nan and _LOWEST < most < _INFINITE
            row = take(address)

    return best
