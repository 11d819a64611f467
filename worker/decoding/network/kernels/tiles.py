"""How tokens attend in tiles, in bfloat16: some queries of one key head together, with products of pairs.

A row is one query: those of the first token, then those of the next. Loops run from 0 over views: an index that might
be negative keeps a loop from being vectorised. What a row attends to does not depend on the other rows of its tile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from worker.decoding.network.kernels.compiling import compiled
from worker.decoding.network.kernels.multiplying import Tile, has_pair_products, multiplication
from worker.decoding.network.kernels.numbers import NUMBERS
from worker.decoding.network.kernels.vectors import LANES
from worker.decoding.network.paired import BLOCK

#: Keys side by side: four registers of scores, six queries at a time.
_KEYS: Final = Tile(BLOCK // LANES)
#: Rows of a tile, about: their scores of a thousand keys lie in the cache nearest to a core.
_ROWS: Final = 24


def tokens_together(num_shared: int) -> int:
    """Tokens of a tile."""
    return max(1, _ROWS // num_shared)


def attends_in_tiles(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether attention runs in tiles here: in bfloat16, on a processor with products of pairs, for heads that fit."""
    return dtype == torch.bfloat16 and has_pair_products() and head_dim % 32 == 0


def value_tile(head_dim: int) -> Tile:
    """Elements of values side by side: as many registers as divide a head, whose size is a multiple of 32."""
    return Tile(4 if head_dim % 64 == 0 else 2)


@functools.cache
def gather_queries(head_dim: int, num_shared: int) -> Callable[..., None]:
    """`gather(qkv, first, num, query, queries)`: of `num` tokens, the queries of a key head from number `query` on."""
    size = num_shared * head_dim

    @compiled
    def gather(qkv: Any, first: Any, num: Any, query: Any, queries: Any) -> None:
        for token in range(num):
            asked, row = qkv[first + token, query:], queries[token * size :]
            for d in range(size):
                row[d] = asked[d]

    return gather


@functools.cache
def score_blocks(head_dim: int) -> Callable[..., None]:
    """`score(keys, block_bytes, ahead, queries, rows, num_blocks, scores)`: scores [rows, num_blocks * BLOCK].

    Keys and values are those of one head in a slot, in pairs (`network.paired`), at the address of a block and at those
    `block_bytes` bytes further on each. What lies `ahead` is read next.
    """
    multiply, together = multiplication(_KEYS, head_dim, by_pairs=True), _KEYS.num_rows
    half = head_dim // 2

    @compiled
    def score(keys: Any, block_bytes: Any, ahead: Any, queries: Any, rows: Any, num_blocks: Any, scores: Any) -> None:
        stride = num_blocks * BLOCK
        for block in range(num_blocks):
            of_block = keys + block * block_bytes
            next_block = of_block + block_bytes if block + 1 < num_blocks else ahead
            for row in range(0, rows, together):
                into = scores.ctypes.data + (row * stride + block * BLOCK) * 4
                ask = queries.ctypes.data + row * half * 4
                multiply(of_block, block_bytes, 1, next_block, ask, min(together, rows - row), into, stride)

    return score


@functools.cache
def weigh_row() -> Callable[..., Any]:
    """`weigh(scores, begin, end, scaling, weights)`: e^score from `begin` to `end`, 0 elsewhere.

    Returns the sum of the weights before they are rounded.
    """
    numbers = NUMBERS[torch.bfloat16]
    exp, store, largest = numbers.exp, numbers.store, numbers.largest

    @compiled
    def fill(scores: Any, factor: Any, weights: Any) -> Any:
        most, total = largest(scores), np.float32(0)
        for key in range(len(scores)):
            weight = exp((scores[key] - most) * factor)
            total += weight
            weights[key] = store(weight)
        return total

    @compiled
    def clear(weights: Any) -> None:
        for key in range(len(weights)):
            weights[key] = np.uint16(0)

    @compiled
    def weigh(scores: Any, begin: Any, end: Any, scaling: Any, weights: Any) -> Any:
        clear(weights[:begin])
        clear(weights[end:])
        return fill(scores[begin:end], np.float32(scaling), weights[begin:end])

    return weigh


@functools.cache
def mix_values(head_dim: int) -> Callable[..., None]:
    """`mix(values, block_bytes, ahead, weights, rows, num_blocks, out)`: out [rows, head_dim], sums of values."""
    tile = value_tile(head_dim)
    multiply, together, width = (
        multiplication(tile, BLOCK, by_pairs=True, num_outputs=head_dim),
        tile.num_rows,
        tile.num_outputs,
    )

    @compiled
    def mix(values: Any, block_bytes: Any, ahead: Any, weights: Any, rows: Any, num_blocks: Any, out: Any) -> None:
        num = num_blocks * BLOCK
        for part in range(head_dim // width):
            of_part = values + part * width * 4
            for row in range(0, rows, together):
                weighed = weights.ctypes.data + row * num * 2
                into = out.ctypes.data + (row * head_dim + part * width) * 4
                multiply(of_part, block_bytes, num_blocks, ahead, weighed, min(together, rows - row), into, head_dim)

    return mix


@functools.cache
def write_seen(head_dim: int, num_shared: int) -> Callable[..., None]:
    """`write(sums, totals, first, num, head, seen)`: a tile's sums over their totals, rounded, where they belong."""
    store, size = NUMBERS[torch.bfloat16].store, num_shared * head_dim

    @compiled
    def write(sums: Any, totals: Any, first: Any, num: Any, head: Any, seen: Any) -> None:
        for token in range(num):
            written, found = seen[first + token, head * size :], sums[token * size :]
            for shared in range(num_shared):
                factor = np.float32(1) / totals[token * num_shared + shared]
                for d in range(head_dim):
                    written[shared * head_dim + d] = store(found[shared * head_dim + d] * factor)

    return write
