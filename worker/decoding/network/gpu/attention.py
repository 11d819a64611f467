"""Attention of short reads over the slot cache, by lengths: only what a slot holds is read.

A program takes one read, one key head and a part of the keys. All query heads of all tokens of the read that share the
key head are its rows, so that keys are read once. Where reads are few their keys are shared out among several programs,
whose results are then combined (flash decoding: Dao et al. 2023).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens"])
def attend_kernel(
    qkv,
    seen,
    partial,
    marks,
    positions,
    ancestry,
    read_slots,
    lengths,
    firsts,
    widths,
    capacity,
    address,
    scaling,
    window,
    num_tokens,
    NUM_QUERIES: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    IS_LOCAL: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """`seen` [tokens, queries, head_dim]; or for several parts `partial` [parts, tokens, queries, head_dim] and
    `marks` [2, parts, tokens, queries]: each part's greatest score, and the sum of its weights.

    `scaling` is in units of log 2. Programs: reads, key heads * blocks of rows, parts.
    """
    SHARED: tl.constexpr = NUM_QUERIES // NUM_KEYS
    read, part = tl.program_id(0), tl.program_id(2)
    key_head, block = tl.program_id(1) % NUM_KEYS, tl.program_id(1) // NUM_KEYS
    width = tl.load(widths + read).to(tl.int32)
    if block * BLOCK_ROWS < width * SHARED:
        length = tl.load(lengths + read).to(tl.int32)
        first = tl.load(firsts + read)
        rows = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        is_query = rows < width * SHARED
        token = first + tl.where(is_query, rows // SHARED, 0)
        head = token * NUM_QUERIES + key_head * SHARED + rows % SHARED
        dims = tl.arange(0, HEAD_DIM)
        source = token * (NUM_QUERIES + 2 * NUM_KEYS) + key_head * SHARED + rows % SHARED
        queries = tl.load(qkv + source[:, None] * HEAD_DIM + dims[None, :], mask=is_query[:, None], other=0.0)
        sees = tl.load(ancestry + token)

        begin = 0
        position = tl.load(positions + token).to(tl.int32)
        if IS_LOCAL:
            begin = tl.maximum(length - window + 1, 0)  # no token of the read stands before position `length`
        total = length + width
        share = tl.cdiv(tl.cdiv(total - begin, NUM_PARTS), BLOCK_KEYS) * BLOCK_KEYS
        low = begin + part * share
        high = tl.minimum(low + share, total)
        # Unless told that it lies on 16 bytes, memory is read number by number.
        held = tl.multiple_of(tl.load(address).to(tl.pointer_type(qkv.dtype.element_ty)), 16)
        slot_rows = tl.load(capacity)
        keys = held + (tl.load(read_slots + read) * (2 * NUM_KEYS) + key_head) * slot_rows * HEAD_DIM
        values = keys + NUM_KEYS * slot_rows * HEAD_DIM

        best = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        weight = tl.zeros([BLOCK_ROWS], tl.float32)
        mixed = tl.zeros([BLOCK_ROWS, HEAD_DIM], tl.float32)
        for start in range(low, high, BLOCK_KEYS):
            columns = start + tl.arange(0, BLOCK_KEYS)
            inside = columns < high
            key = tl.load(keys + columns[None, :] * HEAD_DIM + dims[:, None], mask=inside[None, :], other=0.0)
            scores = tl.dot(queries, key, input_precision="ieee") * scaling
            # What was held before is seen by all; of its own read a token sees itself and what it hangs on.
            behind = columns - length
            own = (sees[:, None] >> tl.minimum(tl.maximum(behind, 0), 62)[None, :].to(tl.int64)) & 1
            is_seen = inside[None, :] & ((behind < 0)[None, :] | (own != 0))
            if IS_LOCAL:
                is_own = inside & (behind >= 0)
                drafted = tl.load(positions + first + tl.where(is_own, behind, 0), mask=is_own, other=0).to(tl.int32)
                is_seen &= position[:, None] - tl.where(is_own, drafted, columns)[None, :] < window
            scores = tl.where(is_seen, scores, float("-inf"))
            new_best = tl.maximum(best, tl.max(scores, 1))
            # A row may have seen nothing yet: infinity less infinity is no number.
            base = tl.where(new_best == float("-inf"), 0.0, new_best)
            fading = tl.exp2(best - base)
            weights = tl.exp2(scores - base[:, None])
            weight = weight * fading + tl.sum(weights, 1)
            value = tl.load(values + columns[:, None] * HEAD_DIM + dims[None, :], mask=inside[:, None], other=0.0)
            mixed = tl.dot(weights.to(value.dtype), value, mixed * fading[:, None], input_precision="ieee")
            best = new_best

        if NUM_PARTS == 1:
            target = seen + head[:, None] * HEAD_DIM + dims[None, :]
            tl.store(target, (mixed / weight[:, None]).to(seen.dtype.element_ty), mask=is_query[:, None])
        else:
            place = part.to(tl.int64) * num_tokens * NUM_QUERIES + head
            tl.store(partial + place[:, None] * HEAD_DIM + dims[None, :], mixed, mask=is_query[:, None])
            tl.store(marks + place, best, mask=is_query)
            tl.store(marks + NUM_PARTS * num_tokens * NUM_QUERIES + place, weight, mask=is_query)


@triton.jit(do_not_specialize=["num_tokens"])
def combine_kernel(
    seen,
    partial,
    marks,
    columns,
    num_tokens,
    NUM_QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_PARTS: tl.constexpr,
):
    """One query head of one token a program: the parts' results, each weighted as its scores say."""
    token, query = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(columns + token) >= 0:
        head = token * NUM_QUERIES + query
        places = tl.arange(0, NUM_PARTS).to(tl.int64) * num_tokens * NUM_QUERIES + head
        best = tl.load(marks + places)
        # The part with the token itself has seen something.
        fading = tl.exp2(best - tl.max(best, 0))
        weight = tl.sum(fading * tl.load(marks + NUM_PARTS * num_tokens * NUM_QUERIES + places), 0)
        dims = tl.arange(0, HEAD_DIM)
        mixed = tl.load(partial + places[:, None] * HEAD_DIM + dims[None, :])
        total = tl.sum(mixed * fading[:, None], 0) / weight
        tl.store(seen + head * HEAD_DIM + dims, total.to(seen.dtype.element_ty))
