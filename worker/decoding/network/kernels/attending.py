"""How the tokens of a read attend, one by one, to what their slot holds, for all query heads of one key head.

These are functions for a kernel. Sizes are constants of the compiled code. Sums over elements are split over a vector's
lanes, always in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from worker.decoding.network.kernels.compiling import compiled
from worker.decoding.network.kernels.numbers import Numbers

#: Values that are weighed together: each element of the sum is read and written once for so many.
_TOGETHER: Final = 4
#: The score of what is not seen.
_NEVER: Final = -1e30


def attend_by_token(numbers: Numbers, head_dim: int, num_shared: int) -> Callable[..., None]:
    """`attend(qkv, query, keys, values, block_bytes, ahead, length, positions, ancestry, window, scaling, seen)`.

    For one read. `block_bytes` and `ahead` mean something to `attend_by_tile` only, which is called in the same way.

    Its tokens are the rows of `qkv`, whose queries of the key head begin at number `query`, and of `seen`, which is
    written from there on. They lie behind `length` others at `positions`; token i sees the tokens of the read whose
    bits are set in ancestry[i]. keys, values: [positions, head_dim].
    """
    score, hide, soften = score_keys(numbers, head_dim, num_shared), hide_unseen(numbers), softmax(numbers)
    mix, load, store, real = mix_values(numbers, head_dim, num_shared), numbers.load, numbers.store, numbers.real
    size = num_shared * head_dim

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
        total = length + len(positions)
        queries, mixed, scores = np.empty(size, real), np.empty(size, real), np.empty(num_shared * total, real)
        for token in range(len(positions)):
            asked, written = qkv[token, query:], seen[token, query:]
            for d in range(size):
                queries[d] = load(asked[d])
            score(queries, keys, total, scores)
            end = total
            for shared in range(num_shared):
                row = scores[shared * total : (shared + 1) * total]
                end = hide(row, length, positions[token], ancestry[token], positions, window)
                soften(row, end, scaling)
            mix(scores, total, values, end, mixed)
            for d in range(size):
                written[d] = store(mixed[d])

    return attend


def hide_unseen(numbers: Numbers) -> Callable[..., int]:
    """`hide(scores, length, position, seen, positions, window)`; returns how many keys end with the last one seen."""
    real = numbers.real

    @compiled
    def hide(scores: Any, length: Any, position: Any, seen: Any, positions: Any, window: Any) -> Any:
        end = length
        for column in range(len(positions)):
            is_near = window == 0 or position - positions[column] < window
            if (seen >> np.uint64(column)) & np.uint64(1) and is_near:
                end = length + column + 1
            else:
                scores[length + column] = real(_NEVER)
        if window:
            for key in range(min(length, position - window + 1)):
                scores[key] = real(_NEVER)
        return end

    return hide


def score_keys(numbers: Numbers, head_dim: int, num_shared: int) -> Callable[..., None]:
    """`score(queries, keys, num, scores)`: scores [num_shared, num] of queries [num_shared, head_dim]."""
    load, real = numbers.load, numbers.real

    @compiled
    def score(queries: Any, keys: Any, num: Any, scores: Any) -> None:
        for j in range(num):
            key = keys[j * head_dim : (j + 1) * head_dim]
            for shared in range(num_shared):
                query = queries[shared * head_dim : (shared + 1) * head_dim]
                total = real(0)
                for d in range(head_dim):
                    total += query[d] * load(key[d])
                scores[shared * num + j] = total

    return score


def softmax(numbers: Numbers) -> Callable[..., None]:
    """`soften(scores, num, scaling)`: in place, over the first `num`."""
    real, exp, largest = numbers.real, numbers.exp, numbers.largest

    @compiled
    def soften(scores: Any, num: Any, scaling: Any) -> None:
        most = largest(scores[:num])
        total = real(0)
        for j in range(num):
            weight = exp((scores[j] - most) * scaling)
            scores[j] = weight
            total += weight
        for j in range(num):
            scores[j] = scores[j] / total

    return soften


def mix_values(numbers: Numbers, head_dim: int, num_shared: int) -> Callable[..., None]:
    """`mix(weights, stride, values, num, out)`: out [num_shared, head_dim], rows of weights `stride` apart."""
    load, real = numbers.load, numbers.real

    @compiled
    def mix(weights: Any, stride: Any, values: Any, num: Any, out: Any) -> None:
        for d in range(num_shared * head_dim):
            out[d] = real(0)
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
