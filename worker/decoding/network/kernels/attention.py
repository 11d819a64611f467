"""Norms of heads, rotation, keys and values into the cache, and attention of short reads, in one call a layer.

Every query sums over the keys that it may see and over no others, in an order that depends on nothing else: what a
token attends to is computed alike in a pass of one token and in one of nine.
"""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
import torch

from worker.decoding.network.kernels.attending import attend_by_token
from worker.decoding.network.kernels.attention_arguments import NUM_ARGUMENTS, NUM_PASS_ARGUMENTS, At, PassAt
from worker.decoding.network.kernels.compiling import array, float_of, kernel, take
from worker.decoding.network.kernels.heads import copy_out, rotate, turn_queries
from worker.decoding.network.kernels.numbers import NUMBERS
from worker.decoding.network.kernels.placing import place_key, place_value
from worker.decoding.network.kernels.threads import Kernel
from worker.decoding.network.kernels.tiled_attending import attend_by_tile
from worker.decoding.network.kernels.tiles import attends_in_tiles


@functools.cache
def attention_kernel(dtype: torch.dtype, head_dim: int, num_shared: int) -> Kernel:
    """For heads of that size and `num_shared` query heads a key head: loops over both are unrolled. Takes seconds."""
    numbers = NUMBERS[dtype]
    raw, real = numbers.dtype, numbers.real
    turn, ask, write = rotate(numbers, head_dim), turn_queries(numbers, head_dim, num_shared), copy_out(numbers)
    is_paired = attends_in_tiles(dtype, head_dim)
    keep_key, keep_value = place_key(numbers, head_dim, is_paired=is_paired), place_value(head_dim, is_paired=is_paired)
    attend = attend_by_tile(head_dim, num_shared) if is_paired else attend_by_token(numbers, head_dim, num_shared)

    @kernel
    def attention(address: Any) -> None:
        a = numba.carray(address, (NUM_ARGUMENTS,), np.int64)
        of_pass = array(a[At.OF_PASS], (NUM_PASS_ARGUMENTS,), np.int64)
        num_tokens, num_queries, capacity = of_pass[PassAt.NUM_TOKENS], a[At.NUM_QUERIES], of_pass[PassAt.CAPACITY]
        num_keys = num_queries // num_shared
        qkv = array(a[At.QKV], (num_tokens, (num_queries + 2 * num_keys) * head_dim), raw)
        held = array(a[At.HELD], (of_pass[PassAt.NUM_SLOTS], 2 * num_keys, capacity * head_dim), raw)
        seen = array(a[At.SEEN], (num_tokens, num_queries * head_dim), raw)
        num_short, num_pieces = of_pass[PassAt.NUM_SHORT], of_pass[PassAt.NUM_PIECES]
        short = array(of_pass[PassAt.SHORT], (num_short, 4), np.int64)
        pieces = array(of_pass[PassAt.PIECES], (num_pieces, 4), np.int64)
        rotations = array(a[At.ROTATIONS], (a[At.NUM_POSITIONS], head_dim), real)
        positions = array(of_pass[PassAt.POSITIONS], (num_tokens,), np.int64)
        ancestry = array(of_pass[PassAt.ANCESTRY], (num_tokens,), np.uint64)
        norms = array(a[At.NORMS], ((num_queries + num_keys) * head_dim,), raw)
        is_normed, epsilon = a[At.NORMS] != 0, real(float_of(a[At.EPSILON]))
        scaling, window = real(float_of(a[At.SCALING])), a[At.WINDOW]
        turned = np.empty(num_shared * head_dim, real)
        item = take(a.ctypes.data)
        while item < (num_pieces + num_short) * num_keys:
            number = item // num_keys
            head = item - number * num_keys
            read = pieces[number] if number < num_pieces else short[number - num_pieces]
            slot, length, first, end = read[0], read[1], read[2], read[2] + read[3]
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
            if number >= num_pieces:
                depths, visible = positions[first:end], ancestry[first:end]
                attend(qkv[first:end], query, keys, values, length, depths, visible, window, scaling, seen[first:end])
            item = take(a.ctypes.data)

    return attention
