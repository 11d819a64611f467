"""Exactness where passes are recorded and repeated: without a GPU by a tape, on one by CUDA graphs and Triton."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.fixtures.models import FAMILIES, FUSED, make_job
from tests.fixtures.recording import ReferenceOperations, TapeRecorder
from tests.fixtures.reference import Reference
from tests.integration.test_exactness_tiny import ADJUSTED, GREEDY, Bench, check, decisions, make_bench, some_text
from worker.decoding.memory import available_bytes
from worker.decoding.network import fused, language_model
from worker.decoding.network.recording import recorded_bytes

References = Callable[[str], Reference]
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])
def test_repeated_passes_change_no_text(
    tiny_engine: Callable[..., object], tiny_models: dict[str, Path], references: References, family: str,
    rng: random.Random, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    recorders: list[TapeRecorder] = []

    def recorder(_: torch.device) -> TapeRecorder:
        recorders.append(TapeRecorder())
        return recorders[-1]

    monkeypatch.setattr(fused, "_operations", lambda *_: ReferenceOperations())
    monkeypatch.setattr(language_model, "CudaRecorder", recorder)
    bench = make_bench(tiny_engine, tiny_models, references, family, 4, rng)
    check_every_drafter(bench, rng)
    assert [one.num_recorded > 3 for one in recorders] == [True] * 3, "the target and two drafts"


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_changes_no_text(
    tiny_engine: Callable[..., object], tiny_models: dict[str, Path], references: References, family: str, dtype: str,
    rng: random.Random,
) -> None:  # fmt: skip
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


def check_every_drafter(bench: Bench, rng: random.Random, first: int = 0) -> None:
    """Vanilla and every drafter, greedy and adjusted, in batches of four that join and leave."""
    work = []
    for number, decided in enumerate(decisions(rng, 12), first):
        sampling = replace(GREEDY, max_tokens=rng.randint(4, 20))
        if number % 3 == 2:
            sampling = rng.choice(ADJUSTED)(sampling, rng)
        work.append((make_job(some_text(rng, rng.randint(1, 60)) + "a", number), sampling, decided))
    check(bench, work, rng)
