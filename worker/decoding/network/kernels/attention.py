"""Norms of heads, rotation, keys and values into the cache, and attention of short reads, in one call a layer.

Every query sums over the keys that it may see and over no others, in an order that depends on nothing else: what a
token attends to is computed alike in a pass of one token and in one of nine.
"""

from __future__ import annotations

from collections.abc import Callable
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
from worker.decoding.network.kernels.tiled_attending import attend_by_tile
from worker.decoding.network.kernels.tiles import attends_in_tiles
from worker.decoding.network.paired import BLOCK


@kernel
def attention_kernel(dtype: torch.dtype, head_dim: int, num_shared: int) -> Callable[[Any], None]:
    """For heads of that size and `num_shared` query heads a key head: loops over both are unrolled. Takes seconds."""
    numbers = NUMBERS[dtype]
    raw, real, itemsize = numbers.dtype, numbers.real, dtype.itemsize
    turn, ask, write = rotate(numbers, head_dim), turn_queries(numbers, head_dim, num_shared), copy_out(numbers)
    is_paired = attends_in_tiles(dtype, head_dim)
    keep_key, keep_value = place_key(numbers, head_dim, is_paired=is_paired), place_value(head_dim, is_paired=is_paired)
    attend = attend_by_tile(head_dim, num_shared) if is_paired else attend_by_token(numbers, head_dim, num_shared)

    def attention(address: Any) -> None:
        a = numba.carray(address, (NUM_ARGUMENTS,), np.int64)
        of_pass = array(a[At.OF_PASS], (NUM_PASS_ARGUMENTS,), np.int64)
        num_tokens, num_queries = of_pass[PassAt.NUM_TOKENS], a[At.NUM_QUERIES]
        slot_size, head_size = of_pass[PassAt.SLOT_SIZE], of_pass[PassAt.HEAD_SIZE]
        block_size = of_pass[PassAt.BLOCK_SIZE]
        block_bytes = block_size * itemsize
        num_keys = num_queries // num_shared
        qkv = array(a[At.QKV], (num_tokens, (num_queries + 2 * num_keys) * head_dim), raw)
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
            next_item = take(a.ctypes.data)
            number, next_number = item // num_keys, next_item // num_keys
            head = item - number * num_keys
            read = pieces[number] if number < num_pieces else short[number - num_pieces]
            slot, length, first, end = read[0], read[1], read[2], read[2] + read[3]
            num_held = length + end - first
            reach = (num_held + BLOCK - 1) // BLOCK * block_size if is_paired else num_held * head_dim
            of_head = a[At.HELD] + (slot * slot_size + head * head_size) * itemsize
            keys = array(of_head, (reach,), raw)
            values = array(of_head + num_keys * head_size * itemsize, (reach,), raw)
            query, key = head * num_shared * head_dim, (num_queries + head) * head_dim
            for token in range(first, end):
                position = length + token - first
                turn(qkv[token, key:], rotations[positions[token]], norms[key:], is_normed, epsilon, turned)
                keep_key(turned, keys, position, block_size)
                keep_value(qkv[token, key + num_keys * head_dim :], values, position, block_size)
            for token in range(first, end):
                ask(qkv[token, query:], rotations[positions[token]], norms[query:], is_normed, epsilon, turned)
                write(turned, qkv[token, query:])
            if number >= num_pieces:
                depths, visible = positions[first:end], ancestry[first:end]
                rows, into = qkv[first:end], seen[first:end]
                ahead = of_head
                if next_number < num_pieces + num_short:
                    next_slot, next_head = short[next_number - num_pieces][0], next_item - next_number * num_keys
                    ahead = a[At.HELD] + (next_slot * slot_size + next_head * head_size) * itemsize
                attend(rows, query, keys, values, block_bytes, ahead, length, depths, visible, window, scaling, into)
            item = next_item

    return attention
