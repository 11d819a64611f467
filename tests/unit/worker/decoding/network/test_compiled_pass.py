"""A whole pass as one program of kernels: bit for bit the same as kernel by kernel, for all families and reads."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from worker.decoding.network.fused import FusedDecoder
from worker.decoding.network.kernels.linear import most_rows
from worker.decoding.network.kernels.threads import openmp
from worker.decoding.network.passes import WIDEST_SHARED, Read, plan_pass
from worker.decoding.network.slots import SlotCache

VOCABULARY = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
MODELS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=40),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen3": transformers.Qwen3Config(**SIZES),
    "gemma3": transformers.Gemma3TextConfig(**SIZES, sliding_window=40),
}

pytestmark = pytest.mark.skipif(openmp() is None, reason="no OpenMP runtime to call")
has_program = pytest.mark.skipif(most_rows() is not None, reason="other linear layers are faster here for wide passes")


def decoder_of(family: str, seed: int) -> FusedDecoder:
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[family]).to(torch.bfloat16).eval()
    for parameter in model.parameters():
        parameter.data.mul_(3)  # else attention is nearly uniform, and hides what it gets wrong
    return FusedDecoder(model, 512)


def in_both_ways(decoder: FusedDecoder, cache: SlotCache, reads: list[Read]) -> tuple[Tensor, Tensor]:
    """Logits by the program and kernel by kernel, of the same reads behind the same cache."""
    plan, program = plan_pass(cache, reads, decoder.window), decoder._program
    assert program is not None
    assert program.serves(plan)
    before = [layer.clone() for layer in cache.layers]
    found = decoder(cache, plan)
    written = [layer.clone() for layer in cache.layers]
    for layer, old in zip(cache.layers, before, strict=True):
        layer.copy_(old)
    decoder._program = None
    expected = decoder(cache, plan)
    decoder._program = program
    assert all(torch.equal(*both) for both in zip(written, cache.layers, strict=True))
    return found, expected


@has_program
@torch.inference_mode()
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_pass_is_the_same_as_kernel_by_kernel(
    family: str, num_threads: int, seed: int, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains, trees and pieces of prompts, with more and with fewer tokens than the pass before; all logits or some."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    decoder = decoder_of(family, seed)
    cache = SlotCache(decoder.kv_shape, 5, torch.device("cpu"))
    slots = [cache.acquire() for _ in range(5)]
    for widths in ([3], [5, 1, 9], [150, 2, 1, 40], [1, 1, 1, 1, 1], [4, 130]):
        reads = []
        for slot, width in zip(slots, widths, strict=False):
            tokens = [rng.randrange(VOCABULARY) for _ in range(width)]
            is_tree = 1 < width <= WIDEST_SHARED and rng.random() < 0.5
            parents = [rng.randint(-1, token - 1) for token in range(width)] if is_tree else None
            reads.append(Read(slot, tokens, rng.choice([1, width]), parents))
        found, expected = in_both_ways(decoder, cache, reads)
        assert len(found) == sum(read.num_logits for read in reads)
        assert torch.equal(found, expected)
        for read in reads:
            cache.lengths[read.slot] += len(read.token_ids)


@has_program
@torch.inference_mode()
def test_without_a_logit_wanted_keys_and_values_are_written(seed: int) -> None:
    decoder = decoder_of("llama", seed)
    cache = SlotCache(decoder.kv_shape, 1, torch.device("cpu"))
    found, _ = in_both_ways(decoder, cache, [Read(cache.acquire(), [1, 2, 3], num_logits=0)])
    assert found.shape == (0, VOCABULARY)
    assert any(layer.any() for layer in cache.layers)


@has_program
@torch.inference_mode()
def test_logits_outlive_the_next_pass(seed: int) -> None:
    decoder = decoder_of("llama", seed)
    cache = SlotCache(decoder.kv_shape, 1, torch.device("cpu"))
    slot = cache.acquire()
    first = decoder(cache, plan_pass(cache, [Read(slot, [1, 2], 2)], None))
    kept = first.clone()
    decoder(cache, plan_pass(cache, [Read(slot, [5, 6], 2)], None))
    assert torch.equal(first, kept)
