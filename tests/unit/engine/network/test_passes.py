"""Passes over slots against plain passes, in any shape, as one program of kernels, and on a device that is no CPU.

Which models are computed by `fused`, what it takes over, and its layers.
"""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers
from torch import Tensor

from engine.measuring import measure_pass_ms
from engine.network.compiled import CompiledOperations
from engine.network.fused import FusedDecoder, can_fuse
from engine.network.kernels.linear import LinearArguments, arranged, arranged_bias, linear_kernel, most_rows
from engine.network.kernels.multiplying import has_pair_products
from engine.network.kernels.threads import openmp
from engine.network.language_model import LanguageModel
from engine.network.operations import can_pack
from engine.network.passes import WIDEST_SHARED, Read, plan_pass
from engine.network.slots import SlotCache
from engine.states import FINAL
from tests.fixtures.drafting import language_model
from tests.fixtures.models import FAMILIES, FUSED, NUM_TOKENS, WINDOW, Reference

NUM_SLOTS: Final = 6
TAPS: Final = (0, 2, FINAL)  #: of the models of three layers
TOLERANCE: Final = 1e-9  #: of logits of size 10, in float64


@dataclass(frozen=True, slots=True)
class Reading:
    """A read, the path of each of its tokens, as places in the read, and the text that it ends in truth."""

    read: Read
    places: list[list[int]]
    paths: list[list[int]]

    @property
    def wanted(self) -> list[list[int]]:
        """The texts behind which logits are wanted."""
        return self.paths[len(self.paths) - self.read.num_logits :]


def read_on(model: LanguageModel, cache: SlotCache, *reads: Read) -> Tensor:
    logits = model.read(cache, list(reads))
    for one in reads:
        cache.lengths[one.slot] += len(one.token_ids)
    return logits


def some_tokens(rng: random.Random, num: int) -> list[int]:
    return [rng.randrange(NUM_TOKENS) for _ in range(num)]


def some_reading(rng: random.Random, slot: int, text: list[int], *, must_be_short: bool) -> Reading:
    kind = rng.choice(("chain", "tree") if must_be_short else ("chain", "tree", "piece"))
    num = rng.randint(WIDEST_SHARED + 1, WIDEST_SHARED + 30) if kind == "piece" else rng.randint(1, 9)
    tokens = some_tokens(rng, num)
    parents = [rng.randint(-1, i - 1) for i in range(num)] if kind == "tree" else list(range(-1, num - 1))
    places: list[list[int]] = []
    for place, parent in enumerate(parents):
        places.append([*(places[parent] if parent >= 0 else []), place])
    read = Read(slot, tokens, rng.randint(0, num), parents if kind == "tree" else None)
    return Reading(read, places, [[*text, *(tokens[place] for place in path)] for path in places])


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_any_pass_equals_plain_passes(
    tiny_models: dict[str, Path], references: Callable[[str], Reference], family: str, rng: random.Random
) -> None:
    model, reference = language_model(tiny_models[family]), references(family)
    cache = model.new_cache(NUM_SLOTS)
    texts = {cache.acquire(): some_tokens(rng, rng.choice((1, 5, WINDOW, 40))) for _ in range(NUM_SLOTS)}
    for slot, text in texts.items():
        model.prefill(cache, slot, text)
    for _ in range(5):
        # Slots that are left out lie dead between the others.
        slots = rng.sample(sorted(texts), rng.randint(1, NUM_SLOTS))
        readings = [some_reading(rng, slot, texts[slot], must_be_short=rng.random() < 0.8) for slot in slots]
        found = model.read(cache, [one.read for one in readings])
        expected = [reference.logits(path)[-1] for one in readings for path in one.wanted]
        assert found.shape == (len(expected), NUM_TOKENS)
        if expected:
            assert float((found - torch.stack(expected)).abs().max()) < TOLERANCE
        for one in readings:
            # One path stays, of any length: so later passes look back on what was moved.
            path = rng.choice([[], *one.places])
            cache.keep(one.read.slot, path)
            texts[one.read.slot] = [*texts[one.read.slot], *(one.read.token_ids[place] for place in path)]
            assert cache.lengths[one.read.slot] == len(texts[one.read.slot])


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

has_kernels = pytest.mark.skipif(
    not can_pack(torch.zeros(1, 1).bfloat16()) or openmp() is None, reason="no kernels here"
)
has_program = pytest.mark.skipif(
    openmp() is None or most_rows() is not None, reason="no OpenMP runtime, or other layers are faster for wide passes"
)


def model_of(config: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    for parameter in model.parameters():
        parameter.data.mul_(3)  # else attention is nearly uniform, and hides what it gets wrong
    return model


def in_both_ways(decoder: FusedDecoder, cache: SlotCache, reads: list[Read]) -> tuple[Tensor, Tensor]:
    """Logits by the program and kernel by kernel, of the same reads behind the same cache; states are compared here."""
    plan, program = plan_pass(cache, reads, decoder.window), decoder._program
    assert program is not None
    assert program.serves(plan)
    before = [layer.clone() for layer in cache.layers]
    found, tapped = decoder(cache, plan, TAPS)
    written = [layer.clone() for layer in cache.layers]
    for layer, old in zip(cache.layers, before, strict=True):
        layer.copy_(old)
    assert torch.equal(decoder(cache, plan)[0], found), "the same without taps"
    decoder._program = None
    expected, states = decoder(cache, plan, TAPS)
    decoder._program = program
    assert all(torch.equal(tapped[tap], states[tap]) for tap in TAPS)
    assert all(torch.equal(*both) for both in zip(written, cache.layers, strict=True))
    return found, expected


@has_program
@torch.inference_mode()
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_pass_is_the_same_as_kernel_by_kernel(
    family: str, num_threads: int, seed: int, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains, trees and pieces of prompts, with more and with fewer tokens than the one before; all logits, some, none.

    Logits outlive the next pass.
    """
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    decoder = FusedDecoder(model_of(MODELS[family], seed), 512)
    cache = SlotCache(decoder.kv_shape, 5, torch.device("cpu"), most_positions=512)
    slots = [cache.acquire() for _ in range(5)]
    before = kept = torch.empty(0)
    for widths in ([3], [5, 1, 9], [150, 2, 1, 40], [1, 1, 1, 1, 1], [4, 130]):
        reads = []
        for slot, width in zip(slots, widths, strict=False):
            tokens = [rng.randrange(VOCABULARY) for _ in range(width)]
            is_tree = 1 < width <= WIDEST_SHARED and rng.random() < 0.5
            parents = [rng.randint(-1, token - 1) for token in range(width)] if is_tree else None
            reads.append(Read(slot, tokens, 0 if widths == [3] else rng.choice([1, width]), parents))
        found, expected = in_both_ways(decoder, cache, reads)
        assert len(found) == sum(read.num_logits for read in reads)
        assert torch.equal(found, expected)
        assert torch.equal(before, kept)
        assert all(layer.any() for layer in cache.layers), "without a logit wanted, too"
        before, kept = found, found.clone()
        for read in reads:
            cache.lengths[read.slot] += len(read.token_ids)


@has_program
@torch.inference_mode()
@pytest.mark.parametrize("window", [None, 100])
def test_a_prompt_read_in_any_pieces_gets_the_logits_of_single_tokens(window: int | None, seed: int) -> None:
    """Bit for bit: a text in bfloat16 does not depend on drafts, on what else runs, or on how its prompt was read."""
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 64}
    config = transformers.MistralConfig(**(SIZES | sizes), sliding_window=window)
    model, tokens = LanguageModel(model_of(config, seed), 512), torch.randint(0, 256, (400,)).tolist()
    cache = model.new_cache(4)
    found = []
    for width in (1, 7, 150, len(tokens)):
        slot, logits = cache.acquire(), []
        for at in range(0, len(tokens), width):
            piece = tokens[at : at + width]
            logits.append(read_on(model, cache, Read(slot, piece, len(piece))))
        found.append(torch.cat(logits))
    assert all(torch.equal(other, found[0]) for other in found[1:])


@pytest.mark.parametrize("family", FUSED)
@torch.inference_mode()
def test_a_plain_pass_mixes_nothing_of_the_host_with_what_is_on_the_device(
    tiny_models: dict[str, Path], family: str
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_models[family], dtype=torch.bfloat16)
    network = FusedDecoder(model.eval().to("meta"), 512)
    cache = SlotCache(network.kv_shape, 4, torch.device("meta"))
    cache.lengths = [3, 40, 7, 0]
    reads = [
        Read(0, [1, 2, 3], num_logits=3, parents=[-1, 0, 0]),
        Read(2, [5]),
        Read(1, [6] * 40),
        Read(3, [4] * 20, num_logits=2),
    ]
    logits, states = network(cache, plan_pass(cache, reads, network.window), (0, FINAL))
    assert (logits.device.type, logits.shape) == ("meta", (7, network.num_outputs))
    assert [len(states[tap]) for tap in (0, FINAL)] == [64, 7]


def test_a_device_that_is_no_cpu_needs_no_numba() -> None:
    """In a process of its own, in which numba and LLVM cannot be imported."""
    program = """
        import sys
        sys.modules["numba"] = sys.modules["llvmlite"] = None
        import torch, transformers
        from engine import measuring, own
        from engine.network.fused import FusedDecoder
        from engine.network.passes import Read, plan_pass
        from engine.network.slots import SlotCache
        from engine import verification
        shape = transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16,
        )
        network = FusedDecoder(transformers.LlamaForCausalLM(shape).to("meta"), 64)
        cache = SlotCache(network.kv_shape, 1, torch.device("meta"))
        with torch.inference_mode():
            print(tuple(network(cache, plan_pass(cache, [Read(0, [1, 2])], None))[0].shape))
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=170, check=False
    )
    assert (ran.stdout, ran.returncode) == ("(1, 64)\n", 0), ran.stderr


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
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_models["llama"], dtype=torch.float64).eval()
    LanguageModel(model, 64)
    left = {name.split(".")[-2] for name, _ in model.named_parameters()}
    assert left == {"embed_tokens", "norm", "lm_head"}


@torch.inference_mode()
def test_float32_stays_near_float64(tiny_models: dict[str, Path], seed: int) -> None:
    """Packed weights, mixed rotations: the rounding of the dtype and no more."""
    tokens = torch.randint(0, NUM_TOKENS, (12,), generator=torch.Generator().manual_seed(seed)).tolist()
    for family in FUSED:
        models = [language_model(tiny_models[family], dtype=dtype) for dtype in ("float64", "float32")]
        exact, found = (read_on(model, model.new_cache(1), Read(0, tokens, len(tokens))).double() for model in models)
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
            monkeypatch.setattr(f"engine.network.{module}.can_pack", lambda weight: False)
        monkeypatch.setattr("engine.network.operations._BLOCK_WEIGHTS", 48 * 33)
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
@has_kernels
@pytest.mark.parametrize("by_pairs", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_token_is_multiplied_alike_alone_and_among_others(by_pairs: bool, has_bias: bool, seed: int) -> None:
    """Bit for bit; both forms of the kernel, where the processor has both."""
    if by_pairs and not has_pair_products():
        pytest.skip("no products of pairs on this processor")
    generator = torch.Generator().manual_seed(seed)
    weight, bias = (torch.randn(shape, generator=generator).bfloat16() for shape in ((200, 48), (200,)))
    kernel, lain, lain_bias = linear_kernel(by_pairs=by_pairs), arranged(weight), arranged_bias(bias)

    def multiply(x: Tensor, held: Tensor | None, num_threads: int) -> Tensor:
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
@has_kernels
@pytest.mark.parametrize("family", FUSED)
def test_in_bfloat16_a_token_gets_the_same_logits_alone_and_among_others(
    tiny_models: dict[str, Path], family: str, seed: int
) -> None:
    """Bit for bit, where kernels compute the whole pass: then a draft is verified by what vanilla would have seen."""
    model = language_model(tiny_models[family], dtype="bfloat16")
    num = min(WIDEST_SHARED, most_rows() or WIDEST_SHARED)
    tokens = torch.randint(0, NUM_TOKENS, (2 + num,), generator=torch.Generator().manual_seed(seed)).tolist()
    cache = model.new_cache(6)
    alone, *others = (cache.acquire() for _ in range(6))
    for slot in (alone, *others):
        read_on(model, cache, Read(slot, tokens[:2]))
    single = torch.cat([read_on(model, cache, Read(alone, [token])) for token in tokens[2:]])
    half = num // 2
    first = read_on(model, cache, Read(others[1], tokens[2:3]), Read(others[0], tokens[2 : 2 + half], half))[1:]
    rest = read_on(model, cache, Read(others[0], tokens[2 + half :], num - half))
    assert torch.equal(torch.cat([first, rest]), single)
    if most_rows() is None:
        together = read_on(model, cache, *(Read(slot, tokens[2:], num) for slot in others[2:]))
        assert torch.equal(together, single.repeat(3, 1))


def test_a_pass_is_timed_over_keys_that_were_written(
    tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that nothing was written to is read in no time: attention would look free."""
    model = language_model(tiny_models["llama"], dtype="float32")
    read, are_written = model.read, []

    def watched(cache: SlotCache, reads: Sequence[Read]) -> Tensor:
        are_written.append(not any(layer[:4, :, :102].isnan().any() for layer in cache.layers))
        return read(cache, reads)

    monkeypatch.setattr(
        "engine.network.slots.zeros", lambda shape, dtype, _, **__: torch.full(shape, torch.nan, dtype=dtype)
    )
    monkeypatch.setattr(model, "read", watched)
    measure_pass_ms(model, 4, 2, 100, 1)
    assert are_written == [True, True]
