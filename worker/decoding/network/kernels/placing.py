"""Where keys and values of a token go in the cache: functions for a kernel, one pair a layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from worker.decoding.network.kernels.compiling import inlined
from worker.decoding.network.kernels.numbers import Numbers
from worker.decoding.network.paired import BLOCK


def place_key(numbers: Numbers, head_dim: int, *, is_paired: bool) -> Callable[..., None]:
    """`place(key, keys, position, block_size)`: key [head_dim] of `real`s, rounded, into one head's keys.

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
        block = position // BLOCK
        held = keys[block * block_size + 2 * (position - block * BLOCK) :]
        for pair in range(head_dim // 2):
            held[pair * 2 * BLOCK] = store(key[2 * pair])
            held[pair * 2 * BLOCK + 1] = store(key[2 * pair + 1])

    return paired if is_paired else plain


def place_value(head_dim: int, *, is_paired: bool) -> Callable[..., None]:
    """`place(value, values, position, block_size)`: value [head_dim], as it is, where `place_key` places keys."""

    # Not as one assignment of slices: the message of its error alone would take numba two seconds.
    @inlined
    def plain(value: Any, values: Any, position: Any, block_size: Any) -> None:
        held = values[position * head_dim :]
        for d in range(head_dim):
            held[d] = value[d]

    @inlined
    def paired(value: Any, values: Any, position: Any, block_size: Any) -> None:
        block = position // BLOCK
        two = (position - block * BLOCK) // 2
        held = values[block * block_size + two * 2 * head_dim + position % 2 :]
        for d in range(head_dim):
            held[2 * d] = value[d]

    return paired if is_paired else plain
