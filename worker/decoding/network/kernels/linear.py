"""y = x W' + b in bfloat16: few tokens at the speed of the memory, many at the speed of the processor.

Each thread goes through its blocks of 48 outputs. It multiplies a block's weights with groups of at most eight tokens.
With one group the memory sets the pace, and the processor prefetches by itself. With three groups or more, products
take longer than reading, so the first three groups prefetch the next block's weights beside their products. With one
or two groups that costs more than it saves (docs/log.md).

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

from worker.decoding.network.kernels.compiling import array, compiled, kernel
from worker.decoding.network.kernels.linear_tile import linear_tile
from worker.decoding.network.kernels.multiplying import Tile, has_matrix_products, has_pair_products
from worker.decoding.network.kernels.threads import Kernel, argument_fields, thread_functions
from worker.decoding.network.kernels.vectors import LINE_BYTES


class At(IntEnum):
    """Where the arguments lie."""

    X = 0  #: [rows, inputs]
    WEIGHTS = 1  #: of `arranged`
    Y = 2  #: [rows, outputs], written
    NUM_ROWS = 3
    NUM_INPUTS = 4
    NUM_OUTPUTS = 5
    BIAS = 6  #: of `arranged_bias`; 0 without
    HELD = 7  #: [rows, outputs], added; 0 without


class Arguments(ctypes.Structure):
    """The arguments by name, in lower case."""

    _fields_: ClassVar = argument_fields(At)


NUM_ARGUMENTS: Final = len(At)
_TILE: Final = Tile(3)
OUTPUTS: Final = _TILE.num_outputs
#: Groups of rows that prefetch the next block's weights, each its share of the lines.
_NUM_PREFETCHING: Final = _TILE.num_registers
#: Rows that a group has at least where there are `_NUM_PREFETCHING` groups: 17 rows make 5, 6 and 6.
_LEAST_PREFETCHING_ROWS: Final = 5
#: Rows whose inputs stay in the L2 cache while the weights pass.
_MOST_ROWS: Final = 256
#: Rows of a thread, at least, where threads share the rows too.
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
def share_of(num_rows: Any, num_blocks: Any, thread: Any, num_threads: Any) -> Any:
    """A thread's first row, number of rows, first block and number of blocks; it computes each row of each block.

    Threads share the blocks, and the rows only where there are fewer than two blocks a thread.
    """
    wanted = (2 * num_threads + num_blocks - 1) // num_blocks
    num_shares = max(1, min(wanted, num_rows // LEAST_ROWS, num_threads))  # of rows
    num_block_shares = num_threads // num_shares
    block_share = thread // num_shares
    if block_share >= num_block_shares:
        return 0, 0, 0, 0
    share = thread - block_share * num_shares
    row, block = num_rows * share // num_shares, num_blocks * block_share // num_block_shares
    row_end, block_end = (
        num_rows * (share + 1) // num_shares,
        num_blocks * (block_share + 1) // num_block_shares,
    )
    return row, row_end - row, block, block_end - block


@compiled
def _copy(source: Any, num_rows: Any, into: Any) -> None:
    for row in range(num_rows):
        from_row, to_row = source[row], into[row]
        for output in range(min(len(from_row), len(to_row))):
            to_row[output] = from_row[output]


@functools.cache
def linear_kernel(*, by_pairs: bool) -> Kernel:
    """For any number of tokens. `by_pairs`: on processors where `has_pair_products` only."""
    compute = linear_tile(_TILE, by_pairs=by_pairs)
    compute_and_prefetch = linear_tile(_TILE, by_pairs=by_pairs, prefetches=True, least_rows=_LEAST_PREFETCHING_ROWS)
    together = _TILE.num_rows
    thread, team = thread_functions()

    @kernel
    def linear(address: Any) -> None:
        a = numba.carray(address, (NUM_ARGUMENTS,), np.int64)
        num_rows, num_inputs, num_outputs = a[At.NUM_ROWS], a[At.NUM_INPUTS], a[At.NUM_OUTPUTS]
        y = array(a[At.Y], (num_rows, num_outputs), np.uint16)
        held = array(a[At.HELD], (num_rows, num_outputs), np.uint16)
        # Of the last block, where outputs are lacking.
        last_y, last_held = np.empty((together, OUTPUTS), np.uint16), np.zeros((together, OUTPUTS), np.uint16)
        num_blocks, block_size = (num_outputs + OUTPUTS - 1) // OUTPUTS, OUTPUTS * num_inputs * 2
        own_row, num_own_rows, own_block, num_own_blocks = share_of(num_rows, num_blocks, thread(), team())
        num_parts = (num_own_rows + _MOST_ROWS - 1) // _MOST_ROWS
        for item in range(num_parts * num_own_blocks):
            part = item // num_own_blocks
            block = own_block + item - part * num_own_blocks
            begin = own_row + num_own_rows * part // num_parts
            num = own_row + num_own_rows * (part + 1) // num_parts - begin
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
                    ahead = weights + block_size + group * LINE_BYTES
                    compute_and_prefetch(weights, x, num_inputs, end - row, into, stride, bias, added, ahead)
                else:
                    compute(weights, x, num_inputs, end - row, into, stride, bias, added, 0)
                if not is_whole:
                    _copy(last_y, end - row, y[row:, first:])

    return linear
