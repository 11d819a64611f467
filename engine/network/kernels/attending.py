"""How the tokens of a read attend to what their slot holds: functions for the kernels of `attention`.

Two ways, for all query heads of one key head: token by token, in any dtype, and in tiles, in bfloat16 on processors
with products of pairs. SmolLM2, 8 sequences of 300 tokens, one layer on one core: five tokens each take 854 µs one by
one and 325 in tiles, one token each 163 and 169. Sizes are constants of the compiled code. Sums over
elements are split over a vector's lanes, always in the same way.

A row of a tile is one query: those of the first token, then those of the next. What a row attends to does not depend on
the other rows of its tile. Loops run from 0 over views: an index that might be negative keeps a loop from being
vectorised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from engine.network.kernels.compiling import compiled
from engine.network.kernels.multiplying import LANES, Tile, has_pair_products, multiplication
from engine.network.kernels.numbers import Numbers, exp, largest, to_bfloat16
from engine.network.kv_layout import PAIR_BLOCK

#: Values that are weighed together: each element of the sum is read and written once for all of them.
_TOGETHER: Final = 4
#: The score of what is not seen.
_NEVER: Final = -1e30


def attend_by_token(numbers: Numbers, head_dim: int, num_shared: int) -> Callable[..., None]:
    """`attend(qkv, query, keys, values, block_bytes, ahead, sight, scaling, seen)`.

    For one read. `block_bytes` and `ahead` mean something to `attend_by_tile` only, which is called in the same way.

    Its tokens are the rows of `qkv`, whose queries of the key head begin at number `query`, and of `seen`, which is
    written from there on. keys, values: [positions, head_dim].

    `sight` says what they see: (length, positions, ancestry, window). They follow `length` others, at `positions`;
    token i sees the tokens of the read whose bits are set in ancestry[i], and no further back than `window` if any.
    """
    score, mix = _score_keys(numbers, head_dim, num_shared), _mix_values(numbers, head_dim, num_shared)
    load, store = numbers.load, numbers.store
    size = num_shared * head_dim

    @compiled
    def attend(
        qkv: Any, query: Any, keys: Any, values: Any, block_bytes: Any, ahead: Any, sight: Any, scaling: Any, seen: Any
    ) -> None:
        num_tokens = len(sight[1])
        total = sight[0] + num_tokens
        queries, mixed = np.empty(size, np.float32), np.empty(size, np.float32)
        scores = np.empty(num_shared * total, np.float32)
        for token in range(num_tokens):
            row_queries, written = qkv[token, query:], seen[token, query:]
            for d in range(size):
                queries[d] = load(row_queries[d])
            score(queries, keys, total, scores)
            end = total
            for shared in range(num_shared):
                row = scores[shared * total : (shared + 1) * total]
                end = _hide(row, token, sight)
                _soften(row, end, scaling)
            mix(scores, total, values, end, mixed)
            for d in range(size):
                written[d] = store(mixed[d])

    return attend


@compiled
def _hide(scores: Any, token: Any, sight: Any) -> Any:
    """Overwrite a token's scores of what it does not see; returns how many keys end with the last one that it sees."""
    length, positions, ancestry, window = sight
    position, seen, end = positions[token], ancestry[token], length
    for column in range(len(positions)):
        is_near = window == 0 or position - positions[column] < window
        if (seen >> np.uint64(column)) & np.uint64(1) and is_near:
            end = length + column + 1
        else:
            scores[length + column] = np.float32(_NEVER)
    if window:
        for key in range(min(length, position - window + 1)):
            scores[key] = np.float32(_NEVER)
    return end


def _score_keys(numbers: Numbers, head_dim: int, num_shared: int) -> Callable[..., None]:
    """`score(queries, keys, num, scores)`: scores [num_shared, num] of queries [num_shared, head_dim]."""
    load = numbers.load

    @compiled
    def score(queries: Any, keys: Any, num: Any, scores: Any) -> None:
        for j in range(num):
            key = keys[j * head_dim : (j + 1) * head_dim]
            for shared in range(num_shared):
                query = queries[shared * head_dim : (shared + 1) * head_dim]
                total = np.float32(0)
                for d in range(head_dim):
                    total += query[d] * load(key[d])
                scores[shared * num + j] = total

    return score


@compiled
def _soften(scores: Any, num: Any, scaling: Any) -> None:
    """Softmax in place, over the first `num`."""
    most = largest(scores[:num])
    total = np.float32(0)
    for j in range(num):
        weight = exp((scores[j] - most) * scaling)
        scores[j] = weight
        total += weight
    for j in range(num):
        scores[j] = scores[j] / total


def _mix_values(numbers: Numbers, head_dim: int, num_shared: int) -> Callable[..., None]:
    """`mix(weights, stride, values, num, out)`: out [num_shared, head_dim], rows of weights `stride` apart."""
    load = numbers.load

    @compiled
    def mix(weights: Any, stride: Any, values: Any, num: Any, out: Any) -> None:
        for d in range(num_shared * head_dim):
            out[d] = np.float32(0)
        whole = num // _TOGETHER * _TOGETHER
        for j in range(0, whole, _TOGETHER):
            v0 = values[j * head_dim : (j + 1) * head_dim]
            v1 = values[(j + 1) * head_dim : (j + 2) * head_dim]
            v2 = values[(j + 2) * head_dim : (j + 3) * head_dim]
            v3 = values[(j + 3) * head_dim : (j + 4) * head_dim]
            for shared in range(num_shared):
                w = weights[shared * stride + j : shared * stride + j + _TOGETHER]
                w0, w1, w2, w3 = w[0], w[1], w[2], w[3]
                row = out[shared * head_dim : (shared + 1) * head_dim]
                for d in range(head_dim):
                    row[d] += w0 * load(v0[d]) + w1 * load(v1[d]) + w2 * load(v2[d]) + w3 * load(v3[d])
        for j in range(whole, num):
            value = values[j * head_dim : (j + 1) * head_dim]
            for shared in range(num_shared):
                w0 = weights[shared * stride + j]
                row = out[shared * head_dim : (shared + 1) * head_dim]
                for d in range(head_dim):
                    row[d] += w0 * load(value[d])

    return mix


def attend_by_tile(head_dim: int, num_shared: int) -> Callable[..., None]:
    """As `attending.attend_by_token`; keys and values are in pairs, and a slot's positions are whole blocks.

    `block_bytes`: from the keys of a block to those of the next. `ahead`: the keys of the thread's next read.
    """
    score, weigh, mix = _score_blocks(head_dim), _weigh_tile(num_shared), _mix_blocks(head_dim)
    gather, write = _gather_queries(head_dim, num_shared), _write_seen(head_dim, num_shared)
    together, size = tokens_together(num_shared), num_shared * head_dim

    @compiled
    def attend(
        qkv: Any, query: Any, keys: Any, values: Any, block_bytes: Any, ahead: Any, sight: Any, scaling: Any, seen: Any
    ) -> None:
        num_tokens = len(sight[1])
        rows, num = min(num_tokens, together) * num_shared, (sight[0] + num_tokens + PAIR_BLOCK - 1) // PAIR_BLOCK
        queries, sums = np.empty(rows * head_dim, np.uint16), np.empty(rows * head_dim, np.float32)
        scores, weights = np.empty(rows * num * PAIR_BLOCK, np.float32), np.empty(rows * num * PAIR_BLOCK, np.uint16)
        totals = np.empty(rows, np.float32)
        for first in range(0, num_tokens, together):
            end = min(first + together, num_tokens)
            gather(qkv, first, end - first, query, queries)
            rows = (end - first) * num_shared
            score(np.int64(keys.ctypes.data), block_bytes, np.int64(values.ctypes.data), queries, rows, num, scores)
            weigh(scores, num * PAIR_BLOCK, first, end, sight, scaling, weights, totals)
            mix(np.int64(values.ctypes.data), block_bytes, ahead, weights, rows, num, sums)
            write(sums, totals, first, end - first, query // size, seen)

    return attend


def _weigh_tile(num_shared: int) -> Callable[..., None]:
    """`weigh(scores, num, first, end, sight, scaling, weights, totals)`.

    `num`: keys of a row. The tile's tokens are `first` to `end` of those of `sight`. Weights are e^score, 0 for
    what is not seen; totals: their sums before they are rounded. Scores of what is not seen are overwritten.
    """

    @compiled
    def weigh(scores: Any, num: Any, first: Any, end: Any, sight: Any, scaling: Any, weights: Any, totals: Any) -> None:
        length, positions, _, window = sight
        for row in range((end - first) * num_shared):
            token = first + row // num_shared
            row_scores, weighed = scores[row * num : (row + 1) * num], weights[row * num : (row + 1) * num]
            num_seen = _hide(row_scores, token, sight)
            # Summed up from the first key of the window on.
            oldest = min(length, max(0, positions[token] - window + 1)) if window else 0
            _clear(weighed[:oldest])
            _clear(weighed[num_seen:])
            totals[row] = _weigh(row_scores[oldest:num_seen], np.float32(scaling), weighed[oldest:num_seen])

    return weigh


@compiled
def _weigh(scores: Any, factor: Any, weights: Any) -> Any:
    most, total = largest(scores), np.float32(0)
    for key in range(len(scores)):
        weight = exp((scores[key] - most) * factor)
        total += weight
        weights[key] = to_bfloat16(weight)
    return total


@compiled
def _clear(weights: Any) -> None:
    for key in range(len(weights)):
        weights[key] = np.uint16(0)


#: Keys side by side: four registers of scores, six queries at a time.
_KEYS: Final = Tile(PAIR_BLOCK // LANES)
#: Rows of a tile, about: their scores of a thousand keys lie in the cache nearest to a core.
_ROWS: Final = 24


def tokens_together(num_shared: int) -> int:
    """Tokens of a tile."""
    return max(1, _ROWS // num_shared)


def attends_in_tiles(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether attention runs in tiles here: in bfloat16, on a processor with products of pairs, for heads that fit."""
    return dtype == torch.bfloat16 and has_pair_products() and head_dim % 32 == 0


def _gather_queries(head_dim: int, num_shared: int) -> Callable[..., None]:
    """`gather(qkv, first, num, query, queries)`: of `num` tokens, the queries of a key head from number `query` on."""
    size = num_shared * head_dim

    @compiled
    def gather(qkv: Any, first: Any, num: Any, query: Any, queries: Any) -> None:
        for token in range(num):
            source, row = qkv[first + token, query:], queries[token * size :]
            for d in range(size):
                row[d] = source[d]

    return gather


def _score_blocks(head_dim: int) -> Callable[..., None]:
    """`score(keys, block_bytes, ahead, queries, rows, num_blocks, scores)`: scores [rows, num_blocks * BLOCK].

    Keys and values are those of one head in a slot, in pairs (`network.kv_layout`), at the address of a block and at
    those `block_bytes` bytes further on each. What lies `ahead` is read next.
    """
    multiply, together = multiplication(_KEYS, head_dim, _KEYS.num_outputs), _KEYS.num_rows
    half = head_dim // 2

    @compiled
    def score(keys: Any, block_bytes: Any, ahead: Any, queries: Any, rows: Any, num_blocks: Any, scores: Any) -> None:
        stride = num_blocks * PAIR_BLOCK
        for block in range(num_blocks):
            of_block = keys + block * block_bytes
            next_block = of_block + block_bytes if block + 1 < num_blocks else ahead
            for row in range(0, rows, together):
                into = scores.ctypes.data + (row * stride + block * PAIR_BLOCK) * 4
                ask = queries.ctypes.data + row * half * 4
                multiply(of_block, block_bytes, 1, next_block, ask, min(together, rows - row), into, stride)

    return score


def _mix_blocks(head_dim: int) -> Callable[..., None]:
    """`mix(values, block_bytes, ahead, weights, rows, num_blocks, out)`: out [rows, head_dim], sums of values."""
    # As many registers of elements side by side as divide a head, whose size is a multiple of 32.
    tile = Tile(4 if head_dim % 64 == 0 else 2)
    multiply = multiplication(tile, PAIR_BLOCK, head_dim)
    together, width = tile.num_rows, tile.num_outputs

    @compiled
    def mix(values: Any, block_bytes: Any, ahead: Any, weights: Any, rows: Any, num_blocks: Any, out: Any) -> None:
        num = num_blocks * PAIR_BLOCK
        for part in range(head_dim // width):
            of_part = values + part * width * 4
            for row in range(0, rows, together):
                weighed = weights.ctypes.data + row * num * 2
                into = out.ctypes.data + (row * head_dim + part * width) * 4
                multiply(of_part, block_bytes, num_blocks, ahead, weighed, min(together, rows - row), into, head_dim)

    return mix


def _write_seen(head_dim: int, num_shared: int) -> Callable[..., None]:
    """`write(sums, totals, first, num, head, seen)`: a tile's sums over their totals, rounded, where they belong."""
    size = num_shared * head_dim

    @compiled
    def write(sums: Any, totals: Any, first: Any, num: Any, head: Any, seen: Any) -> None:
        for token in range(num):
            written, summed = seen[first + token, head * size :], sums[token * size :]
            for shared in range(num_shared):
                factor = np.float32(1) / totals[token * num_shared + shared]
                for d in range(head_dim):
                    written[shared * head_dim + d] = to_bfloat16(summed[shared * head_dim + d] * factor)

    return write
