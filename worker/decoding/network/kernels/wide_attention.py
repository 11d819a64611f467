"""Attention of long reads, pieces of prompts, in bfloat16: products of pairs, and no key that no token sees.

torch's attention on a CPU computes the scores of all keys, with a mask for the later ones, at a quarter of the speed of
these products (docs/log.md). A tile of some tokens' queries is scored against all keys that its last token sees, then
weighed, then multiplied with the values. Scores and sums are float32, weights are rounded to bfloat16: the precision of
FlashAttention (Dao et al. 2022) with bfloat16 inputs. What a token attends to does not depend on its tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from worker.decoding.network.kernels.attention_arguments import NUM_ARGUMENTS, NUM_PASS_ARGUMENTS, At, PassAt
from worker.decoding.network.kernels.compiling import array, float_of, kernel, take
from worker.decoding.network.kernels.tiles import (
    gather_queries,
    mix_values,
    score_blocks,
    tokens_together,
    weigh_row,
    write_seen,
)
from worker.decoding.network.paired import BLOCK


@kernel
def wide_kernel(head_dim: int, num_shared: int) -> Callable[[Any], None]:
    """Attends to what the reads' slots hold, their own tokens included. `num_shared`: query heads a key head.

    Queries are rotated, and keys and values lie in the cache: `attention.attention_kernel` ran before.
    """
    num_together = tokens_together(num_shared)
    num_most = num_together * num_shared
    gather, write = gather_queries(head_dim, num_shared), write_seen(head_dim, num_shared)
    score, weigh, mix = score_blocks(head_dim), weigh_row(), mix_values(head_dim)

    def wide_attention(address: Any) -> None:
        a = numba.carray(address, (NUM_ARGUMENTS,), np.int64)
        of_pass = array(a[At.OF_PASS], (NUM_PASS_ARGUMENTS,), np.int64)
        num_queries, window = a[At.NUM_QUERIES], a[At.WINDOW]
        num_keys, num_tokens = num_queries // num_shared, of_pass[PassAt.NUM_TOKENS]
        qkv = array(a[At.QKV], (num_tokens, (num_queries + 2 * num_keys) * head_dim), np.uint16)
        seen = array(a[At.SEEN], (num_tokens, num_queries * head_dim), np.uint16)
        wide = array(of_pass[PassAt.WIDE], (of_pass[PassAt.NUM_WIDE], 4), np.int64)
        slot_bytes, head_bytes = of_pass[PassAt.SLOT_SIZE] * 2, of_pass[PassAt.HEAD_SIZE] * 2
        block_bytes = of_pass[PassAt.BLOCK_SIZE] * 2
        queries = np.empty(num_most * head_dim, np.uint16)
        totals = np.empty(num_most, np.float32)
        out = np.empty(num_most * head_dim, np.float32)
        item, first_item = take(a.ctypes.data), 0
        for read in range(len(wide)):
            slot, length, first_token, width = wide[read, 0], wide[read, 1], wide[read, 2], wide[read, 3]
            num_tiles = (width + num_together - 1) // num_together
            num_held = (length + width + BLOCK - 1) // BLOCK
            of_slot = a[At.HELD] + slot * slot_bytes
            scores = np.empty(num_most * num_held * BLOCK, np.float32)
            weights = np.empty(num_most * num_held * BLOCK, np.uint16)
            while item < first_item + num_tiles * num_keys:
                # The last tile first, because it sees most: those that see less end the work evenly.
                tile = num_tiles - 1 - (item - first_item) // num_keys
                head = (item - first_item) % num_keys
                begin, end = tile * num_together, min((tile + 1) * num_together, width)
                rows, first = (end - begin) * num_shared, first_token + begin
                gather(qkv, first, end - begin, head * num_shared * head_dim, queries)
                # Blocks that some token of the tile sees: the others are not computed.
                block = max(0, length + begin - window + 1) // BLOCK if window else 0
                num = (length + end + BLOCK - 1) // BLOCK - block
                keys = of_slot + head * head_bytes + block * block_bytes
                score(keys, block_bytes, keys + num_keys * head_bytes, queries, rows, num, scores)
                for row in range(rows):
                    last = length + begin - block * BLOCK + row // num_shared + 1
                    oldest = max(0, last - window) if window else 0
                    of_row, at = weights[row * num * BLOCK : (row + 1) * num * BLOCK], scores[row * num * BLOCK :]
                    totals[row] = weigh(at, oldest, last, float_of(a[At.SCALING]), of_row)
                mix(keys + num_keys * head_bytes, block_bytes, keys, weights, rows, num, out)
                write(out, totals, first, end - begin, head, seen)
                item = take(a.ctypes.data)
            first_item += num_tiles * num_keys

    return wide_attention
