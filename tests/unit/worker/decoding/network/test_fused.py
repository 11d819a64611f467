"""Which models are computed by `fused`, and what it takes over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.fixtures.models import FAMILIES, FUSED, NUM_TOKENS
from worker.decoding.network.compiled import CompiledOperations
from worker.decoding.network.fused import can_fuse
from worker.decoding.network.kernels.linear import (
    LinearArguments,
    arranged,
    arranged_bias,
    linear_kernel,
    most_rows,
)
from worker.decoding.network.kernels.multiplying import has_pair_products
from worker.decoding.network.kernels.threads import openmp
from worker.decoding.network.language_model import LanguageModel
from worker.decoding.network.operations import can_pack
from worker.decoding.network.passes import WIDEST_SHARED, Read
from worker.decoding.network.slots import SlotCache


def load(folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def test_the_families_that_are_known_are_fused(tiny_models: dict[str, Path]) -> None:
    for family in FAMILIES:
        config = transformers.AutoConfig.from_pretrained(tiny_models[family])
        assert can_fuse(config) == (family in FUSED), family


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("llama", {"hidden_act": "relu"}),
        ("gemma3_text", {"final_logit_softcapping": 30.0}),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}),
        ("gemma3_text", {"use_bidirectional_attention": True}),
    ],
)
def test_what_would_be_computed_otherwise_is_not_fused(
    tiny_models: dict[str, Path], family: str, changed: dict[str, Any]
) -> None:
    config = transformers.AutoConfig.from_pretrained(tiny_models[family])
    assert can_fuse(config)
    for name, value in changed.items():
        setattr(config, name, value)
    assert not can_fuse(config)


def test_weights_are_held_once(tiny_models: dict[str, Path]) -> None:
    model = load(tiny_models["llama"])
    LanguageModel(model, 64)
    left = {name.split(".")[-2] for name, _ in model.named_parameters()}
    assert left == {"embed_tokens", "norm", "lm_head"}


@torch.inference_mode()
def test_float32_stays_near_float64(tiny_models: dict[str, Path], seed: int) -> None:
    """Packed weights, mixed rotations: the rounding of the dtype and no more."""
    tokens = torch.randint(0, NUM_TOKENS, (12,), generator=torch.Generator().manual_seed(seed)).tolist()
    for family in FUSED:
        models = [LanguageModel(load(tiny_models[family], dtype), 64) for dtype in (torch.float64, torch.float32)]
        exact, found = (_read(model, model.new_cache(1), Read(0, tokens, len(tokens))).double() for model in models)
        assert float((found - exact).norm() / exact.norm()) < 1e-5, family


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("layout", ["once", "twice", "without oneDNN"])
def test_a_packed_layer_is_that_layer(
    dtype: torch.dtype, has_bias: bool, layout: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For few tokens and for many; 200 outputs are no multiple of what is computed together."""
    if layout == "without oneDNN":
        for module in ("compiled", "operations"):
            monkeypatch.setattr(f"worker.decoding.network.{module}.can_pack", lambda weight: False)
        monkeypatch.setattr("worker.decoding.network.operations._BLOCK_WEIGHTS", 48 * 33)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn((200, 48), generator=generator).to(dtype)
    bias = torch.randn(200, generator=generator).to(dtype) if has_bias else None
    layer = CompiledOperations(dtype, is_twice=layout == "twice").linear(weight, bias)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.2}[dtype]
    for num_tokens in (0, 1, 2, 3, 4, 5, 8, 9, 17, 21, 33, 50, 300, 530):
        x, held = (torch.randn((num_tokens, num), generator=generator).to(dtype) for num in (48, 200))
        expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        assert torch.allclose(layer(x).double(), expected, atol=tolerance, rtol=0)
        before = held.clone()
        assert torch.allclose(layer(x, held).double(), before.double() + expected, atol=tolerance, rtol=0)
        assert layer(x).dtype == dtype
    assert not can_pack(weight) or dtype != torch.float64


@torch.inference_mode()
@pytest.mark.skipif(not can_pack(torch.zeros(1, 1).bfloat16()) or openmp() is None, reason="no kernels here")
@pytest.mark.parametrize("by_pairs", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_token_is_multiplied_alike_alone_and_among_others(by_pairs: bool, has_bias: bool, seed: int) -> None:
    """Bit for bit; both forms of the kernel, where the processor has both."""
    if by_pairs and not has_pair_products():
        pytest.skip("no products of pairs on this processor")
    generator = torch.Generator().manual_seed(seed)
    weight, bias = (
        torch.randn((200, 48), generator=generator).bfloat16(),
        torch.randn(200, generator=generator).bfloat16(),
    )
    kernel, lain, lain_bias = linear_kernel(by_pairs=by_pairs), arranged(weight), arranged_bias(bias)

    def multiply(x: torch.Tensor, held: torch.Tensor | None, num_threads: int) -> torch.Tensor:
        y = torch.full((len(x), 200), 7.0, dtype=torch.bfloat16)
        arguments = LinearArguments(
            x=x.data_ptr(),
            weights=lain.data_ptr(),
            y=y.data_ptr(),
            num_rows=len(x),
            num_inputs=48,
            num_outputs=200,
            bias=lain_bias.data_ptr() if has_bias else 0,
            held=0 if held is None else held.data_ptr(),
        )
        kernel(arguments, num_threads)
        return y

    for num_tokens in (1, 2, 3, 7, 8, 9, 16, 17, 24, 40, 70):
        x, held = (torch.randn((num_tokens, num), generator=generator).bfloat16() for num in (48, 200))
        expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double() if has_bias else None)
        for added in (None, held):
            found = multiply(x, added, 2)
            exact = expected if added is None else expected + added.double()
            assert torch.allclose(found.double(), exact, atol=0.2, rtol=0)
            for row in range(num_tokens):
                alone = multiply(x[row : row + 1], None if added is None else added[row : row + 1], 1)
                assert torch.equal(alone[0], found[row])


@torch.inference_mode()
@pytest.mark.skipif(not can_pack(torch.zeros(1, 1).bfloat16()) or openmp() is None, reason="no kernels here")
@pytest.mark.parametrize("family", FUSED)
def test_in_bfloat16_a_token_gets_the_same_logits_alone_and_among_others(
    tiny_models: dict[str, Path], family: str, seed: int
) -> None:
    """Bit for bit, where kernels compute the whole pass: then a draft is verified by what vanilla would have seen."""
    model = LanguageModel(load(tiny_models[family], torch.bfloat16), 64)
    num = min(WIDEST_SHARED, most_rows() or WIDEST_SHARED)
    tokens = torch.randint(0, NUM_TOKENS, (2 + num,), generator=torch.Generator().manual_seed(seed)).tolist()
    cache = model.new_cache(6)
    alone, *others = (cache.acquire() for _ in range(6))
    for slot in (alone, *others):
        _read(model, cache, Read(slot, tokens[:2]))
    single = torch.cat([_read(model, cache, Read(alone, [token])) for token in tokens[2:]])
    half = num // 2
    first = _read(model, cache, Read(others[1], tokens[2:3]), Read(others[0], tokens[2 : 2 + half], half))[1:]
    rest = _read(model, cache, Read(others[0], tokens[2 + half :], num - half))
    assert torch.equal(torch.cat([first, rest]), single)
    if most_rows() is None:
        together = _read(model, cache, *(Read(slot, tokens[2:], num) for slot in others[2:]))
        assert torch.equal(together, single.repeat(3, 1))


def _read(model: LanguageModel, cache: SlotCache, *reads: Read) -> torch.Tensor:
    logits = model.read(cache, list(reads))
    for one in reads:
        cache.lengths[one.slot] += len(one.token_ids)
    return logits
