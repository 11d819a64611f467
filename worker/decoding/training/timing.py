"""Times a pass over one token: the target's and the draft's by turns, as the engine computes them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any, Final

import torch

from worker.decoding.network.language_model import LanguageModel
from worker.decoding.network.passes import Read

_CONTEXT: Final = 128
_NUM_WARM: Final = 3
_NUM_SAMPLES: Final = 25


@torch.inference_mode()
def measure_passes_ms(models: Sequence[Any]) -> list[float]:
    """Median milliseconds of one token at batch 1 behind 128 others, best token included, for each model.

    Takes over the models as the engine does, so they cannot be used afterwards.
    """
    engines = [LanguageModel(model, _CONTEXT + 1) for model in models]
    caches = [engine.new_cache(1) for engine in engines]
    for cache in caches:
        # Reading empty keys takes as long as reading others.
        cache.lengths[cache.acquire()] = _CONTEXT
    taken: list[list[float]] = [[] for _ in engines]
    for sample in range(_NUM_WARM + _NUM_SAMPLES):
        for engine, cache, times in zip(engines, caches, taken, strict=True):
            began = time.perf_counter()
            engine.read(cache, [Read(0, [0], num_logits=1)]).argmax(dim=-1).tolist()
            if sample >= _NUM_WARM:
                times.append(1000 * (time.perf_counter() - began))
    return [statistics.median(times) for times in taken]
