"""How the tokens of a short read attend in tiles, in bfloat16, to what their slot holds in pairs.

SmolLM2 in bf16, 8 sequences of 300 tokens, one layer on one core: five tokens each 854 µs one by one, 325 in tiles; one
token each 163 and 169. That was with keys and values that were packed in every pass (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from worker.decoding.network.kernels.attending import hide_unseen
from worker.decoding.network.kernels.compiling import compiled
from worker.decoding.network.kernels.numbers import NUMBERS
from worker.decoding.network.kernels.tiles import (
    gather_queries,
    mix_values,
    score_blocks,
    tokens_together,
    weigh_row,
    write_seen,
)
from worker.decoding.network.paired import BLOCK


def attend_by_tile(head_dim: int, num_shared: int) -> Callable[..., None]:
    """As `attending.attend_by_token`; keys and values are in pairs, and a slot's positions are whole blocks.

    `block_bytes`: from the keys of a block to those of the next. `ahead`: the keys of the thread's next read.
    """
    score, weigh, mix = score_blocks(head_dim), weigh_tile(num_shared), mix_values(head_dim)
    gather, write = gather_queries(head_dim, num_shared), write_seen(head_dim, num_shared)
    together, size = tokens_together(num_shared), num_shared * head_dim

    @compiled
    def attend(
        qkv: Any,
        query: Any,
        keys: Any,
        values: Any,
        block_bytes: Any,
        ahead: Any,
        length: Any,
        positions: Any,
        ancestry: Any,
        window: Any,
        scaling: Any,
        seen: Any,
    ) -> None:
        num_tokens, rows = len(positions), min(len(positions), together) * num_shared
        num = (length + num_tokens + BLOCK - 1) // BLOCK
        queries, sums = np.empty(rows * head_dim, np.uint16), np.empty(rows * head_dim, np.float32)
        scores, weights = np.empty(rows * num * BLOCK, np.float32), np.empty(rows * num * BLOCK, np.uint16)
        totals = np.empty(rows, np.float32)
        for first in range(0, num_tokens, together):
            end = min(first + together, num_tokens)
            gather(qkv, first, end - first, query, queries)
            rows = (end - first) * num_shared
            score(np.int64(keys.ctypes.data), block_bytes, np.int64(values.ctypes.data), queries, rows, num, scores)
            weigh(scores, num * BLOCK, first, end, length, positions, ancestry, window, scaling, weights, totals)
            mix(np.int64(values.ctypes.data), block_bytes, ahead, weights, rows, num, sums)
            write(sums, totals, first, end - first, query // size, seen)

    return attend


def weigh_tile(num_shared: int) -> Callable[..., None]:
    """`weigh(scores, num, first, end, length, positions, ancestry, window, scaling, weights, totals)`.

    `num`: keys of a row. The tile's tokens are `first` to `end` of those at `positions`. Scores of what they do not see
    are overwritten.
    """
    hide, weigh_one = hide_unseen(NUMBERS[torch.bfloat16]), weigh_row()

    @compiled
    def weigh(
        scores: Any,
        num: Any,
        first: Any,
        end: Any,
        length: Any,
        positions: Any,
        ancestry: Any,
        window: Any,
        scaling: Any,
        weights: Any,
        totals: Any,
    ) -> None:
        for row in range((end - first) * num_shared):
            token = first + row // num_shared
            found = scores[row * num : (row + 1) * num]
            num_seen = hide(found, length, positions[token], ancestry[token], positions, window)
            # Summed up from the first key of the window on, as `wide_attention` does.
            oldest = min(length, max(0, positions[token] - window + 1)) if window else 0
            totals[row] = weigh_one(found, oldest, num_seen, scaling, weights[row * num : (row + 1) * num])

    return weigh
