"""The norm and the rotation of heads: functions for a kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from worker.decoding.network.kernels.compiling import compiled, inlined
from worker.decoding.network.kernels.numbers import Numbers


@functools.cache
def rotate(numbers: Numbers, head_dim: int) -> Callable[..., None]:
    """`turn(x, rotation, norm, is_normed, epsilon, out)`: RMS norm where there is one, then each pair turned."""
    load, real = numbers.load, numbers.real

    @compiled
    def turn(x: Any, rotation: Any, norm: Any, is_normed: Any, epsilon: Any, out: Any) -> None:
        for d in range(head_dim):
            out[d] = load(x[d])
        if is_normed:
            squares = real(0)
            for d in range(head_dim):
                squares += out[d] * out[d]
            factor = real(1) / np.sqrt(squares / real(head_dim) + epsilon)
            for d in range(head_dim):
                out[d] = out[d] * factor * load(norm[d])
        for pair in range(head_dim // 2):
            a, b, cosine, sine = out[2 * pair], out[2 * pair + 1], rotation[2 * pair], rotation[2 * pair + 1]
            out[2 * pair] = a * cosine - b * sine
            out[2 * pair + 1] = a * sine + b * cosine

    return turn


def turn_queries(numbers: Numbers, head_dim: int, num_shared: int) -> Callable[..., None]:
    """`ask(queries, rotation, norm, is_normed, epsilon, out)`: [num_shared, head_dim], turned."""
    turn = rotate(numbers, head_dim)

    @inlined
    def ask(queries: Any, rotation: Any, norm: Any, is_normed: Any, epsilon: Any, out: Any) -> None:
        for shared in range(num_shared):
            at, end = shared * head_dim, (shared + 1) * head_dim
            turn(queries[at:end], rotation, norm[at:end], is_normed, epsilon, out[at:end])

    return ask


def copy_out(numbers: Numbers) -> Callable[..., None]:
    """`write(x, out)`: all of x, rounded."""
    store = numbers.store

    @compiled
    def write(x: Any, out: Any) -> None:
        for d in range(len(x)):
            out[d] = store(x[d])

    return write
