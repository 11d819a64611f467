"""Jobs leave no cycles of objects, so a worker may look for such cycles seldom."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.fixtures.drafting import draft_model
from tests.fixtures.models import VANILLA, decision, finish, make_job
from worker.decoding.engine import TransformersEngine
from worker.engine import Sampling

Build = Callable[..., TransformersEngine]
NUM_SLOTS = 4
NUM_JOBS = 24


@pytest.fixture
def found_by_the_search() -> Iterator[Callable[[], list[object]]]:
    """What only a search for cycles would free, of the objects made since the test began."""
    gc.collect()
    gc.disable()

    def search() -> list[object]:
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return list(gc.garbage)

    yield search
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def decode(engine: TransformersEngine, rng: random.Random) -> None:
    sampling, ways = Sampling(max_tokens=5, temperature=0.0), (VANILLA, decision("lookup", 4), decision("model", 2))
    jobs = [make_job("ab " * rng.randint(1, 12) + str(number), number) for number in range(NUM_JOBS)]
    assert len(finish(engine, ((job, sampling, rng.choice(ways)) for job in jobs))) == NUM_JOBS


def test_no_tensor_of_a_job_waits_for_the_search(
    tiny_engine: Build,
    tiny_models: dict[str, Path],
    rng: random.Random,
    found_by_the_search: Callable[[], list[object]],
) -> None:
    engine = tiny_engine(
        num_slots=NUM_SLOTS, drafters={"model": draft_model("model", tiny_models["qwen2"], num_slots=4)}
    )
    decode(engine, rng)
    gc.collect()
    decode(engine, rng)
    left = found_by_the_search()
    assert not [one for one in left if isinstance(one, torch.Tensor)]
    assert len(left) < NUM_JOBS
