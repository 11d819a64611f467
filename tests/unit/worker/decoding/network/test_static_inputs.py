"""The block of numbers that a recorded pass reads."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from worker.decoding.network.groups import Read
from worker.decoding.network.kv_shape import KvShape
from worker.decoding.network.slots import SlotCache
from worker.decoding.network.static_inputs import NUM_TOKENS, WIDTHS, InputBlock, StaticShape

CPU = torch.device("cpu")
SHAPE = KvShape(num_layers=3, num_heads=2, head_dim=4, dtype=torch.float32)


def reads_of(*widths: int) -> list[Read]:
    """One a slot, as chains."""
    return [Read(slot, list(range(10, 10 + width)), num_logits=width) for slot, width in enumerate(widths)]


@pytest.mark.parametrize(
    ("widths", "expected"),
    [
        ((1,), (1, 1)),
        ((1, 1, 1, 1, 1), (6, 1)),
        ((5, 1, 1), (8, 8)),
        ((32, 32), (64, 32)),
        ((1,) * 256, (256, 1)),
    ],
)
def test_a_shape_is_the_smallest_that_holds_the_reads(widths: tuple[int, ...], expected: tuple[int, int]) -> None:
    assert StaticShape.of(reads_of(*widths)) == StaticShape(*expected)


@pytest.mark.parametrize("widths", [(33,), (32,) * 9, (1,) * 257])
def test_long_passes_have_no_shape(widths: tuple[int, ...]) -> None:
    assert StaticShape.of(reads_of(*widths)) is None


def test_filling_up_costs_at_most_half_of_a_pass() -> None:
    assert all(more <= 1.5 * fewer or more - fewer == 1 for fewer, more in pairwise(NUM_TOKENS))
    assert all(more == 2 * fewer for fewer, more in pairwise(WIDTHS))


def test_the_block_holds_what_the_reads_say_and_nothing_of_those_before(rng: random.Random) -> None:
    cache = SlotCache(SHAPE, 9, CPU)
    block = InputBlock(SHAPE.num_layers, CPU)
    for _ in range(20):
        cache.lengths = [rng.randrange(300) for _ in range(9)]
        reads = [_some_read(slot, rng) for slot in rng.sample(range(9), rng.randint(1, 9))]
        shape = StaticShape.of(reads)
        assert shape is not None
        cache.reserve(dict.fromkeys(range(9), 340))
        num_wanted = block.fill(shape, reads, cache)
        inputs = block.views(shape)
        flat = [(read, column) for read in reads for column in range(len(read.token_ids))]
        num = len(flat)
        assert inputs.token_ids.tolist() == [read.token_ids[column] for read, column in flat] + [0] * (
            shape.num_tokens - num
        )
        assert inputs.slots[:num].tolist() == [read.slot for read, _ in flat]
        assert inputs.columns.tolist() == [cache.lengths[read.slot] + column for read, column in flat] + [-1] * (
            shape.num_tokens - num
        )
        for (read, column), position, bits in zip(
            flat, inputs.positions.tolist(), inputs.ancestry.tolist(), strict=False
        ):
            path = _path(read, column)
            assert position == cache.lengths[read.slot] + len(path) - 1
            assert bits == sum(1 << ancestor for ancestor in path)
        assert inputs.widths.tolist() == [len(read.token_ids) for read in reads] + [0] * (shape.num_tokens - len(reads))
        for read, slot, length, first in zip(
            reads, inputs.read_slots.tolist(), inputs.lengths.tolist(), inputs.firsts.tolist(), strict=False
        ):
            assert (slot, length) == (read.slot, cache.lengths[read.slot])
            assert flat[first] == (read, 0)
        wanted = [index for index, (read, column) in enumerate(flat) if column >= len(read.token_ids) - read.num_logits]
        assert inputs.wanted[:num_wanted].tolist() == wanted
        assert inputs.capacity.tolist() == [cache.capacity]
        assert inputs.addresses.tolist() == [layer.data_ptr() for layer in cache.layers]


def _some_read(slot: int, rng: random.Random) -> Read:
    width = rng.choice([1, 1, 2, 5, 32])
    parents = [-1, *(rng.randrange(index) for index in range(1, width))] if rng.random() < 0.5 else None
    tokens = [rng.randrange(1, 1000) for _ in range(width)]
    return Read(slot, tokens, num_logits=rng.randint(0, width), parents=parents)


def _path(read: Read, column: int) -> list[int]:
    if read.parents is None:
        return list(range(column + 1))
    parent = read.parents[column]
    return [*(_path(read, parent) if parent >= 0 else ()), column]
