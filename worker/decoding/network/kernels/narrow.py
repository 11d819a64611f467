"""y = x W' + b for a few tokens in bfloat16, as fast as the weights can be read.

oneDNN reads 17 GB/s of weights for one token where this machine's memory gives 43, and gets faster up to eight tokens
(docs/log.md). Here each thread streams through its part of the weights once, 48 outputs at a time, and multiplies them
with up to eight tokens' inputs as it goes; more tokens come in equal groups, whose weights then lie in the cache.

A token's sums are added up in one order: they are bit for bit the same alone and among others.
"""

from __future__ import annotations

import ctypes
import functools
from enum import IntEnum
from typing import Any, ClassVar, Final

import numba
import numpy as np
import torch
from torch import Tensor

from worker.decoding.network.kernels.compiling import array, kernel
from worker.decoding.network.kernels.multiplying import Tile, has_pair_products, multiplication
from worker.decoding.network.kernels.numbers import NUMBERS
from worker.decoding.network.kernels.threads import Kernel, argument_fields, thread_functions


class At(IntEnum):
    """Where the arguments lie."""

    X = 0  #: [rows, inputs]
    WEIGHTS = 1  #: of `arranged`
    Y = 2  #: [rows, outputs], written
    NUM_ROWS = 3
    NUM_INPUTS = 4
    NUM_OUTPUTS = 5
    BIAS = 6  #: [outputs]; 0 without
    HELD = 7  #: [rows, outputs], added; 0 without


class Arguments(ctypes.Structure):
    """The arguments by name, in lower case."""

    _fields_: ClassVar = argument_fields(At)


NUM_ARGUMENTS: Final = len(At)
_TILE: Final = Tile(3)
OUTPUTS: Final = _TILE.num_outputs


def most_rows() -> int:
    """Tokens up to which this is faster than oneDNN (docs/log.md): fewer where each product is an instruction."""
    return 32 if has_pair_products() else 4


def can_arrange(weight: Tensor) -> bool:
    """Whether there is a kernel for [outputs, inputs] of this dtype and size."""
    return weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0


def arranged(weight: Tensor) -> Tensor:
    """[outputs / 48, inputs / 2, 48, 2] of a weight [outputs, inputs]; outputs that are lacking are zeros."""
    num_outputs, num_inputs = weight.shape
    lacking = -num_outputs % OUTPUTS
    whole = torch.nn.functional.pad(weight, (0, 0, 0, lacking)) if lacking else weight
    return whole.view(-1, OUTPUTS, num_inputs // 2, 2).transpose(1, 2).contiguous()


@functools.cache
def narrow_kernel(*, by_pairs: bool) -> Kernel:
    """For any number of tokens. `by_pairs`: on processors where `has_pair_products` only."""
    numbers = NUMBERS[torch.bfloat16]
    raw, load, store = numbers.dtype, numbers.load, numbers.store
    multiply = multiplication(_TILE, by_pairs=by_pairs)
    most_together = _TILE.num_rows
    thread, team = thread_functions()

    @kernel
    def narrow(address: Any) -> None:
        a = numba.carray(address, (NUM_ARGUMENTS,), np.int64)
        num_rows, num_inputs, num_outputs = a[At.NUM_ROWS], a[At.NUM_INPUTS], a[At.NUM_OUTPUTS]
        y = array(a[At.Y], (num_rows, num_outputs), raw)
        bias = array(a[At.BIAS], (num_outputs,), raw)
        held = array(a[At.HELD], (num_rows, num_outputs), raw)
        sums = np.empty(num_rows * OUTPUTS, np.float32)
        num_groups = (num_rows + most_together - 1) // most_together
        num_blocks = (num_outputs + OUTPUTS - 1) // OUTPUTS
        for block in range(num_blocks * thread() // team(), num_blocks * (thread() + 1) // team()):
            weights = a[At.WEIGHTS] + block * OUTPUTS * num_inputs * 2
            for group in range(num_groups):
                row, end = num_rows * group // num_groups, num_rows * (group + 1) // num_groups
                x, into = a[At.X] + row * num_inputs * 2, sums.ctypes.data + row * OUTPUTS * 4
                multiply(weights, x, num_inputs, end - row, into, OUTPUTS)
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
