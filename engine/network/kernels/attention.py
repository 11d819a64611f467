"""Norms of heads, rotation, keys and values into the cache, and attention, in one or two calls a layer.

`attention_kernel` puts the tokens of all reads into the cache and attends for short reads; `wide_kernel` attends for
long ones. Every query sums over the keys that it may see and over no others, in an order that depends on nothing else:
what a token attends to is computed alike in a pass of one token, in one of nine, and in a piece of a prompt.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, Final

import numba
import numpy as np
import torch

from engine.network.kernels.attending import (
    attend_by_tile,
    attend_by_token,
    attends_in_tiles,
    tokens_together,
)
from engine.network.kernels.compiling import array, compiled, inlined, kernel, take
from engine.network.kernels.numbers import NUMBERS, Numbers
from engine.network.kernels.threads import arguments
from engine.network.kv_layout import PAIR_BLOCK


@arguments
class AttentionArguments(ctypes.Structure):
    """The arguments of a layer: addresses and numbers."""

    taken: int
    qkv: int  #: [tokens, queries + 2 * keys, head_dim]; pairs to be rotated lie side by side
    held: int  #: keys and values of all slots; in pairs where reads attend in tiles
    seen: int  #: [tokens, queries, head_dim], written
    num_queries: int  #: heads
    scaling: float
    window: int  #: positions that a token looks back on, itself included; 0: all
    rotations: int  #: [positions, head_dim / 2, 2]: cosine, sine
    num_positions: int
    norms: int  #: [queries + keys, head_dim]; 0 without
    epsilon: float
    of_pass: int  #: address of a pass's arguments


@arguments
class PassArguments(ctypes.Structure):
    """The arguments of a pass: addresses and numbers."""

    short: int  #: int64 [reads, 4] of reads that attend by themselves: slot, tokens held before, first token, tokens
    num_short: int
    pieces: int  #: the same of pieces of long reads, whose tokens are put into the cache
    num_pieces: int
    wide: int  #: the same of long reads as a whole
    num_wide: int
    num_tokens: int
    positions: int  #: int64 [tokens]
    ancestry: int  #: uint64 [tokens]: bit i says that token i of its short read is seen
    slot_size: int  #: numbers from a slot's keys and values to the next slot's, in a layer
    head_size: int  #: from a head's to the next head's; values' heads follow the keys'
    block_size: int  #: from a block's to the next block's, in pairs; 0 where they are not in blocks


_LAYOUT: Final = np.dtype(AttentionArguments)
_PASS_LAYOUT: Final = np.dtype(PassArguments)


@kernel
def attention_kernel(dtype: torch.dtype, head_dim: int, num_shared: int) -> Callable[[Any], None]:
    """For heads of that size and `num_shared` query heads a key head: loops over both are unrolled. Takes seconds."""
    numbers = NUMBERS[dtype]
    raw, itemsize = numbers.dtype, dtype.itemsize
    turn, turn_queries = _rotate(numbers, head_dim), _turn_queries(numbers, head_dim, num_shared)
    is_paired = attends_in_tiles(dtype, head_dim)
    keep_key = _place_key(numbers, head_dim, is_paired=is_paired)
    keep_value = _place_value(head_dim, is_paired=is_paired)
    attend = attend_by_tile(head_dim, num_shared) if is_paired else attend_by_token(numbers, head_dim, num_shared)

    def attention(address: Any) -> None:
        a = numba.carray(address, (1,), _LAYOUT)[0]
        of_pass = array(a.of_pass, (1,), _PASS_LAYOUT)[0]
        num_tokens, num_queries = of_pass.num_tokens, a.num_queries
        slot_size, head_size = of_pass.slot_size, of_pass.head_size
        block_size = of_pass.block_size
        block_bytes = block_size * itemsize
        num_keys = num_queries // num_shared
        qkv = array(a.qkv, (num_tokens, (num_queries + 2 * num_keys) * head_dim), raw)
        seen = array(a.seen, (num_tokens, num_queries * head_dim), raw)
        num_short, num_pieces = of_pass.num_short, of_pass.num_pieces
        short = array(of_pass.short, (num_short, 4), np.int64)
        pieces = array(of_pass.pieces, (num_pieces, 4), np.int64)
        rotations = array(a.rotations, (a.num_positions, head_dim), np.float32)
        positions = array(of_pass.positions, (num_tokens,), np.int64)
        ancestry = array(of_pass.ancestry, (num_tokens,), np.uint64)
        norms = array(a.norms, ((num_queries + num_keys) * head_dim,), raw)
        is_normed, epsilon = a.norms != 0, np.float32(a.epsilon)
        scaling, window = np.float32(a.scaling), a.window
        turned = np.empty(num_shared * head_dim, np.float32)
        item = take(address)
        while item < (num_pieces + num_short) * num_keys:
            next_item = take(address)
            number, next_number = item // num_keys, next_item // num_keys
            head = item - number * num_keys
            read = pieces[number] if number < num_pieces else short[number - num_pieces]
            slot, length, first, end = read[0], read[1], read[2], read[2] + read[3]
            num_held = length + end - first
            reach = (num_held + PAIR_BLOCK - 1) // PAIR_BLOCK * block_size if is_paired else num_held * head_dim
            of_head = a.held + (slot * slot_size + head * head_size) * itemsize
            keys = array(of_head, (reach,), raw)
            values = array(of_head + num_keys * head_size * itemsize, (reach,), raw)
            query, key = head * num_shared * head_dim, (num_queries + head) * head_dim
            for token in range(first, end):
                position = length + token - first
                turn(qkv[token, key:], rotations[positions[token]], norms[key:], is_normed, epsilon, turned)
                keep_key(turned, keys, position, block_size)
                keep_value(qkv[token, key + num_keys * head_dim :], values, position, block_size)
            for token in range(first, end):
                turn_queries(qkv[token, query:], rotations[positions[token]], norms[query:], is_normed, epsilon, turned)
            if number >= num_pieces:
                sight = length, positions[first:end], ancestry[first:end], window
                rows, into = qkv[first:end], seen[first:end]
                ahead = of_head
                if next_number < num_pieces + num_short:
                    next_slot, next_head = short[next_number - num_pieces][0], next_item - next_number * num_keys
                    ahead = a.held + (next_slot * slot_size + next_head * head_size) * itemsize
                attend(rows, query, keys, values, block_bytes, ahead, sight, scaling, into)
            item = next_item

    return attention


@kernel
def wide_kernel(head_dim: int, num_shared: int) -> Callable[[Any], None]:
    """Attention of long reads, pieces of prompts, in bfloat16: products of pairs, and no key that no token sees.

    torch's attention on a CPU computes the scores of all keys, with a mask for the later ones, at a quarter of the
    speed of these products. Each tile attends as a short read would, after what stands before it. Scores and sums are
    float32, weights are rounded to bfloat16: the precision of FlashAttention (Dao et al. 2022) with bfloat16 inputs.
    `num_shared`: query heads a key head.

    Queries are rotated, and keys and values lie in the cache: `attention_kernel` ran before.
    """
    attend, together = attend_by_tile(head_dim, num_shared), tokens_together(num_shared)

    def wide_attention(address: Any) -> None:
        a = numba.carray(address, (1,), _LAYOUT)[0]
        of_pass = array(a.of_pass, (1,), _PASS_LAYOUT)[0]
        num_queries, window = a.num_queries, a.window
        num_keys, num_tokens = num_queries // num_shared, of_pass.num_tokens
        qkv = array(a.qkv, (num_tokens, (num_queries + 2 * num_keys) * head_dim), np.uint16)
        seen = array(a.seen, (num_tokens, num_queries * head_dim), np.uint16)
        wide = array(of_pass.wide, (of_pass.num_wide, 4), np.int64)
        slot_bytes, head_bytes = of_pass.slot_size * 2, of_pass.head_size * 2
        block_bytes, scaling = of_pass.block_size * 2, np.float32(a.scaling)
        positions, ancestry = np.empty(together, np.int64), np.empty(together, np.uint64)
        for token in range(together):
            ancestry[token] = (np.uint64(2) << np.uint64(token)) - np.uint64(1)
        item, first_item = take(address), 0
        for read in range(len(wide)):
            slot, length, first_token, width = wide[read, 0], wide[read, 1], wide[read, 2], wide[read, 3]
            num_tiles = (width + together - 1) // together
            while item < first_item + num_tiles * num_keys:
                # The last tile first, because it sees most: those that see less end the work evenly.
                tile = num_tiles - 1 - (item - first_item) // num_keys
                head = (item - first_item) % num_keys
                begin, end = tile * together, min((tile + 1) * together, width)
                # Blocks that some token of the tile sees: the others are not computed.
                block = max(0, length + begin - window + 1) // PAIR_BLOCK if window else 0
                before = length + begin - block * PAIR_BLOCK
                for token in range(end - begin):
                    positions[token] = before + token
                address_of_keys = a.held + slot * slot_bytes + head * head_bytes + block * block_bytes
                keys = array(address_of_keys, (1,), np.uint16)
                values = array(address_of_keys + num_keys * head_bytes, (1,), np.uint16)
                rows, into = qkv[first_token + begin : first_token + end], seen[first_token + begin : first_token + end]
                query, sight = head * num_shared * head_dim, (before, positions[: end - begin], ancestry, window)
                attend(rows, query, keys, values, block_bytes, address_of_keys, sight, scaling, into)
                item = take(address)
            first_item += num_tiles * num_keys

    return wide_attention


@functools.cache
def _rotate(numbers: Numbers, head_dim: int) -> Callable[..., None]:
    """`turn(x, rotation, norm, is_normed, epsilon, out)`: RMS norm where there is one, then each pair turned."""
    load = numbers.load

    @compiled
    def turn(x: Any, rotation: Any, norm: Any, is_normed: Any, epsilon: Any, out: Any) -> None:
        for d in range(head_dim):
            out[d] = load(x[d])
        if is_normed:
            squares = np.float32(0)
            for d in range(head_dim):
                squares += out[d] * out[d]
            factor = np.float32(1) / np.sqrt(squares / np.float32(head_dim) + epsilon)
            for d in range(head_dim):
                out[d] = out[d] * factor * load(norm[d])
        for pair in range(head_dim // 2):
            a, b, cosine, sine = out[2 * pair], out[2 * pair + 1], rotation[2 * pair], rotation[2 * pair + 1]
            out[2 * pair] = a * cosine - b * sine
            out[2 * pair + 1] = a * sine + b * cosine

    return turn


def _turn_queries(numbers: Numbers, head_dim: int, num_shared: int) -> Callable[..., None]:
    """`turn_queries(queries, rotation, norm, is_normed, epsilon, turned)`: [num_shared, head_dim], in place.

    turned: memory of as many float32.
    """
    turn, store = _rotate(numbers, head_dim), numbers.store

    @compiled
    def turn_queries(queries: Any, rotation: Any, norm: Any, is_normed: Any, epsilon: Any, turned: Any) -> None:
        for shared in range(num_shared):
            at, end = shared * head_dim, (shared + 1) * head_dim
            turn(queries[at:end], rotation, norm[at:end], is_normed, epsilon, turned[at:end])
        for d in range(num_shared * head_dim):
            queries[d] = store(turned[d])

    return turn_queries


def _place_key(numbers: Numbers, head_dim: int, *, is_paired: bool) -> Callable[..., None]:
    """`place(key, keys, position, block_size)`: key [head_dim] of float32, rounded, into one head's keys.

    keys: [positions * head_dim]; in pairs, blocks of as many positions `block_size` numbers apart.
    """
    store = numbers.store

    @inlined
    def plain(key: Any, keys: Any, position: Any, block_size: Any) -> None:
        held = keys[position * head_dim :]
        for d in range(head_dim):
            held[d] = store(key[d])

    @inlined
    def paired(key: Any, keys: Any, position: Any, block_size: Any) -> None:
        block = position // PAIR_BLOCK
        held = keys[block * block_size + 2 * (position - block * PAIR_BLOCK) :]
        for pair in range(head_dim // 2):
            held[pair * 2 * PAIR_BLOCK] = store(key[2 * pair])
            held[pair * 2 * PAIR_BLOCK + 1] = store(key[2 * pair + 1])

    return paired if is_paired else plain


def _place_value(head_dim: int, *, is_paired: bool) -> Callable[..., None]:
    """`place(value, values, position, block_size)`: value [head_dim], as it is, where `_place_key` places keys."""

    # Not as one assignment of slices: the message of its error alone would take numba two seconds.
    @inlined
    def plain(value: Any, values: Any, position: Any, block_size: Any) -> None:
        held = values[position * head_dim :]
        for d in range(head_dim):
            held[d] = value[d]

    @inlined
    def paired(value: Any, values: Any, position: Any, block_size: Any) -> None:
        block = position // PAIR_BLOCK
        two = (position - block * PAIR_BLOCK) // 2
        held = values[block * block_size + two * 2 * head_dim + position % 2 :]
        for d in range(head_dim):
            held[2 * d] = value[d]

    return paired if is_paired else plain
