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
    BLOCK,
    gather_queries,
    mix_values,
    score_blocks,
    value_tile,
    weigh_rows,
    write_seen,
)

#: Queries that are scored together, about: their scores of a thousand keys lie in the cache nearest to a core.
_QUERIES: Final = 24


class At(IntEnum):
    """Where the arguments of both kernels lie."""

    QKV = 0  #: [tokens, queries + 2 * keys, head_dim], queries rotated
    HELD = 1  #: [slots, 2 * keys, capacity, head_dim]
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
    KEYS = 13  #: [keys, blocks, head_dim / 2, `BLOCK`, 2], written by the one kernel and read by the other
    VALUES = 14  #: [keys, head_dim / tile, blocks * `BLOCK` / 2, tile, 2], likewise


class Arguments(ctypes.Structure):
    """The arguments by name, in lower case."""

    _fields_: ClassVar = argument_fields(At, At.SCALING)


NUM_ARGUMENTS: Final = len(At)


def can_attend(head_dim: int) -> bool:
    """Whether there are kernels for heads of that size."""
    return head_dim % 16 == 0


def num_blocks(num_positions: int) -> int:
    """Blocks of keys that hold so many positions."""
    return -(-num_positions // BLOCK)


@functools.cache
def arranging_kernel(head_dim: int, num_shared: int) -> Kernel:
    """Copies what a slot holds, in pairs, to where `wide_kernel` reads it. A capacity is whole blocks."""
    half, width = head_dim // 2, value_tile(head_dim).num_outputs
    num_parts = head_dim // width
    thread, team = thread_functions()

    @kernel
    def arrange(address: Any) -> None:
        a = numba.carray(address, (NUM_ARGUMENTS,), np.int64)
        num_keys, capacity = a[At.NUM_QUERIES] // num_shared, a[At.CAPACITY]
        held = array(a[At.HELD], (a[At.NUM_SLOTS], 2 * num_keys, capacity * half), np.uint32)
        blocks = (a[At.LENGTH] + a[At.WIDTH] + BLOCK - 1) // BLOCK
        all_keys = array(a[At.KEYS], (num_keys, blocks, half * BLOCK), np.uint32)
        all_values = array(a[At.VALUES], (num_keys, num_parts, blocks * (BLOCK // 2) * width), np.uint32)
        low, high = np.uint32(0xFFFF), np.uint32(0xFFFF0000)
        for item in range(thread(), num_keys * blocks, team()):
            head = item // blocks
            block = item - head * blocks
            keys, values = held[a[At.SLOT], head], held[a[At.SLOT], num_keys + head]
            arranged = all_keys[head, block]
            for pair in range(half):
                for key in range(BLOCK):
                    arranged[pair * BLOCK + key] = keys[(block * BLOCK + key) * half + pair]
            for part in range(num_parts):
                mixed = all_values[head, part]
                for two in range(block * BLOCK // 2, (block + 1) * BLOCK // 2):
                    first, second = 2 * two * half + part * width // 2, (2 * two + 1) * half + part * width // 2
                    for i in range(width // 2):
                        one, other = values[first + i], values[second + i]
                        mixed[two * width + 2 * i] = (one & low) | (other << np.uint32(16))
                        mixed[two * width + 2 * i + 1] = (one >> np.uint32(16)) | (other & high)

    return arrange


@functools.cache
def wide_kernel(head_dim: int, num_shared: int) -> Kernel:
    """Attends to what `arranging_kernel` has copied, with `num_shared` query heads a key head. Takes seconds."""
    half, num_together = head_dim // 2, max(1, _QUERIES // num_shared)
    num_most, width = num_together * num_shared, value_tile(head_dim).num_outputs
    gather, write = gather_queries(head_dim, num_shared), write_seen(head_dim, num_shared)
    score, weigh, mix = score_blocks(head_dim), weigh_rows(num_shared), mix_values(head_dim)
    thread, team = thread_functions()

    @kernel
    def attend(address: Any) -> None:
        a = numba.carray(address, (NUM_ARGUMENTS,), np.int64)
        num_queries, length, read_width, window = a[At.NUM_QUERIES], a[At.LENGTH], a[At.WIDTH], a[At.WINDOW]
        num_keys = num_queries // num_shared
        qkv = array(a[At.QKV], (a[At.NUM_TOKENS], (num_queries + 2 * num_keys) * half), np.uint32)
        seen = array(a[At.SEEN], (a[At.NUM_TOKENS], num_queries * head_dim), np.uint16)
        num_held = (length + read_width + BLOCK - 1) // BLOCK
        queries = np.empty(num_most * half, np.uint32)
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
            gather(qkv, first, end - begin, head, queries)
            # Blocks that some token of the tile sees: the others are not computed.
            block = max(0, length + begin - window + 1) // BLOCK if window else 0
            num = (length + end + BLOCK - 1) // BLOCK - block
            score(a[At.KEYS] + (head * num_held + block) * half * BLOCK * 4, queries, rows, num, scores)
            position = length + begin - block * BLOCK
            weigh(scores, rows, num * BLOCK, position, window, float_of(a[At.SCALING]), weights, totals)
            values = a[At.VALUES] + (head * num_held * half + block * width // 2) * BLOCK * 4
            mix(values, num_held, weights, rows, num, out)
            write(out, totals, first, end - begin, head, seen)

    return attend
