"""Exactness where passes are recorded and repeated: without a GPU by a tape, on one by CUDA graphs and Triton."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.fixtures.models import FAMILIES, FUSED, VANILLA, make_job
from tests.fixtures.recording import ReferenceOperations, TapeRecorder
from tests.fixtures.reference import Reference
from tests.integration.test_exactness_tiny import ADJUSTED, GREEDY, Bench, check, decisions, make_bench, some_text
from worker.decoding.device import available_bytes
from worker.decoding.network import fused, language_model
from worker.decoding.network.groups import Read
from worker.decoding.network.recording import recorded_bytes
from worker.decoding.network.slots import SlotCache

References = Callable[[str], Reference]
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[TapeRecorder]:
    """Of every model that is loaded from now on."""
    made: list[TapeRecorder] = []

    def recorder(_: torch.device) -> TapeRecorder:
        made.append(TapeRecorder())
        return made[-1]

    monkeypatch.setattr(fused, "_operations", lambda *_: ReferenceOperations())
    monkeypatch.setattr(language_model, "CudaRecorder", recorder)
    return made


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])
def test_repeated_passes_change_no_text(
    tiny_engine: Callable[..., object],
    tiny_models: dict[str, Path],
    references: References,
    family: str,
    rng: random.Random,
    recorders: list[TapeRecorder],
) -> None:
    bench = make_bench(tiny_engine, tiny_models, references, family, 4, rng)
    check_every_drafter(bench, rng)
    # One shape is recorded by the check at load. With a window it is forgotten, because the check shortens the window.
    assert [one.num_recorded > 1 for one in recorders] == [True] * 3, "the target and two drafts"
    has_window = int(family == "gemma3_text")
    assert [one.num_forgotten for one in recorders] == [0, has_window, has_window]


def test_a_step_without_memory_takes_it_from_recordings_and_loses_no_job(
    tiny_engine: Callable[..., object],
    tiny_models: dict[str, Path],
    references: References,
    rng: random.Random,
    recorders: list[TapeRecorder],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = make_bench(tiny_engine, tiny_models, references, "llama", 4, rng)
    model, num_failures = bench.engine._target.model, 0
    read = model.read

    def small(cache: SlotCache, reads: Sequence[Read]) -> Tensor:
        nonlocal num_failures
        if len(reads) > 1 and num_failures < 2:
            num_failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return read(cache, reads)

    monkeypatch.setattr(model, "read", small)
    check_every_drafter(bench, rng, of=("lookup",))
    assert num_failures == 2
    assert [one.num_forgotten for one in recorders] == [2] * 3, "the target and two drafts"


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_changes_no_text(
    tiny_engine: Callable[..., object],
    tiny_models: dict[str, Path],
    references: References,
    family: str,
    dtype: str,
    rng: random.Random,
) -> None:
    bench = make_bench(tiny_engine, tiny_models, references, family, 4, rng, device="cuda", dtype=dtype)
    check_every_drafter(bench, rng)
    model = bench.engine._target.model
    is_recorded = model._recorded is not None and len(model._recorded) > 3
    assert is_recorded == (family in FUSED and dtype == "float32")


@pytest.mark.gpu
@on_a_gpu
def test_recordings_count_as_memory_that_is_not_free_until_they_are_given_back(
    tiny_engine: Callable[..., object], tiny_models: dict[str, Path], references: References, rng: random.Random
) -> None:
    device = torch.device("cuda")
    bench = make_bench(tiny_engine, tiny_models, references, "llama", 4, rng, device="cuda", dtype="float32")
    check_every_drafter(bench, rng)
    model = bench.engine._target.model
    held, free = recorded_bytes(device), available_bytes(device)
    assert held > 0
    model.give_back()
    assert recorded_bytes(device) < held
    assert available_bytes(device) > free
    check_every_drafter(bench, rng, first=100)  # recorded again


def check_every_drafter(bench: Bench, rng: random.Random, first: int = 0, of: Sequence[str] | None = None) -> None:
    """Vanilla and every drafter, or some, greedy and adjusted, in batches of four that join and leave."""
    work = []
    for number, decided in enumerate(decisions(rng, 12), first):
        sampling = replace(GREEDY, max_tokens=rng.randint(4, 20))
        if number % 3 == 2:
            sampling = rng.choice(ADJUSTED)(sampling, rng)
        if of is not None and decided.drafter not in of:
            decided = VANILLA
        work.append((make_job(some_text(rng, rng.randint(1, 60)) + "a", number), sampling, decided))
    check(bench, work, rng)
