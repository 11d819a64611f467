"""Where keys and values of a token go in the cache: functions for a kernel, one pair a layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from worker.decoding.network.kernels.compiling import inlined
from worker.decoding.network.kernels.numbers import Numbers
from worker.decoding.network.paired import BLOCK


def place_key(numbers: Numbers, head_dim: int, *, is_paired: bool) -> Callable[..., None]:
    """`place(key, keys, position)`: key [head_dim] of `real`s, rounded, into one head's keys [positions * head_dim]."""
    store = numbers.store

    @inlined
    def plain(key: Any, keys: Any, position: Any) -> None:
        held = keys[position * head_dim :]
        for d in range(head_dim):
            held[d] = store(key[d])

    @inlined
    def paired(key: Any, keys: Any, position: Any) -> None:
        block = position // BLOCK
        held = keys[block * BLOCK * head_dim + 2 * (position - block * BLOCK) :]
        for pair in range(head_dim // 2):
            held[pair * 2 * BLOCK] = store(key[2 * pair])
            held[pair * 2 * BLOCK + 1] = store(key[2 * pair + 1])

    return paired if is_paired else plain


def place_value(head_dim: int, *, is_paired: bool) -> Callable[..., None]:
    """`place(value, values, position)`: value [head_dim], as it is, into one head's values [positions * head_dim]."""

    # Not as one assignment of slices: the message of its error alone would take numba two seconds.
    @inlined
    def plain(value: Any, values: Any, position: Any) -> None:
        held = values[position * head_dim :]
        for d in range(head_dim):
            held[d] = value[d]

    @inlined
    def paired(value: Any, values: Any, position: Any) -> None:
        two = position // 2
        held = values[two * 2 * head_dim + position - 2 * two :]
        for d in range(head_dim):
            held[2 * d] = value[d]

    return paired if is_paired else plain
