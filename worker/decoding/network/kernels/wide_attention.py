"""Attention of a long read, a piece of a prompt, in bfloat16: products of pairs, and no key that no token sees.

torch's attention on a CPU computes the scores of all keys, with a mask for the later ones, at a quarter of the speed of
these products (docs/log.md). A tile of some tokens' queries is scored against all keys that its last token sees, then
weighed, then multiplied with the values. Scores and sums are float32, weights are rounded to bfloat16: the precision of
FlashAttention (Dao et al. 2022) with bfloat16 inputs. What a token attends to does not depend on its tile.
"""

from __future__ import annotations

import ctypes
import functools
from enum import IntEnum
from typing import Any, ClassVar, Final

import numba
import numpy as np

from worker.decoding.network.kernels.compiling import array, float_of, kernel
from worker.decoding.network.kernels.threads import Kernel, argument_fields, thread_functions
from worker.decoding.network.kernels.tiles import (
    gather_queries,
    mix_values,
    score_blocks,
    tokens_together,
    weigh_row,
    write_seen,
)
from worker.decoding.network.paired import BLOCK


class At(IntEnum):
    """Where the arguments lie."""

    QKV = 0  #: [tokens, queries + 2 * keys, head_dim], queries rotated
    HELD = 1  #: [slots, 2 * keys, capacity, head_dim], in pairs
    SEEN = 2  #: [tokens, queries, head_dim], written
    SLOT = 3
    LENGTH = 4  #: tokens held before the read
    FIRST = 5  #: its first token
    WIDTH = 6  #: its tokens
    NUM_TOKENS = 7
    NUM_QUERIES = 8  #: heads
    CAPACITY = 9
    NUM_SLOTS = 10
    SCALING = 11
    WINDOW = 12  #: positions that a token looks back on, itself included; 0: all


class Arguments(ctypes.Structure):
    """The arguments by name, in lower case."""

    _fields_: ClassVar = argument_fields(At, At.SCALING)


NUM_ARGUMENTS: Final = len(At)


@functools.cache
def wide_kernel(head_dim: int, num_shared: int) -> Kernel:
    """Attends to what the read's slot holds, its own tokens included. `num_shared`: query heads a key head."""
    num_together = tokens_together(num_shared)
    num_most = num_together * num_shared
    gather, write = gather_queries(head_dim, num_shared), write_seen(head_dim, num_shared)
    score, weigh, mix = score_blocks(head_dim), weigh_row(), mix_values(head_dim)
    thread, team = thread_functions()

    @kernel
    def attend(address: Any) -> None:
        a = numba.carray(address, (NUM_ARGUMENTS,), np.int64)
        num_queries, length, read_width, window = a[At.NUM_QUERIES], a[At.LENGTH], a[At.WIDTH], a[At.WINDOW]
        num_keys = num_queries // num_shared
        qkv = array(a[At.QKV], (a[At.NUM_TOKENS], (num_queries + 2 * num_keys) * head_dim), np.uint16)
        seen = array(a[At.SEEN], (a[At.NUM_TOKENS], num_queries * head_dim), np.uint16)
        num_held, num_bytes = (length + read_width + BLOCK - 1) // BLOCK, a[At.CAPACITY] * head_dim * 2
        of_slot = a[At.HELD] + a[At.SLOT] * 2 * num_keys * num_bytes
        queries = np.empty(num_most * head_dim, np.uint16)
        scores = np.empty(num_most * num_held * BLOCK, np.float32)
        weights = np.empty(num_most * num_held * BLOCK, np.uint16)
        totals = np.empty(num_most, np.float32)
        out = np.empty(num_most * head_dim, np.float32)
        num_tiles = (read_width + num_together - 1) // num_together
        for item in range(thread(), num_tiles * num_keys, team()):
            tile = item // num_keys
            head = item - tile * num_keys
            begin, end = tile * num_together, min((tile + 1) * num_together, read_width)
            rows, first = (end - begin) * num_shared, a[At.FIRST] + begin
            gather(qkv, first, end - begin, head * num_shared * head_dim, queries)
            # Blocks that some token of the tile sees: the others are not computed.
            block = max(0, length + begin - window + 1) // BLOCK if window else 0
            num = (length + end + BLOCK - 1) // BLOCK - block
            keys = of_slot + head * num_bytes + block * BLOCK * head_dim * 2
            score(keys, queries, rows, num, scores)
            for row in range(rows):
                last = length + begin - block * BLOCK + row // num_shared + 1
                oldest = max(0, last - window) if window else 0
                of_row, at = weights[row * num * BLOCK : (row + 1) * num * BLOCK], scores[row * num * BLOCK :]
                totals[row] = weigh(at, oldest, last, float_of(a[At.SCALING]), of_row)
            mix(keys + num_keys * num_bytes, weights, rows, num, out)
            write(out, totals, first, end - begin, head, seen)

    return attend
