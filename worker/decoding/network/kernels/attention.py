"""Attention of short reads in one call a layer: norms of heads, rotation, keys and values into the cache, attention.

Every query sums over the keys that it may see and over no others, in an order that depends on nothing else: what a
token attends to is computed alike in a pass of one token and in one of nine.
"""

from __future__ import annotations

import ctypes
import functools
from enum import IntEnum
from typing import Any, ClassVar, Final

import numba
import numpy as np
import torch

from worker.decoding.network.kernels.attending import attend_by_token
from worker.decoding.network.kernels.compiling import array, float_of, kernel
from worker.decoding.network.kernels.heads import copy_out, rotate, turn_queries
from worker.decoding.network.kernels.numbers import NUMBERS
from worker.decoding.network.kernels.placing import place_key, place_value
from worker.decoding.network.kernels.threads import Kernel, argument_fields, thread_functions
from worker.decoding.network.kernels.tiled_attending import attend_by_tile
from worker.decoding.network.kernels.tiles import attends_in_tiles


class At(IntEnum):
    """Where the arguments lie: addresses, numbers, and float64s by their bits."""

    QKV = 0  #: [tokens, queries + 2 * keys, head_dim], queries rotated in place; pairs to be rotated lie side by side
    HELD = 1  #: [slots, 2 * keys, capacity, head_dim]; in pairs where reads attend in tiles
    SEEN = 2  #: [tokens, queries, head_dim], written
    READS = 3  #: int64 [reads, 4]: slot, tokens held before, first token, tokens
    NUM_READS = 4
    NUM_TOKENS = 5
    NUM_QUERIES = 6  #: heads
    CAPACITY = 7
    NUM_SLOTS = 8
    SCALING = 9
    ROTATIONS = 10  #: [positions, head_dim / 2, 2]: cosine, sine
    NUM_POSITIONS = 11
    POSITIONS = 12  #: int64 [tokens]
    WINDOW = 13  #: positions that a token looks back on, itself included; 0: all
    ANCESTRY = 14  #: uint64 [tokens]: bit i says that token i of its read is seen
    NORMS = 15  #: [queries + keys, head_dim]; 0 without
    EPSILON = 16
    ONLY_ROTATE = 17  #: 1: nothing is attended to


class Arguments(ctypes.Structure):
    """The kernel's arguments by name, in lower case."""

    _fields_: ClassVar = argument_fields(At, At.SCALING, At.EPSILON)


NUM_ARGUMENTS: Final = len(At)


@functools.cache
def attention_kernel(dtype: torch.dtype, head_dim: int, num_shared: int) -> Kernel:
    """For heads of that size and `num_shared` query heads a key head: loops over both are unrolled. Takes seconds."""
    numbers = NUMBERS[dtype]
    raw, real = numbers.dtype, numbers.real
    turn, ask, write = rotate(numbers, head_dim), turn_queries(numbers, head_dim, num_shared), copy_out(numbers)
    is_paired = attends_in_tiles(dtype, head_dim)
    keep_key, keep_value = place_key(numbers, head_dim, is_paired=is_paired), place_value(head_dim, is_paired=is_paired)
    attend = attend_by_tile(head_dim, num_shared) if is_paired else attend_by_token(numbers, head_dim, num_shared)
    thread, team = thread_functions()

    @kernel
    def attention(address: Any) -> None:
        a = numba.carray(address, (NUM_ARGUMENTS,), np.int64)
        num_tokens, num_queries, capacity = a[At.NUM_TOKENS], a[At.NUM_QUERIES], a[At.CAPACITY]
        num_keys = num_queries // num_shared
        qkv = array(a[At.QKV], (num_tokens, (num_queries + 2 * num_keys) * head_dim), raw)
        held = array(a[At.HELD], (a[At.NUM_SLOTS], 2 * num_keys, capacity * head_dim), raw)
        seen = array(a[At.SEEN], (num_tokens, num_queries * head_dim), raw)
        reads = array(a[At.READS], (a[At.NUM_READS], 4), np.int64)
        rotations = array(a[At.ROTATIONS], (a[At.NUM_POSITIONS], head_dim), real)
        positions = array(a[At.POSITIONS], (num_tokens,), np.int64)
        ancestry = array(a[At.ANCESTRY], (num_tokens,), np.uint64)
        norms = array(a[At.NORMS], ((num_queries + num_keys) * head_dim,), raw)
        is_normed, epsilon = a[At.NORMS] != 0, real(float_of(a[At.EPSILON]))
        scaling, window = real(float_of(a[At.SCALING])), a[At.WINDOW]
        turned = np.empty(num_shared * head_dim, real)
        for item in range(thread(), a[At.NUM_READS] * num_keys, team()):
            read = item // num_keys
            head = item - read * num_keys
            slot, length, first, end = reads[read, 0], reads[read, 1], reads[read, 2], reads[read, 2] + reads[read, 3]
            keys, values = held[slot, head], held[slot, num_keys + head]
            query, key = head * num_shared * head_dim, (num_queries + head) * head_dim
            for token in range(first, end):
                position = length + token - first
                turn(qkv[token, key:], rotations[positions[token]], norms[key:], is_normed, epsilon, turned)
                keep_key(turned, keys, position)
                keep_value(qkv[token, key + num_keys * head_dim :], values, position)
            for token in range(first, end):
                ask(qkv[token, query:], rotations[positions[token]], norms[query:], is_normed, epsilon, turned)
                write(turned, qkv[token, query:])
            if not a[At.ONLY_ROTATE]:
                depths, visible = positions[first:end], ancestry[first:end]
                attend(qkv[first:end], query, keys, values, length, depths, visible, window, scaling, seen[first:end])

    return attention
