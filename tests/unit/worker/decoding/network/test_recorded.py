"""Passes that are recorded and repeated, without a GPU: what differs from pass to pass must be an input."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.fixtures.models import FUSED
from tests.fixtures.recording import ReferenceOperations, TapeRecorder
from worker.decoding.network import fused, language_model, recorded
from worker.decoding.network.fused import FusedDecoder
from worker.decoding.network.groups import Read
from worker.decoding.network.language_model import LanguageModel
from worker.decoding.network.passes import plan_pass
from worker.decoding.network.recorded import RecordedPasses
from worker.decoding.network.slots import SlotCache

CPU = torch.device("cpu")
NUM_SLOTS = 5


@pytest.fixture
def decoder(tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], FusedDecoder]:
    """A decoder whose passes can be recorded here."""
    monkeypatch.setattr(fused, "_operations", lambda *_: ReferenceOperations())
    return lambda family: FusedDecoder(_load(tiny_models[family]), 512)


@pytest.mark.parametrize("family", FUSED)
@torch.inference_mode()
def test_a_repeated_pass_reads_what_a_plain_one_reads(
    decoder: Callable[[str], FusedDecoder], family: str, rng: random.Random
) -> None:
    network, recorder = decoder(family), TapeRecorder()
    passes = RecordedPasses(network, recorder, CPU)
    caches = [SlotCache(network.kv_shape, NUM_SLOTS, CPU) for _ in range(2)]
    for step in range(24):
        if step == 12:  # other caches, elsewhere in memory: nothing is recorded again for them
            lengths = caches[0].lengths
            caches = [_copied(cache) for cache in caches]
            assert caches[0].lengths == lengths
        # The cache grows on the way, by rows and by positions: it moves each time.
        most = 2 if step < 4 else NUM_SLOTS
        reads = [_some_read(slot, rng) for slot in rng.sample(range(most), rng.randint(1, most))]
        expected = network(caches[0], plan_pass(caches[0], reads, network.window))
        seen = passes.read(caches[1], reads)
        assert seen is not None
        torch.testing.assert_close(seen, expected, rtol=1e-9, atol=1e-9)
        for cache in caches:
            for read in reads:
                cache.lengths[read.slot] += len(read.token_ids) if read.parents is None else 1
    assert len(passes) == recorder.num_recorded < 24


@torch.inference_mode()
def test_logits_stay_what_they_are_while_others_are_read(decoder: Callable[[str], FusedDecoder]) -> None:
    passes = RecordedPasses(decoder("llama"), TapeRecorder(), CPU)
    cache = SlotCache(decoder("llama").kv_shape, 2, CPU)
    first = _read(passes, cache, [Read(0, [5])])
    kept = first.clone()
    assert not torch.equal(_read(passes, cache, [Read(0, [6])]), kept)
    assert torch.equal(first, kept)


@torch.inference_mode()
def test_what_cannot_be_recorded_is_read_plainly_and_not_tried_again(
    decoder: Callable[[str], FusedDecoder], caplog: pytest.LogCaptureFixture
) -> None:
    class Full(TapeRecorder):
        def record(self, run: Callable[[], None]) -> Callable[[], None]:
            super().record(run)
            raise torch.OutOfMemoryError("CUDA out of memory")

    network, recorder = decoder("llama"), Full()
    passes, cache = RecordedPasses(network, recorder, CPU), SlotCache(network.kv_shape, 2, CPU)
    with caplog.at_level(logging.WARNING, "worker.decoding.network"):
        for _ in range(3):
            assert passes.read(cache, [Read(0, [5, 6])]) is None
    assert (recorder.num_recorded, recorder.num_forgotten, len(passes)) == (1, 1, 0)
    assert "passes of 2 tokens, 2 wide, are not recorded: CUDA out of memory" in caplog.text


@torch.inference_mode()
def test_recordings_are_bounded_and_the_least_used_goes(
    decoder: Callable[[str], FusedDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded, "MOST_RECORDED", 2)
    network, recorder = decoder("llama"), TapeRecorder()
    passes, cache = RecordedPasses(network, recorder, CPU), SlotCache(network.kv_shape, 2, CPU)
    for width in (1, 2, 1, 3, 1):  # 3 takes the place of 2
        _read(passes, cache, [Read(0, [7] * width)])
    assert (len(passes), recorder.num_recorded) == (2, 3)
    _read(passes, cache, [Read(0, [7] * 2)])
    assert (len(passes), recorder.num_recorded) == (2, 4)


@torch.inference_mode()
def test_memory_is_given_back_and_passes_are_recorded_again(decoder: Callable[[str], FusedDecoder]) -> None:
    network, recorder = decoder("llama"), TapeRecorder()
    passes, cache = RecordedPasses(network, recorder, CPU), SlotCache(network.kv_shape, 2, CPU)
    before = _read(passes, cache, [Read(0, [5, 6])])
    passes.forget()
    assert (len(passes), recorder.num_forgotten) == (0, 1)
    assert torch.equal(_read(passes, cache, [Read(0, [5, 6])]), before)
    assert recorder.num_recorded == 2


@torch.inference_mode()
def test_a_model_is_served_plainly_where_repeating_does_not_agree(
    tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Idle(TapeRecorder):
        def record(self, run: Callable[[], None]) -> Callable[[], None]:
            super().record(lambda: None)
            return lambda: None

    monkeypatch.setattr(fused, "_operations", lambda *_: ReferenceOperations())
    monkeypatch.setattr(language_model, "CudaRecorder", lambda _: Idle())
    with caplog.at_level(logging.WARNING, "worker.decoding.network"):
        model = LanguageModel(_load(tiny_models["llama"]), 512)
    assert "passes are not recorded: passes over the slot cache differ" in caplog.text
    expected = _load(tiny_models["llama"])(torch.tensor([[5, 6, 7]])).logits[0, -1:]
    torch.testing.assert_close(model.prefill(model.new_cache(1), 0, [5, 6, 7]), expected, rtol=1e-5, atol=1e-5)


def _load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")


def _read(passes: RecordedPasses, cache: SlotCache, reads: list[Read]) -> Tensor:
    seen = passes.read(cache, reads)
    assert seen is not None
    return seen


def _copied(cache: SlotCache) -> SlotCache:
    copied = SlotCache(cache.shape, cache.num_slots, cache.device)
    copied.reserve(dict.fromkeys(range(cache.layers[0].shape[0]), cache.capacity))
    copied.lengths = list(cache.lengths)
    for layer, other in zip(copied.layers, cache.layers, strict=True):
        layer.copy_(other)
    return copied


def _some_read(slot: int, rng: random.Random) -> Read:
    width = rng.choice([1, 1, 2, 3, 7, 20])
    parents = [-1, *(rng.randrange(index) for index in range(1, width))] if rng.random() < 0.4 else None
    return Read(slot, [rng.randrange(384) for _ in range(width)], num_logits=rng.randint(1, width), parents=parents)
