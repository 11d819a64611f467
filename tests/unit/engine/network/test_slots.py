"""The slot cache against a dictionary: what was written and counts is there, wherever rows and memory moved."""

from __future__ import annotations

import errno
import mmap
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.network.kv_layout import BLOCK, PAIR_BLOCK, KvShape, to_paired, to_plain
from engine.network.slots import SlotCache, zeros

NUM_SLOTS: Final = 4
SHAPE: Final = KvShape(num_layers=2, num_heads=1, head_dim=2, dtype=torch.float64)
CPU: Final = torch.device("cpu")


def cell(layer: int, number: float) -> torch.Tensor:
    """What a token's cell holds in a layer: [2 * heads, head_dim], all different."""
    return number + torch.tensor([[0.1, 0.2], [0.3, 0.4]], dtype=torch.float64) + 0.01 * layer


class Slots(RuleBasedStateMachine):
    """`model` holds the numbers of the tokens that count, by slot; a slot that is not in use is not in it."""

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[int, list[int]] = {}
        self.num_written = 0

    @initialize(
        max_bytes=st.none() | st.just(NUM_SLOTS * BLOCK * SHAPE.bytes_per_token),
        is_paired=st.booleans(),
        most_positions=st.sampled_from([BLOCK // 2, 8 * BLOCK]),  # texts are longer, or they are not
    )
    def build(self, max_bytes: int | None, is_paired: bool, most_positions: int) -> None:
        self.max_bytes = max_bytes
        shape = replace(SHAPE, is_paired=is_paired)
        self.cache = SlotCache(shape, NUM_SLOTS, CPU, max_bytes=max_bytes, most_positions=most_positions)

    def plain(self, layer: torch.Tensor, slot: int) -> torch.Tensor:
        """[1, 2 * heads, capacity, head_dim] of a slot."""
        held = layer[slot : slot + 1]
        return to_plain(held) if self.cache.shape.is_paired else held

    @torch.inference_mode()
    def write(self, slot: int, num: int) -> list[int]:
        """`num` columns behind a slot's length, as a pass writes them; their numbers."""
        length = self.cache.lengths[slot]
        self.cache.reserve({slot: length + num})
        numbers = list(range(self.num_written, self.num_written + num))
        self.num_written += num
        for index, layer in enumerate(self.cache.layers):
            plain = self.plain(layer, slot)
            for column, number in enumerate(numbers):
                plain[0, :, length + column] = cell(index, number)
            layer[slot] = (to_paired(plain) if self.cache.shape.is_paired else plain)[0]
        return numbers

    @precondition(lambda self: len(self.model) < NUM_SLOTS)
    @rule()
    def acquire(self) -> None:
        slot = self.cache.acquire()
        assert slot == min(set(range(NUM_SLOTS)) - set(self.model)), "expected the lowest free slot"
        self.model[slot] = []

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.model)))
        del self.model[slot]
        self.cache.release(slot)
        if not self.model:
            assert self.cache.num_bytes == 0

    @precondition(lambda self: self.model)
    @rule(data=st.data(), num=st.integers(1, BLOCK + 20) | st.just(BLOCK))
    def read_a_piece(self, data: st.DataObject, num: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.model)))
        if self.max_bytes is not None and len(self.model[slot]) + num > BLOCK:
            return  # the engine would not have admitted it
        self.model[slot] += self.write(slot, num)
        self.cache.lengths[slot] += num

    @precondition(lambda self: self.model)
    @rule(data=st.data(), num=st.integers(1, 9))
    def keep(self, data: st.DataObject, num: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.model)))
        if self.max_bytes is not None and len(self.model[slot]) + num > BLOCK:
            return
        kept = [0, *sorted(data.draw(st.sets(st.integers(1, num - 1))))] if num > 1 else [0]
        numbers = self.write(slot, num)
        self.cache.keep(slot, kept)
        self.model[slot] += [numbers[column] for column in kept]

    @precondition(lambda self: len({len(held) for held in self.model.values()}) > 1)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        begin = data.draw(st.sampled_from(sorted({len(held) for held in self.model.values()})[:-1]))
        source = data.draw(st.sampled_from([slot for slot, held in self.model.items() if len(held) > begin]))
        slots = [slot for slot, held in self.model.items() if len(held) == begin]
        most = len(self.model[source])
        end = data.draw(st.integers(begin + 1, most) | st.just(most))
        self.cache.copy(source, slots, begin, end)
        for slot in slots:
            self.model[slot] += self.model[source][begin:end]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def lower(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.model)))
        free = set(range(NUM_SLOTS)) - set(self.model)
        expected = min({slot, *free})
        assert self.cache.lower(slot) == expected
        self.model[expected] = self.model.pop(slot)

    @rule()
    def trim(self) -> None:
        self.cache.trim()
        lengths = [len(numbers) for numbers in self.model.values()]
        if self.cache.shape.is_paired:
            num_blocks = sum(-(-length // PAIR_BLOCK) for length in lengths)
            assert self.cache.num_bytes == num_blocks * PAIR_BLOCK * SHAPE.bytes_per_token
        else:
            assert self.cache.num_bytes == self.cache.num_bytes_with(max(self.model, default=-1) + 1, lengths or [0])

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.model = {}

    @invariant()
    def what_counts_is_there(self) -> None:
        for slot, numbers in self.model.items():
            assert self.cache.lengths[slot] == len(numbers)
            for index, layer in enumerate(self.cache.layers if numbers else ()):
                expected = torch.stack([cell(index, number) for number in numbers], dim=1)
                assert torch.equal(self.plain(layer, slot)[0, :, : len(numbers)], expected)

    @invariant()
    def the_stated_bytes_are_held(self) -> None:
        held = self.cache.num_bytes
        assert self.max_bytes is None or held <= self.max_bytes
        if self.cache.shape.is_paired:
            assert held >= sum(map(len, self.model.values())) * SHAPE.bytes_per_token
            return
        assert held == sum(layer.untyped_storage().nbytes() for layer in self.cache.layers)
        assert all(len(layer) <= NUM_SLOTS for layer in self.cache.layers)
        assert self.cache.capacity % BLOCK == 0


Slots.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestSlots = Slots.TestCase


@pytest.mark.parametrize("is_paired", [False, True])
@pytest.mark.parametrize("num_readers", [1, 2, 3])
@torch.inference_mode()
def test_a_beginning_that_fills_its_slot_is_copied_into_others(is_paired: bool, num_readers: int) -> None:
    cache = SlotCache(replace(SHAPE, is_paired=is_paired), NUM_SLOTS, CPU)
    slots = [cache.acquire() for _ in range(1 + num_readers)]
    cache.reserve(dict.fromkeys(slots, BLOCK))
    assert cache.capacity == BLOCK or is_paired
    for number, layer in enumerate(cache.layers):
        layer[0] = 1.0 + number
        layer[1 : 1 + num_readers] = 0.0
    cache.lengths[0] = BLOCK
    cache.copy(0, slots[1:], 0, BLOCK)
    assert [cache.lengths[slot] for slot in slots] == [BLOCK] * len(slots)
    for number, layer in enumerate(cache.layers):
        held = to_plain(layer) if is_paired else layer
        assert bool((held[: 1 + num_readers, :, :BLOCK] == 1.0 + number).all())


def test_rows_and_positions_that_were_needed_at_different_times_are_not_held_together() -> None:
    """One long text, then many short ones: a cache that only ever grew would hold the product."""
    limit = 8 * BLOCK * SHAPE.bytes_per_token
    cache = SlotCache(SHAPE, 8, CPU, max_bytes=limit)
    first, second = cache.acquire(), cache.acquire()
    cache.reserve({0: 4 * BLOCK})
    cache.lengths[second] = 3
    cache.release(first)
    for _ in range(7):
        cache.acquire()
    cache.reserve(dict.fromkeys(range(8), BLOCK))
    assert cache.layers[0].shape[::2] == (8, BLOCK), "rows and positions"
    for slot in range(2, 8):
        cache.release(slot)
    cache.reserve({0: 4 * BLOCK})
    assert cache.layers[0].shape[::2] == (2, 4 * BLOCK)
    assert cache.num_bytes == limit


def test_memory_that_runs_out_while_layers_grow_leaves_an_empty_cache(
    monkeypatch: pytest.MonkeyPatch, rng: random.Random
) -> None:
    """Layers of different sizes would be read as if they were of one: nothing half done may stay."""
    cache = SlotCache(SHAPE, 2, CPU)
    slots = [cache.acquire(), cache.acquire()]
    cache.reserve({0: 10, 1: 10})
    cache.lengths = [7, 9]
    calls = []

    def failing(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory for the second layer")
        return zeros(*args, **kwargs)

    resize = rng.choice((lambda: cache.reserve({0: 200, 1: 200}), lambda: (cache.release(slots[1]), cache.trim())))
    with monkeypatch.context() as patched:
        patched.setattr("engine.network.slots.zeros", failing)
        with pytest.raises(torch.OutOfMemoryError):
            resize()
    assert cache.num_bytes == 0
    assert cache.layers == []
    assert cache.lengths == [0, 0]
    cache.reserve({0: 200, 1: 200})
    assert {tuple(layer.shape) for layer in cache.layers} == {(2, 2, 256, 2)}


def test_a_lack_of_memory_is_an_error_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", lacking)
    with pytest.raises(MemoryError, match="the system has no 8388608 bytes"):
        zeros((1024, 1024), torch.float64, CPU)
    assert zeros((3,), torch.float64, CPU).tolist() == [0, 0, 0]


#: A block takes 2 MiB, as much as a huge page.
PAIRED: Final = KvShape(num_layers=4, num_heads=32, head_dim=64, dtype=torch.bfloat16, is_paired=True)
BLOCK_BYTES: Final = PAIR_BLOCK * PAIRED.bytes_per_token


def acquired(num_slots: int, **options: Any) -> SlotCache:
    """A cache whose slots are all in use."""
    cache = SlotCache(PAIRED, num_slots, CPU, **options)
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
