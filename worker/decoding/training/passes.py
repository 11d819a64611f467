"""How long a pass over one token takes: the target's and the draft's, in turns, through transformers' own forward."""

from __future__ import annotations

import statistics
import time
from typing import Any, Final

import torch
from transformers import DynamicCache

_CONTEXT: Final = 128
_WARM: Final = 3


@torch.inference_mode()
def measure_passes_ms(models: list[Any], num_samples: int = 25) -> list[float]:
    """Median milliseconds of one token at batch 1 behind 128 others, for each model."""
    caches = []
    for model in models:
        cache = DynamicCache(config=model.config)
        prompt = torch.arange(_CONTEXT)[None] % model.get_input_embeddings().num_embeddings
        model(input_ids=prompt.to(model.device), past_key_values=cache, use_cache=True)
        caches.append(cache)
    taken: list[list[float]] = [[] for _ in models]
    for sample in range(_WARM + num_samples):
        for model, cache, times in zip(models, caches, taken, strict=True):
            cache.crop(_CONTEXT)
            began = time.perf_counter()
            _pass(model, cache)
            if sample >= _WARM:
                times.append(1000 * (time.perf_counter() - began))
    return [statistics.median(times) for times in taken]


def _pass(model: Any, cache: DynamicCache) -> None:
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    best = model(input_ids=token, past_key_values=cache, use_cache=True).logits.argmax(dim=-1)
    best.tolist()  # waits for a GPU
