"""Timing one round's parts on this device. Scratch slots and scratch texts: nothing running is touched."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Final

import torch

from alphaloop.errors import DecodeFailed
from worker.decoding.drafters.lookup import LookupDrafter
from worker.decoding.target import Target
from worker.decoding.verify import verify_greedy

NUM_WARM_UP: Final = 2


@torch.inference_mode()
def measure_target_ms(target: Target, batch: int, width: int, context: int, num_samples: int) -> float:
    """Median milliseconds of a pass of `width` columns for `batch` sequences, with its greedy verification."""
    generator = torch.Generator().manual_seed(batch * 1000 + width)
    context = min(context, target.identity.context_length - width)
    token_ids = torch.randint(0, target.model.config.vocab_size, (batch, width), generator=generator)
    proposed = torch.full((batch,), width - 1, device=target.device)
    cache = target.new_cache(batch)
    rows = [cache.acquire() for _ in range(batch)]

    def one_pass() -> None:
        columns = token_ids.to(target.device)
        best = target.logits(cache, rows, columns).max(dim=-1)
        verify_greedy(best.indices, columns[:, 1:], proposed)

    try:
        # Empty keys take as long to read as any others, and reading a prompt takes longer than all the passes.
        for row in rows:
            cache.lengths[row] = context
        return _median_ms(one_pass, num_samples)
    except RuntimeError as error:
        raise DecodeFailed(f"measuring {batch} sequences of width {width} failed: {error}") from error


@torch.inference_mode()
def measure_target_prefill_ms(target: Target, num_tokens: int, num_samples: int) -> float:
    """Median milliseconds in which a prompt of `num_tokens` is read into an empty slot."""
    generator = torch.Generator().manual_seed(num_tokens)
    prompt = torch.randint(0, target.model.config.vocab_size, (num_tokens,), generator=generator).tolist()
    cache = target.new_cache(1)

    def one_prefill() -> None:
        slot = cache.acquire()
        target.prefill(cache, slot, prompt)
        cache.release(slot)

    try:
        return _median_ms(one_prefill, num_samples)
    except RuntimeError as error:
        raise DecodeFailed(f"measuring a prompt of {num_tokens} tokens failed: {error}") from error


def measure_draft_ms(drafter: LookupDrafter, batch: int, width: int, context: int, num_samples: int) -> float:
    """Median milliseconds to take in a round's tokens and propose `width - 1` more for each of `batch` sequences."""
    tokens = _some_text(context)
    texts = [drafter.start(tokens) for _ in range(batch)]

    def one_proposal() -> None:
        for text in texts:
            text.extend(tokens[:width])
            text.propose(width - 1)

    return _median_ms(one_proposal, num_samples)


def measure_draft_prefill_ms(drafter: LookupDrafter, num_tokens: int, num_samples: int) -> float:
    """Median milliseconds until a prompt of `num_tokens` has its first proposal."""
    tokens = _some_text(num_tokens)
    return _median_ms(lambda: drafter.start(tokens).propose(1), num_samples)


def _some_text(num_tokens: int) -> list[int]:
    return [(7 * i * i) % 31 for i in range(num_tokens)]


def _median_ms(run: Callable[[], object], num_samples: int) -> float:
    for _ in range(NUM_WARM_UP):
        run()
    samples = []
    for _ in range(num_samples):
        began = time.perf_counter()
        run()
        samples.append(1000 * (time.perf_counter() - began))
    return statistics.median(samples)
