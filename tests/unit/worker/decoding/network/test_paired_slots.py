"""Memory in pairs: a slot grows where it lies, and takes what its own text needs."""

from __future__ import annotations

import errno
import mmap
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from worker.decoding.network.kv_layout import PAIR_BLOCK, KvShape
from worker.decoding.network.slots import SlotCache

CPU: Final = torch.device("cpu")
#: A block takes 2 MiB, as much as a huge page.
SHAPE: Final = KvShape(num_layers=4, num_heads=32, head_dim=64, dtype=torch.bfloat16, is_paired=True)
BLOCK_BYTES: Final = PAIR_BLOCK * SHAPE.bytes_per_token


def acquired(num_slots: int, **options: Any) -> SlotCache:
    """A cache whose slots are all in use."""
    cache = SlotCache(SHAPE, num_slots, CPU, **options)
    for _ in range(num_slots):
        cache.acquire()
    return cache


def write(cache: SlotCache, slot: int, num_blocks: int, number: float) -> None:
    """Fill the first blocks of a slot, as passes would."""
    cache.reserve({slot: num_blocks * PAIR_BLOCK})
    for layer in cache.layers:
        layer[slot, :num_blocks] = number
    cache.lengths[slot] = num_blocks * PAIR_BLOCK


def holds(cache: SlotCache, slot: int, num_blocks: int, number: float) -> bool:
    return all(bool((layer[slot, :num_blocks] == number).all()) for layer in cache.layers)


def num_resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
@torch.inference_mode()
def test_a_long_text_beside_short_ones_takes_the_memory_of_its_own_length() -> None:
    cache = acquired(16, most_positions=1 << 17)
    before = num_resident()
    write(cache, 3, 32, 1.0)
    for slot in (0, 7, 15):
        write(cache, slot, 1, 2.0)
    assert cache.num_bytes == 35 * BLOCK_BYTES
    # A slot may have begun another huge page at its end.
    assert num_resident() - before == pytest.approx(cache.num_bytes, abs=5 * 2**21)
    cache.release(3)
    cache.trim()
    assert cache.num_bytes == 3 * BLOCK_BYTES
    assert num_resident() - before < 8 * 2**21
    assert cache.acquire() == 3
    assert not any(layer[3].any() for layer in cache.layers), "memory that was given back comes back as zeros"
    assert holds(cache, 15, 1, 2.0)


@torch.inference_mode()
def test_a_system_with_few_addresses_gives_those_that_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    mapping, most = mmap.mmap, 20 * BLOCK_BYTES

    def limited(fileno: int, num_bytes: int, **kwargs: Any) -> mmap.mmap:
        if num_bytes > most:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return mapping(fileno, num_bytes, **kwargs)

    monkeypatch.setattr(mmap, "mmap", limited)
    cache = acquired(2, most_positions=1 << 17)
    write(cache, 1, 3, 7.0)
    write(cache, 0, 10, 5.0)
    assert holds(cache, 1, 3, 7.0)
    with pytest.raises(MemoryError, match=f"no addresses for {11 * PAIR_BLOCK} positions in each of 2 slots"):
        cache.reserve({0: 11 * PAIR_BLOCK})
    assert (cache.num_bytes, cache.layers, cache.lengths) == (0, [], [0, 0])


@torch.inference_mode()
def test_memory_of_texts_that_ended_is_given_back_before_the_limit_is_passed() -> None:
    cache = acquired(3, most_positions=100 * PAIR_BLOCK, max_bytes=8 * BLOCK_BYTES)
    write(cache, 0, 6, 5.0)
    cache.release(0)
    write(cache, 1, 2, 7.0)
    assert cache.num_bytes == 8 * BLOCK_BYTES
    write(cache, 2, 3, 6.0)
    assert cache.num_bytes == 5 * BLOCK_BYTES
    assert holds(cache, 1, 2, 7.0)
