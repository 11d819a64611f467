"""Which slots admitted sequences have: gaps stay where they cost nothing, and never cost memory that a job was told."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.fixtures.models import make_job
from worker.decoding.engine import AdmittedSequences
from worker.decoding.network.kv_layout import BLOCK, KvShape
from worker.decoding.network.slots import SlotCache
from worker.engine import PreparedJob, Sampling

SHAPE = KvShape(num_layers=1, num_heads=1, head_dim=32, dtype=torch.bfloat16, is_paired=True)
NUM_SLOTS = 6


@dataclass
class Running:
    """What is asked of a sequence here."""

    job_id: str
    slot: int
    num_positions: int


def job(number: int, num_positions: int) -> PreparedJob:
    return PreparedJob(make_job("text", number), (1,) * (num_positions - 1), Sampling(max_tokens=1, temperature=0.0))


def admit(admitted: Any, number: int, num_positions: int) -> Running | None:
    prepared = job(number, num_positions)
    if not admitted.fits(prepared):
        return None
    running = Running(str(number), admitted.acquire(prepared), num_positions)
    admitted.running.append(running)
    return running


def new(max_bytes: int, *, is_paired: bool = True) -> tuple[SlotCache, Any]:
    cache = SlotCache(dataclasses.replace(SHAPE, is_paired=is_paired), NUM_SLOTS, torch.device("cpu"))
    return cache, AdmittedSequences(cache, NUM_SLOTS, max_bytes)


def test_memory_never_exceeds_its_limit_whatever_gaps_there_are(rng: random.Random) -> None:
    for _ in range(50):
        cache, admitted = new(8 * BLOCK * SHAPE.bytes_per_token)
        cache.max_bytes = 8 * BLOCK * SHAPE.bytes_per_token
        for number in range(60):
            if admitted.running and rng.random() < 0.5:
                admitted.drop(rng.choice(admitted.running))
                admitted.close_gaps()
            running = admit(admitted, number, rng.choice([3, BLOCK, 2 * BLOCK, 5 * BLOCK, 8 * BLOCK]))
            if running is not None:
                cache.reserve({running.slot: running.num_positions})
                cache.lengths[running.slot] = running.num_positions
            assert cache.num_bytes <= cache.max_bytes
            slots = [one.slot for one in admitted.running]
            assert len(set(slots)) == len(slots)


@pytest.mark.parametrize(("is_paired", "slots"), [(True, [1, 2]), (False, [0, 1])])
def test_gaps_are_closed_where_a_pass_would_compute_them(is_paired: bool, slots: list[int]) -> None:
    _, admitted = new(100 * BLOCK * SHAPE.bytes_per_token, is_paired=is_paired)
    first = admit(admitted, 0, 9)
    for number in (1, 2):
        admit(admitted, number, 9)
    admitted.drop(first)
    admitted.close_gaps()
    assert sorted(one.slot for one in admitted.running) == slots
