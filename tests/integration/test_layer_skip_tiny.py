"""A target that drafts with some of its own layers: over the same weights, in slots of its own, and to its own text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers
from torch import nn

from alphaloop.engine import Sampling
from alphaloop.errors import ConfigError, UnsupportedModel
from alphaloop.settings.models import LayerSkipDrafterSettings
from engine.network.language_model import LanguageModel
from engine.network.passes import Read
from engine.own import TransformersEngine
from tests.fixtures.drafting import language_model
from tests.fixtures.models import FUSED, NUM_TOKENS, decision, engine_over, finish, make_job, small_llama

NUM_LAYERS: Final = 24
SKIPPED: Final = tuple(range(6, 18))
K: Final = 4


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory, tiny_models: dict[str, Path], tiny_tokenizer: Any) -> Path:
    """A Llama of 24 layers whose inner twelve say little, as those of a model that was trained to be skipped."""
    folder = tmp_path_factory.mktemp("deep")
    config = transformers.LlamaConfig.from_pretrained(tiny_models["llama"], num_hidden_layers=NUM_LAYERS)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(24)
        made: Any = transformers.LlamaForCausalLM(config).to(torch.float64)
        for index in SKIPPED:
            layer = made.model.layers[index]
            layer.self_attn.o_proj.weight *= 0.05
            layer.mlp.down_proj.weight *= 0.05
        made.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(deep: Path) -> TransformersEngine:
    return loaded(
        deep,
        skip={"method": "layer_skip", "skip_layers": SKIPPED, "max_draft_tokens": 8},
        branching={"method": "layer_skip", "skip_layers": SKIPPED, "num_branches": 2},
        recycling={"method": "recycling"},
        all={"method": "hybrid", "sources": ["lookup", "recycling", "skip"], "rule": "tree", "max_draft_tokens": 8},
    )


def loaded(folder: Path, **drafters: Any) -> TransformersEngine:
    return engine_over(folder, num_slots=4, drafters={"lookup": {}, **drafters})


def tensors_of(network: Any) -> dict[int, int]:
    """Bytes of the weights, by their address."""
    linears = [linear for layer in network._layers for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    weights = [network.embeddings, network._norm.weight, *(linear._weight for linear in (*linears, network._head))]
    return {one.data_ptr(): one.numel() * one.element_size() for one in weights}


def test_weights_are_in_memory_once_and_keys_are_those_of_the_layers_that_stay(engine: TransformersEngine) -> None:
    target, draft = engine._target.model, engine._drafters["skip"]
    own, drafting = tensors_of(target._network), tensors_of(draft.model._network)
    assert drafting.items() < own.items()
    assert target.num_layers == NUM_LAYERS
    assert draft.model.num_layers == NUM_LAYERS - len(SKIPPED)
    per_token = target.kv_shape.bytes_per_token * (NUM_LAYERS - len(SKIPPED)) // NUM_LAYERS
    state = draft.state
    assert state.cache_bytes_per_token == per_token
    assert engine.memory().drafts_per_token["skip"] == per_token
    assert state.revision == f"{engine.identity.target_revision}-s6-17"
    assert engine._drafters["branching"].state.revision == f"{engine.identity.target_revision}-s6-17-b2w"
    assert draft._cache.shape.num_layers == draft.model.num_layers


@pytest.mark.parametrize("family", FUSED)
def test_a_pass_is_that_of_transformers_modules_without_these_layers(
    tiny_models: dict[str, Path], family: str, rng: random.Random
) -> None:
    compare(tiny_models[family], "float64", rng)


def test_the_same_as_one_program_where_a_machine_has_kernels(
    tiny_models: dict[str, Path], tiny_tokenizer: Any, tmp_path: Path, rng: random.Random
) -> None:
    compare(
        small_llama(tiny_models["llama"], tiny_tokenizer, tmp_path, num_hidden_layers=5, head_dim=32), "bfloat16", rng
    )


@torch.inference_mode()
def compare(folder: Path, dtype: str, rng: random.Random) -> None:
    whole = language_model(folder, dtype=dtype)
    skipped = {rng.randrange(whole.num_layers)}
    cut: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    stay = [index for index in range(whole.num_layers) if index not in skipped]
    cut.model.layers = nn.ModuleList(cut.model.layers[index] for index in stay)
    cut.config.num_hidden_layers = len(stay)
    if getattr(cut.config, "layer_types", None):
        cut.config.layer_types = [cut.config.layer_types[index] for index in stay]
    text = [rng.randrange(NUM_TOKENS) for _ in range(12)]
    before, draft = logits_of(whole, text), whole.without(skipped)
    found, expected = logits_of(draft, text), cut(input_ids=torch.tensor([text]), use_cache=False).logits[0]
    limit = 0.05 if dtype == "bfloat16" else 1e-5
    assert float((found - expected).norm()) < limit * float(expected.norm())
    assert float((before - expected).norm()) > 2 * limit * float(expected.norm()), "the layer says something"
    assert torch.equal(logits_of(whole, text), before), "the whole model goes on as before"
    assert (draft._network._program is None) == (whole._network._program is None)


def logits_of(model: LanguageModel, text: Sequence[int]) -> torch.Tensor:
    """Behind each token, in two passes."""
    cache = model.new_cache(1)
    slot = cache.acquire()
    first = model.read(cache, [Read(slot, text[:5], num_logits=5)]).clone()
    cache.lengths[slot] += 5
    return torch.cat((first, model.read(cache, [Read(slot, text[5:], num_logits=len(text) - 5)])))


def test_layers_that_say_little_are_drafted_without(engine: TransformersEngine) -> None:
    """Half of the layers, and most of what they draft stays; a sampled job draws from what the half says."""
    jobs = [make_job(f"{number} is a number" * 3, number) for number in range(4)]
    for temperature in (0.0, 1.0):
        sampling = Sampling(max_tokens=40, temperature=temperature, logit_bias=((0, -1000.0),))
        done = finish(engine, ((job, sampling, decision("skip", K)) for job in jobs))
        counts = [its.counts for one in done.values() for its in one.drafted]
        assert sum(one.num_tokens for one in counts) > 2.5 * sum(one.rounds for one in counts)


@pytest.mark.parametrize("layers", [(24,), tuple(range(24)), (3, 99)])
def test_layers_that_the_target_does_not_have_are_refused(deep: Path, layers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"models\.drafters\.skip\.skip_layers.* 0 to 23"):
        loaded(deep, skip=LayerSkipDrafterSettings(skip_layers=layers))


def test_a_family_of_transformers_own_modules_is_refused(tiny_models: dict[str, Path]) -> None:
    with pytest.raises(UnsupportedModel, match=r"models\.drafters\.skip: expected a model of gemma3_text.* gpt_neox"):
        loaded(tiny_models["gpt_neox"], skip=LayerSkipDrafterSettings(skip_layers=(1,)))
