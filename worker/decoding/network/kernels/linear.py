"""y = x W' + b in bfloat16: few tokens at the speed of the memory, many at the speed of the processor.

A thread takes one block of 48 outputs after the other. It multiplies its weights with groups of at most eight tokens.
With one group the memory sets the pace, and the processor prefetches by itself. With three groups or more, products
take longer than reading, so the first three groups prefetch the thread's next block beside their products. With one
or two groups that costs more than it saves (docs/log.md).

A token's sums are added up in one order: they are bit for bit the same alone and among others.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from enum import IntEnum
from typing import Any, ClassVar, Final

import numba
import numpy as np
import torch
from torch import Tensor

from worker.decoding.network.kernels.compiling import array, compiled, kernel, take
from worker.decoding.network.kernels.linear_tile import linear_tile
from worker.decoding.network.kernels.multiplying import Tile, has_matrix_products, has_pair_products
from worker.decoding.network.kernels.threads import argument_fields, team_functions
from worker.decoding.network.kernels.vectors import LINE_BYTES


class At(IntEnum):
    """Where the arguments lie."""

    TAKEN = 0
    X = 1  #: [rows, inputs]
    WEIGHTS = 2  #: of `arranged`
    Y = 3  #: [rows, outputs], written
    NUM_ROWS = 4
    NUM_INPUTS = 5
    NUM_OUTPUTS = 6
    BIAS = 7  #: of `arranged_bias`; 0 without
    HELD = 8  #: [rows, outputs], added; 0 without; may be Y


class Arguments(ctypes.Structure):
    """The arguments by name, in lower case."""

    _fields_: ClassVar = argument_fields(At)


NUM_ARGUMENTS: Final = len(At)
_TILE: Final = Tile(3)
OUTPUTS: Final = _TILE.num_outputs
#: Groups of rows that prefetch the next block, each its share of the lines.
_NUM_PREFETCHING: Final = _TILE.num_registers
#: Rows that a group has at least where there are `_NUM_PREFETCHING` groups: 17 rows make 5, 6 and 6.
_LEAST_PREFETCHING_ROWS: Final = 5
#: Rows of an item, at most: their inputs stay in the L2 cache while the weights pass.
MOST_ROWS: Final = 256
#: Rows of an item, at least, where threads share the rows too.
LEAST_ROWS: Final = 32


def most_rows() -> int | None:
    """Tokens up to which this is faster than oneDNN (docs/log.md); None: it always is.

    Without products of pairs each product is an instruction. With AMX, which was not measured, oneDNN has many more
    tokens' products in an instruction.
    """
    if not has_pair_products():
        return 4
    return 32 if has_matrix_products() else None


def can_arrange(weight: Tensor) -> bool:
    """Whether there is a kernel for [outputs, inputs] of this dtype and size."""
    return weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0


def arranged(weight: Tensor) -> Tensor:
    """[outputs / 48, inputs / 2, 48, 2] of a weight [outputs, inputs]; outputs that are lacking are zeros."""
    num_outputs, num_inputs = weight.shape
    lacking = -num_outputs % OUTPUTS
    whole = torch.nn.functional.pad(weight, (0, 0, 0, lacking)) if lacking else weight
    return whole.view(-1, OUTPUTS, num_inputs // 2, 2).transpose(1, 2).contiguous()


def arranged_bias(bias: Tensor) -> Tensor:
    """A bias [outputs] with zeros for the outputs that are lacking."""
    return torch.nn.functional.pad(bias, (0, -len(bias) % OUTPUTS)).contiguous()


@compiled
def num_parts_of(num_rows: Any, num_blocks: Any, num_threads: Any) -> Any:
    """In how many parts the rows are computed. An item of work is one block of one part.

    Threads share the rows only where there are fewer than two blocks a thread.
    """
    wanted = (2 * num_threads + num_blocks - 1) // num_blocks
    return max(1, (num_rows + MOST_ROWS - 1) // MOST_ROWS, min(wanted, num_rows // LEAST_ROWS))


@compiled
def _copy(source: Any, num_rows: Any, into: Any) -> None:
    for row in range(num_rows):
        from_row, to_row = source[row], into[row]
        for output in range(min(len(from_row), len(to_row))):
            to_row[output] = from_row[output]


@kernel
def linear_kernel(*, by_pairs: bool) -> Callable[[Any], None]:
    """For any number of tokens. `by_pairs`: on processors where `has_pair_products` only."""
    compute = linear_tile(_TILE, by_pairs=by_pairs)
    compute_and_prefetch = linear_tile(_TILE, by_pairs=by_pairs, prefetches=True, least_rows=_LEAST_PREFETCHING_ROWS)
    together = _TILE.num_rows
    _, team, _ = team_functions()

    def linear(address: Any) -> None:
        a = numba.carray(address, (NUM_ARGUMENTS,), np.int64)
        num_rows, num_inputs, num_outputs = a[At.NUM_ROWS], a[At.NUM_INPUTS], a[At.NUM_OUTPUTS]
        y = array(a[At.Y], (num_rows, num_outputs), np.uint16)
        held = array(a[At.HELD], (num_rows, num_outputs), np.uint16)
        # Of the last block, where outputs are lacking.
        last_y, last_held = np.empty((together, OUTPUTS), np.uint16), np.zeros((together, OUTPUTS), np.uint16)
        num_blocks, block_size = (num_outputs + OUTPUTS - 1) // OUTPUTS, OUTPUTS * num_inputs * 2
        num_parts = num_parts_of(num_rows, num_blocks, team())
        item = take(a.ctypes.data)
        while item < num_parts * num_blocks:
            next_item = take(a.ctypes.data)
            part = item // num_blocks
            block, next_block = item - part * num_blocks, next_item % num_blocks
            begin = num_rows * part // num_parts
            num = num_rows * (part + 1) // num_parts - begin
            num_groups = (num + together - 1) // together
            weights, first = a[At.WEIGHTS] + block * block_size, block * OUTPUTS
            bias, is_whole = a[At.BIAS] + first * 2 if a[At.BIAS] else 0, first + OUTPUTS <= num_outputs
            for group in range(num_groups):
                row, end = begin + num * group // num_groups, begin + num * (group + 1) // num_groups
                x, place, stride = a[At.X] + row * num_inputs * 2, (row * num_outputs + first) * 2, num_outputs
                into, added = a[At.Y] + place, a[At.HELD] + place if a[At.HELD] else 0
                if not is_whole:
                    into, stride = np.int64(last_y.ctypes.data), OUTPUTS
                    if added:
                        _copy(held[row:, first:], end - row, last_held)
                        added = np.int64(last_held.ctypes.data)
                if num_groups >= _NUM_PREFETCHING and group < _NUM_PREFETCHING:
                    ahead = a[At.WEIGHTS] + next_block * block_size + group * LINE_BYTES
                    compute_and_prefetch(weights, x, num_inputs, end - row, into, stride, bias, added, ahead)
                else:
                    compute(weights, x, num_inputs, end - row, into, stride, bias, added, 0)
                if not is_whole:
                    _copy(last_y, end - row, y[row:, first:])
            item = next_item

    return linear
