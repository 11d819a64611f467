"""Many jobs through one engine: nothing stays open, memory does not grow, and no cycle of objects is left.

`SOAK_JOBS=10000 pytest tests/integration/test_soak.py -s` is the long run.
"""

from __future__ import annotations

import gc
import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from alphaloop.deciding.decision import Decision
from alphaloop.engine import PreparedJob, Sampling
from engine.own import TransformersEngine
from tests.fixtures.drafting import draft_model
from tests.fixtures.models import VANILLA, decision, make_job

Build = Callable[..., TransformersEngine]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_JOBS: Final = int(os.environ.get("SOAK_JOBS", "300"))
NUM_SLOTS: Final = 8
#: Growth behind the first tenth that is not called a leak: what an allocator keeps of blocks that come and go.
MOST_GROWTH_BYTES: Final = 12 * 2**20
#: Objects that may be left over: counters and caches of the interpreter, not one a job.
MOST_GROWTH_OBJECTS: Final = NUM_JOBS // 10


@pytest.fixture(autouse=True)
def search_again() -> Iterator[None]:
    """What comes later is searched for cycles as before."""
    yield
    gc.enable()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def some_job(engine: TransformersEngine, number: int, rng: random.Random) -> tuple[PreparedJob, Decision]:
    sampling = Sampling(
        max_tokens=rng.randint(3, 8), temperature=rng.choice((0.0, 0.0, 0.9)), seed=rng.choice((None, number))
    )
    if rng.random() < 0.2:
        sampling = replace(sampling, repetition_penalty=1.2, stop=("zz",))
    job = make_job("ab " * rng.randint(1, 12) + str(number), number, stream=rng.random() < 0.2)
    drafter, k = rng.choice((("", 0), ("lookup", 4), ("model", 2), ("model", 4)))
    return engine.prepare(job, sampling), decision(drafter, k) if k else VANILLA


def measure() -> tuple[int, int]:
    gc.collect()
    return resident_bytes(), len(gc.get_objects())


def kinds_in_cycles() -> list[type]:
    """Of what only a search for cycles frees: a worker may search seldom."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    kinds = [type(one) for one in gc.garbage]
    gc.set_debug(0)
    gc.garbage.clear()
    return kinds


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_memory_does_not_grow_with_the_jobs(
    tiny_engine: Build, tiny_models: dict[str, Path], rng: random.Random
) -> None:
    engine = tiny_engine(
        num_slots=NUM_SLOTS, drafters={"model": draft_model("model", tiny_models["qwen2"], num_slots=8)}
    )
    began = time.perf_counter()
    admitted: deque[str] = deque(maxlen=NUM_SLOTS)
    num_admitted = num_finished = num_cancelled = num_tokens = 0
    before: tuple[int, int] | None = None
    while num_finished + num_cancelled < NUM_JOBS:
        while num_admitted < NUM_JOBS and engine.load().num_free:
            prepared, decided = some_job(engine, num_admitted, rng)
            engine.admit(prepared, decided)
            num_admitted += 1
            admitted.append(prepared.job.job_id)
            if rng.random() < 0.01:
                num_cancelled += engine.cancel(prepared.job.job_id)
        for job_id in admitted:  # some have ended, and some run on beside them
            if rng.random() < 0.2:
                engine.redraft(job_id, rng.choice((None, "lookup", "model")), rng.choice((0, 2, 4)))
        for generation in engine.step().finished:
            num_finished += 1
            num_tokens += len(generation.token_ids)
            assert generation.counts.num_tokens == len(generation.token_ids)
        if before is None and num_finished >= NUM_JOBS // 10:
            before = measure()
            gc.disable()
    assert before is not None
    kinds = kinds_in_cycles()
    assert not [kind for kind in kinds if issubclass(kind, torch.Tensor)]
    assert len(kinds) < NUM_JOBS
    grown_bytes, grown_objects = (now - then for now, then in zip(measure(), before, strict=True))
    print(
        f"{num_finished} jobs, {num_cancelled} cancelled, {num_tokens} tokens in {time.perf_counter() - began:.0f} s; "
        f"behind the first tenth {grown_bytes / 2**20:+.1f} MiB, {grown_objects:+d} objects"
    )
    assert engine.load().num_running == 0
    assert sorted(engine._cache._free) == list(range(NUM_SLOTS))
    assert engine._cache.num_bytes == 0
    nothing_is_left(engine._drafters)
    assert grown_bytes < MOST_GROWTH_BYTES
    assert grown_objects < MOST_GROWTH_OBJECTS


def nothing_is_left(drafters: dict[str, Any]) -> None:
    model, lookup = drafters["model"], drafters["lookup"]
    assert model._held == {}
    assert sorted(model._cache._free) == list(range(NUM_SLOTS))
    assert model._cache.num_bytes == 0
    assert lookup._open == {}
